"""Restrictions of the process that opens tensor files of other programs.

The process gives up its network access, and limits its memory, CPU time and file sizes. An audit
hook refuses operations that reading a file does not need: starting a program, connecting to a host,
and writing outside of one folder.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from surefoot.core.errors import InputError

try:
    import resource
except ImportError:  # pragma: no cover - not on Windows
    resource = None  # type: ignore[assignment]

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000  # <linux/sched.h>
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# prefixes of audit events
NEVER = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.kill",
    "ctypes.",
    "pty.",
    "ftplib.",
    "smtplib.",
    "urllib.",
    "os.chmod",
    "os.chown",
    "os.symlink",
    "os.link",
    "shutil.copy",
    "shutil.move",
    "shutil.chown",
    "shutil.make_archive",
    "shutil.unpack_archive",
)
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")


def confine(folder: Path, memory_bytes: int, cpu_s: int) -> list[str]:
    """Restrict this process; return the names of the resources that could not be restricted.

    The restrictions cannot be undone.

    Args:
        folder: The only folder in which the process may still write.
        memory_bytes: Address space that the process may map in addition to what it has mapped so
            far. This is also the largest size of a file that it may write.
        cpu_s: CPU time that the process may use in addition to the time used so far.
    """
    missing = [] if _leave_network() else ["the network"]
    if resource is None:
        missing.append("memory and time")
    else:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limits = {
            resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + cpu_s,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: memory_bytes,
        }
        if (mapped := _mapped_bytes()) is not None:
            limits[resource.RLIMIT_AS] = mapped + memory_bytes
        for which, most in limits.items():
            resource.setrlimit(which, (most, most))
    sys.addaudithook(_hook(os.path.realpath(folder)))
    return missing


def _leave_network() -> bool:
    """Move this process into a network namespace without connections; return whether it worked.

    If the process lacks the rights for this, a user namespace is created too.
    """
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (AttributeError, OSError, TypeError):
        return False
    return any(unshare(flags) == 0 for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET))


def _mapped_bytes() -> int | None:
    """Return the mapped address space of this process in bytes; None if it is not reported.

    torch alone maps gigabytes.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _hook(folder: str):  # type: ignore[no-untyped-def]
    def refuse(event: str, given: tuple[Any, ...]) -> None:
        if event.startswith(NEVER):
            raise InputError(f"reading a tensor file requested {event}")
        if event.startswith(CHANGES) or (event == "open" and _is_write(given)):
            paths = [each for each in given[:2] if isinstance(each, str | bytes | os.PathLike)]
            if event == "open":
                paths = paths[:1]
            if any(not _is_below(os.fsdecode(each), folder) for each in paths):
                raise InputError(f"reading a tensor file tried to write {os.fsdecode(paths[0])}")

    return refuse


def _is_write(given: tuple[Any, ...]) -> bool:
    _, mode, flags = given
    return (isinstance(mode, str) and bool(set(mode) & set("wax+"))) or (
        isinstance(flags, int) and bool(flags & WRITES)
    )


def _is_below(path: str, folder: str) -> bool:
    # the working folder is FOLDER, so a name relative to a descriptor also resolves below FOLDER
    whole = os.path.realpath(path)
    return path == os.devnull or whole == folder or whole.startswith(folder + os.sep)
