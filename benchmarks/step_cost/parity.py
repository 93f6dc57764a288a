"""Does surefoot's step compute what the idiomatic loop computes?

Tensors after one step, losses after 2,000, same batches.

python benchmarks/step_cost/parity.py            both; the losses take minutes
python benchmarks/step_cost/parity.py --steps 0  the tensors only

The losses take three processes, two at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measured import show
from benchmarks.step_cost.run import ARMS, MODELS, RESULTS, make_arm
from benchmarks.step_cost.tables import PARITY, render_parity
from surefoot.core.statistics import mean
from surefoot.trial import Arm, compare_arms, find_conditions, read_arrays, run_arm

REFERENCE, CANDIDATE = "idiomatic", "surefoot"
# torch's own loop with another order of rounding: what 2,000 steps make of that is the floor of the
# losses
ROUNDED = "fused"
WINDOW = 50  # steps whose mean loss is compared
TENSOR_STEPS = (1, 10)  # the bar is step 1; what ten steps make of rounding is shown beside it
TENSOR_TOLERANCE, LOSS_TOLERANCE = 1e-5, 1e-3
MAX_S = 3600.0


def find_tensor_rows(models: str) -> list[dict[str, Any]]:
    """The worst tensor of each model and group (gradients, weights, loss of a step).

    Each with the floor of two equal runs.
    """
    words = ("--steps", str(max(TENSOR_STEPS)), "--tensors", *map(str, TENSOR_STEPS))
    parity = compare_arms(
        _arm(CANDIDATE, models, words), _arm(REFERENCE, models, words), tolerance=TENSOR_TOLERANCE
    )
    if parity.failure is not None:
        raise SystemExit(parity.failure)
    rows = []
    for model in models.split(","):
        for step in TENSOR_STEPS:
            for group in ("loss", "gradient", "weight"):
                gaps = [
                    gap for gap in parity.gaps if gap.name.startswith(f"{model}/{group}/{step}")
                ]
                gaps = [gap for gap in gaps if gap.name.split("/")[2] == str(step)]
                worst = gaps[0]
                rows.append(
                    {
                        "model": model,
                        "what": group,
                        "step": step,
                        "tensors": len(gaps),
                        "worst": worst.name,
                        "distance": worst.distance,
                        "floor": worst.floor,
                        "verdict": worst.verdict,
                        "bar": TENSOR_TOLERANCE if step == 1 else None,
                    }
                )
    return rows


def find_loss_rows(models: str, steps: int, batches: int) -> list[dict[str, Any]]:
    """The mean losses of the last WINDOW steps, of all three arms, at each quarter of `steps`.

    Also the loss of that step alone.
    """
    marks = [steps * quarter // 4 for quarter in (1, 2, 3, 4)]
    read = [step for mark in marks for step in range(mark - WINDOW + 1, mark + 1)]
    words = ("--steps", str(steps), "--batches", str(batches), "--losses", *map(str, read))
    arms = [
        replace(_arm(name, models, words), timeout_s=MAX_S)
        for name in (REFERENCE, ROUNDED, CANDIDATE)
    ]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(2) as pool:
        folders = [Path(work) / arm.name for arm in arms]
        for outcome in pool.map(run_arm, arms, folders):
            if outcome.ended != "done":
                raise SystemExit(f"{outcome.arm} {outcome.ended}: {outcome.error}")
        losses = [read_arrays(folder / "rank0" / "report.json") for folder in folders]
    return [
        _loss_row(model, mark, losses, is_last=mark == steps)
        for model in models.split(",")
        for mark in marks
    ]


def _loss_row(
    model: str, mark: int, losses: Sequence[Mapping[str, Any]], *, is_last: bool
) -> dict[str, Any]:
    steps = range(mark - WINDOW + 1, mark + 1)
    reference, rounded, candidate = (
        mean([float(found[f"{model}/loss/{step}"][0]) for step in steps]) for found in losses
    )
    alone = [float(found[f"{model}/loss/{mark}"][0]) for found in losses]
    return {
        "model": model,
        "step": mark,
        "reference": reference,
        "candidate": candidate,
        "difference": abs(candidate - reference),
        "floor": abs(rounded - reference),
        "difference_of_this_step": abs(alone[2] - alone[0]),
        "floor_of_this_step": abs(alone[1] - alone[0]),
        "bar": LOSS_TOLERANCE if is_last else None,
    }


def _arm(name: str, models: str, words: tuple[str, ...]) -> Arm:
    arm = make_arm(name, ARMS[name][0], models)
    return replace(arm, command=(*arm.command, *words))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--steps", type=int, default=2000, help="of the losses; 0 leaves them out")
    parser.add_argument(
        "--batches",
        type=int,
        help="of data for the losses; as many as steps, if not told: none comes twice",
    )
    parser.add_argument("--out", type=Path, default=PARITY)
    parser.add_argument(
        "--show", action="store_true", help="only make the table from the results that are there"
    )
    asked = parser.parse_args()
    if not asked.show:
        found = {
            "conditions": find_conditions(),
            "tensors": find_tensor_rows(asked.models),
            "losses": [],
        }
        if asked.steps:
            found["losses"] = find_loss_rows(
                asked.models, asked.steps, asked.batches or asked.steps
            )
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    readme = RESULTS.parents[1] / "README.md"
    show(
        {"parity": render_parity(json.loads(asked.out.read_text()))},
        readme if asked.out == PARITY else None,
    )


if __name__ == "__main__":
    main()
