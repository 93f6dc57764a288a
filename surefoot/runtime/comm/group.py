"""This process among the ranks of a run, and the few things they do together. Of one rank all of it costs nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.core.errors import LostRank, SurefootError
from surefoot.core.flight import Flight, Kind
from surefoot.runtime.comm.host_memory import Shared, is_small

Result = TypeVar("Result")
CPU = torch.device("cpu")
GONE, GONE_HINT = "another rank is gone, which had come before", "the rank that failed first says why"
FLAT_BYTES = 32 << 20  # sent at a time where many tensors go together
_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 renamed both
_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class Waiting:
    """What this process has spent in what ranks do together, on every axis; and ranges of a trace around it, while one is recorded."""

    ns: int = 0
    ranges: Callable[[str], AbstractContextManager[Any]] | None = None


@dataclass(frozen=True)
class Group:
    """Rank `rank` of `size`. Every method is called by all ranks, in the same order. Raises LostRank where another rank is gone."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    flight: Flight | None = None  # where its launcher looks on
    channel: Any = None  # torch's group of these ranks; None: all of them
    roll: Callable[[], str] = field(default=lambda: "", compare=False)  # who says nothing, once they are out of reach; in words
    traffic: Counter[Kind] = field(default_factory=Counter, compare=False)  # bytes of what was summed, gathered ..., by kind
    waiting: Waiting = field(default_factory=Waiting, compare=False)
    memory: Shared | None = field(default=None, compare=False)  # where all ranks are processes of one host

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.rank == 0

    @property
    def transport(self) -> str:
        """What its sums go by: nccl, shared_memory or gloo."""
        return "nccl" if self.device.type == "cuda" else "gloo" if self.memory is None else "shared_memory"

    @property
    def place(self) -> str:
        """What an error begins with: `rank 1 of 2, `, nothing for one rank."""
        return "" if self.is_alone else f"rank {self.rank} of {self.size}, "

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in its place: the same bits everywhere."""
        if self.is_alone:
            return tensor
        memory = self.memory
        job = partial(dist.all_reduce, tensor, group=self.channel) if memory is None else partial(memory.add, tensor)
        self.do(job, Kind.SUM, tensor)
        return tensor

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all ranks."""
        if self.is_alone:
            return list(values)
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.memory is not None and is_small(row):
            rows: Tensor = self.do(partial(self.memory.rows, row, Kind.LARGEST), Kind.LARGEST, row)
            return rows.amax(0).tolist()
        self.do(lambda: dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.channel), Kind.LARGEST, row)
        return row.tolist()

    def begin_to_add(self, tensor: Tensor) -> Callable[[], None]:
        """The same, while this process goes on; gives what waits for it."""
        if (memory := self.memory_of(tensor)) is not None:
            return self._waiting(self.do(partial(memory.begin_to_add, tensor), Kind.SUM, tensor), tensor)
        return self._begin(tensor, dist.ReduceOp.SUM, Kind.SUM)

    def begin_to_take_largest(self, tensor: Tensor) -> Callable[[], None]:
        """The same with the largest of each number. Where one of them is no number, any of them."""
        return self._begin(tensor, dist.ReduceOp.MAX, Kind.LARGEST)

    def _begin(self, tensor: Tensor, op: Any, kind: Kind) -> Callable[[], None]:
        if self.is_alone:
            return lambda: None
        work: Any = self.do(lambda: dist.all_reduce(tensor, op=op, group=self.channel, async_op=True), kind, tensor)
        return self._waiting(work.wait, tensor)

    def begin_to_scatter(self, into: Tensor, tensor: Tensor) -> Callable[[], None]:
        """The sum of `tensor`, of which each rank gets its part in a row: (ranks * n) into (n). Gives what waits for it.

        What is within reach of the others is lost.
        """
        if (memory := self.memory_of(tensor)) is not None:
            return self._waiting(self.do(partial(memory.begin_to_scatter, into, tensor), Kind.SCATTER, tensor), tensor)
        work: Any = self.do(lambda: _scatter(into, tensor, group=self.channel, async_op=True), Kind.SCATTER, tensor)
        return self._waiting(work.wait, tensor)

    def _waiting(self, job: Callable[[], Any], tensor: Tensor) -> Callable[[], None]:
        def wait() -> None:
            self.do(job, Kind.WAIT, tensor)

        return wait

    def gather_into(self, into: Tensor, tensor: Tensor, *, is_async: bool = False) -> Any:
        """Every rank's `tensor` in a row: (n) into (ranks * n). With `is_async` gives torch's work, to be waited for."""
        if (memory := self.memory_of(tensor)) is not None:
            return self.do(partial(memory.gather_into, into, tensor), Kind.GATHER, into)
        return self.do(lambda: _gather(into, tensor, group=self.channel, async_op=is_async), Kind.GATHER, into)

    def memory_of(self, tensor: Tensor) -> Shared | None:
        """The memory that a tensor lies in, within reach of the other ranks of this host; None for any other tensor."""
        return None if self.memory is None or self.memory.links.find(tensor) is None else self.memory

    def allocate(self, size: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what is sent, its numbers not set: within reach of the other ranks of this host, where there is such."""
        shape = torch.Size([size] if isinstance(size, int) else size)
        if self.memory is None or device.type != "cpu" or not shape.numel():
            return torch.empty(shape, dtype=dtype, device=device)
        return self.memory.allocate(shape, dtype)

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's `tensor`, of one shape everywhere: (ranks, ...)."""
        if self.is_alone:
            return tensor[None]
        if self.memory is not None and is_small(tensor):
            found: Tensor = self.do(partial(self.memory.rows, tensor, Kind.GATHER), Kind.GATHER, tensor)
            return found
        made = tensor.new_empty((self.size, *tensor.shape))
        self.do(lambda: dist.all_gather(list(made.unbind()), tensor.contiguous(), group=self.channel), Kind.GATHER, tensor)
        return made

    def gather_to_first(self, tensor: Tensor) -> Tensor | None:
        """Every rank's `tensor` at rank 0, of one shape everywhere: (ranks, ...); None at the others."""
        if self.is_alone:
            return tensor[None]
        made = tensor.new_empty((self.size, *tensor.shape)) if self.is_first else None
        rows = None if made is None else list(made.unbind())
        self.do(lambda: dist.gather(tensor.contiguous(), rows, group=self.channel, group_dst=0), Kind.GATHER, tensor)
        return made

    def exchange(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        if self.is_alone:
            return [text]
        content = np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8)  # names of files hold any byte
        sizes = self.gather(torch.tensor(len(content), device=self.device)).tolist()
        padded = np.zeros(max(1, *sizes), dtype=np.uint8)
        padded[: len(content)] = content
        rows = self.gather(torch.from_numpy(padded).to(self.device)).cpu().numpy()
        return [bytes(row[:size]).decode(errors="surrogatepass") for row, size in zip(rows, sizes, strict=True)]

    def from_first(self, text: str) -> str:
        """The text of rank 0."""
        return self.exchange(text if self.is_first else "")[0]

    @torch.no_grad()
    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank rank 0's values of these tensors, in their place."""
        if self.is_alone:
            return
        for together in _packs([each.detach() for each in tensors]):
            flat = torch.cat([_flat(each) for each in together]).to(self.device)
            self.do(lambda flat=flat: dist.broadcast(flat, group=self.channel, group_src=0), Kind.COPY, flat)  # type: ignore[misc]
            parts = torch.split(flat, [_flat(each).numel() for each in together])
            for each, part in zip(together, parts, strict=True):
                _flat_view(each).copy_(part) if each.is_contiguous() else each.copy_(_as_before(part, each))

    def settle(self, job: Callable[[], Result]) -> Result:
        """`job` done by this rank; where it fails on one, every other rank ends too instead of waiting. Raises what it raised.

        The others raise LostRank, with what that rank said.
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
                raise LostRank(f"rank {rank} of {self.size} did not begin: {words}", hint="its own message says what to do")
        made: Result = result
        return made

    def check_equal(self, facts: Mapping[str, str]) -> list[tuple[str, int, str, str]]:
        """The facts in which a rank differs from rank 0: name, rank, what it has, what rank 0 has."""
        mine = "\x1f".join(f"{name}\x1e{value}" for name, value in facts.items())
        rows = [dict(pair.split("\x1e", 1) for pair in text.split("\x1f")) for text in self.exchange(mine)]
        return [
            (name, rank, row.get(name, "nothing"), rows[0].get(name, "nothing"))
            for rank, row in enumerate(rows)
            for name in facts
            if row.get(name) != rows[0].get(name)
        ]

    def do(self, job: Callable[[], Result], kind: Kind, tensor: Tensor) -> Result:
        """What all ranks do together with `tensor`, told to who looks on. Raises LostRank where the others are out of reach."""
        num_bytes = tensor.numel() * tensor.element_size()
        self.traffic[kind] += num_bytes
        begun_ns = time.perf_counter_ns()
        try:
            with nullcontext() if self.waiting.ranges is None else self.waiting.ranges(kind.range(num_bytes)):
                if self.flight is None:
                    return job()
                is_of_all = self.channel is None or self.channel is dist.group.WORLD
                return self.flight.during(kind, num_bytes, job, is_of_all=is_of_all)
        except LostRank as error:  # of the memory of this host, where it is known who
            told = f"{error.message}, after {_since(begun_ns):.1f} s in {kind.words} of {num_bytes:,} bytes"
            raise LostRank(told, hint=error.hint) from error
        except RuntimeError as error:  # gloo and NCCL raise nothing more exact
            raise LostRank(
                f"the other ranks are out of reach, after {_since(begun_ns):.1f} s in {kind.words} of {num_bytes:,} bytes{self.roll()}",
                hint="the rank that failed first says why",
            ) from error
        finally:
            self.waiting.ns += time.perf_counter_ns() - begun_ns


@contextmanager
def lost_while_joining() -> Iterator[None]:
    """Raises LostRank where torch's groups cannot be made, since a rank that had come is gone."""
    try:
        yield
    except RuntimeError as error:
        raise LostRank(GONE, hint=GONE_HINT) from error


def _since(begun_ns: int) -> float:
    """Seconds since then."""
    return (time.perf_counter_ns() - begun_ns) / 1e9


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, SurefootError) else f"{type(error).__name__}: {error}"


def _packs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, so many bytes at a time."""
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


def _flat(tensor: Tensor) -> Tensor:
    """Its numbers as bytes of a row: what is sent has no shape, and any dtype goes through."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _flat_view(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _as_before(content: Tensor, like: Tensor) -> Tensor:
    return content.clone().view(like.dtype).view(like.shape)


ALONE = Group()
