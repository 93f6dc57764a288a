"""What lies in files trains to the same losses, bit for bit, as the same rows in memory.

And packed documents go on as they began.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.numpy import save_file
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.data.sources.images import ImageFolder
from surefoot.components.data.sources.tables import Table
from surefoot.components.data.sources.tensors import Safetensors
from surefoot.components.data.sources.texts import Texts, join_texts
from surefoot.contract.task import Source
from surefoot.tasks.pycorpus import PyCorpus

DRAW = np.random.default_rng(0)
LABELS = np.sort(np.arange(90) % 3)  # in order, as a folder a class gives them
TEXTS = [
    DRAW.integers(1, 30, size=size) + 30 * (number % 2)
    for number, size in enumerate(DRAW.integers(1, 40, size=60))
]
PIXELS = (DRAW.integers(0, 100, size=(90, 4, 4, 3)) + 70 * LABELS[:, None, None, None]).astype(
    np.uint8
)


class Small:
    """Three kinds of small images, read from whatever `source` is."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def data(self, split: str) -> Source:
        return self.source

    def model(self) -> nn.Module:
        return nn.Linear(48, 3)

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["images"].reshape(-1, 48).float() / 255)

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(
            F.cross_entropy(output, batch["labels"], reduction="sum"), count=len(output)
        )


def spec_of(steps: int = 20, batch: int = 16, split: str = "test") -> RunSpec:
    train = {"length": f"{steps} steps", "batch": batch}
    return RunSpec(
        train=train, optim={"lr": 0.01}, evaluate={"split": split}, observe={"tensorboard": False}
    )


def losses_of(task: Any, folder: Path, spec: RunSpec | None = None) -> list[float]:
    with Run(spec or spec_of(), task, folder=folder, quiet=True) as run:
        return [report.loss for report in run.steps()]


def from_npy(folder: Path) -> Source:
    np.save(folder / "x.npy", PIXELS)
    np.save(folder / "y.npy", LABELS)
    return Arrays.of_files(images=folder / "x.npy", labels=folder / "y.npy")


def from_safetensors(folder: Path) -> Source:
    save_file({"x": PIXELS, "y": LABELS}, folder / "a.safetensors")
    return Safetensors(folder / "a.safetensors", images="x", labels="y")


def from_folder(folder: Path) -> Source:
    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        (folder / f"{label}").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{label}" / f"{number:03d}.png")
    return ImageFolder(folder)


def from_parquet(folder: Path) -> Source:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pictures = [
        {"bytes": path.read_bytes()}
        for path in sorted((from_folder(folder), folder)[1].rglob("*.png"))
    ]
    pq.write_table(
        pa.table({"image": pictures, "label": LABELS}), folder / "a.parquet", row_group_size=20
    )
    return Table(folder / "a.parquet", images="image", labels="label")


@pytest.mark.parametrize("make", [from_npy, from_safetensors, from_folder, from_parquet])
def test_a_file_trains_to_the_losses_of_the_same_rows_in_memory(
    make: Callable[[Path], Source], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    expected = losses_of(Small(Arrays(images=PIXELS, labels=LABELS)), tmp_path / "memory")
    assert losses_of(Small(make(tmp_path / "data")), tmp_path / "files") == expected
    assert expected[-1] < 0.9 * expected[0]


class Bags:
    """The class of a text by the mean of its words.

    Padding and grouping may not show in the losses.
    """

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.source = Texts(*join_texts(TEXTS), labels=np.arange(len(TEXTS)) % 2, bounds=bounds)

    data = Small.data

    def model(self) -> nn.Module:
        return nn.Embedding(64, 2)

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        is_real = torch.arange(batch["inputs"].shape[1]) < batch["lengths"][:, None]
        return (model(batch["inputs"]) * is_real[..., None]).double().sum(1) / batch["lengths"][
            :, None
        ]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(
            F.cross_entropy(output, batch["labels"], reduction="sum"), count=len(output)
        )


def test_the_bounds_of_texts_do_not_show_in_the_losses(tmp_path: Path) -> None:
    few, many = (
        losses_of(Bags((40,)), tmp_path / "few"),
        losses_of(Bags((8, 16, 24, 32, 40)), tmp_path / "many"),
    )
    assert few == pytest.approx(many, rel=1e-6)


def packed_files(folder: Path) -> PyCorpus:
    folder.mkdir(exist_ok=True)
    for number in range(60):
        (folder / f"m{number}.py").write_text(f"x{number} = {'ab' * (number % 23)!r}\n")
    return PyCorpus(str(folder), layers=1, width=16, heads=2, length=48, packed=True)


def test_packed_documents_split_into_microbatches_train_as_the_whole_batch(tmp_path: Path) -> None:
    spec, task = spec_of(6, 12, "heldout"), packed_files(tmp_path / "src")
    whole = losses_of(task, tmp_path / "whole", spec)
    assert losses_of(
        task, tmp_path / "split", spec.replace(train={"microbatch": 3})
    ) == pytest.approx(whole, rel=1e-5)


def test_a_run_over_packed_documents_goes_on_with_the_losses_of_an_unbroken_one(
    tmp_path: Path,
) -> None:
    spec = spec_of(8, 8, "heldout").replace(checkpoint={"every": "2 steps"})
    unbroken = losses_of(packed_files(tmp_path / "src"), tmp_path / "unbroken", spec)
    with (
        pytest.raises(Exception, match="left"),
        Run(spec, packed_files(tmp_path / "src"), folder=tmp_path / "left", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 5:
                raise RuntimeError("left")
    gone_on = losses_of(packed_files(tmp_path / "src"), tmp_path / "left", spec)
    assert 3 <= len(gone_on) <= 6
    assert gone_on == unbroken[-len(gone_on) :]
