"""How the ranks of a run find each other: at the address that the launcher gave, within a time, or with words for who is missing."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from surefoot.core import place
from surefoot.core.errors import InputError, LostRank
from surefoot.core.flight import Flight, make_file
from surefoot.core.place import Place
from surefoot.core.ranks.layout import Transport
from surefoot.core.signals import STACKS_SIGNAL, dying_with
from surefoot.runtime.comm.group import ALONE, GONE, GONE_HINT, Group, lost_while_joining
from surefoot.runtime.comm.host_memory import meet

LOOK_S, ROLL_S = 0.05, 1.0
_rounds = itertools.count()  # how often this process has joined others: one run may follow the other, and all ranks count alike
LOOPBACK = "lo"


@contextlib.contextmanager
def join(
    here: Place, device: torch.device, *, wait_s: float, timeout_s: float, transport: Transport = "auto"
) -> Iterator[Group]:  # fmt: skip
    """The group of all ranks, for as long as the block lasts. A rank waits `wait_s` for the others, a collective `timeout_s`.

    gloo joins CPUs, and the memory of one host where all are on it (`host_memory`); NCCL joins GPUs.
    Raises InputError for an address that is none, a port that is taken, and ranks that do not come: by number.
    Raises LostRank where one is gone again before all are joined.
    """
    if here.world_size == 1:
        yield ALONE
        return
    _collect_at_exit()
    if here.has_agent:
        dying_with(os.getppid())()  # torchrun that is killed ends nobody: its ranks would train on, and hold the run
    interface = None if here.has_interface else LOOPBACK if here.is_on_loopback else _find_interface(here)
    put_back = place.set_variable("GLOO_SOCKET_IFNAME", interface) if interface is not None else _nothing
    try:
        store = PrefixStore(f"surefoot/{here.restart}/{next(_rounds)}", _open_store(here, wait_s))
        with lost_while_joining():
            _await_all(store, here, wait_s)
        backend, begun_s = "nccl" if device.type == "cuda" else "gloo", time.monotonic()
        try:
            dist.init_process_group(
                backend, store=PrefixStore("torch", store), rank=here.rank, world_size=here.world_size,
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
        except RuntimeError as error:
            if time.monotonic() - begun_s >= timeout_s:
                raise LostRank(
                    f"{GONE}, or does not answer within {timeout_s:g} s",
                    hint=f"{GONE_HINT}; layout.timeout says how long it is waited for",
                ) from error
            if here.is_on_loopback:
                raise LostRank(GONE, hint=GONE_HINT) from error
            by = f" by {interface}" if interface is not None else ""
            raise InputError(
                f"rank {here.rank} of {here.world_size} met the others at {here.meeting}, and cannot be joined to them{by}: {error}",
                hint="GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) names the network interface that leads to the other hosts",
            ) from error
        try:
            where = device if backend == "nccl" else torch.device("cpu")
            # else the launcher knows more
            roll = functools.partial(_call_the_roll, store, here) if here.told is None else lambda: ""
            with _recording(here) as flight:
                group = Group(here.rank, here.world_size, where, flight, roll=roll)
                memory = meet(group, transport, wait_s=wait_s, timeout_s=timeout_s) if where.type == "cpu" else None
                with contextlib.nullcontext() if memory is None else contextlib.closing(memory.links):
                    yield replace(group, memory=memory)
        finally:
            dist.destroy_process_group()
    finally:
        put_back()


@functools.cache
def _collect_at_exit() -> None:
    """Let what holds gloo's groups go before the interpreter ends. Its threads let go of tensors late, and one that does so while the
    interpreter ends aborts the process ("terminate called without an active exception"): of an error that ranks raise together, one of
    a dozen became a rank that was ended by SIGABRT."""
    atexit.register(gc.collect)


def _nothing() -> None: ...


def _find_interface(here: Place) -> str | None:
    """The interface that leads to the meeting; None where it cannot be known. gloo's own choice is what the name of the host stands for,
    and that is the loopback on many."""
    try:
        family, _, _, _, address = socket.getaddrinfo(here.meeting, here.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of datagrams: nothing is sent
            mine = probe.getsockname()[0]
    except OSError:
        return None
    found = [name for name, rows in psutil.net_if_addrs().items() if any(row.address.partition("%")[0] == mine for row in rows)]
    return found[0] if found else None


@contextlib.contextmanager
def _recording(here: Place) -> Iterator[Flight]:
    """Let the launcher, or where none looks on the other ranks of this host, see what this rank does, and have its stack: by
    STACKS_SIGNAL, for a launcher also where a signal such as SIGABRT ends it, since gloo ends a process that is sent what it does not
    expect."""
    if here.told is not None:
        flight, stacks = here.told
        faulthandler.enable(file=stacks, all_threads=True)
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        yield Flight(flight, stacks)
        return
    flight = make_file(f"surefoot-flight-{here.rank}")
    try:
        yield Flight(flight, _open_stacks())
    finally:
        os.close(flight)


@functools.cache
def _open_stacks() -> int:
    """A file that takes the stacks of this process whenever STACKS_SIGNAL asks for them, to its end: nobody else could be asked later
    without being ended by that signal. -1 where there is no such signal."""
    if not hasattr(os, "pidfd_open"):
        return -1
    stacks = make_file("surefoot-stacks")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    return stacks


def _call_the_roll(store: Store, here: Place) -> str:
    """Who else is out of reach of somebody, and who says nothing of it, in words: asked where the ranks met, within a few seconds.

    All ranks but those to blame come here at about one time, by the deadline of what they do together, or as a link breaks.
    """
    silent: list[list[int]] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            store.set(f"lost/{here.rank}", "")
            others = [rank for rank in range(here.world_size) if rank != here.rank]
            until_s = time.monotonic() + ROLL_S
            while others and time.monotonic() < until_s:
                time.sleep(LOOK_S)
                others = [rank for rank in others if not store.check([f"lost/{rank}"])]
            silent.append(others)

    asking = threading.Thread(target=ask, daemon=True)  # where the link is cut it waits for good
    asking.start()
    asking.join(2 * ROLL_S)
    if not silent:
        return f"; {here.meeting}, where rank 0 is, does not answer: it has ended, or the network to it is cut"
    (named,) = silent
    if not named:
        return "; all of them are there: the network between them is cut, or one called something else"
    return f"; rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} of {here.world_size} " + (
        "says nothing: it has ended, hangs, or the network to it is cut"
        if len(named) == 1
        else "say nothing: they have ended, hang, or the network to them is cut"
    )


@functools.cache
def _open_store(here: Place, wait_s: float) -> Store:
    """Where ranks leave word for each other; rank 0 holds it, unless its launcher does. One for all runs of a process."""
    try:
        family, _, _, _, address = socket.getaddrinfo(here.meeting, here.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(
            f"the ranks are to meet at {here.meeting}, which is no host that is known here: {error.strerror or error}",
            hint="MASTER_ADDR is the name or the address of the host of rank 0",
        ) from None
    holds = here.rank == 0 and not here.has_agent
    descriptor = here.listens
    if holds and descriptor is None:
        descriptor = _listen(here, family, address)
    try:
        store: Store = TCPStore(
            here.meeting, here.port, here.world_size, is_master=holds, timeout=timedelta(seconds=wait_s), wait_for_workers=False,
            master_listen_fd=descriptor if holds else None,
        )  # fmt: skip
        return store
    except RuntimeError as error:
        raise InputError(
            f"rank {here.rank} of {here.world_size} found nobody at {here.meeting}:{here.port} within {wait_s:g} s",
            hint="is rank 0 there, and are MASTER_ADDR and MASTER_PORT the same everywhere?",
        ) from error


def _listen(here: Place, family: socket.AddressFamily, address: Any) -> int:
    """A socket at the address of the meeting and at no other: torch's own would listen on every interface."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise InputError(
            f"rank 0 cannot listen at {here.meeting}:{here.port}: {error.strerror}",
            hint="set MASTER_PORT to a free port, and MASTER_ADDR to an address of the host of rank 0",
        ) from None
    return listener.detach()


def _await_all(store: Store, here: Place, wait_s: float) -> None:
    """Come together. Raises InputError, with the ranks that are missing, for those that do not come in time, and for one that was told
    another number of ranks."""
    until_s = time.monotonic() + wait_s
    store.set(f"rank/{here.rank}", str(here.world_size))
    missing, look_s = list(range(here.world_size)), 0.001
    while missing := [rank for rank in missing if not _has_come(store, rank, here)]:
        if time.monotonic() >= until_s:
            told = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")
            raise InputError(
                f"rank{'s' * (len(missing) > 1)} {told} of {here.world_size} did not come within {wait_s:g} s",
                hint="start every rank with the same WORLD_SIZE, and a RANK of its own",
            )
        time.sleep(look_s)
        look_s = min(2 * look_s, LOOK_S)


def _has_come(store: Store, rank: int, here: Place) -> bool:
    if not store.check([f"rank/{rank}"]):
        return False
    theirs = store.get(f"rank/{rank}").decode()
    if theirs != str(here.world_size):
        raise InputError(
            f"rank {here.rank} is one of {here.world_size}, rank {rank} is one of {theirs}",
            hint="start every rank with the same WORLD_SIZE, and a RANK of its own",
        )
    return True
