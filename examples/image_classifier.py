"""Handwritten digits with a small convolutional net: the shortest whole task.

python examples/image_classifier.py
surefoot train examples/image_classifier.py:ImageClassifier --set optim.lr=0.005
"""

from __future__ import annotations

import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays
from surefoot.metrics import Mean, accuracy

Batch = dict[str, Tensor]


class ImageClassifier:
    """Ten classes of 8 x 8 pixels; every fifth image is kept for the test."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def data(self, split: str) -> Arrays:
        pixels, labels = load_digits(return_X_y=True)
        is_test = [number % 5 == 0 for number in range(len(labels))]
        chosen = is_test if split == "test" else [not kept for kept in is_test]
        images = pixels[chosen].reshape(-1, 1, 8, 8).astype("float32") / 16
        return Arrays(images=images, labels=labels[chosen])

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["images"])

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        total = F.cross_entropy(output, batch["labels"], reduction="sum")
        return Loss.sum(total, count=len(output))  # a sum with its count, never a mean

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch["labels"])}


def main(folder: str | None = None) -> Run:
    spec = RunSpec(optim={"lr": 5e-3}, train={"length": "6 epochs", "batch": 64})
    with Run(spec, ImageClassifier(), folder=folder) as run:
        for report in run.steps():
            if run.evaluation_due and run.evaluate().metrics["accuracy"] == 1.0:
                run.stop(f"nothing is left to learn after step {report.step}")
    return run


if __name__ == "__main__":
    main()
