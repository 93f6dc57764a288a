"""Process group of a rank and its collectives, which return at once if there is only one rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.core.errors import LostRank, SurefootError
from surefoot.core.flight import Flight, Kind

if TYPE_CHECKING:
    from surefoot.runtime.comm.host_memory import SharedMemoryCollectives

Result = TypeVar("Result")
CPU = torch.device("cpu")
GONE, GONE_HINT = (
    "another rank, which had joined before, has exited",
    "the message of the rank that failed first has the reason",
)
FLAT_BYTES = 32 << 20  # sent at a time if many tensors are broadcast
# torch 2.13 renamed both functions
_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class Waiting:
    """Total time in collectives on all axes of the layout.

    Args:
        ns: The time in nanoseconds.
        ranges: Function that returns a context to mark a collective in a profiler trace; None if no
            trace is recorded.
    """

    ns: int = 0
    ranges: Callable[[str], AbstractContextManager[Any]] | None = None


@dataclass(frozen=True)
class Group:
    """Process group as one of its ranks sees it, with the collectives of the group.

    All ranks must call the same methods in the same order. A method raises LostRank if another rank
    has failed. `join` and `lay_out` return groups.

    Args:
        rank: Number of this rank, from 0.
        size: Number of ranks.
        device: Device of the tensors in collectives.
        flight: Record of the current collective, which the launcher reads; None without a launcher.
        channel: torch's process group of these ranks; None for all ranks.
        roll: Function that describes unreachable ranks, for error messages.
        traffic: Bytes of the tensors in collectives so far, by type of collective.
        waiting: Time spent in collectives so far.
        memory: Collectives in shared memory, if all ranks are processes of one host; None for the
            collectives of torch.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    flight: Flight | None = None
    channel: Any = None
    roll: Callable[[], str] = field(default=lambda: "", compare=False)
    traffic: Counter[Kind] = field(default_factory=Counter, compare=False)
    waiting: Waiting = field(default_factory=Waiting, compare=False)
    memory: SharedMemoryCollectives | None = field(default=None, compare=False)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """True if this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def transport(self) -> str:
        """Name of the transport that sums over ranks use: nccl, shared_memory or gloo."""
        return (
            "nccl"
            if self.device.type == "cuda"
            else "gloo"
            if self.memory is None
            else "shared_memory"
        )

    @property
    def place(self) -> str:
        """Prefix of error messages, such as `rank 1 of 2, `; empty if there is only one rank."""
        return "" if self.is_alone else f"rank {self.rank} of {self.size}, "

    def add(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it.

        The result is bitwise identical on all ranks.
        """
        if self.is_alone:
            return tensor
        memory = self.memory
        job = (
            partial(dist.all_reduce, tensor, group=self.channel)
            if memory is None
            else partial(memory.add, tensor)
        )
        self.do(job, Kind.SUM, tensor)
        return tensor

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maximum of `values` over all ranks."""
        if self.is_alone:
            return list(values)
        from surefoot.runtime.comm.host_memory import is_small

        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.memory is not None and is_small(row):
            rows: Tensor = self.do(partial(self.memory.rows, row, Kind.LARGEST), Kind.LARGEST, row)
            return rows.amax(0).tolist()
        self.do(
            lambda: dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.channel),
            Kind.LARGEST,
            row,
        )
        return row.tolist()

    def begin_to_add(self, tensor: Tensor) -> Callable[[], None]:
        """Start an in-place sum of `tensor` over all ranks; return a function that waits for it."""
        if (memory := self.memory_of(tensor)) is not None:
            return self._waiting(
                self.do(partial(memory.begin_to_add, tensor), Kind.SUM, tensor), tensor
            )
        return self._begin(tensor, dist.ReduceOp.SUM, Kind.SUM)

    def begin_to_take_largest(self, tensor: Tensor) -> Callable[[], None]:
        """Start an in-place maximum over the ranks; return a function that waits for it.

        The maximum is elementwise. If an element is NaN on some rank, the result may be the element
        of any rank.
        """
        return self._begin(tensor, dist.ReduceOp.MAX, Kind.LARGEST)

    def _begin(self, tensor: Tensor, op: Any, kind: Kind) -> Callable[[], None]:
        if self.is_alone:
            return lambda: None
        work: Any = self.do(
            lambda: dist.all_reduce(tensor, op=op, group=self.channel, async_op=True), kind, tensor
        )
        return self._waiting(work.wait, tensor)

    def begin_to_scatter(self, into: Tensor, tensor: Tensor) -> Callable[[], None]:
        """Start a reduce-scatter of `tensor` into `into`; return a function that waits for it.

        Args:
            into: Output, (n): the sum over all ranks of this rank's part.
            tensor: Values of this rank, (ranks * n); overwritten if they are in shared memory.
        """
        if (memory := self.memory_of(tensor)) is not None:
            return self._waiting(
                self.do(partial(memory.begin_to_scatter, into, tensor), Kind.SCATTER, tensor),
                tensor,
            )
        work: Any = self.do(
            lambda: _scatter(into, tensor, group=self.channel, async_op=True), Kind.SCATTER, tensor
        )
        return self._waiting(work.wait, tensor)

    def _waiting(self, job: Callable[[], Any], tensor: Tensor) -> Callable[[], None]:
        def wait() -> None:
            self.do(job, Kind.WAIT, tensor)

        return wait

    def gather_into(self, into: Tensor, tensor: Tensor, *, is_async: bool = False) -> Any:
        """Gather the `tensor` of every rank, (n), into `into`, (ranks * n).

        With `is_async`, torch's `Work` object is returned and must be waited for. A gather in
        shared memory is complete on return, and returns None.
        """
        if (memory := self.memory_of(tensor)) is not None:
            return self.do(partial(memory.gather_into, into, tensor), Kind.GATHER, into)
        return self.do(
            lambda: _gather(into, tensor, group=self.channel, async_op=is_async), Kind.GATHER, into
        )

    def memory_of(self, tensor: Tensor) -> SharedMemoryCollectives | None:
        """Return the collectives in shared memory if they can read `tensor`; otherwise None."""
        return (
            None if self.memory is None or self.memory.links.find(tensor) is None else self.memory
        )

    def allocate(
        self, size: int | Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialized tensor for collectives, in shared memory if the group uses it."""
        shape = torch.Size([size] if isinstance(size, int) else size)
        if self.memory is None or device.type != "cpu" or not shape.numel():
            return torch.empty(shape, dtype=dtype, device=device)
        return self.memory.allocate(shape, dtype)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the `tensor` of every rank, stacked in rank order: (ranks, ...).

        The shape must be the same on all ranks.
        """
        if self.is_alone:
            return tensor[None]
        from surefoot.runtime.comm.host_memory import is_small

        if self.memory is not None and is_small(tensor):
            found: Tensor = self.do(
                partial(self.memory.rows, tensor, Kind.GATHER), Kind.GATHER, tensor
            )
            return found
        made = tensor.new_empty((self.size, *tensor.shape))
        self.do(
            lambda: dist.all_gather(list(made.unbind()), tensor.contiguous(), group=self.channel),
            Kind.GATHER,
            tensor,
        )
        return made

    def gather_to_first(self, tensor: Tensor) -> Tensor | None:
        """Return the `tensor` of every rank, stacked in rank order, on rank 0: (ranks, ...).

        Other ranks get None. The shape must be the same on all ranks.
        """
        if self.is_alone:
            return tensor[None]
        made = tensor.new_empty((self.size, *tensor.shape)) if self.is_first else None
        rows = None if made is None else list(made.unbind())
        self.do(
            lambda: dist.gather(tensor.contiguous(), rows, group=self.channel, group_dst=0),
            Kind.GATHER,
            tensor,
        )
        return made

    def exchange(self, text: str) -> list[str]:
        """Return the `text` of every rank, in rank order."""
        if self.is_alone:
            return [text]
        # file names may contain any byte
        content = np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8)
        sizes = self.gather(torch.tensor(len(content), device=self.device)).tolist()
        padded = np.zeros(max(1, *sizes), dtype=np.uint8)
        padded[: len(content)] = content
        rows = self.gather(torch.from_numpy(padded).to(self.device)).cpu().numpy()
        return [
            bytes(row[:size]).decode(errors="surrogatepass")
            for row, size in zip(rows, sizes, strict=True)
        ]

    def from_first(self, text: str) -> str:
        """Return the `text` of rank 0 on every rank."""
        return self.exchange(text if self.is_first else "")[0]

    @torch.no_grad()
    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast rank 0's values of `tensors` to all ranks, in place."""
        if self.is_alone:
            return
        for together in _make_packs([each.detach() for each in tensors]):
            flat = torch.cat([_as_bytes(each) for each in together]).to(self.device)
            self.do(
                partial(dist.broadcast, flat, group=self.channel, group_src=0),
                Kind.COPY,
                flat,
            )
            parts = torch.split(flat, [_as_bytes(each).numel() for each in together])
            for each, part in zip(together, parts, strict=True):
                _flat_view(each).copy_(part) if each.is_contiguous() else each.copy_(
                    _restore_dtype_and_shape(part, each)
                )

    def settle(self, job: Callable[[], Result]) -> Result:
        """Run `job` on this rank and return its result, but raise on all ranks if it fails on one.

        The failed rank raises the error of `job`. The other ranks raise LostRank with the message
        of that error.
        """
        if self.is_alone:
            return job()
        problem: BaseException | None = None
        result: Any = None
        try:
            result = job()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again once the others know
            problem = error
        said = self.exchange("" if problem is None else _words(problem) or "failed")
        if problem is not None:
            raise problem
        for rank, words in enumerate(said):
            if words:
                raise LostRank(
                    f"rank {rank} of {self.size} did not start: {words}",
                    hint="the message of that rank has the hint",
                )
        made: Result = result
        return made

    def check_equal(self, facts: Mapping[str, str]) -> list[tuple[str, int, str, str]]:
        """Return the facts whose values differ from those on rank 0, for all ranks.

        Args:
            facts: Values of this rank by name.

        Returns:
            For each difference the name, the rank, the value on that rank and the value on rank 0.
        """
        mine = "\x1f".join(f"{name}\x1e{value}" for name, value in facts.items())
        rows = [
            dict(pair.split("\x1e", 1) for pair in text.split("\x1f"))
            for text in self.exchange(mine)
        ]
        return [
            (name, rank, row.get(name, "nothing"), rows[0].get(name, "nothing"))
            for rank, row in enumerate(rows)
            for name in facts
            if row.get(name) != rows[0].get(name)
        ]

    def do(self, job: Callable[[], Result], kind: Kind, tensor: Tensor) -> Result:
        """Run the collective `job` on `tensor`, and record its type, bytes and time.

        While it runs, the supervisor can read the record.

        Raises:
            LostRank: If other ranks are unreachable.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        self.traffic[kind] += num_bytes
        begun_ns = time.perf_counter_ns()
        try:
            with (
                nullcontext()
                if self.waiting.ranges is None
                else self.waiting.ranges(kind.range(num_bytes))
            ):
                if self.flight is None:
                    return job()
                is_of_all = self.channel is None or self.channel is dist.group.WORLD
                return self.flight.during(kind, num_bytes, job, is_of_all=is_of_all)
        except LostRank as error:  # raised by shared memory, which knows the lost rank
            told = (
                f"{error.message}, "
                f"after {_seconds_since(begun_ns):.1f} s in {kind.words} of {num_bytes:,} bytes"
            )
            raise LostRank(told, hint=error.hint) from error
        except RuntimeError as error:  # gloo and NCCL raise no more specific error
            raise LostRank(
                (
                    f"the other ranks are unreachable, after {_seconds_since(begun_ns):.1f} s in "
                    f"{kind.words} of {num_bytes:,} bytes{self.roll()}"
                ),
                hint="the message of the rank that failed first has the reason",
            ) from error
        finally:
            self.waiting.ns += time.perf_counter_ns() - begun_ns


@contextmanager
def raise_lost_rank() -> Iterator[None]:
    """Return a context that replaces a RuntimeError by LostRank.

    torch raises a RuntimeError if it cannot create a process group because a rank has failed.
    """
    try:
        yield
    except RuntimeError as error:
        raise LostRank(GONE, hint=GONE_HINT) from error


def _seconds_since(begun_ns: int) -> float:
    """Return the seconds since `begun_ns`, a value of `time.perf_counter_ns`."""
    return (time.perf_counter_ns() - begun_ns) / 1e9


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, SurefootError) else f"{type(error).__name__}: {error}"


def _make_packs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in lists of one dtype and device, each of at most FLAT_BYTES if possible.

    Empty tensors are left out.
    """
    packs: list[list[Tensor]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for each in tensors:
        if not each.numel():
            continue
        key, size = (each.dtype, each.device), each.numel() * each.element_size()
        pack, held = open_.get(key, ([], 0))
        if not pack or held + size > FLAT_BYTES:
            pack, held = [], 0
            packs.append(pack)
        pack.append(each)
        open_[key] = pack, held + size
    return packs


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor of any shape and dtype as a flat uint8 tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _flat_view(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _restore_dtype_and_shape(content: Tensor, like: Tensor) -> Tensor:
    return content.clone().view(like.dtype).view(like.shape)


ALONE = Group()
