"""Prediction of the memory that a computation allocates, without real tensors.

The computation runs on fake tensors, which have sizes but no data
(`torch._subclasses.fake_tensor.FakeTensorMode`). A `torch.utils._python_dispatch.TorchDispatchMode`
records every storage. Memory that a kernel allocates internally is not visible; `workspace` adds it
for the operators where it matters.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.components.memory import workspace
from surefoot.runtime.nested_tensors import find_tensors

ACTIVATIONS, GRADIENTS, TEMPORARIES, WORKSPACE = (
    "activations",
    "gradients",
    "temporaries",
    "workspace",
)
OF_PART = f"{ACTIVATIONS} of "


def fake_tensors() -> FakeTensorMode:
    """Return a context in which tensors have sizes, dtypes and devices, but no data."""
    return _Sizes(allow_non_fake_inputs=True)


def build_without_numbers(sizes: FakeTensorMode, build: Callable[[], Any]) -> Any:
    """Return the result of `build`, with fake tensors of the mode `sizes`.

    If `build` fails with fake tensors, because it needs data (a cast, `item()`), it runs with real
    tensors, and a fake copy of the result is returned.
    """
    try:
        return build()
    except Exception:  # noqa: BLE001 - torch's own; errors of the code are raised again
        with unset_fake_temporarily():
            made = build()
        with FakeCopyMode(sizes):
            return copy.deepcopy(made)


class _Sizes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensorMode that `copy.deepcopy` does not copy.

    Each fake tensor refers to its mode. If the mode were copied with a tensor, the views of that
    tensor would become separate tensors.
    """

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that records when each storage is created and freed, and its kind.

    The kind says what a storage is used for. A storage that a forward pass creates and does not
    free is an activation, of the part of the model that was named last by `enter`. All other
    storages are temporary, unless the caller sets a different kind.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._part: str | None = None
        self._is_forward = False
        self._events: list[tuple[int, int]] = []  # number of the storage, bytes allocated or freed
        self._kinds: list[str] = []
        self._alive: dict[int, int] = {}  # id of a storage -> its number

    def enter(self, part: str | None) -> None:
        """Attribute later allocations to this part of the model; None for no part."""
        self._part = part

    def begin_forward(self) -> None:
        self._is_forward, self._first = True, len(self._kinds)

    def end_forward(self) -> None:
        """End the forward pass; storages that it has created and freed again become temporary."""
        self._is_forward = False
        alive = set(self._alive.values())
        for number in range(self._first, len(self._kinds)):
            if number not in alive and self._kinds[number] != WORKSPACE:
                self._kinds[number] = TEMPORARIES

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        out, inside = workspace.measure_workspace(func, args, out)
        for tensor in find_tensors(out):
            self.hold(tensor, self._kind())
        if inside:  # memory besides the output
            self.pass_through(inside, WORKSPACE)
        return out

    def _kind(self) -> str:
        if not self._is_forward:
            return TEMPORARIES
        return ACTIVATIONS if self._part is None else f"{OF_PART}{self._part}"

    def pass_through(self, num_bytes: int, kind: str) -> None:
        """Record `num_bytes` that are allocated and freed again immediately."""
        number = self.reserve(num_bytes, kind)
        self._events.append((number, -num_bytes))

    def reserve(self, num_bytes: int, kind: str) -> int:
        """Record `num_bytes` that are never freed and belong to no tensor.

        Returns the number of the record.
        """
        self._kinds.append(kind)
        self._events.append((len(self._kinds) - 1, num_bytes))
        return len(self._kinds) - 1

    def hold(self, tensor: Tensor, kind: str, share: float = 1.0) -> None:
        """Record the storage of `tensor` until it is freed, unless it is already recorded.

        `share` is the fraction of its bytes that is counted.
        """
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._alive or not storage.nbytes():
            return
        number, num_bytes = len(self._kinds), math.ceil(storage.nbytes() * share)
        self._alive[id(storage)] = number
        self._kinds.append(kind)
        self._events.append((number, num_bytes))
        weakref.finalize(storage, self._record_free, id(storage), number, num_bytes)

    def _record_free(self, identity: int, number: int, num_bytes: int) -> None:
        self._alive.pop(identity, None)
        self._events.append((number, -num_bytes))

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Set the kind of the storage of `tensor`, for its whole lifetime."""
        number = self._alive.get(id(tensor.untyped_storage()))
        if number is not None:
            self._kinds[number] = kind

    def peak(self) -> tuple[int, dict[str, int]]:
        """Return the peak of the allocated bytes, and the bytes of each kind at that time."""
        now = most = 0
        place = 0
        for index, (_, change) in enumerate(self._events):
            now += change
            if now > most:
                most, place = now, index
        terms: Counter[str] = Counter()
        for number, change in self._events[: place + 1]:
            terms[self._kinds[number]] += change
        return most, {kind: num_bytes for kind, num_bytes in terms.items() if num_bytes}

    def by_part(self) -> dict[str, int]:
        """Return the peak bytes of activations for each part of the model, the largest first."""
        now: Counter[str] = Counter()
        most: Counter[str] = Counter()
        for number, change in self._events:
            kind = self._kinds[number]
            if kind.startswith(OF_PART):
                now[kind] += change
                most[kind] = max(most[kind], now[kind])
        return {kind.removeprefix(OF_PART): num_bytes for kind, num_bytes in most.most_common()}


@contextlib.contextmanager
def track_blocks(
    blocks: Mapping[str, nn.Module], enter: Callable[[str | None], None]
) -> Iterator[None]:
    """Call `enter` with the name of a block when its forward pass starts, and with None at its end.

    The hooks for this are removed at the end of the `with` block.
    """
    handles = []
    for name, block in blocks.items():
        handles.append(block.register_forward_pre_hook(lambda module, args, name=name: enter(name)))
        handles.append(block.register_forward_hook(lambda module, args, output: enter(None)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total size in bytes of the storages of `tensors`; a shared one counts once."""
    return sum(
        {
            id(storage): storage.nbytes()
            for storage in (each.untyped_storage() for each in tensors)
        }.values()
    )
