"""Tests of commits of a loop of one's own.

What is saved under a name comes back under it, and what does not fit changes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.components import checkpoint
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import RunFolderError, TaskError


def linear(value: float) -> nn.Linear:
    """A layer whose every number is `value`."""
    made = nn.Linear(3, 2)
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    return made


# ---- names


@pytest.mark.parametrize("other", ["model_ema", "model-ema", "model.safetensors", "modell", "a"])
def test_a_module_comes_back_under_its_own_name_alone(other: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"model": linear(1.0), other: linear(2.0)})
    into, first, second = linear(0.0), linear(0.0), linear(0.0)
    checkpoint.load_into(into, tmp_path, 1)
    checkpoint.load(tmp_path, {other: second, "model": first})
    assert [each.bias[0].item() for each in (into, first, second)] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("name", ["model-00001-of-00002", "m" * 120, "model\n", "a b", "state", ""])
def test_a_module_whose_file_could_not_be_told_from_others_is_refused(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="the name of a module is"):
        checkpoint.save(tmp_path, 1, {name: linear(1.0)})
    assert not list(tmp_path.iterdir())


# ---- a kill while a commit takes the place of another


class Killed(BaseException):
    """As a kill: nothing is put in order on the way out."""


def replace_and_die(folder: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save step 10 as 1, then as 2, and die before the `at`th rename of the second."""
    checkpoint.save(folder, 10, {"model": linear(1.0)})
    renames, rename = [], Path.rename

    def dying(path: Path, to: Path) -> Path:
        renames.append(path)
        if len(renames) == at:
            raise Killed
        return rename(path, to)

    with monkeypatch.context() as context, pytest.raises(Killed):
        context.setattr(Path, "rename", dying)
        context.setattr(shutil, "rmtree", lambda *given, **more: None)
        checkpoint.save(folder, 10, {"model": linear(2.0)})


def read(folder: Path) -> float | None:
    into = linear(0.0)
    found = checkpoint.load(folder, {"model": into})
    return None if found is None else into.bias[0].item()


@pytest.mark.parametrize(("at", "expected"), [(1, 1.0), (2, 1.0), (3, 2.0)])
def test_a_kill_while_a_step_is_replaced_leaves_one_to_load_and_later_saves_succeed(
    at: int, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_and_die(tmp_path, at, monkeypatch)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert len(left) == 2
    assert read(tmp_path) == expected
    into = linear(0.0)
    checkpoint.load_into(into, tmp_path, 10)
    assert into.bias[0].item() == expected
    # somebody may be saving there: left as it is
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == left
    checkpoint.save(tmp_path, 9, {"model": linear(9.0)})
    assert read(tmp_path) == expected
    checkpoint.save(tmp_path, 10, {"model": linear(3.0)})
    assert read(tmp_path) == 3.0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000000000009",
        "step-000000000010",
    ]


def test_of_a_step_whose_new_commit_is_damaged_the_one_that_it_replaced_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_and_die(tmp_path, 3, monkeypatch)
    (tmp_path / "checkpoints" / "step-000000000010" / "state.json").write_text("{}")
    assert read(tmp_path) == 1.0
    assert (tmp_path / "checkpoints" / ".bad-step-000000000010").is_dir()


# ---- what does not fit


