"""Check whether a model keeps state, such as a hidden state, between batches of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from surefoot.runtime.attributes.values import Aliases, named_attributes, sign
from surefoot.train.quiet import read_entry

NONE = Aliases({}, {}, {})


class CarriedState:
    """Comparison of buffers, module attributes and the task's `state()` between evaluated batches.

    A change that only the first of several batches makes does not count, because a model may build
    a table on first use.
    """

    def __init__(self, model: nn.Module, state: Callable[[], Mapping[str, Any]] | None) -> None:
        self._model, self._state = model, state
        self._num_batches, self._before = 0, self._sign()
        self._after_first: dict[str, Any] = {}

    def after_batch(self) -> None:
        """Count a batch; after the first one, read the state."""
        self._num_batches += 1
        if self._num_batches == 2:
            self._before = self._after_first
        if self._num_batches == 1:
            self._after_first = self._sign()

    def has_changed(self) -> bool:
        """Return whether state has changed since the first batch, or in the only batch."""
        return bool(self.find_changed())

    def find_changed(self) -> list[str]:
        """Return the names of state changed since the first batch, or in the only batch."""
        now, before = self._sign(), self._before
        return [name for name in {**before, **now} if now.get(name) != before.get(name)]

    def _sign(self) -> dict[str, Any]:
        state = {} if self._state is None else self._state()
        aliases = Aliases.of(self._model, state)
        found = {
            f"attributes/{name}": sign(value, aliases)
            for name, value in named_attributes(self._model).items()
        }
        found |= {
            f"buffers/{name}": sign(value, NONE) for name, value in self._model.named_buffers()
        }
        return found | {
            f"state/{name}": sign(read_entry(name, value), NONE) for name, value in state.items()
        }
