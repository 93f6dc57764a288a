"""Sources for the tests of the loader, in a module so that a spawned worker can import them."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.order import Keys
from surefoot.contract.task import Guarantee

NUM_SAMPLES = 97


class Numbers:
    """Sample i is the number i, told in three ways; `delay_s` for each batch."""

    guarantee: Guarantee = "proven"
    digest = "numbers"
    thread_safe = True

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    def __len__(self) -> int:
        return NUM_SAMPLES

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        time.sleep(self.delay_s)
        return {
            "number": torch.from_numpy(ids.copy()),
            "image": torch.from_numpy(ids[:, None, None] * np.ones((1, 4, 3), np.float32)),
        }

    def describe(self) -> str:
        return "numbers"


class Once:
    """What happens when a sample is read, for as often as `times` says.

    A file counts, since another process may have done it.
    """

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def is_over(self) -> bool:
        return self.folder.with_suffix(".over").exists()

    def is_due(self) -> bool:
        number = len(list(self.folder.iterdir()))
        if number >= self.times:
            return False
        (self.folder / f"{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
        return True


class Troubled(Numbers):
    """At sample 40 it hangs, raises, dies or computes for ever; as often as is said."""

    def __init__(self, how: str, once: Once) -> None:
        super().__init__()
        self.how, self.once = how, once

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        if 40 in ids and self.once.is_due():
            if self.how == "hangs":
                while not self.once.is_over():
                    time.sleep(0.02)
            elif self.how == "raises":
                raise OSError("the cable is loose")
            elif self.how == "computes":
                until_s = time.monotonic() + 1e6
                while time.monotonic() < until_s:
                    pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().read(ids)


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Odd:
    """A batch of a type of its own."""

    wide: Tensor
    words: list[str]


class Odds(Numbers):
    """Batches of all that may be in one."""

    def read(self, ids: np.ndarray) -> Any:
        numbers = torch.from_numpy(ids)
        return Odd(
            wide=numbers.to(torch.bfloat16).view(-1, 1).expand(-1, 3),
            words=[f"word {number}" for number in ids],
        ), Pair(
            numbers % 2 == 0,
            {
                "empty": torch.empty(0, 5, dtype=torch.float16),
                "complex": numbers * 1j,
                "scalar": torch.tensor(3.5),
                "array": ids.astype(np.uint16)[::-1],
                "nothing": None,
                "turned": (numbers.view(-1, 1) * torch.arange(4)).t(),
            },
        )


def shifted(batch: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """An augmentation that depends on the sample and the epoch."""
    return {**batch, "image": batch["image"] + keys.uniform(3)[:, None, :]}


class Locked(Numbers):
    """Cannot be sent to another process: an attribute of an attribute is a nameless function."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"transform": lambda image: image}


class Unsafe(Numbers):
    """Lets no two threads read."""

    thread_safe = False


class Counting(Numbers):
    """Holds the interpreter's lock all the time."""

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        sum(range(300_000))
        return super().read(ids)


class Wordy(Numbers):
    """Batches whose numbers and words are more than a pipe holds."""

    def __len__(self) -> int:
        return 200_000

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        return {
            "number": torch.from_numpy(ids.copy()),
            "words": [f"word {number}" for number in ids],
        }


class Nameless(Numbers):
    """Batches that do not pickle; or, with `comes_back` False, that cannot be made again."""

    def __init__(self, comes_back: bool) -> None:
        super().__init__()
        self.comes_back = comes_back

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        return {**super().read(ids), "odd": Fragile() if self.comes_back else (lambda: 0)}


class Fragile:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("made of glass")

    def __getstate__(self) -> Any:
        return {"made": 1}


class OnlyAtHome(Numbers):
    """Raises in any process but the one that made it, as what is on a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        if os.getpid() != self.home:
            raise RuntimeError("cannot be used in a forked process")
        return super().read(ids)


class Drawing(Unsafe):
    """Draws from the streams of Python, numpy and torch, as many a dataset does."""

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002
        return {
            "number": torch.from_numpy(ids.copy()),
            "image": torch.tensor(drawn, dtype=torch.float64),
        }
