"""The rank and host of this process, from environment variables.

Only this module reads the environment. Arguments take precedence over environment variables.
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from surefoot.core.errors import DataError, InputError
from surefoot.core.process import launchers
from surefoot.core.process.forked import call_in_children

# descriptors of the flight record and the stacks of a rank
FLIGHT, STACKS = "SUREFOOT_FLIGHT", "SUREFOOT_STACKS"
LISTENS = "SUREFOOT_LISTENS"  # the descriptor of the socket at which rank 0 accepts the others
# the descriptor of the socket over which a process is requested to fork ranks
FORKS = "SUREFOOT_FORKS"
PROFILER_LOG = "KINETO_LOG_LEVEL"
# environment variables that a run records: those that can change results or speed
RECORDED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTHONHASHSEED",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
)
MEANT = {
    "RANK": "ranks count from 0: set RANK to a number below WORLD_SIZE",
    "WORLD_SIZE": "set WORLD_SIZE to the number of ranks, or unset it",
    "LOCAL_RANK": "set LOCAL_RANK to the number of this rank on its host, from 0",
    "MASTER_PORT": "a port is a number from 1 to 65535",
}
TALKING = ("NCCL_", "TORCH_NCCL_", "GLOO_")  # prefixes of variables that configure communication


@dataclass(frozen=True, kw_only=True)
class Place:
    """Position of this process among the ranks of a run, and the address where the ranks meet.

    Args:
        rank: Number of this process among all ranks, from 0.
        world_size: Number of ranks.
        local_rank: Number of this process among the ranks on its host, from 0.
        host: Name of this host.
        meeting: Address of the rendezvous (MASTER_ADDR).
        port: Port of the rendezvous (MASTER_PORT).
        listens: Descriptor of the socket on which rank 0 listens, if the launcher opened it.
        has_agent: True if the launcher (torchrun) listens at the rendezvous instead of rank 0.
        has_interface: True if GLOO_SOCKET_IFNAME is set.
        restart: Number of times that the launcher has restarted the ranks.
        told: Descriptors of two files in which a launcher reads the rank's progress (its flight
            record) and the stacks of its threads; None without such a launcher.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str = "localhost"
    meeting: str = ""
    port: int = 0
    listens: int | None = None
    has_agent: bool = False
    has_interface: bool = False
    restart: int = 0
    # descriptors of the flight record and the stacks, if a launcher watches
    told: tuple[int, int] | None = None

    @property
    def is_on_loopback(self) -> bool:
        """True if the rendezvous address is a loopback address: all ranks are on this host."""
        return self.meeting in ("localhost", "::1") or self.meeting.startswith("127.")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Return the place that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe.

        These are the variables of torchrun. Raises InputError if a number is not an integer, RANK
        is out of range or set without WORLD_SIZE, or several ranks have no rendezvous address or no
        valid port.
        """
        values = {
            name: _read_integer(environ, name, default)
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        }
        if not 0 <= values["RANK"] < values["WORLD_SIZE"]:
            raise InputError(
                f"RANK is {values['RANK']}, and WORLD_SIZE is {values['WORLD_SIZE']}",
                hint="ranks count from 0, and WORLD_SIZE is the number of them",
            )
        if "RANK" in environ and "WORLD_SIZE" not in environ:
            raise InputError(
                f"RANK is {values['RANK']}, and WORLD_SIZE is not set",
                hint="set it to the number of ranks, or unset RANK",
            )
        here = cls(
            rank=values["RANK"],
            world_size=values["WORLD_SIZE"],
            local_rank=values["LOCAL_RANK"],
            host=socket.gethostname(),
        )
        if here.world_size == 1:
            return here
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise InputError(
                    f"{name} is not set, but WORLD_SIZE is {here.world_size}",
                    hint=(
                        "surefoot train SPEC --ranks N and torchrun set it; otherwise set "
                        "it to the host of rank 0, or to a free port on that host"
                    ),
                )
        port = _read_integer(environ, "MASTER_PORT", 0)
        if not 0 < port < 1 << 16:
            raise InputError(f"MASTER_PORT is {port}", hint="a port is a number from 1 to 65535")
        return replace(
            here,
            meeting=environ["MASTER_ADDR"],
            port=port,
            has_interface="GLOO_SOCKET_IFNAME" in environ,
            listens=_read_integer(environ, LISTENS, 0) if LISTENS in environ else None,
            has_agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart=_read_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            told=(_read_integer(environ, FLIGHT, 0), _read_integer(environ, STACKS, 0))
            if FLIGHT in environ
            else None,
        )


def _read_integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"the variable {name} is {text!r}, not a whole number", hint=MEANT.get(name, "unset it")
        ) from None


def here() -> Place:
    """Return the `Place` of this process, read from its environment variables."""
    return Place.from_environ(os.environ)


def has_other_ranks() -> bool:
    """Return whether a launcher such as torchrun started this process as one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_started_rank() -> bool:
    """Return whether surefoot started this process as a rank, or its rank is not 0."""
    return FLIGHT in os.environ or os.environ.get("RANK", "0") != "0"