def test_nothing_changes_where_one_part_does_not_fit(tmp_path: Path) -> None:
    first = linear(1.0)
    adam = torch.optim.Adam(first.parameters())
    checkpoint.save(
        tmp_path, 1, {"a": first, "b": linear(2.0), "optimizer": adam, "t": torch.ones(2)}
    )
    for wrong, said in (
        ({"b": nn.Linear(4, 2)}, "weight"),
        ({"best": adam}, "no state of 'best'"),
        (
            {"optimizer": torch.optim.SGD(linear(0.0).parameters(), lr=1.0)},
            "which was Adam: the loop passes SGD",
        ),
        (
            {"optimizer": torch.optim.Adam([linear(0.0).weight])},
            r"groups of \[2\] parameters, and this optimizer has \[1\]",
        ),
        ({"t": torch.zeros(3)}, "'t' as a tensor of F32"),
    ):
        into, draws = linear(0.0), torch.get_rng_state()
        with pytest.raises(RunFolderError, match=said):
            checkpoint.load(tmp_path, {"a": into, **wrong})
        assert not into.bias.any()
        assert torch.equal(draws, torch.get_rng_state())


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        (torch.tensor([7.0]), torch.zeros(4, dtype=torch.int32)),
        (torch.tensor([1.7, float("nan")]), torch.zeros(2, dtype=torch.bool)),
        (3, torch.zeros(4)),
        (torch.zeros(6), torch.zeros(4)),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2)),
        (torch.ones(2), torch.zeros(2, device="meta")),
    ],
)
def test_a_tensor_is_neither_broadcast_nor_cast(
    saved: object, into: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, 1, {"t": saved})
    with pytest.raises(
        RunFolderError, match=r"contains 't' as a .*, and the loop passes a tensor of"
    ):
        checkpoint.load(tmp_path, {"t": into})
    assert into.is_meta or not into.any()


def test_a_model_without_memory_is_not_loaded_in_silence(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"model": linear(1.0)})
    with pytest.raises(RunFolderError, match="on the meta device, without values: weight, bias"):
        checkpoint.load_into(linear(0.0).to("meta"), tmp_path, 1)


# ---- what can be saved


