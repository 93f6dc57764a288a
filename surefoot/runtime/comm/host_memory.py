"""Collectives of the ranks of one host through shared memory; each rank sums its share.

The values of a rank are in anonymous memory files (memfd_create(2)), whose descriptors are passed
to the other ranks. A killed rank therefore leaves nothing behind. Messages of a few bytes go
through a socket between every two ranks (unix(7)): they order memory accesses on any processor, and
a socket closes when its rank ends. Small values are sent in the message itself. A sum adds pairs of
neighboring ranks, then pairs of these sums, so that every rank gets the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.core.errors import InputError, LostRank
from surefoot.core.flight import Kind
from surefoot.core.ranks.layout import Transport
from surefoot.core.ranks.mapping import map_file

if TYPE_CHECKING:
    from surefoot.runtime.comm.group import Group

SMALL_BYTES = 32 << 10  # largest tensor that is sent in a message
PIECE = 1 << 16  # numbers summed at a time: they fit in the cache of a core
# What, axis, Kind, number of the collective on that axis, memory file, offset, bytes
HEAD = struct.Struct("<3BxIqqq")
ANSWER_S = 0.05
HINT = "the message of the rank that failed first has the reason"
SILENT = "the rank hangs or is stopped: py-spy dump --pid PID prints the stack of its process"
DIFFERENT = "the ranks call different collectives"
GONE, FULL = (errno.EPIPE, errno.ECONNRESET), (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)


class What(IntEnum):
    """Type of a message from one rank to another."""

    ROW = 0  # the values follow in the message
    READY = 1  # the values are in shared memory of the sender
    DONE = 2  # the sender has added or read its share
    FILE = 3  # a memory file of the sender, with its descriptor


Word = tuple[What, Kind, int, int, int, bytes]  # file, offset, bytes, content
Key = tuple[int, int, bool]  # axis, number, whether it is DONE


class Links:
    """Sockets to the other ranks of this host, by rank, and the shared memory of each rank.

    `timeout_s` is the longest time, in seconds, to wait for a message.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], *, timeout_s: float) -> None:
        self._sockets, self._timeout_s = dict(sockets), timeout_s
        self._inbox: dict[int, dict[Key, Word]] = {rank: {} for rank in sockets}
        self._theirs: dict[int, dict[int, Tensor]] = {rank: {} for rank in sockets}
        self._free: dict[int, list[Any]] = {}  # by size
        self._numbers: dict[int, int] = {}  # of mapped files, by address
        self._buffer = bytearray(HEAD.size + SMALL_BYTES)
        whole, rest = divmod(timeout_s, 1)
        limit = struct.pack("ll", int(whole), int(rest * 1e6))
        for each in self._sockets.values():
            each.setblocking(True)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a uint8 tensor of `num_bytes` in shared memory; freed memory is reused."""
        size = max(mmap.PAGESIZE, num_bytes)
        free = self._free.setdefault(size, [])
        mapped = free.pop() if free else self._make(size)
        view = memoryview(mapped)
        made = torch.frombuffer(view, dtype=torch.uint8)
        weakref.finalize(view, free.append, mapped).atexit = False
        return made[:num_bytes]

    def _make(self, size: int) -> Any:
        try:
            descriptor = os.memfd_create("surefoot-ranks")
        except OSError as error:
            raise _no_memory(size) from error
        try:
            mapped = _resize_and_map(descriptor, size)
            if mapped is None:
                raise _no_memory(size)
            number = len(self._numbers)
            self._numbers[ctypes.addressof(mapped)] = number
            for rank in self._sockets:
                self.send(rank, HEAD.pack(What.FILE, 0, 0, 0, number, 0, size), descriptor)
        finally:
            os.close(descriptor)
        return mapped

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return a tensor's memory file and offset in it; None if it is not in shared memory."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        base = tensor.untyped_storage().data_ptr()
        number = self._numbers.get(base)
        return None if number is None else (number, tensor.data_ptr() - base)

    def reach(self, rank: int, word: Word) -> Tensor:
        """Return, as uint8, the part of another rank's memory that the message `word` names."""
        _, _, number, offset, num_bytes, _ = word
        return self._theirs[rank][number][offset : offset + num_bytes]

    def send(self, rank: int, packet: bytes, descriptor: int | None = None) -> None:
        carried = []
        if descriptor is not None:
            carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        until_s: float | None = None
        while True:
            try:
                self._sockets[rank].sendmsg(
                    [packet], carried, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                )
            except OSError as error:
                if error.errno in GONE:
                    return  # a rank that waits for the message will get the error
                if error.errno not in FULL:
                    raise
                # the rank does not read: it may be waiting until this rank reads
                self.drain()
                until_s = until_s or time.monotonic() + self._timeout_s
                if time.monotonic() > until_s:
                    raise LostRank(f"rank {rank} does not read messages", hint=SILENT) from None
                ready = select.poll()  # select(2) knows the first 1,024 descriptors
                ready.register(self._sockets[rank], select.POLLOUT)
                ready.poll(ANSWER_S * 1000)
            else:
                return

    def drain(self) -> None:
        """Receive all messages that have arrived, without waiting for more."""
        for rank in self._sockets:
            with contextlib.suppress(BlockingIOError, LostRank):
                while True:
                    self._receive(rank, socket.MSG_DONTWAIT)

    def take(self, rank: int, key: Key) -> Word:
        """Return the message of a rank for a collective; wait until it arrives.

        Raises LostRank if the rank has failed or the message does not arrive in time.
        """
        inbox = self._inbox[rank]
        while key not in inbox:
            try:
                self._receive(rank)
            except BlockingIOError:
                raise LostRank(f"rank {rank} does not respond", hint=SILENT) from None
        return inbox.pop(key)

    def has(self, rank: int, key: Key) -> bool:
        return key in self._inbox[rank]

    def _receive(self, rank: int, flags: int = 0) -> None:
        while True:
            try:
                size, carried, _, _ = self._sockets[rank].recvmsg_into(
                    [self._buffer], socket.CMSG_SPACE(4), flags
                )
            except ConnectionResetError:
                # reported once if the rank ended without reading all; its messages follow
                continue
            break
        if not size:
            raise LostRank(f"rank {rank} has exited", hint=HINT)
        what, axis, kind, number, file, offset, num_bytes = HEAD.unpack_from(self._buffer)
        if what == What.FILE:
            if not carried:  # the system drops descriptors beyond the limit of a process
                raise InputError(
                    (
                        "a rank has reached its limit of open files, and cannot map the "
                        "memory of another rank"
                    ),
                    hint="raise the limit: ulimit -n",
                )
            (descriptor,) = struct.unpack("i", carried[0][2])
            mapped = map_file(descriptor, num_bytes)
            os.close(descriptor)
            if mapped is None:
                raise _no_memory(num_bytes)
            self._theirs[rank][file] = torch.frombuffer(memoryview(mapped), dtype=torch.uint8)
            return
        row = bytes(self._buffer[HEAD.size : size])
        word = What(what), Kind(kind), file, offset, num_bytes, row
        self._inbox[rank][axis, number, what == What.DONE] = word


