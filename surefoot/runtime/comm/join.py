"""Rendezvous of the ranks of a run, which names the ranks that do not join."""

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
from surefoot.core.flight import Flight, Kind, make_file
from surefoot.core.place import Place
from surefoot.core.process.signals import STACKS_SIGNAL, make_parent_death_hook
from surefoot.core.ranks.layout import Transport
from surefoot.runtime.comm.group import ALONE, GONE, GONE_HINT, Group, raise_lost_rank
from surefoot.runtime.comm.host_memory import connect

LOOK_S, ROLL_S = 0.05, 1.0
# number of times this process has joined others, equal on all ranks; a process may do several runs
_rounds = itertools.count()
LOOPBACK = "lo"


@contextlib.contextmanager
def join(
    here: Place,
    device: torch.device,
    *,
    wait_s: float,
    timeout_s: float,
    transport: Transport = "auto",
) -> Iterator[Group]:
    """Return a context that joins all ranks into a group, and yields the group.

    Args:
        here: Rank, size and addresses of this process, as `this_rank` returns them.
        device: Device of the tensors; GPUs use NCCL.
        wait_s: Seconds to wait until all ranks have joined.
        timeout_s: Seconds after which a collective fails.
        transport: Transport of ranks on CPUs: "gloo", "shared_memory", or "auto" for shared memory
            if all ranks are on one host (`host_memory`).

    Raises:
        InputError: For an invalid address, a port in use, and ranks that do not join, by number.
        LostRank: If a rank fails before all have joined.
    """
    if here.world_size == 1:
        yield ALONE
        return
    _collect_at_exit()
    if here.has_agent:
        make_parent_death_hook(os.getppid())()  # or the ranks of a killed torchrun would train on
    interface = (
        None if here.has_interface else LOOPBACK if here.is_on_loopback else _find_interface(here)
    )
    restore = _noop if interface is None else place.set_variable("GLOO_SOCKET_IFNAME", interface)
    try:
        with _record_collectives(here) as flight:
            meet = functools.partial(_meet, here, device, interface, wait_s, timeout_s)
            store = flight.during(Kind.JOIN, -1, meet)
            try:
                where = device if device.type == "cuda" else torch.device("cpu")
                roll = (  # with a launcher, which knows more: no text
                    functools.partial(_call_the_roll, store, here)
                    if here.told is None
                    else lambda: ""
                )
                group = Group(here.rank, here.world_size, where, flight, roll=roll)
                shm = (
                    connect(group, transport, wait_s=wait_s, timeout_s=timeout_s)
                    if where.type == "cpu"
                    else None
                )
                with contextlib.nullcontext() if shm is None else contextlib.closing(shm.links):
                    yield replace(group, memory=shm)
            finally:
                dist.destroy_process_group()
    finally:
        restore()


def _meet(
    here: Place, device: torch.device, interface: str | None, wait_s: float, timeout_s: float
) -> Store:
    """Wait until all ranks have joined, and create torch's process group; return their store.

    `interface` is the network interface; None for that of the environment. Raises what `join`
    raises.
    """
    store = PrefixStore(f"surefoot/{here.restart}/{next(_rounds)}", _open_store(here, wait_s))
    with raise_lost_rank():
        _await_all(store, here, wait_s)
    begun_s = time.monotonic()
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("torch", store),
            rank=here.rank,
            world_size=here.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        if time.monotonic() - begun_s >= timeout_s:
            raise LostRank(
                f"{GONE}, or does not answer within {timeout_s:g} s",
                hint=f"{GONE_HINT}; layout.timeout is the time limit",
            ) from error
        if here.is_on_loopback:
            raise LostRank(GONE, hint=GONE_HINT) from error
        by = f" by {interface}" if interface is not None else ""
        raise InputError(
            f"rank {here.rank} of {here.world_size} reached the other ranks at "
            f"{here.meeting}, and cannot connect to them{by}: {error}",
            hint=(
                "GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) names the network interface that "
                "leads to the other hosts"
            ),
        ) from error
    return store


@functools.cache
def _collect_at_exit() -> None:
    """Register garbage collection at exit, which frees gloo's groups before interpreter shutdown.

    gloo's threads free tensors late. A thread that does so during interpreter shutdown aborts the
    process ("terminate called without an active exception"): of twelve errors that all ranks
    raised, one ended with a rank killed by SIGABRT.
    """
    atexit.register(gc.collect)


def _noop() -> None: ...


