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
    "a number of NumPy": np.float64(1.5),
    "integers": [[0], (1, 2**63, -(2**70)), [], ()],
    "integers among others": [[1, True], (0, 2.0), [1, None]],
    "integers in 99 lists": nested(98),
    "a plain tree": {"a": [1, (2, 3.5)], 4: None},
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
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


def test_a_namedtuple_whose_class_is_gone_has_its_fields_and_no_other_class_is_made_of_it() -> None:
    skeleton, tensors = checkpoint.split(Point(1, 2))
    for known in ("no.such.module:Point", "builtins:tuple", f"{__name__}:Place", "os:system"):
        back = checkpoint.join({**skeleton, "type": known}, tensors)
        assert (back.x, back.y, isinstance(back, tuple)) == (1, 2, True)
    with pytest.raises(RunFolderError):
        checkpoint.join({**skeleton, "fields": ["x"]}, tensors)


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
