"""Detection of the file for which a process waits, from the system calls of its threads.

The kernel reports these calls in /proc (proc(5), `syscall`). Only Linux on x86-64 and arm64 is
supported.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# calls that may wait for a file: their number on x86-64, on arm64 (None: no such call), and which
# argument is a descriptor or a path
CALLS = {
    "read": (0, 63, "descriptor"),
    "write": (1, 64, "descriptor"),
    "readv": (19, 65, "descriptor"),
    "writev": (20, 66, "descriptor"),
    "pread64": (17, 67, "descriptor"),
    "pwrite64": (18, 68, "descriptor"),
    "preadv": (295, 69, "descriptor"),
    "fsync": (74, 82, "descriptor"),
    "fdatasync": (75, 83, "descriptor"),
    "ftruncate": (77, 46, "descriptor"),
    "fallocate": (285, 47, "descriptor"),
    "getdents64": (217, 61, "descriptor"),
    "flock": (73, 32, "descriptor"),
    "fstat": (5, 80, "descriptor"),
    "open": (2, None, "path"),
    "stat": (4, None, "path"),
    "mkdir": (83, None, "path"),
    "unlink": (87, None, "path"),
    "rename": (82, None, "path"),
    "openat": (257, 56, "second path"),
    "newfstatat": (262, 79, "second path"),
    "statx": (332, 291, "second path"),
    "unlinkat": (263, 35, "second path"),
    "mkdirat": (258, 34, "second path"),
    "renameat": (264, 38, "second path"),
}
COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)
IS_KNOWN = sys.platform.startswith("linux") and platform.machine() in ("x86_64", "aarch64")
CALL_BY_NUMBER = {row[COLUMN]: (name, row[2]) for name, row in CALLS.items()} if IS_KNOWN else {}
MAX_PATH = 4096
NO_FILES = ("/memfd:", "/dev/", "/proc/")


class Wait(NamedTuple):
    """System call on a file that a thread is executing.

    `asked` is the kernel's line about the call. If a later reading gives the same line, the thread
    is still in this call.
    """

    call: str
    path: str
    asked: str

    @property
    def words(self) -> str:
        return f"{self.call} of {self.path}"


def find_waits(pid: int) -> list[Wait]:
    """Return the system calls on files that a process and its children are executing.

    There is at most one call per thread. The threads of the process itself come first, its main
    thread before the others. On unsupported platforms the list is empty.
    """
    return (
        []
        if not CALL_BY_NUMBER
        else [found for task in _tasks(pid) if (found := _wait_of(task)) is not None]
    )


def _tasks(pid: int) -> Iterator[Path]:
    """Yield the /proc folder of each thread of the process and of its descendants."""
    with contextlib.suppress(OSError, ValueError):
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda each: int(each.name))
        yield from tasks
        for task in tasks:
            for child in (task / "children").read_text().split():
                yield from _tasks(int(child))


def _wait_of(task: Path) -> Wait | None:
    try:
        asked = (task / "syscall").read_text().strip()
        number, *arguments = asked.split()[:3]
        if not number.isdigit() or int(number) not in CALL_BY_NUMBER:
            return None
        name, how = CALL_BY_NUMBER[int(number)]
        if how == "descriptor":
            path = os.readlink(task / "fd" / str(int(arguments[0], 16)))
        else:
            path = _text_at(task, int(arguments[how == "second path"], 16))
    except (OSError, ValueError, IndexError):  # the thread has ended, or may not be inspected
        return None
    return (
        None
        if not path or path.startswith(NO_FILES) or (how == "descriptor" and path[0] != "/")
        else Wait(name, path, asked)
    )


def _text_at(task: Path, address: int) -> str:
    """Read the null-terminated string at an address in the memory of a thread's process."""
    descriptor = os.open(task / "mem", os.O_RDONLY)
    try:
        content = b""
        while b"\0" not in content and len(content) < MAX_PATH:
            place = address + len(content)
            # never past the end of a page, which may be the last
            content += os.pread(descriptor, 256 - place % 256, place)
        return content.split(b"\0")[0].decode(errors="replace")
    finally:
        os.close(descriptor)
