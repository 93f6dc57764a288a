"""Detection: a set of boxes for each image (DETR: Carion et al., 2020).

They are matched one to one with those that are there.

python examples/kinds/detection.py
surefoot train examples/kinds/detection.py:Boxes --steps 40

Images hold unequal numbers of boxes. `counts(batch)` knows how many before the forward pass, so
microbatches give the gradient of the whole batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, Term
from surefoot.data import Arrays
from surefoot.metrics import Mean, mean_of

QUERIES, MOST, SIDE = 4, 2, 16
Batch = dict[str, Tensor]
SPEC = RunSpec(
    optim={"name": "adam", "lr": 3e-3, "weight_decay": 0.0},
    train={"length": "10 epochs", "batch": 32},
    evaluate={"every": "5 epochs"},
)


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
        count = {"train": 1000, "test": 200}[split]
        draws = torch.Generator().manual_seed(int(split == "test"))
        size = torch.randint(3, 7, (count, MOST, 2), generator=draws)
        there = torch.rand(count, MOST, generator=draws) < 0.7
        free = torch.tensor([8, SIDE]) - size + 1
        corner = (torch.rand(count, MOST, 2, generator=draws) * free).long()
        corner[:, 1, 0] += 8
        boxes = torch.cat([corner, corner + size], 2)
        y, x = torch.arange(SIDE)[:, None], torch.arange(SIDE)
        left, top, right, bottom = (each[..., None, None] for each in boxes.unbind(2))
        inside = (x >= left) & (x < right) & (y >= top) & (y < bottom) & there[..., None, None]
        noise = torch.randn(count, 1, SIDE, SIDE, generator=draws)
        images = inside.any(1, keepdim=True) + 0.1 * noise
        return Arrays(images=images, boxes=torch.where(there[..., None], boxes / SIDE, -1.0))

    def counts(self, batch: Batch) -> dict[str, int]:
        boxes = batch["boxes"]
        return {"there": len(boxes) * QUERIES, "boxes": int((boxes[..., 0] >= 0).sum())}

    def forward(self, model: nn.Module, batch: Batch) -> Batch:
        logits, middle, size = model(batch["images"]).split([1, 2, 2], 2)
        middle, size = middle.sigmoid(), size.sigmoid()
        boxes = torch.cat([middle - size / 2, middle + size / 2], 2)
        return {"logits": logits[..., 0], "boxes": boxes}

    def match(self, output: Batch, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The image, the query and the box of each pair of the cheapest assignment."""
        rows = []
        for image, boxes in enumerate(batch["boxes"]):
            real = (boxes[:, 0] >= 0).nonzero()[:, 0]
            sure = output["logits"][image].sigmoid()[:, None]
            cost = torch.cdist(output["boxes"][image], boxes[real], p=1) - sure
            pairs = zip(*linear_sum_assignment(cost.detach().cpu()), strict=True)
            rows += [(image, query, real[box]) for query, box in pairs]
        return tuple(torch.tensor(rows, device=batch["boxes"].device).reshape(-1, 3).long().T)

    def loss(self, output: Batch, batch: Batch) -> Loss:
        image, query, box = self.match(output, batch)
        there = torch.zeros_like(output["logits"]).index_put((image, query), torch.ones(()))
        mine, real = output["boxes"][image, query], batch["boxes"][image, box]
        off = (mine - real).abs().sum() + (1 - overlap(mine, real)).sum()
        counts = self.counts(batch)
        told = F.binary_cross_entropy_with_logits(output["logits"], there, reduction="sum")
        return Loss(Term("there", told, counts["there"]), Term("boxes", off, counts["boxes"]))

    def metrics(self, output: Batch, batch: Batch) -> dict[str, Mean]:
        """Of the boxes that are there: how many are found, with half of the union shared."""
        image, query, box = self.match(output, batch)
        shared = overlap(output["boxes"][image, query], batch["boxes"][image, box])
        found = (shared > 0.5) & (output["logits"][image, query] > 0)
        return {"boxes found": mean_of(found.sum(), len(found), better="higher")}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Boxes(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