def check_launcher() -> None:
    """Raise InputError if a launcher started several processes without rank variables.

    For example, srun sets neither RANK nor WORLD_SIZE.
    """
    tasks = launchers.find_tasks(os.environ)
    if tasks is not None:
        message, line = launchers.describe(tasks)
        raise InputError(message, hint=line)


def flight_file() -> int | None:
    """Return the descriptor of this rank's flight record, in which its launcher reads its progress.

    None if no launcher reads the record.
    """
    return _read_integer(os.environ, FLIGHT, 0) if FLIGHT in os.environ else None


def recorded_variables() -> dict[str, str]:
    """Return the environment variables that a run records in its Started event."""
    talking = sorted(name for name in os.environ if name.startswith(TALKING))
    return {name: os.environ[name] for name in (*RECORDED, *talking) if name in os.environ}


def variables_with(prefix: str) -> dict[str, str]:
    """Return the environment variables whose names start with `prefix`."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def set_variable(name: str, value: str) -> Callable[[], None]:
    """Set an environment variable of this process; return a function that restores it."""
    before = os.environ.get(name)
    os.environ[name] = value

    def put_back() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    return put_back


def take_forks() -> int | None:
    """Return the descriptor of the socket over which this fork server receives requests for ranks.

    None if this process is not a fork server. The environment variable that holds the descriptor is
    removed, so that child processes do not inherit it.
    """
    given = os.environ.pop(FORKS, "")
    with contextlib.suppress(OSError, OverflowError):
        return (
            int(given)
            if given.isdecimal() and stat.S_ISSOCK(os.fstat(int(given)).st_mode)
            else None
        )
    return None


def quiet_profiler() -> Callable[[], None]:
    """Stop torch's profiler from logging its stages; return a function that undoes this.

    Nothing changes if KINETO_LOG_LEVEL is set.
    """
    return (lambda: None) if PROFILER_LOG in os.environ else set_variable(PROFILER_LOG, "99")


def has_chosen_allocator() -> bool:
    """Return whether environment variables configure or replace malloc."""
    return any(
        name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES")
        for name in os.environ
    )


def has_threads() -> bool:
    """Return whether the environment sets the number of compute threads (OMP_NUM_THREADS)."""
    return "OMP_NUM_THREADS" in os.environ


def whole_path(path: str | Path) -> Path:
    """Return `path` as an absolute path, with `~` expanded."""
    return Path(path).expanduser().absolute()


def find_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the files that a path, a pattern such as `data/train_*.bin`, or a list of them names.

    The files of a pattern are sorted by name. A path that exists is not read as a pattern.
    Raises DataError for a pattern without a match.
    """
    found: list[Path] = []
    for given in [paths] if isinstance(paths, str | Path) else paths:
        path = folder = whole_path(given)
        while not folder.exists():
            folder = folder.parent
        pattern = str(path.relative_to(folder))  # the names of existing folders are no pattern
        if not glob.has_magic(pattern):
            found.append(path)
            continue
        names = sorted(glob.glob(pattern, root_dir=folder, recursive=True))
        if not names:
            raise DataError(
                f"no file matches {path}", hint="check the folder and the pattern of the names"
            )
        found += [folder / name for name in names]
    return found


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/surefoot`, or `~/.cache/surefoot`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "surefoot"


def child_environment(*, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables for a process that surefoot starts.

    They are those of this process, with the folder of this Python interpreter first on PATH. If
    `threads` is given, OMP_NUM_THREADS and MKL_NUM_THREADS have that value.
    """
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), environment.get("PATH", ""))
    )
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment


def yield_to_others(nice: int) -> None:
    """Lower the priority of the calling thread by `nice`, on Linux.

    Threads that it starts later inherit the priority. Nothing changes on other systems.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS,
                threading.get_native_id(),
                min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice),
            )


def close_in_children(owner: Any) -> None:
    """Close `owner._descriptor` in every process forked from this one, and set it to -1 there.

    Otherwise a forked worker would keep the inherited lock or file open as long as it lives, even
    after its parent was killed. A program started with exec inherits neither, because the
    descriptors are opened with O_CLOEXEC.
    """
    call_in_children(owner, _close_inherited)


def _close_inherited(owner: Any) -> None:
    if owner._descriptor >= 0:
        with contextlib.suppress(OSError):
            os.close(owner._descriptor)
        owner._descriptor = -1
