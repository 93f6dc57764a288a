"""The fault campaigns in large numbers.

One JSON a campaign, with its conditions, counts, seeds and failures, and the table of README.md.

python benchmarks/faults/run.py [--case F04] [--trials 200000] [--seed 0] [--show]
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measured import show
from surefoot.core.units import UNKNOWN, format_seconds
from surefoot.prove.campaigns import CAMPAIGNS
from surefoot.prove.campaigns.outcome import CampaignOutcome, run_trials
from surefoot.prove.campaigns.workshop import Workshop
from surefoot.prove.promises import PROMISES
from surefoot.trial import find_conditions, markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
MANY = {  # trials of each campaign in the large count
    "F01": 500,
    "F02": 10_000,
    "F03": 200,
    "F04": 20_000,
    "F05": 4_000,
    "F06": 500,
    "F06-run": 40,
    "F07": 168,
    "F08": 1_000,
    "F09": 20,
    "F10": 10,
    "F12": 100,
    "F13": 100,
    "F20": 100,
    "F23": 100,
    "F24": 200,
    "F26": 50,
    "F01-loop": 20,
    "F29": 200,
    "M01": 2_000,
}
Row = Mapping[str, Any]


def as_row(outcome: CampaignOutcome) -> dict[str, Any]:
    """What is published of a campaign."""
    conditions = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **find_conditions(("torch", "surefoot")),
    }
    return {"conditions": conditions, **asdict(outcome), "bound": outcome.bound}


def read_rows(folder: Path) -> list[Row]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def render_results(rows: Sequence[Row]) -> str:
    """A line a campaign."""
    cells = [
        (
            row["case"],
            row["title"],
            _promises(row["case"]),
            f"{row['trials']:,}",
            str(len(row["failures"])),
            UNKNOWN if row["bound"] is None else f"{row['bound']:.3%}",
            f"from {row['seed']:,}",
            format_seconds(row["elapsed_s"]),
        )
        for row in rows
    ]
    return markdown(
        ("case", "fault", "promises", "trials", "failures", "rate below (95 %)", "seeds", "time"),
        cells,
    )


def _promises(case: str) -> str:
    return ", ".join(str(each.number) for each in PROMISES[:-1] if case in each.cases)


def render_places(rows: Sequence[Row]) -> str:
    """Where the faults fell."""
    cells = [
        (row["case"], ", ".join(f"{name} {count:,}" for name, count in row["counts"].items()))
        for row in rows
    ]
    return markdown(("case", "where the faults fell, and what was tried"), cells)


def render_conditions(rows: Sequence[Row]) -> str:
    """What the counts were made on; a value that differed between campaigns is given for each."""
    names = dict.fromkeys(name for row in rows for name in row["conditions"])
    values = {
        name: {row["case"]: row["conditions"].get(name, UNKNOWN) for row in rows} for name in names
    }
    cells = [
        (
            name,
            next(iter(each.values()))
            if len(set(each.values())) == 1
            else ", ".join(f"{case}: {v}" for case, v in each.items()),
        )
        for name, each in values.items()
    ]
    return markdown(("condition", "value"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case",
        action="append",
        choices=[each.case for each in CAMPAIGNS],
        help="this campaign; repeatable",
    )
    parser.add_argument("--trials", type=int, help="of each campaign; by default its large count")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument(
        "--in",
        dest="scratch",
        type=Path,
        help="the folder to work in; by default the system's for temporary files",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where a JSON a campaign goes")
    parser.add_argument(
        "--show", action="store_true", help="only make the tables from the results that are there"
    )
    asked = parser.parse_args()
    chosen = (
        []
        if asked.show
        else [each for each in CAMPAIGNS if not asked.case or each.case in asked.case]
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="surefoot-faults-", dir=asked.scratch) as folder:
        for campaign in chosen:
            workshop, trials = (
                Workshop(Path(folder) / campaign.case),
                asked.trials or MANY[campaign.case],
            )
            outcome = run_trials(campaign, workshop, trials=trials, seed=asked.seed, tell=_tell)
            (asked.out / f"{campaign.case}.json").write_text(
                json.dumps(as_row(outcome), indent=1) + "\n"
            )
    rows = read_rows(asked.out)
    parts = {
        "results": render_results(rows),
        "places": render_places(rows),
        "conditions": render_conditions(rows),
    }
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
