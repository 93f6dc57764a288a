"""What surefoot adds to a step of a user's own loop: own data object, own optimizer.

Live processes in turns on one core, until what each adds is known to 2 % of the plain step.

python benchmarks/own_loop/run.py [--cases "DataLoader,10 layers"] [--doors surefoot,attach,fabric]
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.live import Side, pin
from benchmarks.measured import ROOT, make_parser, render_interval, show, standing_of
from benchmarks.own_loop.turns import CASES, STEPS
from surefoot.core.statistics import Interval, paired_difference, paired_ratio
from surefoot.trial import find_conditions, markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "own_loop.json"
DOORS = {"surefoot": "surefoot", "attach": "surefoot", "fabric": "lightning"}  # package needed
HALF_WIDTH, MIN_TURNS, MOST_TURNS, TURNS_OF_A_PAIR = 0.02, 40, 200, 10
US = 1e6 / STEPS
FIXED_US, EACH_US, ATTACH_US, MOST_RATIO = 40.0, 0.05, 25.0, 1.05  # the bars


def measure_case(name: str, doors: list[str]) -> dict[str, Any]:
    """CPU seconds of the turns of each door, taken side by side, and the number of parameters."""
    taken: dict[str, list[float]] = {door: [] for door in ("plain", *doors)}
    while True:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            sides = {
                door: stack.enter_context(
                    Side(
                        (str(FOLDER / "turns.py"), name, door, folder),
                        folder,
                        {"PYTHONPATH": str(ROOT)},
                    )
                )
                for door in taken
            }
            for number in range(TURNS_OF_A_PAIR):
                for door in (*sides,) if number % 2 else (*reversed(sides),):
                    taken[door].append(sides[door].turn())
            parameters = int(sides["plain"].facts["parameters"])
        plain = taken["plain"]
        widths = [half_width(paired_ratio(taken[door], plain)) for door in doors]
        if len(plain) >= MOST_TURNS or (len(plain) >= MIN_TURNS and max(widths) < HALF_WIDTH):
            return {"parameters": parameters, "taken": taken}


def half_width(ratio: Interval) -> float:
    """Infinite where the turns are too few for an interval."""
    if ratio.low is None or ratio.high is None:
        return float("inf")
    return (ratio.high - ratio.low) / 2


def bar_of(door: str, parameters: int) -> float | None:
    """Microseconds that a door may add to a step; None for a peer."""
    if door == "surefoot":
        return FIXED_US + EACH_US * parameters
    return ATTACH_US if door == "attach" else None


def render(found: dict[str, Any]) -> str:
    rows = []
    for name, each in found["cases"].items():
        taken, plain = each["taken"], each["taken"]["plain"]
        for door in (door for door in taken if door != "plain"):
            added, ratio = (
                paired_difference(taken[door], plain),
                paired_ratio(taken[door], plain),
            )
            most = bar_of(door, each["parameters"])
            bar = "" if most is None else f"<= {most:.3g} us"
            verdict = "" if most is None else standing_of(added, most=most / US)
            middle = sorted(plain)[len(plain) // 2] * US
            rows.append(
                (
                    name,
                    f"{each['parameters']:,}",
                    f"{middle:.0f} us",
                    door,
                    f"{render_interval(added, '.3g', US)} us",
                    bar,
                    verdict,
                    render_interval(ratio, ".3f"),
                    str(len(plain)),
                )
            )
    head = ("case", "parameters", "plain step", "door", "adds (95 %)", "bar", "verdict")
    return markdown((*head, "ratio (95 %)", "turns"), rows)


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--cases", default=None, help="cases, by comma; all, if none is given")
    parser.add_argument("--doors", default=",".join(DOORS))
    asked = parser.parse_args()
    if not asked.show:
        names = list(CASES) if asked.cases is None else asked.cases.split(",")
        doors = [door for door in asked.doors.split(",") if find_spec(DOORS[door]) is not None]
        pin()
        found: dict[str, Any] = {
            "conditions": dict(find_conditions(("torch", "numpy", "surefoot", "lightning"))),
            "cases": {},
        }
        for name in names:
            # an own source is no iterable of batches, which attach takes
            mine = [door for door in doors if not (name == "own source" and door == "attach")]
            found["cases"][name] = measure_case(name, mine)
            print(render({"cases": {name: found["cases"][name]}}), file=sys.stderr, flush=True)
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(asked.out.read_text())
    conditions = markdown(("condition", "value"), [*found["conditions"].items()])
    show(
        {"bars": render(found), "conditions": conditions},
        FOLDER / "README.md" if asked.out == RESULTS else None,
    )


if __name__ == "__main__":
    main()
