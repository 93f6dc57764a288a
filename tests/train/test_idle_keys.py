"""Keys without effect on a source or on one rank are named; messages call a default a default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from surefoot import Loss, Run, RunSpec, Term
from surefoot.core.errors import SpecError, TaskError
from tests.train.small import Small, spec
from tests.world.ranks import run_ranks


class Loaded(Small):
    """The data are a DataLoader, for the splits that `loaded` names."""

    def __init__(self, *loaded: str) -> None:
        super().__init__()
        self.loaded = loaded

    def data(self, split: str) -> Any:
        source = super().data(split)
        if split not in self.loaded:
            return source
        return DataLoader(TensorDataset(*source.read(np.arange(24))), batch_size=4)

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch


def started(folder: Path, task: Small, **tables: Any) -> str:
    """All that the run says at its start."""
    given = spec(2, **tables)
    if "train" in getattr(task, "loaded", ()):
        given = RunSpec(
            **{**given.as_tables(), "train": {"length": "2 steps"}}  # its batch is the loader's
        )
    with Run(given, task, folder=folder, quiet=True) as run:
        return json.dumps([*run.assembly.notes, *run.assembly.told], ensure_ascii=False)


@pytest.mark.parametrize(
    ("loaded", "tables", "says"),
    [
        (("train",), {"data": {"shuffle": False}}, "data.shuffle = false has no effect"),
        (("train",), {"data": {"shuffle": True}}, "data.shuffle = true has no effect"),
        (("test",), {"evaluate": {"batch": 8}}, "evaluate.batch = 8 has no effect"),
        ((), {"data": {"draws": "sample"}}, 'data.draws = "sample" has no effect'),
        (("train",), {"data": {"draws": "sample"}}, None),
        (("train",), {"data": {"last_batch": "drop"}}, 'data.last_batch = "drop" has no effect'),
        ((), {"data": {"last_batch": "drop"}}, None),
        (("train",), {}, None),
        (("train",), {"evaluate": {"batch": 8}}, None),
        (("test",), {"data": {"shuffle": False}}, None),
    ],
)
def test_a_key_that_a_loader_decides_is_named_at_the_start(
    loaded: tuple[str, ...], tables: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    said = started(tmp_path / "run", Loaded(*loaded), **tables)
    assert ("has no effect" in said) is (says is not None)
    assert (says or "").replace('"', '\\"') in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transport", "gloo"),
        ("timeout", 60.0),
        ("check_every", "7 steps"),
        ("sync_buffers", False),
        ("bucket_size", "1 MiB"),
    ],
)
def test_a_key_of_several_ranks_is_named_on_one_rank_and_the_run_trains(
    key: str, value: Any, tmp_path: Path
) -> None:
    said = started(tmp_path / "run", Small(), layout={key: value})
    assert f"layout.{key} = {value!r} has no effect: the run has one rank" in said
    assert "has no effect" not in started(tmp_path / "other", Small())


# ---- values that were not given


def test_a_microbatch_that_does_not_divide_the_default_batch_is_refused(tmp_path: Path) -> None:
    given = RunSpec(train={"microbatch": 5, "length": "2 steps"})
    with pytest.raises(SpecError) as raised, Run(given, Small(), folder=tmp_path / "run"):
        pass
    assert (
        raised.value.message
        == "train.microbatch = 5 does not divide train.batch = 128 (the default)"
    )
    assert raised.value.hint == "use one of [1, 2, 4, 8, 16, 32, 64, 128]"


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            {"train": {"microbatch": 5, "batch": 128}},
            "microbatch = 5 does not divide batch = 128",
        ),
        ({"optim": {"clip_value": 0.5}}, "clip_value = 0.5 contradicts clip = 1 (the default)"),
        (
            {"precision": {"weights": "bf16"}},
            "weights = 'bf16' with compute = 'fp32' (the default) converts",
        ),
        (
            {"precision": {"compute": "fp16", "min_scale": 2.0**40}},
            "is above init_scale = 65536 (the default)",
        ),
        (
            {"train": {"ramp": [[0, 16], [99, 64]]}},
            "samples that rise from 0, and at last batch = 128 (the default)",
        ),
        (
            {"optim": {"state": "8bit", "name": "sgd"}},
            "the adam or adamw of surefoot, not name = 'sgd'",
        ),
        (
            {"memory": {"update_in_backward": True}},
            "optim.clip = 1 (the default) needs the norm of all gradients",
        ),
    ],
)
def test_a_message_calls_a_value_that_was_not_given_the_default(
    tables: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as refused:
        RunSpec(**tables)
    assert says in str(refused.value)
    assert str(refused.value).count("(the default)") == says.count("(the default)")


# ---- hints of a loss that is split


class TwoTerms(Small):
    def loss(self, output: Tensor, batch: Any) -> Loss:
        (term,) = super().loss(output, batch).terms
        return Loss(term, Term("size", output.square().sum(), output.numel()))


class Whole(Small):
    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(
            nn.functional.cross_entropy(output, batch[1], reduction="sum"),
            len(batch[1]),
            additive=False,
        )


SPLITS: dict[str, tuple[dict[str, Any], str]] = {
    "microbatch": ({"train": {"microbatch": 2}}, "leave train.microbatch out"),
    "memory": ({"memory": {"on_oom": "halve"}}, "leave memory.on_oom out"),
    "virtual ranks": (
        {"layout": {"virtual_ranks": 2}, "train": {"threads": 1}},
        "leave layout.virtual_ranks out",
    ),
}


@pytest.mark.parametrize("task", [TwoTerms, Whole])
@pytest.mark.parametrize("split", SPLITS)
def test_the_hint_names_the_setting_that_splits_the_batch_and_leads_out(
    split: str, task: type[Small], tmp_path: Path
) -> None:
    tables, way = SPLITS[split]
    with pytest.raises(TaskError) as refused:
        started(tmp_path / "run", task(), **tables)
    assert way in str(refused.value.hint)
    assert str(refused.value.hint).count("leave ") == 1
    started(tmp_path / "other", task())


@pytest.mark.parametrize("task", [TwoTerms, Whole])
def test_the_hint_on_two_ranks_does_not_name_a_microbatch_that_was_not_given(
    task: type[Small], tmp_path: Path
) -> None:
    found = run_ranks(
        2, lambda rank: started(tmp_path / "run", task(), train={"threads": 1}), tmp_path / "ranks"
    )
    assert all("train on one rank" in each["error"] for each in found), found
    assert all("microbatch out" not in each["error"] for each in found)
