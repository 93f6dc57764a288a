"""Detection: a set of boxes for each image (DETR: Carion et al., 2020).

They are matched one to one with those that are there.

python examples/kinds/detection.py
surefoot train examples/kinds/detection.py:Boxes --steps 40

Images hold unequal numbers of boxes. `counts(batch)` knows how many before the forward pass, so
microbatches give the gradient of the whole batch.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, Term
from surefoot.data import Arrays
from surefoot.metrics import Mean, mean_of

QUERIES, MOST, SIDE = 4, 2, 16
Batch, Pairs = dict[str, Tensor], tuple[Tensor, Tensor]
OPTIM = {"name": "adam", "lr": 3e-3, "weight_decay": 0.0}
SPEC = RunSpec(optim=OPTIM, train={"batch": 32}, evaluate={"every": "5 epochs"})


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """The intersection over the union of boxes (..., 4) given as left, top, right, bottom."""
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
    return shared / (areas - shared)


class Boxes:
    def model(self) -> nn.Module:
        body = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
        head = [nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, QUERIES * 5)]
        return nn.Sequential(*body, *head, nn.Unflatten(1, (QUERIES, 5)))

    def data(self, split: str) -> Arrays:
        """Bright boxes on a dark image, one in each half of it at most.

        A row of boxes that is not there is -1.
        """
        draws, count = np.random.default_rng(split == "test"), 200 if split == "test" else 1000
        images = 0.1 * draws.normal(size=(count, 1, SIDE, SIDE)).astype(np.float32)
        boxes = np.full((count, MOST, 4), -1, np.float32)
        for image, half in np.argwhere(draws.random((count, MOST)) < 0.7):
            width, height = draws.integers(3, 7, 2)
            left, top = 8 * half + draws.integers(0, 9 - width), draws.integers(0, 17 - height)
            images[image, 0, top : top + height, left : left + width] += 1
            boxes[image, half] = np.array([left, top, left + width, top + height]) / SIDE
        return Arrays(images=torch.from_numpy(images), boxes=torch.from_numpy(boxes))

    def counts(self, batch: Batch) -> dict[str, int]:
        num_boxes = int((batch["boxes"][..., 0] >= 0).sum())
        return {"there": len(batch["boxes"]) * QUERIES, "boxes": num_boxes}

    def forward(self, model: nn.Module, batch: Batch) -> Batch:
        logits, boxes = model(batch["images"]).split([1, 4], 2)
        mid, size = boxes.sigmoid().chunk(2, 2)
        return {"logits": logits[..., 0], "boxes": torch.cat([mid - size / 2, mid + size / 2], 2)}

    def match(self, output: Batch, batch: Batch) -> tuple[Pairs, Tensor, Tensor]:
        """The image and the query of each pair of the cheapest assignment, and both boxes."""
        rows = []
        for image, boxes in enumerate(batch["boxes"]):
            real = (boxes[:, 0] >= 0).nonzero()[:, 0]
            cost = torch.cdist(output["boxes"][image], boxes[real], p=1)
            cost = cost - output["logits"][image].sigmoid()[:, None]
            pairs = zip(*linear_sum_assignment(cost.detach().cpu()), strict=True)
            rows += [(image, query, real[box]) for query, box in pairs]
        image, query, box = torch.tensor(rows, device=real.device).reshape(-1, 3).long().T
        return (image, query), output["boxes"][image, query], batch["boxes"][image, box]

    def loss(self, output: Batch, batch: Batch) -> Loss:
        pairs, mine, real = self.match(output, batch)
        there = torch.zeros_like(output["logits"]).index_put(pairs, torch.ones(()))
        off = (mine - real).abs().sum() + (1 - overlap(mine, real)).sum()
        wrong = F.binary_cross_entropy_with_logits(output["logits"], there, reduction="sum")
        totals, counts = {"there": wrong, "boxes": off}, self.counts(batch)
        return Loss(*(Term(name, total, counts[name]) for name, total in totals.items()))

    def metrics(self, output: Batch, batch: Batch) -> dict[str, Mean]:
        """Of the boxes that are there: how many are found, with half of the union shared."""
        pairs, mine, real = self.match(output, batch)
        found = (overlap(mine, real) > 0.5) & (output["logits"][pairs] > 0)
        return {"boxes found": mean_of(found.sum(), len(found), better="higher")}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Boxes(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