def _find_interface(here: Place) -> str | None:
    """Return the network interface that leads to the rendezvous; None if it cannot be found.

    By default gloo uses the address of the host name, which is the loopback on many hosts.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            here.meeting, here.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket sends nothing here
            mine = probe.getsockname()[0]
    except OSError:
        return None
    found = [
        name
        for name, rows in psutil.net_if_addrs().items()
        if any(row.address.partition("%")[0] == mine for row in rows)
    ]
    return found[0] if found else None


@contextlib.contextmanager
def _record_collectives(here: Place) -> Iterator[Flight]:
    """Return a context that yields the record of this rank's collectives and stacks.

    The supervisor reads the record; without a supervisor other ranks of this host do. STACKS_SIGNAL
    makes this process write its stacks. If there is a supervisor, a fatal signal such as SIGABRT
    does the same, because gloo aborts a process that receives unexpected data.
    """
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
    """Return the descriptor of the file to which STACKS_SIGNAL writes this process's stacks.

    The signal handler is never removed, because the signal would otherwise kill the process.
    Returns -1 on systems without pidfd_open.
    """
    if not hasattr(os, "pidfd_open"):
        return -1
    stacks = make_file("surefoot-stacks")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    return stacks


def _call_the_roll(store: Store, here: Place) -> str:
    """Return a text that names the ranks that do not respond, for an error message.

    When a collective times out or a connection breaks, all ranks except the failed ones call this
    at about the same time. They exchange messages through the rendezvous store for a few seconds.
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

    asking = threading.Thread(target=ask, daemon=True)  # waits forever if the network is down
    asking.start()
    asking.join(2 * ROLL_S)
    if not silent:
        return (
            f"; {here.meeting}, the host of rank 0, does not respond: rank 0 has ended, or "
            "the network connection is down"
        )
    (named,) = silent
    if not named:
        return (
            "; all ranks respond: the network between them is down, or one called "
            "another collective"
        )
    return f"; rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} of {here.world_size} " + (
        "does not respond: it has ended, hangs, or the network connection is down"
        if len(named) == 1
        else "do not respond: they have ended, hang, or the network connection is down"
    )


@functools.cache
def _open_store(here: Place, wait_s: float) -> Store:
    """Return the store through which ranks exchange messages while they join.

    Rank 0 hosts the store unless its launcher does. All runs of a process use the same store.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            here.meeting, here.port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise InputError(
            (
                f"MASTER_ADDR is {here.meeting}, which cannot be resolved on this host: "
                f"{error.strerror or error}"
            ),
            hint="set MASTER_ADDR to the name or the address of the host of rank 0",
        ) from None
    holds = here.rank == 0 and not here.has_agent
    descriptor = here.listens
    if holds and descriptor is None:
        descriptor = _listen(here, family, address)
    try:
        store: Store = TCPStore(
            here.meeting,
            here.port,
            here.world_size,
            is_master=holds,
            timeout=timedelta(seconds=wait_s),
            wait_for_workers=False,
            master_listen_fd=descriptor if holds else None,
        )
        return store
    except RuntimeError as error:
        raise InputError(
            (
                f"rank {here.rank} of {here.world_size} found no rank 0 at "
                f"{here.meeting}:{here.port} within {wait_s:g} s"
            ),
            hint=(
                "check that rank 0 runs there, and that MASTER_ADDR and MASTER_PORT are "
                "the same on all ranks"
            ),
        ) from error


def _listen(here: Place, family: socket.AddressFamily, address: Any) -> int:
    """Return the descriptor of a socket that listens only at the rendezvous address.

    The socket that torch would open listens at all addresses of the host.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise InputError(
            f"rank 0 cannot listen at {here.meeting}:{here.port}: {error.strerror}",
            hint=(
                "set MASTER_PORT to a free port, "
                "and MASTER_ADDR to an address of the host of rank 0"
            ),
        ) from None
    return listener.detach()


def _await_all(store: Store, here: Place, wait_s: float) -> None:
    """Wait until all ranks have joined.

    Raises InputError if ranks are missing after `wait_s`, or if a rank has a different WORLD_SIZE.
    With a launcher, which has started all ranks, missing ranks raise LostRank: they may restart.
    """
    until_s = time.monotonic() + wait_s
    store.set(f"rank/{here.rank}", str(here.world_size))
    missing, look_s = list(range(here.world_size)), 0.001
    while missing := [rank for rank in missing if not _has_come(store, rank, here)]:
        if time.monotonic() >= until_s:
            told = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")
            what = (
                f"rank{'s' * (len(missing) > 1)} {told} of {here.world_size} did not "
                f"connect within {wait_s:g} s"
            )
            if here.told is not None:
                raise LostRank(what, hint=GONE_HINT)
            hint = "start every rank with the same WORLD_SIZE and a different RANK"
            raise InputError(what, hint=hint)
        time.sleep(look_s)
        look_s = min(2 * look_s, LOOK_S)


def _has_come(store: Store, rank: int, here: Place) -> bool:
    if not store.check([f"rank/{rank}"]):
        return False
    theirs = store.get(f"rank/{rank}").decode()
    if theirs != str(here.world_size):
        raise InputError(
            (
                f"rank {here.rank} has WORLD_SIZE {here.world_size}, rank {rank} has "
                f"WORLD_SIZE {theirs}"
            ),
            hint="start every rank with the same WORLD_SIZE and a different RANK",
        )
    return True