class Odd(nn.Module):
    """Buffers that are views: expanded, conjugated, negated."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.full((1,), value).expand(3))
        self.one = nn.Parameter(torch.full((4,), value)[::4])
        self.register_buffer("grid", torch.full((2, 1), value).expand(2, 3))
        self.register_buffer("turned", torch.tensor([1 + 2j, 3 - 1j]).mul(value).conj())
        self.register_buffer("negated", torch.tensor([1 + 2j]).mul(value).conj().imag)


def test_views_come_back_as_what_they_show(tmp_path: Path) -> None:
    model, into = Odd(2.0), Odd(1.0)
    state = {
        "wide": torch.ones(1).expand(3),
        "turned": torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
    }
    checkpoint.save(tmp_path, 1, {"model": model, **state})
    other = {
        "wide": torch.zeros(1).expand(3),
        "turned": torch.zeros(2, dtype=torch.complex64).conj(),
    }
    checkpoint.load(tmp_path, {"model": into, **other})
    again = Odd(1.0)
    checkpoint.load_into(again, tmp_path, 1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, into.state_dict()[name]), name
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert all(torch.equal(state[name], other[name]) for name in state)
    plain = linear(1.0)
    plain.register_buffer("b", torch.arange(3.0))
    checkpoint.save(tmp_path, 2, {"model": plain})
    narrow = linear(1.0)
    narrow.register_buffer("b", torch.ones(1).expand(3))
    with pytest.raises(RunFolderError, match="b is expanded, one value for 3 along dimension 0"):
        checkpoint.load_into(narrow, tmp_path, 2)


def holding(name: str, tensor: torch.Tensor) -> nn.Module:
    made = linear(1.0)
    made._buffers[name] = tensor
    return made


def cycle() -> list[object]:
    made: list[object] = []
    made.append(made)
    return made


REFUSED: dict[str, tuple[object, str]] = {
    "sparse": (torch.ones(3).to_sparse(), "sparse_coo"),
    "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "meta": (torch.ones(3, device="meta"), "meta device"),
    "complex128": (torch.ones(3, dtype=torch.complex128), "complex128"),
    "of a different order of bytes": (np.ones(3, ">f4"), ">f4"),
    "a large integer": (10**5000, "an integer of 16,610 bits"),
    "in itself": (cycle(), "or contains itself"),
    "a set": ({1, 2}, "is a set"),
    "a module of sparse": (holding("b", torch.ones(3).to_sparse()), "sparse_coo"),
    "a module of meta": (
        holding("b", torch.ones(3, device="meta")),
        "b is a tensor on the meta device",
    ),
    "a module with a name of the format": (
        holding("__metadata__", torch.ones(3)),
        "has the name '__metadata__'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_commit_cannot_hold_is_refused_in_words_and_nothing_written(
    what: str, tmp_path: Path
) -> None:
    value, said = REFUSED[what]
    with pytest.raises(TaskError, match=said):
        checkpoint.save(tmp_path, 1, {"x": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [-1, 10**12, 1.5, "1"])
def test_a_step_that_no_folder_is_named_for_is_refused(step: int, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="step"):
        checkpoint.save(tmp_path, step, {"model": linear(1.0)})
    assert not list(tmp_path.iterdir())


def test_a_folder_may_be_text_and_a_step_of_numpy(tmp_path: Path) -> None:
    into = linear(0.0)
    checkpoint.save(str(tmp_path), np.int64(10**12 - 1), {"model": linear(1.0)})  # type: ignore[arg-type]
    found = checkpoint.load(str(tmp_path), {"model": into})
    assert found is not None
    assert (found.step, into.bias[0].item()) == (10**12 - 1, 1.0)


def test_a_file_that_a_commit_does_not_hold_is_refused_and_what_it_holds_is_named(
    tmp_path: Path,
) -> None:
    checkpoint.save(tmp_path, 1, {"model": linear(1.0)})
    one = checkpoint.Commit(tmp_path, 1)
    for asked in ("model", "optimizer.safetensors", "model-00001-of-00002.safetensors"):
        with pytest.raises(RunFolderError, match=f"contains no tensors in '{asked}'") as caught:
            one.read(asked)
        assert caught.value.hint == "it contains model.safetensors, state.safetensors"
    assert {*one.read("model.safetensors")} == {"weight", "bias"}


# ---- what is not a tensor of a state dict, and yet decides how a loop goes on


class Full(nn.Module):
    """Keeps a buffer that is not persistent, one that its first batch makes, and one that grows.

    Its extra state is of two kinds.
    """

    def __init__(self, *, is_new: bool = True) -> None:
        super().__init__()
        self.inner = linear(1.0)
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("first", None, persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.calls, self.seen = 0, torch.zeros(2)
        if not is_new:
            self.calls, self.seen = 3, torch.tensor([1.0, 2.0])
            self.mean += 0.5
            self.first, self.cache = torch.ones(2), torch.arange(4.0)
            self.inner.register_buffer("late", torch.ones(1), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Counting(nn.Linear):
    """Its extra state is a tensor made on request, as some libraries keep their scales."""

    count = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.count])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = int(state)


def test_hidden_buffers_and_extra_state_come_back(tmp_path: Path) -> None:
    model, counting = Full(is_new=False), Counting(2, 2)
    counting.count = 7
    checkpoint.save(tmp_path, 1, {"model": model, "inside": nn.Sequential(counting)})
    into, other = Full(), Counting(2, 2)
    mean = into.mean
    checkpoint.load(tmp_path, {"model": into, "inside": nn.Sequential(other)})
    assert (into.calls, other.count) == (3, 7)
    assert into.mean is mean  # in place: others may look at it
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, into.get_buffer(name)), name
    assert "inner.late" not in into.state_dict()
    assert checkpoint.load(tmp_path, {}) is not None


def test_a_hidden_buffer_that_has_no_place_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    checkpoint.save(tmp_path, 1, {"model": Full(is_new=False)})
    into = Full()
    into.inner.late = 1  # type: ignore[assignment] - as where a later version keeps a number under that name
    nn.init.zeros_(into.inner.weight)
    with pytest.raises(
        RunFolderError, match=r"contains the buffer 'inner.late', but the model has no such module"
    ):
        checkpoint.load(tmp_path, {"model": into})
    assert not into.inner.weight.any()


class Packed(nn.Module):
    """As a quantized layer, whose weights are an object of its own."""

    def get_extra_state(self) -> object:
        return {"weights": object()}


def test_a_model_whose_weights_are_no_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError,
        match=r"model/extra/0._extra_state/weights is a object, which a checkpoint cannot store",
    ):
        checkpoint.save(tmp_path, 1, {"model": nn.Sequential(Packed())})
    lazy = nn.LazyLinear(3)
    for state in ({"model": lazy}, {"optimizer": torch.optim.SGD(lazy.parameters(), lr=1.0)}):
        with pytest.raises(TaskError, match="has no shape yet: its module is lazy"):
            checkpoint.save(tmp_path, 1, state)
    assert not list(tmp_path.iterdir())


# ---- the state of optimizers


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_state_of_parameters_that_no_group_holds_is_left_out(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1, **more)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer)
    assert isinstance(model, nn.Sequential)
    model[1] = nn.Linear(2, 2)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    keys = list(optimizer.state)
    checkpoint.save(tmp_path, 3, {"model": model, "optimizer": optimizer})
    assert [id(each) for each in optimizer.state] == [id(each) for each in keys]
    train(model, optimizer)
    checkpoint.save(tmp_path, 6, {"model": model, "optimizer": optimizer})
    again, other = make()
    checkpoint.load(tmp_path, {"model": again, "optimizer": other}, step=3)
    train(again, other)
    for each, same in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(each, same)


class Keeping(torch.optim.Optimizer):
    """Keeps state of every kind.

    Another dtype than its parameters, text, lists, arrays, and some that belongs to none of them.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["wide"], state["narrow"] = (
                torch.full_like(parameter, 1 / 3, dtype=torch.float32),
                torch.ones(2, dtype=torch.bfloat16),
            )
            state["why"], state["history"] = "since", [torch.full((2,), 1 / 3), (1, "two")]
            state["array"] = np.ones(2)
        self.state["all"]["steps"] = 5  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_state_of_an_optimizer_is_neither_cast_nor_taken_apart(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    first, second = linear(1.0).to(dtype), linear(1.0).to(dtype)
    saved, into = Keeping(first.parameters()), Keeping(second.parameters())
    saved.step()
    checkpoint.save(tmp_path, 1, {"model": first, "optimizer": saved})
    checkpoint.load(tmp_path, {"model": second, "optimizer": into})
    assert into.state["all"] == {"steps": 5}  # type: ignore[index]
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        held, found = saved.state[one], into.state[other]
        assert (found["wide"].dtype, found["narrow"].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(found["wide"], held["wide"])
        assert torch.equal(found["history"][0], held["history"][0])
        assert (found["why"], found["history"][1], found["array"].tolist()) == (
            "since",
            (1, "two"),
            [1.0, 1.0],
        )


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    turned = [model.bias, model.weight]
    alike = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    checkpoint.save(
        tmp_path,
        1,
        {
            "model": model,
            "optimizer": stepped(model.parameters()),
            "alike": alike,
            "both": stepped(alike.parameters()),
        },
    )
    other = [*alike[1].parameters(), *alike[0].parameters()]
    for wrong, said in (
        (
            {"optimizer": stepped(turned)},
            r"'optimizer', whose parameter 0 was one of F32 \[2, 4\]: it is now one of F32 \[2\]",
        ),
        (
            {"optimizer": stepped(nn.Linear(4, 3).parameters())},
            r"parameter 0 was one of F32 \[2, 4\]: it is now one of F32 \[3, 4\]",
        ),
        (
            {"alike": alike, "both": stepped(other)},
            r"parameter 0 was alike.0.weight of .* it is now alike.1.weight of",
        ),
    ):
        with pytest.raises(
            RunFolderError, match=said.replace("was one of", "was (one|model.weight) of")
        ):
            checkpoint.load(tmp_path, wrong)


def stepped(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(parameters)
    for each in made.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    made.step()
    return made


def test_a_guarded_update_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    checkpoint.save(tmp_path, 1, {"update": GuardedUpdate([stepped(model.parameters())])})
    turned = GuardedUpdate([stepped([model.bias, model.weight])])
    with pytest.raises(
        RunFolderError,
        match=r"of shapes \[\[2, 4\], \[2\]\], but the optimizer has \[\[2\], \[2, 4\]\]",
    ):
        checkpoint.load(tmp_path, {"update": turned})
