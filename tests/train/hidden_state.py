"""Models that keep state in plain attributes of their modules, each in a different way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tests.train.small import Small


class Pair(NamedTuple):
    fast: Tensor
    slow: Tensor


class Cell(nn.Module):
    """Adds to its hidden units what `carry` remembers of the forward passes before."""

    def __init__(self) -> None:
        super().__init__()
        self.start()

    def start(self) -> None: ...

    def carry(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.3 * self.carry(hidden).detach()


class NoneAtFirst(Cell):
    def start(self) -> None:
        self.h: Tensor | None = None

    def carry(self, hidden: Tensor) -> Tensor:
        before = torch.zeros(8) if self.h is None else self.h
        self.h = torch.tanh(before + hidden.mean(0)).detach()
        return before


class InAGraph(Cell):
    """Keeps its state with the graph that made it, and detaches it where it is used."""

    def start(self) -> None:
        self.h = torch.zeros(8)

    def carry(self, hidden: Tensor) -> Tensor:
        before = self.h.detach()
        self.h = torch.tanh(before + hidden.mean(0))
        return before


class OfALstm(Cell):
    def start(self) -> None:
        self.lstm = nn.LSTM(8, 8)
        self.state: tuple[Tensor, Tensor] | None = None

    def carry(self, hidden: Tensor) -> Tensor:
        output, (h, c) = self.lstm(hidden.mean(0, keepdim=True), self.state)
        self.state = (h.detach(), c.detach())
        return output[0]  # type: ignore[no-any-return]


class AbsentAtFirst(Cell):
    def carry(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "codes"):
            self.codes = hidden.mean(0).detach().clone()  # as a codebook that its first batch gives
        return self.codes


class InPlace(Cell):
    def start(self) -> None:
        self.memory: dict[str, Any] = {"sum": torch.zeros(8), "rows": [np.zeros(8, np.float32), 0]}

    def carry(self, hidden: Tensor) -> Tensor:
        before = self.memory["sum"] + torch.from_numpy(self.memory["rows"][0])
        self.memory["sum"].mul_(0.5).add_(hidden.detach().mean(0))
        self.memory["rows"][0] += hidden.detach().mean(0).numpy() * 0.1
        self.memory["rows"][1] += 1
        return torch.tanh(before) / self.memory["rows"][1]


class Queue(Cell):
    def start(self) -> None:
        self.keys: deque[Tensor] = deque(maxlen=3)

    def carry(self, hidden: Tensor) -> Tensor:
        self.keys.append(hidden.mean(0).detach())
        return torch.stack(tuple(self.keys)).mean(0)


class Named(Cell):
    def start(self) -> None:
        self.pair = Pair(torch.zeros(8), torch.zeros(8))

    def carry(self, hidden: Tensor) -> Tensor:
        now = hidden.mean(0).detach()
        self.pair = Pair(now, 0.9 * self.pair.slow + 0.1 * now)
        return self.pair.slow


class Flagged(Cell):
    """A flag and a number beside a tensor: neither means anything without the others."""

    def start(self) -> None:
        self.is_set, self.weight, self.mean = False, 1.0, torch.zeros(8)

    def carry(self, hidden: Tensor) -> Tensor:
        if not self.is_set:
            self.is_set, self.mean = True, hidden.mean(0).detach()
        self.weight *= 0.9
        return self.mean * self.weight


class Turns(Cell):
    """Refers to one of two buffers in turn."""

    def start(self) -> None:
        self.register_buffer("even", torch.zeros(8))
        self.register_buffer("odd", torch.zeros(8), persistent=False)
        self.now = self.even

    def carry(self, hidden: Tensor) -> Tensor:
        before = self.now.clone()
        self.now = self.odd if self.now is self.even else self.even
        self.now.copy_(torch.tanh(before + hidden.detach().mean(0)))
        return before


class Twice(Cell):
    """Two names for one tensor, which changes in place."""

    def start(self) -> None:
        self.h = self.same = torch.zeros(8)

    def carry(self, hidden: Tensor) -> Tensor:
        before = self.same.clone()
        self.h.mul_(0.7).add_(hidden.detach().mean(0))
        return torch.tanh(before)


KINDS: dict[str, Callable[[], Cell]] = {
    each.__name__: each
    for each in (
        NoneAtFirst,
        InAGraph,
        OfALstm,
        AbsentAtFirst,
        InPlace,
        Queue,
        Named,
        Flagged,
        Turns,
        Twice,
    )
}


class Recurrent(Small):
    """The small task, with a cell between its layers."""

    def __init__(self, cell: Callable[[], nn.Module], poison: tuple[int, ...] = ()) -> None:
        super().__init__(poison=poison)
        self.cell = cell

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), self.cell(), nn.ReLU(), nn.Linear(8, 3))
