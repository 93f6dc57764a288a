"""The predicted peak of a step beside the measured one.

Over six families of models, precisions, ways to recompute and optimizers.

python benchmarks/memory_prediction/run.py [--show]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measured import show
from benchmarks.memory_prediction.cases import make_cases
from surefoot.core.units import format_bytes, format_percent
from surefoot.prove.memory import compare, predict
from surefoot.trial import find_conditions, markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "memory_prediction.json"
MAX_MEDIAN, MOST = 0.005, 0.03


def measure() -> dict[str, Any]:
    """Every case in this process, one after the other: sizes repeat, so that one time says it."""
    rows = []
    for case in make_cases():
        predicted = predict(case.spec())
        found = compare(case.spec(), predicted.peak_bytes)
        rows.append({"case": case.name, "predicted_bytes": predicted.peak_bytes, **found.as_row()})
        print(f"{case.name}: {format_percent(found.error)}", file=sys.stderr, flush=True)
    return {"conditions": find_conditions(("torch", "surefoot")), "cases": rows}


def render(found: dict[str, Any]) -> str:
    """The bars, then every case."""
    cases = [case for case in found["cases"] if case["error"] is not None]
    errors = [abs(case["error"]) for case in cases]
    worst = max(cases, key=lambda case: abs(case["error"]))
    bars = [
        (
            "median error",
            format_percent(median(errors)),
            f"<= {format_percent(MAX_MEDIAN)}",
            "holds" if median(errors) <= MAX_MEDIAN else "fails",
        ),
        (
            f"largest error: {worst['case']}",
            format_percent(max(errors)),
            f"<= {format_percent(MOST)}",
            "holds" if max(errors) <= MOST else "fails",
        ),
        ("cases", str(len(cases)), ">= 40", "holds" if len(cases) >= 40 else "fails"),
    ]
    rows = [
        (
            each["case"],
            format_bytes(each["predicted_bytes"]),
            format_bytes(each["measured_bytes"]),
            format_percent(each["error"]),
        )
        for each in cases
    ]
    cases = markdown(("case", "predicted", "measured", "error"), rows)
    return f"{markdown(('of', 'is', 'bar', 'verdict'), bars)}\n{cases}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--show", action="store_true", help="only make the tables from the results that are there"
    )
    asked = parser.parse_args()
    if not asked.show:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(measure(), indent=1) + "\n")
    found = json.loads(asked.out.read_text())
    parts = {
        "results": render(found),
        "conditions": markdown(("condition", "value"), list(found["conditions"].items())),
    }
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
