"""Models that compute a loss in training mode only, as the detectors of torchvision do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from surefoot import Loss, Term, Update
from surefoot.data import TorchDataset
from surefoot.metrics import mean_of

NUM_IMAGES = 32
Targets = list[dict[str, Tensor]]


class Detector(nn.Module):
    """With targets and in training mode it returns mean losses by name, otherwise predictions."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.classes, self.boxes = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, images: list[Tensor], targets: Targets | None = None) -> Any:
        sizes = [len(image) for image in images]
        rows = self.drop(self.norm(torch.relu(self.body(torch.cat(images)))))
        parts = rows.split(sizes)
        if self.training:
            assert targets is not None, "targets should not be None in training mode"
            classes = [
                F.cross_entropy(self.classes(part), target["labels"])
                for part, target in zip(parts, targets, strict=True)
            ]
            boxes = [
                F.l1_loss(self.boxes(part), target["boxes"])
                for part, target in zip(parts, targets, strict=True)
            ]
            return {
                "classifier": torch.stack(classes).mean(),
                "box_reg": torch.stack(boxes).mean(),
            }
        return [
            {"boxes": self.boxes(part), "labels": self.classes(part).argmax(-1)} for part in parts
        ]


class Images(Dataset[Any]):
    """Images of one to three regions, each with a label and a box."""

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        size = 1 + index % 3
        target = {
            "labels": torch.randint(0, 3, (size,), generator=generator),
            "boxes": torch.rand(size, 2, generator=generator),
        }
        return torch.randn(size, 4, generator=generator), target


def collate(items: list[Any]) -> tuple[list[Tensor], Targets]:
    images, targets = zip(*items, strict=True)
    return list(images), list(targets)


class Detection:
    """Losses in training mode, and predictions that only metrics evaluate."""

    def __init__(self, **kind: Any) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return Detector(**self.kind)

    def data(self, split: str) -> TorchDataset:
        return TorchDataset(Images(), collate)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        images, targets = batch
        return model(images, targets) if model.training else model(images)

    def loss(self, output: Any, batch: Any) -> Loss | None:
        if isinstance(output, list):  # predictions: the model is in evaluation mode
            return None
        num = len(batch[0])
        return Loss(*(Term(name, mean * num, num) for name, mean in output.items()))

    def counts(self, batch: Any) -> dict[str, int]:
        return dict.fromkeys(("classifier", "box_reg"), len(batch[0]))

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        pairs = list(zip(output, batch[1], strict=True))
        far = sum(float(F.l1_loss(made["boxes"], target["boxes"])) for made, target in pairs)
        return {"box_error": mean_of(far, count=len(pairs), better="lower")}


class Segmentation(Detection):
    """The output is one loss in training mode, and a tensor of probabilities in evaluation."""

    def model(self) -> nn.Module:
        class Segmenter(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 3)

            def forward(self, images: list[Tensor], targets: Targets | None = None) -> Any:
                rows = self.inner(torch.cat(images))
                if self.training:
                    assert targets is not None
                    labels = torch.cat([each["labels"] for each in targets])
                    return {"pixels": F.cross_entropy(rows, labels, reduction="sum")}
                return rows.softmax(-1)

        return Segmenter()

    def loss(self, output: Any, batch: Any) -> Loss | None:
        return Loss.sum(output["pixels"], self.counts(batch)) if isinstance(output, dict) else None

    def counts(self, batch: Any) -> Any:
        return sum(len(each["labels"]) for each in batch[1])

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        labels = torch.cat([each["labels"] for each in batch[1]])
        return {"right": mean_of((output.argmax(-1) == labels).sum(), count=len(labels))}


class InUpdates(Detection):
    """The same losses in an Update, which no evaluation computes, and which fails there."""

    def updates(self, model: nn.Module) -> list[Update]:
        def loss(model: Any, batch: Any) -> Loss:
            made, num = model(*batch), len(batch[0])
            return Loss(*(Term(name, mean * num, num) for name, mean in made.items()))

        return [Update("detector", loss, model.parameters())]
