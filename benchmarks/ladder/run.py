"""The ladder against an exhaustive search over five rungs.

And ladders of a rung that changes nothing.

python benchmarks/ladder/run.py [--data DIR] [--only digits|cifar10_quick|equal] [--show]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measured import ROOT, show
from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.units import format_number
from surefoot.prove.ladder import (
    Ladder,
    LadderSettings,
    Rung,
    as_row,
    climb_ladder,
    gate,
    parse_rung,
    rungs,
)
from surefoot.prove.ladder.workbench import OUTCOMES, Workbench
from surefoot.trial import find_conditions, markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "ladder.json"
BUILT = ("allocator", "fused", "bf16")
GIVEN = ('records: observe.every="100 steps"', "loose: train.deterministic=false")
EQUAL = "equal: checkpoint.keep=4"  # a run of a second makes one commit, so it keeps as many
EXHAUSTIVE_ROUNDS, FINAL_ROUNDS, LADDERS = 10, 15, 20
SETTINGS = {"digits": LadderSettings(samples=9600), "cifar10_quick": LadderSettings(samples=600)}
SETS = {"digits": (), "cifar10_quick": ("train.batch=50", "task.widths=[16, 64, 64]")}
PARTS = (*SETS, "equal")
MAX_APART, MAX_RUNS, MAX_FALSE = 1.03, 1 / 3, 1


def tell(text: str) -> None:
    print(f"ladder: {text}", file=sys.stderr, flush=True)


def told(ladder: Ladder) -> None:
    last = ladder.results[-1]
    tell(f"{ladder.spec}: {last.rung.name}: {last.standing}: {last.reason}")


def search(name: str, spec: RunSpec, folder: Path) -> dict[str, Any]:
    """A ladder over five rungs, then every subset of them that passes the gate.

    Then the best of both side by side.
    """
    settings = SETTINGS[name]
    given = [parse_rung(text) for text in GIVEN]
    ladder = climb_ladder(
        name, spec, settings, folder / "ladder", given=given, names=BUILT, tell=tell, decided=told
    )
    bench = Workbench(ladder.start, settings, folder / "exhaustive")
    bench.begin()
    specs = {
        "start": ladder.start,
        **check_all(bench, ladder.start, [each.rung for each in ladder.results]),
    }
    tell(f"{name}: {len(specs)} specs, {EXHAUSTIVE_ROUNDS} rounds")
    trial = bench.measure_all("exhaustive", specs, EXHAUSTIVE_ROUNDS)
    times = {
        each: found.estimate
        for each in specs
        if (found := bench.ratio(trial, each, "start", "time")) is not None
    }
    best = min(times, key=times.__getitem__)
    searched, timed = bench.num_runs, count_timed(folder / "exhaustive")
    final = bench.measure_all(
        "final", {"ladder": ladder.best, "exhaustive": specs[best]}, FINAL_ROUNDS
    )
    apart = bench.ratio(final, "ladder", "exhaustive", "time")
    return {
        "name": name,
        "ladder": as_row(ladder),
        "specs": len(specs),
        "times": times,
        "best": best,
        "num_runs": ladder.num_runs,
        "timed_runs": count_timed(folder / "ladder"),
        "searched_runs": searched,
        "timed_searched_runs": timed,
        "kept": [each.rung.name for each in ladder.kept],
        "apart": None
        if apart is None
        else {"estimate": apart.estimate, "low": apart.low, "high": apart.high, "n": apart.count},
    }


def check_all(bench: Workbench, start: RunSpec, five: list[Rung]) -> dict[str, RunSpec]:
    """Every subset of the rungs whose numbers pass the gate of the ladder, by name."""
    ground = bench.tensors("start", start)
    floors = {
        gate.UNITS[name]: bench.tensors("blurred", start, unit=gate.UNITS[name])
        for name in ("fp32", "bf16")
    }
    found = {}
    for size in range(1, len(five) + 1):
        for subset in itertools.combinations(five, size):
            name, spec = " ".join(each.name for each in subset), _with(start, subset)
            kind, unit = gate.bound_of("nothing", spec.precision.compute)
            verdict = gate.judge(kind, ground, floors[unit], bench.tensors(name, spec))
            tell(f"{name}: {verdict.verdict}: {verdict.words}")
            if verdict.verdict == "passes":
                found[name] = spec
    return found


def count_timed(folder: Path) -> int:
    outcomes = map(json.loads, (folder / OUTCOMES).read_text().splitlines())
    return sum("cpu_s_per_sample" in each["measures"] for each in outcomes)


def _with(spec: RunSpec, subset: tuple[Rung, ...]) -> RunSpec:
    for rung in subset:
        spec = rungs.change(spec, rung.change)
    return spec


def equal_ladders(folder: Path) -> dict[str, Any]:
    """Ladders of one rung that changes nothing, each with its own seed; how often it was kept."""
    rows = []
    for number in range(LADDERS):
        spec = spec_file.read("digits", [("train.seed", number, "here")]).spec
        settings = replace(SETTINGS["digits"], samples=6400)
        ladder = climb_ladder(
            "digits",
            spec,
            settings,
            folder / str(number),
            given=[parse_rung(EQUAL)],
            tell=tell,
            decided=told,
        )
        rows.append(as_row(ladder)["rungs"][0])
    return {"ladders": rows, "kept": sum(row["kept"] for row in rows)}


def render(found: Mapping[str, Any]) -> str:
    """The bars, each with what was measured."""
    rows = []
    for each in (found[part] for part in SETS if part in found):
        apart, share = each["apart"], each["num_runs"] / each["searched_runs"]
        shown = (
            f"{apart['estimate']:.3f} ({apart['low']:.3f} to {apart['high']:.3f})"
            if apart
            else "n/a"
        )
        holds = "holds" if apart and apart["estimate"] <= MAX_APART else "fails"
        rows.append(
            (
                f"{each['name']}: time of the ladder's best to that of the best of {each['specs']}",
                shown,
                f"<= {MAX_APART}",
                holds,
            )
        )
        of_timed = f"timed {each['timed_runs']} of {each['timed_searched_runs']}"
        runs = f"{each['num_runs']} of {each['searched_runs']}: {format_number(share)} ({of_timed})"
        rows.append(
            (
                f"{each['name']}: its runs",
                runs,
                "<= 1/3",
                "holds" if share <= MAX_RUNS else "fails",
            )
        )
    if "equal" in found:
        kept = found["equal"]["kept"]
        share = f"{kept} of {len(found['equal']['ladders'])}"
        rows.append(
            (
                "a rung that changes nothing, kept",
                share,
                "<= 1 of 20",
                "holds" if kept <= MAX_FALSE else "fails",
            )
        )
    return markdown(("bar", "measured", "must", "standing"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=(ROOT / os.environ.get("DATA", "../shared/data")).resolve()
    )
    parser.add_argument(
        "--only", choices=PARTS, help="this alone; the others stay as they were measured before"
    )
    parser.add_argument(
        "--show", action="store_true", help="measure nothing, make the tables again"
    )
    asked = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in () if asked.show else PARTS if asked.only is None else (asked.only,):
        with tempfile.TemporaryDirectory(prefix="surefoot-ladders-") as folder:
            conditions = find_conditions(("torch", "surefoot"))
            found[part] = {**measure_part(part, asked.data, Path(folder)), "conditions": conditions}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(
            json.dumps({part: found[part] for part in PARTS if part in found}, indent=1) + "\n"
        )
    show({"bars": render(found), "conditions": render_conditions(found)}, FOLDER / "README.md")


def measure_part(part: str, data: Path, folder: Path) -> dict[str, Any]:
    if part == "equal":
        return equal_ladders(folder)
    stated = [spec_file.parse_set(text) for text in SETS[part]]
    if part != "digits":
        stated.append(("data.folder", str(data), "--data"))
    return search(part, spec_file.read(part, stated).spec, folder)


def render_conditions(found: Mapping[str, Any]) -> str:
    rows = [
        (part, name, value)
        for part in PARTS
        if part in found
        for name, value in found[part]["conditions"].items()
    ]
    return markdown(("part", "condition", "value"), rows)


if __name__ == "__main__":
    main()
