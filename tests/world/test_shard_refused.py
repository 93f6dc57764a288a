"""Models and layouts that cannot be split are refused, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.cli.options import launch_ranks
from surefoot.contract.spec import RunSpec
from surefoot.core import place
from surefoot.core.errors import SpecError
from tests.world.ranks import run_ranks
from tests.world.test_run import Sentences, spec, train
from tests.world.test_shard import Half, Stacked


class Alone(Stacked):
    def model(self) -> nn.Module:
        model = super().model()
        model.blocks = nn.ModuleList()
        return model


class Parts(Stacked):
    """A task that calls parts of its model."""

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        made: Tensor = model.head(model.table(batch["words"].flatten()))
        return made


class Scalar(Stacked):
    def model(self) -> nn.Module:
        model = super().model()
        model.offset = nn.Parameter(torch.zeros((), dtype=torch.float64))
        return model


class TiedBlocks(Stacked):
    def model(self) -> nn.Module:
        model: Any = super().model()
        model.blocks[1].inner[0].weight = model.blocks[0].inner[0].weight
        return model  # type: ignore[no-any-return]


class Apart(Stacked):
    def model(self) -> nn.Module:
        model = super().model()
        for each in model.parameters() if place.here().rank else ():
            each.data.add_(0.25)
        return model


class Empty(Stacked):
    def model(self) -> nn.Module:
        model = super().model()
        model.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        return model


class ChannelsLast(Stacked):
    def model(self) -> nn.Module:
        model = super().model()
        model.filters = nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model


@pytest.mark.parametrize(
    ("task", "layout", "tables", "words"),
    [
        (Stacked, {"shard": 3}, {}, "layout.shard is 3, but there are 2 ranks"),
        (
            Stacked,
            {"shard": 2, "replicate": 2},
            {},
            "layout.replicate is 2 times a layout.shard of 2, but there are 2 ranks",
        ),
        (
            Stacked,
            {"shard": 2, "zero_stage": 1},
            {"optim": {"name": "muon"}},
            "optim.name is 'muon', and layout.shard is 2",
        ),
        (
            Stacked,
            {"shard": 2},
            {"optim": {"name": "muon"}},
            "optim.name is 'muon', and layout.shard is 2",
        ),
        (
            Stacked,
            {"shard": 2, "zero_stage": 1},
            {"precision": {"weights": "bf16", "compute": "bf16"}},
            "precision.weights is 'bf16', and layout",
        ),
        (
            Stacked,
            {"shard": 2},
            {"precision": {"weights": "bf16", "compute": "bf16", "keep": ["head"]}},
            "precision.keep is ('head',), and layout",
        ),
        (
            Half,
            {"shard": 2},
            {"precision": {"weights": "bf16", "compute": "bf16"}},
            "and frozen.weight is frozen",
        ),
        (
            Stacked,
            {"shard": 2},
            {"compile": {"what": "model"}},
            "compile.what is 'model', and layout.shard is 2",
        ),
        (Alone, {"shard": 2, "zero_stage": 3}, {}, "gathers the weights of one block at a time"),
        (
            Scalar,
            {"shard": 2, "zero_stage": 1},
            {},
            "splits parameters by rows, and offset has no dimension",
        ),
        (TiedBlocks, {"shard": 2}, {}, "is tied to a parameter of another unit"),
        (Empty, {"shard": 2, "zero_stage": 2}, {}, "nothing is empty: [0, 3]"),
        (ChannelsLast, {"shard": 2}, {}, "filters.weight is not contiguous"),
        (Apart, {"shard": 2, "zero_stage": 2}, {}, "weights at the start: rank 1 has"),
        (Sentences, {"shard": 2, "zero_stage": 2}, {}, "calls parts of a ModuleDict"),
        (Parts, {"shard": 2, "zero_stage": 3}, {}, "gather weights when the whole model is called"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_is_written(
    task: Any, layout: Any, tables: Any, words: str, tmp_path: Path
) -> None:
    given = spec(layout=layout, **tables)
    found = run_ranks(2, lambda rank: train(tmp_path / "run", task(), given), tmp_path / "ranks")
    assert words in found[0]["error"], found[0]["error"]
    assert not (tmp_path / "run").exists()


def test_a_layout_that_the_ranks_do_not_make_up_is_refused_before_they_are_started() -> None:
    with pytest.raises(
        SpecError, match=r"layout.replicate is 3 times a layout.shard of 2, but there are 4 ranks"
    ):
        launch_ranks(4, RunSpec(layout={"shard": 2, "replicate": 3}), None, None)  # type: ignore[arg-type]