@dataclass(eq=False)
class _RunningSum:
    """Sum or reduce-scatter in progress: this rank's values, and whether it has added its share."""

    number: int
    kind: Kind
    mine: Tensor
    # output for this rank's share of the sum; None: the sum replaces the values of all ranks
    into: Tensor | None
    num_bytes: int
    is_added: bool = False


@dataclass(eq=False)
class SharedMemoryCollectives:
    """Collectives in shared memory among the ranks on one axis of the layout.

    `ranks` are the global ranks by their index on the axis; `rank` is the index of this rank.
    """

    links: Links
    rank: int
    ranks: Sequence[int]
    axis: int
    _count: int = 0
    _open: deque[_RunningSum] = field(default_factory=deque)

    def among(self, ranks: Sequence[int], axis: int) -> SharedMemoryCollectives:
        """Return the collectives of some of the ranks, given by their indices in this object."""
        return SharedMemoryCollectives(
            self.links, ranks.index(self.rank), [self.ranks[rank] for rank in ranks], axis
        )

    @property
    def _others(self) -> Iterator[tuple[int, int]]:
        return ((place, rank) for place, rank in enumerate(self.ranks) if place != self.rank)

    def _make_header(
        self, what: What, kind: Kind, number: int, at: tuple[int, int] = (0, 0), num_bytes: int = 0
    ) -> bytes:
        return HEAD.pack(what, self.axis, kind, number, *at, num_bytes)

    def _send_to_all(self, packet: bytes) -> None:
        for _, rank in self._others:
            self.links.send(rank, packet)

    def _receive_word(self, rank: int, what: What, kind: Kind, number: int, num_bytes: int) -> Word:
        word = self.links.take(rank, (self.axis, number, False))
        if word[:2] != (what, kind) or word[4] != num_bytes:
            raise LostRank(
                (
                    f"{DIFFERENT}: rank {rank} is in {word[1].words} of {word[4]:,} bytes, "
                    "this rank is in another"
                ),
                hint="call the same methods of the run on every rank, in the same order",
            )
        return word

    def _await_done(self, number: int) -> None:
        for _, rank in self._others:
            self.links.take(rank, (self.axis, number, True))

    def rows(self, tensor: Tensor, kind: Kind) -> Tensor:
        """Return the `tensor` of every rank, stacked: (ranks, ...); it must satisfy `is_small`."""
        self._count += 1
        number, mine = self._count, tensor.contiguous()
        row = mine.view(-1).view(torch.uint8).numpy().tobytes()
        self._send_to_all(self._make_header(What.ROW, kind, number, num_bytes=len(row)) + row)
        found = [row if place == self.rank else b"" for place in range(len(self.ranks))]
        for place, rank in self._others:
            found[place] = self._receive_word(rank, What.ROW, kind, number, len(row))[5]
        if not row:
            return tensor.new_empty((len(self.ranks), *tensor.shape))
        rows = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).view(tensor.dtype)
        return rows.view(len(self.ranks), *tensor.shape)

    def add(self, tensor: Tensor) -> None:
        """Sum `tensor` over all ranks in place."""
        if self.links.find(tensor) is not None:
            self.begin_to_add(tensor)()
        elif is_small(tensor):
            tensor.copy_(add_up(self.rows(tensor, Kind.SUM).unbind()))
        else:
            copy = self.allocate(tensor.shape, tensor.dtype).copy_(tensor)
            self.begin_to_add(copy)()
            tensor.copy_(copy)

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in shared memory."""
        return self.links.allocate(shape.numel() * dtype.itemsize).view(dtype).view(shape)

    def begin_to_add(self, tensor: Tensor) -> Callable[[], None]:
        """Start summing a tensor in shared memory; return a function that waits for the sum."""
        return partial(self._end, self._begin(tensor, None, Kind.SUM))

    def begin_to_scatter(self, into: Tensor, tensor: Tensor) -> Callable[[], None]:
        """Start a reduce-scatter (ranks * n) into (n); return a function that waits for it.

        The values of `tensor` are overwritten.
        """
        return partial(self._end, self._begin(tensor, into, Kind.SCATTER))

    def _begin(self, tensor: Tensor, into: Tensor | None, kind: Kind) -> _RunningSum:
        at, num_bytes = self.links.find(tensor), tensor.numel() * tensor.element_size()
        assert at is not None
        self._count += 1
        begun = _RunningSum(self._count, kind, tensor, into, num_bytes)
        self._send_to_all(self._make_header(What.READY, kind, self._count, at, num_bytes))
        self._open.append(begun)
        self._add_shares()
        return begun

    def _add_shares(self) -> None:
        """Add this rank's share of each started sum for which all ranks' values have arrived."""
        self.links.drain()
        for each in (begun for begun in self._open if not begun.is_added):
            key = self.axis, each.number, False
            if not all(self.links.has(rank, key) for _, rank in self._others):
                return
            self._add_share(each)

    def _end(self, asked: _RunningSum) -> None:
        while not asked.is_added:
            self._add_share(next(each for each in self._open if not each.is_added))
        self._await_done(asked.number)
        self._open.remove(asked)

    @torch.no_grad()
    def _add_share(self, begun: _RunningSum) -> None:
        count, dtype = len(self.ranks), begun.mine.dtype
        rows = [begun.mine.view(-1)] * count
        for place, rank in self._others:
            word = self._receive_word(rank, What.READY, begun.kind, begun.number, begun.num_bytes)
            rows[place] = self.links.reach(rank, word).view(dtype)
        most = -(-begun.mine.numel() // count)
        first = min(begun.mine.numel(), most * self.rank)
        last = min(begun.mine.numel(), first + most)
        for begin in range(first, last, PIECE):
            end = min(last, begin + PIECE)
            pieces = [row[begin:end] for row in rows]
            total = add_up(pieces)
            if begun.into is not None:
                begun.into.view(-1)[begin - first : end - first].copy_(total)
                continue
            for piece in pieces:
                if piece is not total:
                    piece.copy_(total)
        begun.is_added = True
        self._send_to_all(self._make_header(What.DONE, begun.kind, begun.number))

    @torch.no_grad()
    def gather_into(self, into: Tensor, tensor: Tensor) -> None:
        """Gather every rank's `tensor` (n), which is in shared memory, into `into` (ranks * n)."""
        at, num_bytes = self.links.find(tensor), tensor.numel() * tensor.element_size()
        assert at is not None
        self._count += 1
        number = self._count
        self._send_to_all(self._make_header(What.READY, Kind.GATHER, number, at, num_bytes))
        parts = into.view(len(self.ranks), -1)
        if parts[self.rank].data_ptr() != tensor.data_ptr():
            parts[self.rank].copy_(tensor.view(-1))
        for place, rank in self._others:
            word = self._receive_word(rank, What.READY, Kind.GATHER, number, num_bytes)
            parts[place].copy_(self.links.reach(rank, word).view(tensor.dtype))
        self._send_to_all(self._make_header(What.DONE, Kind.GATHER, number))
        self._await_done(number)


