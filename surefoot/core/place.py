"""Where this process stands: its rank among others and its host. The only reader of the environment; arguments win over it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from surefoot.core.errors import InputError

# what a run records of its environment: the variables that can change numbers or speed
PROFILER_LOG = "KINETO_LOG_LEVEL"
RECORDED = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTHONHASHSEED", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process among `world_size`: `rank` over all hosts, `local_rank` on its own."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str = "localhost"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read RANK, WORLD_SIZE and LOCAL_RANK (torchrun's names).

        Raises InputError when one is not a whole number or the rank lies outside the world.
        """
        values = {name: _whole(environ, name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))}
        if not 0 <= values["RANK"] < values["WORLD_SIZE"]:
            raise InputError(f"RANK is {values['RANK']} in a world of {values['WORLD_SIZE']}", hint="ranks count from 0")
        return cls(
            rank=values["RANK"], world_size=values["WORLD_SIZE"], local_rank=values["LOCAL_RANK"], host=socket.gethostname()
        )


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"the variable {name} is {text!r}, not a whole number", hint=f"unset it, or set {name}=0") from None


def here() -> Place:
    """The place of this very process."""
    return Place.from_environ(os.environ)


def recorded_variables() -> dict[str, str]:
    """The variables that a run writes into its Started event."""
    return {name: os.environ[name] for name in RECORDED if name in os.environ}


def set_variable(name: str, value: str) -> Callable[[], None]:
    """Set a variable of this process; gives what puts back what was there."""
    before = os.environ.get(name)
    os.environ[name] = value

    def put_back() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    return put_back


def quiet_profiler() -> Callable[[], None]:
    """Let torch's profiler keep notes of its own stages to itself, unless the environment says what it may tell; gives what ends that."""
    return (lambda: None) if PROFILER_LOG in os.environ else set_variable(PROFILER_LOG, "99")


def has_chosen_allocator() -> bool:
    """Whether the environment says how memory is to be allocated, or by what."""
    return any(name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES") for name in os.environ)


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/surefoot`, or `~/.cache/surefoot`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "surefoot"


def child_environment(*, threads: int | None = None) -> dict[str, str]:
    """The environment for a process of ours: this one's, with the thread counts given and this interpreter's folder first on PATH."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", "")))
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment


def yield_to_others(nice: int) -> None:
    """Lower the priority of this thread by `nice`, where threads have one of their own (Linux); those it starts inherit it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice))
