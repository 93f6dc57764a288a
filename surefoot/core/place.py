"""The rank and host of this process, and the only reader of the environment.

Arguments take precedence over environment variables.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from surefoot.core.errors import InputError
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
    """A process among `world_size`: `rank` over all hosts, `local_rank` on its host.

    The ranks rendezvous at `meeting`:`port`, where rank 0 listens, by the socket `listens` if its
    launcher opened one; or the launcher does (`has_agent`: torchrun). `restart` is the number of
    restarts by the launcher.
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
        """True if all ranks are on this host, according to the rendezvous address."""
        return self.meeting in ("localhost", "::1") or self.meeting.startswith("127.")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (torchrun's names).

        Raises InputError when one is not an integer, the rank is out of range, or several ranks
        have no rendezvous address.
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
    """Return the `Place` of this process, from its environment."""
    return Place.from_environ(os.environ)


def has_other_ranks() -> bool:
    """Return whether a launcher such as torchrun started this process as one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_started_rank() -> bool:
    """Return True in a rank that surefoot started, and in every rank but rank 0 of a launcher."""
    return FLIGHT in os.environ or os.environ.get("RANK", "0") != "0"


def check_launcher() -> None:
    """Raise InputError for one of several processes without rank variables, as srun starts them."""
    tasks = launchers.find_tasks(os.environ)
    if tasks is not None:
        message, line = launchers.describe(tasks)
        raise InputError(message, hint=line)


def flight_file() -> int | None:
    """Return the descriptor of this rank's flight record; None without a launcher that reads it."""
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
    """Return the socket over which ranks are requested, if this process is a fork server.

    The variable is removed, so that child processes do not inherit it.
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
    """Silence the log of torch's profiler about its stages; return a function that undoes it.

    Nothing changes if the environment sets the log level.
    """
    return (lambda: None) if PROFILER_LOG in os.environ else set_variable(PROFILER_LOG, "99")


def has_chosen_allocator() -> bool:
    """Return whether the environment configures or replaces the memory allocator."""
    return any(
        name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES")
        for name in os.environ
    )


def has_threads() -> bool:
    """Return whether the environment sets the number of compute threads."""
    return "OMP_NUM_THREADS" in os.environ


def whole_path(path: str | Path) -> Path:
    """Return the absolute path with `~` expanded, which does not depend on the working folder."""
    return Path(path).expanduser().absolute()


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/surefoot`, or `~/.cache/surefoot`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "surefoot"


def child_environment(*, threads: int | None = None) -> dict[str, str]:
    """Return the environment for a process that surefoot starts.

    It is that of this process, with the given thread counts, and with the folder of this
    interpreter first on PATH.
    """
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), environment.get("PATH", ""))
    )
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment


def yield_to_others(nice: int) -> None:
    """Lower the priority of this thread by `nice`, on Linux; threads that it starts inherit it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS,
                threading.get_native_id(),
                min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice),
            )


def close_in_children(owner: Any) -> None:
    """Close `owner._descriptor` in every process forked from this one, and set it to -1 there.

    A lock or a file that a forked worker inherits would stay held, or open, as long as that worker
    lives, even after its parent was killed. A program that is started with exec inherits neither:
    the descriptors are opened with O_CLOEXEC.
    """
    call_in_children(owner, _close_inherited)


def _close_inherited(owner: Any) -> None:
    if owner._descriptor >= 0:
        with contextlib.suppress(OSError):
            os.close(owner._descriptor)
        owner._descriptor = -1
