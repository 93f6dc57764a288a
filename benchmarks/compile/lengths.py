"""Texts of twenty lengths, compiled.

With sizes that may change, one graph for each bucket of lengths, and padded to the longest.

python -m benchmarks.compile.lengths [--rounds 7] [--out FILE] [--show]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measured import ROOT, make_parser, measure, render_conditions, render_ratio, show
from benchmarks.step_cost.models import GPT
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.statistics import median_interval
from surefoot.core.units import format_seconds
from surefoot.trial import Arm, Trial, find_effect, markdown, read_trial, spec_arm

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "lengths.json"
LENGTHS = tuple(range(16, 336, 16))
BUCKET = 80  # of four buckets
SAMPLES, BATCH, STEPS, WARMUP = 960, 8, 60, 60  # the warm-up sees every length, and its compiling
CPU = "cpu_s_per_step"
ARMS = {  # name -> (how a batch is cut, keys of [compile])
    "padded eager": ("padded", {}),
    "cut eager": ("cut", {}),
    "padded compiled": ("padded", {"what": "model", "dynamic": False}),
    "cut dynamic": ("cut", {"what": "model", "dynamic": True}),
    "bucketed compiled": ("bucketed", {"what": "model", "dynamic": False}),
}
PLAIN = "padded compiled"


class Texts:
    """A language model on texts of twenty lengths, eight of one length to a batch.

    What is padded counts for nothing.
    """

    def __init__(self, how: str = "cut") -> None:
        self.how = how

    def model(self) -> nn.Module:
        return GPT(layers=2, tokens=LENGTHS[-1])

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(0)
        lengths = torch.tensor(LENGTHS)[
            torch.randint(len(LENGTHS), (SAMPLES // BATCH,), generator=draws)
        ].repeat_interleave(BATCH)
        tokens = torch.randint(0, 256, (SAMPLES, LENGTHS[-1] + 1), generator=draws)
        return Arrays(tokens, lengths)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        scores: Tensor = model(batch[0][:, : self._size(batch[1])])
        return scores

    def loss(self, output: Tensor, batch: Any) -> Loss:
        tokens, lengths = batch
        size = self._size(lengths)
        is_text = torch.arange(size) < lengths[:, None]
        targets = tokens[:, 1 : size + 1].masked_fill(~is_text, -100)
        total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        return Loss.sum(total, int(is_text.sum()))

    def _size(self, lengths: Tensor) -> int:
        longest = int(lengths.max())
        return {"padded": LENGTHS[-1], "cut": longest, "bucketed": -(-longest // BUCKET) * BUCKET}[
            self.how
        ]


def make_arms(steps: int = STEPS, warmup: int = WARMUP) -> list[Arm]:
    """Each trains on the same texts in the same order."""
    return [
        spec_arm(
            name,
            RunSpec(
                task={"use": "benchmarks.compile.lengths:Texts", "how": how},
                compile={**keys, **({"on_failure": "stop"} if keys else {})},
                data={"shuffle": False},
                train={"batch": BATCH, "threads": 1},
                observe={"tensorboard": False},
            ),
            steps=steps,
            warmup=warmup,
            folder=ROOT,
            timeout_s=1800.0,
        )
        for name, (how, keys) in ARMS.items()
    ]


def render(trial: Trial) -> str:
    """Time of a step, and of compiling, of each arm against texts that are padded and compiled."""
    rows = []
    for arm in trial.arms:
        times = list(trial.by_round(arm, CPU).values())
        compiling = list(trial.by_round(arm, "compile_s").values())
        if not times:
            continue
        ratio = "" if arm == PLAIN else render_ratio(find_effect(trial, arm, PLAIN, CPU))
        spent = format_seconds(median_interval(compiling).estimate) if compiling else ""
        rows.append((arm, format_seconds(median_interval(times).estimate), ratio, spent))
    return markdown(("texts", "CPU time of a step", f"to {PLAIN} (95 %)", "compiling"), rows)


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.set_defaults(rounds=7)
    asked = parser.parse_args()
    if not asked.show:
        measure(
            "lengths",
            make_arms(),
            rounds=asked.rounds,
            packages=("torch", "surefoot"),
            out=asked.out,
            warmup_rounds=0,
        )
    trial = read_trial(asked.out)
    parts = {"lengths": render(trial), "lengths conditions": render_conditions(trial)}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
