r"""Finding digits on a canvas.

Which cells of a grid hold one (all cells count), and where in them it is (only those that do).

python examples/detector.py
surefoot train examples/detector.py:Detector --set optim.name=muon --set train.batch=32 \
    --set train.microbatch=8

Two terms, each a sum over its own count. `counts(batch)` knows both before the forward pass, so
that microbatches with few and with many digits give the gradient of the whole batch.
"""

# B batch, S cells a side, K classes (0 is "nothing here", 1 to 10 are the digits)

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, Term
from surefoot.data import Arrays
from surefoot.metrics import Mean, accuracy, mean_of

CANVAS, CELL, DIGIT = 32, 8, 8  # pixels
NUM_CELLS = CANVAS // CELL  # a side
Batch = dict[str, Tensor]


def paint(
    num_canvases: int, seed: int, digits: np.ndarray, labels: np.ndarray
) -> dict[str, np.ndarray]:
    """Canvases with one to three digits at any place.

    A digit belongs to the cell that its center is in.
    """
    draw = np.random.default_rng(seed)
    images = draw.random((num_canvases, 1, CANVAS, CANVAS), dtype=np.float32) * 0.2
    classes = np.zeros((num_canvases, NUM_CELLS, NUM_CELLS), dtype=np.int64)
    places = np.zeros((num_canvases, NUM_CELLS, NUM_CELLS, 2), dtype=np.float32)
    for canvas in range(num_canvases):
        for _ in range(draw.integers(1, 4)):
            top, left = draw.integers(0, CANVAS - DIGIT + 1, 2)
            row, column = (top + DIGIT // 2) // CELL, (left + DIGIT // 2) // CELL
            row, column = min(row, NUM_CELLS - 1), min(column, NUM_CELLS - 1)
            if classes[canvas, max(0, row - 1) : row + 2, max(0, column - 1) : column + 2].any():
                continue  # no two digits on top of each other
            chosen = draw.integers(len(digits))
            images[canvas, 0, top : top + DIGIT, left : left + DIGIT] += digits[chosen]
            classes[canvas, row, column] = 1 + labels[chosen]
            places[canvas, row, column] = np.array([top, left]) / CELL - (row, column)
    return {"images": images, "classes": classes, "places": places}


class Detector:
    """A class and a place for each cell of a 4 x 4 grid."""

    def __init__(self, box_weight: float = 2.0) -> None:
        self.box_weight = box_weight

    def model(self) -> nn.Module:
        def stage(inputs: int, outputs: int) -> list[nn.Module]:
            return [
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.GroupNorm(4, outputs),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]

        return nn.Sequential(
            *stage(1, 12), *stage(12, 24), *stage(24, 48), nn.Conv2d(48, 11 + 2, 3, padding=1)
        )

    def data(self, split: str) -> Arrays:
        pixels, labels = load_digits(return_X_y=True)
        is_test = np.arange(len(labels)) % 5 == 0
        chosen = is_test if split == "test" else ~is_test
        digits = (pixels[chosen] / 16).astype(np.float32).reshape(-1, DIGIT, DIGIT)
        return Arrays(
            **paint(
                200 if split == "test" else 1000,
                seed=int(split == "test"),
                digits=digits,
                labels=labels[chosen],
            )
        )

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"classes": batch["classes"].numel(), "places": int((batch["classes"] > 0).sum())}

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        out_BSSC = model(batch["images"]).permute(0, 2, 3, 1)
        return {"classes": out_BSSC[..., :11], "places": out_BSSC[..., 11:]}

    def loss(self, output: dict[str, Tensor], batch: Batch) -> Loss:
        counts, has_digit = self.counts(batch), batch["classes"] > 0
        surprise = F.cross_entropy(
            output["classes"].flatten(0, 2), batch["classes"].flatten(), reduction="sum"
        )
        distance = F.smooth_l1_loss(
            output["places"][has_digit], batch["places"][has_digit], reduction="sum"
        )
        return Loss(
            Term("classes", surprise, counts["classes"]),
            Term("places", distance, counts["places"], weight=self.box_weight),
        )

    def metrics(self, output: dict[str, Tensor], batch: Batch) -> dict[str, Mean]:
        """How many of the cells that hold a digit are named rightly.

        And how many pixels off its corner is.
        """
        has_digit = batch["classes"] > 0
        off = (output["places"][has_digit] - batch["places"][has_digit]).abs().sum() * CELL / 2
        return {
            "digits named": accuracy(output["classes"][has_digit], batch["classes"][has_digit]),
            "pixels off": mean_of(off, has_digit.sum()),
        }


def main(folder: str | None = None) -> Run:
    spec = RunSpec(
        optim={"name": "muon", "lr": 0.02},
        train={"length": "6 epochs", "batch": 32, "microbatch": 16},
        evaluate={"every": "3 epochs"},
    )
    with Run(spec, Detector(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
