"""A DataLoader with a collate function that pads, in microbatches and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.wrapped import TorchDataset
from surefoot.core.errors import SpecError
from tests.world.ranks import run_ranks

HINT = "give a DataLoader with a map-style dataset"


class Padded:
    """Texts of unlike lengths, padded by a collate function."""

    def __init__(self, is_loader: bool) -> None:
        self.is_loader = is_loader

    def model(self) -> nn.Module:
        return nn.EmbeddingBag(9, 3, padding_idx=0).double()

    def data(self, split: str) -> Any:
        texts: Any = [torch.arange(1, 3 + number % 5) for number in range(16)]
        loader: Any = DataLoader(
            texts, batch_size=8, collate_fn=lambda rows: pad_sequence(rows, batch_first=True)
        )
        return loader if self.is_loader else TorchDataset(loader.dataset, loader.collate_fn)

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        output: Tensor = model(batch)
        return output

    def loss(self, output: Tensor, batch: Tensor) -> Loss:
        return Loss.sum(
            nn.functional.cross_entropy(output, batch[:, 0], reduction="sum"), len(batch)
        )


def trained(task: Padded, folder: Path, **train: Any) -> list[float]:
    spec = RunSpec(
        train={"length": "2 steps", **train},
        data={"shuffle": False},
        evaluate={"split": "train"},
        observe={"tensorboard": False},
    )
    with Run(spec, task, folder=folder, quiet=True) as run:
        return [float(report.loss or 0.0) for report in run.steps()]


def test_a_loader_is_divided_as_its_dataset_and_collate_function_are(tmp_path: Path) -> None:
    whole = trained(Padded(True), tmp_path / "whole")
    for number, train in enumerate(({"batch": 8}, {"batch": 8, "microbatch": 4})):
        assert trained(Padded(False), tmp_path / str(number), **train) == pytest.approx(
            whole, rel=1e-12
        )
    assert trained(Padded(True), tmp_path / "cut", microbatch=4) == pytest.approx(whole, rel=1e-12)
    for is_loader, train in ((False, {"batch": 8}), (True, {})):
        found = run_ranks(
            2,
            lambda rank, is_loader=is_loader, train=train: trained(
                Padded(is_loader), tmp_path / f"ranks-{is_loader}", **train
            ),
            tmp_path / f"results-{is_loader}",
        )
        assert found == [pytest.approx(whole, rel=1e-12)] * 2


class Batches:
    """An iterable of batches that does not tell their samples."""

    def __init__(self, batches: Any) -> None:
        self._batches = list(batches)

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Streamed(Padded):
    def data(self, split: str) -> Any:
        return Batches(super().data(split))


def test_a_loader_s_dataset_and_collate_function_are_what_refusals_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"whole batches, of unknown samples") as raised:
        trained(Streamed(True), tmp_path / "refused", microbatch=4)
    assert HINT in str(raised.value.hint)
    for each in run_ranks(
        2, lambda rank: trained(Streamed(True), tmp_path / "refused"), tmp_path / "results"
    ):
        assert HINT in each["error"]