def _resize_and_map(descriptor: int, size: int) -> Any:
    """Set the size of a memory file and map it; return None if the system refuses."""
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        return None
    return map_file(descriptor, size)


def _no_memory(size: int) -> InputError:
    return InputError(
        f"{size:,} bytes of shared memory cannot be allocated",
        hint=(
            'raise the limits of this process (ulimit -n, -f, -v), or set layout.transport = "gloo"'
        ),
    )


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU and small enough to be sent in a message."""
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= SMALL_BYTES


def add_up(rows: Sequence[Tensor]) -> Tensor:
    """Sum `rows` in place: first neighbors, then pairs of these sums, and so on; return the total.

    >>> add_up([torch.tensor(float(each)) for each in (1, 2, 4)])
    tensor(7.)
    """
    apart = 1
    while apart < len(rows):
        for place in range(0, len(rows) - apart, 2 * apart):
            rows[place].add_(rows[place + apart])
        apart *= 2
    return rows[0]


def connect(
    group: Group, transport: Transport, *, wait_s: float, timeout_s: float
) -> SharedMemoryCollectives | None:
    """Connect all ranks of `group` by sockets; every rank must call this.

    Returns None if `transport` is "gloo", if the ranks are on several hosts, or if a rank has no
    shared memory. In the last two cases raises InputError if `transport` is "shared_memory".
    """
    listener = None if transport == "gloo" else _listen()
    with listener or contextlib.nullcontext():
        address = "" if listener is None else f"{_host()} {bytes(listener.getsockname()).hex()}"
        said = [text.split(" ") for text in group.exchange(f"{transport} {address}")]
        for rank, (theirs, *_) in enumerate(said):
            if theirs != said[0][0]:
                raise InputError(
                    f"layout.transport: rank {rank} has {theirs!r}, rank 0 has {said[0][0]!r}",
                    hint="start every rank with the same spec",
                )
        hosts = {host for _, host, *_ in said}
        if listener is None or len(hosts) > 1:
            if transport == "shared_memory":
                raise InputError(
                    "layout.transport is 'shared_memory', but the ranks are not all on one host, "
                    "of one user, with memory files (memfd_create)",
                    hint='leave it out, or set layout.transport = "gloo"',
                )
            return None
        addresses = [bytes.fromhex(each[2]) for each in said]
        try:
            sockets = _connect(listener, addresses, group.rank, wait_s)
        except OSError as error:
            why = f"another rank of this host is unreachable: {error}"
            raise LostRank(why, hint=HINT) from error
    links = Links(sockets, timeout_s=timeout_s)
    return SharedMemoryCollectives(links, group.rank, range(group.size), axis=0)


def _host() -> str:
    """Return an id that is equal for ranks that can connect: boot, network namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def _listen() -> socket.socket | None:
    """Return a socket that listens at an abstract Unix address; None if this is not supported."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        _host()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    try:
        listener.bind("")
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    return listener


def _connect(
    listener: socket.socket, addresses: Sequence[bytes], rank: int, wait_s: float
) -> dict[int, socket.socket]:
    """Return a socket to each other rank: connect to lower ranks and accept higher ones."""
    found: dict[int, socket.socket] = {}
    for other in range(rank):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(wait_s)
        made.connect(addresses[other])
        made.send(struct.pack("q", rank))
        found[other] = made
    listener.settimeout(wait_s)
    while len(found) < len(addresses) - 1:
        caller, _ = listener.accept()
        credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            caller.close()
            continue
        caller.settimeout(wait_s)
        (other,) = struct.unpack("q", caller.recv(8))
        found[other] = caller
    return found
