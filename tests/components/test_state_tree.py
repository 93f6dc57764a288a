"""What a checkpoint takes comes back as it was, type and all, or is refused when it is taken."""

from __future__ import annotations

import enum
import json
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import surefoot
from surefoot.components import checkpoint
from surefoot.core.errors import RunFolderError, TaskError


class Place(NamedTuple):
    row: int
    weights: torch.Tensor


Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - the other way to make one


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 0


class Named(dict[str, int]):
    pass


class Rows(list[int]):
    pass


class Word(str):
    __slots__ = ()


class Meters(float):
    pass


class Block(bytes):
    pass


class Marked(torch.Tensor):
    """A tensor with its own class, such as those of image transformations."""


class Wrapper(torch.Tensor):
    """A tensor whose operators are its own, such as that of a quantization."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Noted(NamedTuple("Noted", [("x", int)])):  # noqa: SLOT002 - so that it has attributes
    pass


def noted() -> Noted:
    made = Noted(1)
    made.note = "a"  # type: ignore[attr-defined]
    return made


def of_a_function() -> Any:
    return namedtuple("Here", ["x"])(1)  # noqa: PYI024


def learned() -> torch.Tensor:
    return torch.zeros(1, requires_grad=True)


def marked_with(note: str) -> Marked:
    made = torch.ones(2).as_subclass(Marked)
    made.note = note  # type: ignore[attr-defined]
    return made


def nested(levels: int) -> list[Any]:
    """Two integers in a list, in `levels` lists."""
    return [nested(levels - 1)] if levels else [1, 2]


KEPT: dict[str, Any] = {
    "a counter": Counter("abca"),
    "a counter of numbers": Counter({3: 2, 5: 1}),
    "a defaultdict": defaultdict(list, {"a": [1], "b": []}),
    "a defaultdict of counts": defaultdict(int, {(1, 2): 3}),
    "an ordered dict": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "a deque": deque([1.5, 2.5], maxlen=2),
    "a namedtuple": Point(1, (2, Point(3, 4))),
    "a NamedTuple with a tensor": [Place(3, torch.arange(4.0))],
    "a size": torch.Size([2, 3]),
    "bytes and a bytearray": (b"ab", bytearray(b"cd")),
    "numbers of NumPy": [np.float64(1.5), np.float64("nan") != 1, np.int8(3), np.bool_(True)],
    "a text of NumPy": [np.str_("a"), {np.str_("b"): 1, "c": 2}],
    "the version of torch": {"torch": torch.__version__},
    "a parameter": nn.Parameter(torch.arange(3.0)),
    "a frozen parameter": [nn.Parameter(torch.ones(2), requires_grad=False)],
    "a learned tensor": {"log_alpha": learned()},
    "a class of Tensor": torch.arange(3.0).as_subclass(Marked),
    "integers": [[0], (1, 2**63, -(2**70)), [], ()],
    "integers among others": [[1, True], (0, 2.0), [1, None]],
    "integers in 99 lists": nested(98),
    "a plain tree": {"a": [1, (2, 3.5)], 4: None},
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.requires_grad == other.requires_grad
    if isinstance(one, dict):
        return same(list(one), list(other)) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", KEPT)
def test_it_comes_back_with_its_type(name: str) -> None:
    skeleton, tensors = checkpoint.split({"it": KEPT[name]})
    back = checkpoint.join(json.loads(json.dumps(skeleton)), tensors)["it"]
    assert same(back, KEPT[name])
    if isinstance(back, defaultdict):
        assert back.default_factory is KEPT[name].default_factory
    if isinstance(back, deque):
        assert back.maxlen == KEPT[name].maxlen


REFUSED: dict[str, Any] = {
    "an enum": Color.RED,
    "an IntEnum": Level.LOW,
    "a class of dict": Named(a=1),
    "a class of list": Rows([1]),
    "a class of str": Word("a"),
    "a class of str as a key": {Word("a"): 1},
    "a class of float": Meters(1.5),
    "a class of bytes": Block(b"a"),
    "a masked array": np.ma.MaskedArray([1.0, 2.0], [False, True]),
    "a matrix": np.eye(2).view(np.matrix),
    "a record array": np.rec.fromarrays([[1, 2]], names="x"),
    "a namedtuple of a function": of_a_function(),
    "a namedtuple with an attribute": noted(),
    "a tensor with an attribute": marked_with("a"),
    "a tensor that wraps another": torch.ones(2).as_subclass(Wrapper),
    "a defaultdict of a function": defaultdict(lambda: 3),
    "a mapping": types.MappingProxyType({"a": 1}),
    "a UserDict": UserDict(a=1),
    "a set": {1, 2},
    "a class": Color,
    "a class of torch": torch.nn.Linear,
    "a function": same,
    "a dtype of numpy": np.float32,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_come_back_as_something_else_is_refused(name: str) -> None:
    with pytest.raises(TaskError, match="which a checkpoint cannot store") as caught:
        checkpoint.split({"it": REFUSED[name]})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (nested(99), "is nested more than 100 levels deep"),
        ([1, -(10**5000), 2], "it/1 is an integer of 16,610 bits"),
        ((True, 10**5000), "it/1 is an integer of 16,610 bits"),
    ],
    ids=["too deep", "too large", "too large beside a bool"],
)
def test_lists_of_integers_that_no_checkpoint_can_hold_are_refused(value: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        checkpoint.split({"it": value})


@pytest.mark.parametrize(
    "known", ["no.such.module:Dot", "builtins:tuple", f"{__name__}:Place", "os:system"]
)
def test_a_namedtuple_whose_class_is_not_loaded_is_not_replaced_by_another(known: str) -> None:
    skeleton, tensors = checkpoint.split(Point(1, 2))
    with pytest.raises(RunFolderError, match="is not loaded") as caught:
        checkpoint.join({**skeleton, "type": known}, tensors)
    assert "import the module" in (caught.value.hint or "")
    with pytest.raises(RunFolderError):
        checkpoint.join({**skeleton, "fields": ["x"]}, tensors)


def test_a_class_is_found_in_a_script_that_has_another_module_name_now() -> None:
    skeleton, tensors = checkpoint.split([Place(3, learned()), torch.ones(1).as_subclass(Marked)])
    text = json.dumps(skeleton).replace(__name__, "__main__")
    assert text != json.dumps(skeleton)
    row, marked = checkpoint.join(json.loads(text), tensors)
    assert (type(row), type(marked)) == (Place, Marked)


def test_a_namedtuple_that_an_earlier_version_stored_of_a_function_still_loads() -> None:
    skeleton, tensors = checkpoint.split(Point(1, 2))
    back = checkpoint.join({**skeleton, "type": f"{__name__}:make.<locals>.Point"}, tensors)
    assert (back.x, back.y, type(back).__name__) == (1, 2, "Point")


@pytest.mark.parametrize(
    "given",
    [
        np.ones((2, 2)).view(np.matrix),
        nn.Parameter(torch.ones(3)),
        torch.ones(3).as_subclass(Marked),
        np.ones(3).view(type("Local", (np.ndarray,), {})),
    ],
    ids=["a matrix", "a parameter", "a class of Tensor", "a class of ndarray"],
)
def test_what_is_restored_in_place_may_have_any_class(given: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"it": given})
    with torch.no_grad():
        given[...] = 7
    checkpoint.load(tmp_path, {"it": given})
    assert (given == 1).all()


def test_a_masked_array_is_refused_when_it_is_given() -> None:
    masked = np.ma.MaskedArray([1.0, 2.0], [False, True])
    with pytest.raises(TaskError, match="it is a MaskedArray, whose mask"):
        checkpoint.check_state({"it": masked})


def test_the_state_of_a_loop_comes_back_with_its_types(tmp_path: Path) -> None:
    class Seen:
        def __init__(self) -> None:
            self.words: Counter[str] = Counter()
            self.by_length: defaultdict[int, list[str]] = defaultdict(list)

        def state_dict(self) -> dict[str, Any]:
            return {"words": self.words, "by_length": self.by_length}

        def load_state_dict(self, held: dict[str, Any]) -> None:
            self.words, self.by_length = held["words"], held["by_length"]

    def loop(steps: int) -> Seen:
        model, seen = nn.Linear(1, 1), Seen()
        run = surefoot.attach(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data=[torch.ones(1)] * 6,
            folder=tmp_path,
            state={"seen": seen},
            save="1 steps",
        )
        for batch in run.batches():
            if run.step == steps:
                break
            seen.words[f"w{run.step}"] += 1
            seen.by_length[run.step].append("w")
            run.step_done(model(batch).sum())
        run.close()
        return seen

    loop(3)
    again = loop(6)
    assert again.words == Counter({f"w{number}": 1 for number in range(6)})
    assert again.by_length[9] == []
