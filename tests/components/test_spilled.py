"""Tests of weights that are built in a file.

The same bits, ties and layouts, and only those in work in memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.components.memory import spilled
from surefoot.components.memory.spilled import FileBackedParameters
from surefoot.trial import resident_bytes


class Tied(nn.Module):
    """What a constructor may do.

    Default draws, draws of its own by torch.nn.init and in place, a tie, a frozen part, a buffer,
    16 bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.blocks = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Conv1d(64, 16, 1))
        self.scale = nn.Parameter(torch.randn(16, 3) * 0.1)
        self.half = nn.Linear(16, 16).to(torch.bfloat16)
        self.register_buffer("mask", torch.ones(16, 16).tril())
        self.apply(self._init)
        with torch.no_grad():
            self.scale[1:, :2] += torch.rand(15, 2)
        self.head.weight = self.table.weight
        self.blocks[0].weight.requires_grad_(requires_grad=False)
        self.empty, self.absent = nn.Parameter(torch.empty(0)), None

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilled, "MIN_BYTES", 1)
    monkeypatch.setattr(spilled, "KEPT_BYTES", 1 << 12)


@pytest.mark.usefixtures("small")
def test_a_model_has_the_same_bits_ties_and_layouts_and_trains_alike() -> None:
    made: list[Any] = []
    for mode in (None, FileBackedParameters()):
        torch.manual_seed(3)
        if mode is None:
            model = Tied()
        else:
            with mode:
                model = Tied()
            assert len(mode._maps) >= 8
        assert model.head.weight is model.table.weight
        assert [name for name, each in model.named_parameters() if not each.requires_grad] == [
            "blocks.0.weight"
        ]
        drawn = torch.rand(3)  # the stream stands where it would
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hidden = model.blocks[0](model.table(torch.arange(4)))
        (model.head(hidden[:, :16]).square().sum() + model.scale.sum()).backward()
        optimizer.step()
        made.append(
            ({**model.state_dict(), "drawn": drawn}, [each.stride() for each in model.parameters()])
        )
    assert made[0][1] == made[1][1]
    assert made[0][0].keys() == made[1][0].keys()
    assert all(torch.equal(made[0][0][name], made[1][0][name]) for name in made[0][0])


class Aliased(nn.Module):
    """Parameters that something else looks at during the constructor, and copies of blocks."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(16, 16)
        self.filled = nn.Parameter(whole)
        whole.copy_(torch.eye(16))
        fused = torch.empty(32, 16)
        self.one, self.other = nn.Parameter(fused[:16]), nn.Parameter(fused[16:])
        nn.init.normal_(fused)
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        self.copied = nn.TransformerEncoder(layer, 2)
        self.half = nn.Sequential(nn.Linear(16, 16)).to(torch.float64)


@pytest.mark.usefixtures("small")
def test_what_something_else_holds_stays_where_it_is_and_copies_of_blocks_move() -> None:
    made = []
    for mode in (None, FileBackedParameters()):
        torch.manual_seed(3)
        if mode is None:
            made.append(Aliased())
            continue
        with mode:
            made.append(Aliased())
        there = {
            name
            for name, each in made[1].named_parameters()
            if each.untyped_storage().data_ptr() in mode._maps
        }
        assert not there & {"filled", "one", "other"}
        assert "copied.layers.1.linear1.weight" in there
        assert "half.0.weight" in there
        kept = len(mode._maps)
        del made[1].copied
        assert len(mode._maps) < kept  # what is let go leaves the file
        made[1].copied = made[0].copied
    assert torch.equal(made[1].filled, torch.eye(16))
    first, second = (each.state_dict() for each in made)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_is_in_work_is_in_memory() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(40)))
        for layer in model:
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight)
        return model

    before = resident_bytes()
    mode = FileBackedParameters()
    with mode:
        model = build()
        assert float(model[0].weight[0, 0]) != 0
    assert resident_bytes() - before < 60 << 20  # of 160 MiB
    assert sum(
        float(each.detach().square().mean()) for each in model.parameters()
    ) == pytest.approx(40, rel=0.01)


def test_where_a_disk_has_no_room_weights_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with FileBackedParameters() as mode:
        model = nn.Linear(512, 512)
    assert mode._maps == {}
    assert model(torch.ones(1, 512)).shape == (1, 512)


def test_the_file_has_no_name_and_no_hook_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilled, "ON_DISK", str(tmp_path))
    with pytest.raises(ValueError, match="planted"), FileBackedParameters():
        nn.Linear(512, 512)
        raise ValueError("planted")
    assert list(tmp_path.iterdir()) == []
    with FileBackedParameters() as mode:
        pass
    nn.Linear(512, 512)
    assert mode._maps == {}
