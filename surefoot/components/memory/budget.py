"""Choice of the blocks to recompute, so that a model stays within a memory budget.

The memory and the time of each block are measured on a batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from surefoot.components.memory.again import Buffers
from surefoot.core.errors import InputError
from surefoot.core.recompute import RecomputeCost, choose, peak_bytes
from surefoot.core.units import format_bytes, format_seconds

TRIALS = 3  # number of measurements of a block; the fastest counts


@dataclass
class RecomputeDecision:
    """Decision whether to recompute a block in the backward pass.

    `again` is True if the block is recomputed. `most_bytes` is the largest total size of the
    block's inputs for which the decision is valid; None means any size.
    """

    again: bool = True
    most_bytes: int | None = None

    def covers(self, inputs: Iterable[Tensor]) -> bool:
        return self.most_bytes is None or count_bytes(inputs) <= self.most_bytes


class Budget:
    """Choice of the blocks to recompute, so that the blocks hold at most `num_bytes` of memory.

    Each block is measured once. If a block gets larger inputs than before, all blocks are measured
    again. `chosen` are the indices of the blocks to recompute; None while the blocks are being
    measured, when every block is recomputed. `fates` holds the decision for each block.

    Args:
        names: Names of the blocks.
        num_bytes: The budget in bytes.
        own: Parameters and buffers of the model, which do not count.
    """

    def __init__(self, names: Sequence[str], num_bytes: int, own: Iterable[Tensor]) -> None:
        self.chosen: frozenset[int] | None = None
        self.fates = [RecomputeDecision() for _ in names]
        self._names, self._bytes = names, num_bytes
        self._own = set(_storages(own))
        self._costs: dict[int, RecomputeCost] = {}
        self._held: set[int] = set()  # inputs that an earlier block also holds, such as a mask

    @property
    def words(self) -> str:
        if self.chosen is None:
            return (
                "what is computed again, so that the blocks hold at most "
                f"{format_bytes(self._bytes)}, is chosen at the first batch"
            )
        costs = self.costs
        again_s = sum(cost.again_s for number, cost in enumerate(costs) if number in self.chosen)
        most = format_bytes(peak_bytes(costs, self.chosen))
        return (
            f"the blocks hold at most {most} of {format_bytes(self._bytes)}, "
            f"for {format_seconds(again_s)} more a pass"
        )

    def needs_measurement(self, number: int, inputs: Sequence[Tensor]) -> bool:
        """Return whether the block at index `number` must be measured with these inputs.

        If a block gets larger inputs than those that were measured, all measurements are discarded.
        """
        fate = self.fates[number]
        if fate.most_bytes is not None and fate.covers(inputs):
            if self.chosen is None:
                # the next forward pass has started: unmeasured blocks were not called
                self._decide()
            return False
        if self.chosen is not None:
            self.forget()
        return True

    def forget(self) -> None:
        """Discard the measurements of all blocks, so that the blocks are measured again.

        The caller uses this if the blocks have not run in a training step, but in a trial in eval
        mode, for example.
        """
        self.chosen = None
        self._costs, self._held = {}, set()
        for fate in self.fates:
            fate.again, fate.most_bytes = True, None

    def measure(
        self, number: int, inputs: Sequence[Tensor], run: Callable[[], Any], buffers: Buffers
    ) -> None:
        """Measure the time of a block and the bytes that it saves, by running it three times.

        Random states, buffers and attributes are restored afterwards. When all blocks are measured,
        the blocks to recompute are chosen.

        Args:
            number: Index of the block.
            inputs: The input tensors of the block.
            run: Function that runs the block.
            buffers: The buffers and attributes of the block.

        Raises:
            SpecError: If all blocks are measured and the budget cannot be met.
            InputError: If the block changes its inputs in place.
        """
        given = _storages(inputs)
        versions = [each._version for each in inputs]
        inner_bytes, again_s = 0, float("inf")
        for _ in range(TRIALS):
            kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is reused
            with _restoring_state(inputs, buffers), saved_tensors_hooks(_keeping(kept), _identity):
                none_of_it = self._own | given.keys() | _storages(buffers.tensors()).keys()
                started_s = _now_s(inputs)
                made = run()
                again_s = min(again_s, _now_s(inputs) - started_s)
            del made
            inner_bytes = sum(
                each.nbytes() for address, each in kept.items() if address not in none_of_it
            )
            if versions != [each._version for each in inputs]:
                raise InputError(
                    f"{self._names[number]} changes its inputs in place, "
                    "so it cannot be computed again",
                    hint="leave it out with memory.blocks, or change them out of place",
                )
        mine = {
            address: size
            for address, size in given.items()
            if address not in self._own and address not in self._held
        }
        self._held |= mine.keys()
        self._costs[number] = RecomputeCost(
            self._names[number], sum(mine.values()), inner_bytes, again_s
        )
        self.fates[number].most_bytes = count_bytes(inputs)
        if len(self._costs) == len(self._names):
            self._decide()

    @property
    def costs(self) -> list[RecomputeCost]:
        """Measured costs of the blocks, in their order; zeros for a block that was not called."""
        nothing = RecomputeCost("", 0, 0, 0.0)  # for a block that was not called
        return [self._costs.get(number, nothing) for number in range(len(self._names))]

    def _decide(self) -> None:
        self.chosen = choose(self.costs, self._bytes)
        for number, fate in enumerate(self.fates):
            fate.again = number in self.chosen


def count_bytes(tensors: Iterable[Tensor]) -> int:
    # the compiler knows nbytes only for static sizes
    return sum(each.numel() * each.element_size() for each in tensors)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each storage that `tensors` use, by its address."""
    storages = (each.untyped_storage() for each in tensors)
    return {each.data_ptr(): each.nbytes() for each in storages}


def _keeping(kept: dict[int, torch.UntypedStorage]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage
        return tensor

    return keep


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def _restoring_state(inputs: Sequence[Tensor], buffers: Buffers) -> Iterator[None]:
    """Restore random states, buffers and attributes at the end of the `with` block."""
    devices = sorted({each.device.index or 0 for each in inputs if each.device.type == "cuda"})
    with torch.random.fork_rng(devices), buffers.with_copies():
        yield


def _now_s(inputs: Sequence[Tensor]) -> float:
    for device in {each.device for each in inputs if each.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    return time.perf_counter()
