"""Memory limits of this process (host, cgroups, `ulimit -v`) and its out-of-memory kills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from surefoot.core.process.refused import address_space_bytes
from surefoot.core.units import format_bytes

ROOT = Path("/")  # root of the kernel's files
UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for no limit


class Limit(NamedTuple):
    """Memory limit in bytes; `source` says in words what sets it."""

    num_bytes: int
    source: str

    @property
    def words(self) -> str:
        return f"{format_bytes(self.num_bytes)} ({self.source})"


def find_limit(root: Path | None = None) -> Limit:
    """Return the smallest memory limit: host memory, cgroups of this process or `ulimit -v`.

    `root` is the folder that contains /proc and /sys; None for the root of the file system.
    """
    return min(_limits(root), key=lambda each: each.num_bytes)


def _limits(root: Path | None) -> Iterator[Limit]:
    yield Limit(psutil.virtual_memory().total, "memory of the host")
    for folder in _cgroups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            number = _number(folder / name)
            if number is not None and number < UNLIMITED:
                yield Limit(number, f"{name} of the cgroup")
    if (space := address_space_bytes()) is not None:
        yield Limit(space, "ulimit -v")


def find_available_bytes(root: Path | None = None) -> int:
    """Return the number of bytes that this process may still allocate.

    This is the smallest remainder of all limits (host, cgroups of this process, `ulimit -v`).
    `root` is as in `find_limit`.
    """
    left = [psutil.virtual_memory().available]
    for folder in _cgroups(root):
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, taken = _number(folder / most), _number(folder / used)
            if limit is not None and taken is not None and limit < UNLIMITED:
                # freed before memory is refused
                cached = _entries(folder / "memory.stat").get("inactive_file", 0)
                left.append(max(0, limit - max(0, taken - cached)))
    if (space := address_space_bytes()) is not None:
        left.append(max(0, space - psutil.Process().memory_info().vms))
    return int(min(left))


def count_kills(root: Path | None = None) -> int:
    """Return how many processes of this cgroup the kernel killed for lack of memory; 0 if unknown.

    `root` is as in `find_limit`.
    """
    return max(
        (
            _entries(folder / name).get("oom_kill", 0)
            for folder in _cgroups(root)
            for name in ("memory.events", "memory.oom_control")
        ),
        default=0,
    )


def _cgroups(root: Path | None) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups, from its own to the topmost visible."""
    top = ROOT if root is None else root
    for line in _text(top / "proc" / "self" / "cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            base = top / "sys" / "fs" / "cgroup"
        elif "memory" in controllers.split(","):
            base = top / "sys" / "fs" / "cgroup" / "memory"
        else:
            continue
        own = base / path.strip("/")
        if not own.is_dir() or ".." in own.parts:
            # the path is that of the host, and the container sees its own group as the topmost
            own = base
        yield from (own, *(each for each in own.parents if each == base or base in each.parents))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _entries(path: Path) -> dict[str, int]:
    """Return the numbers in a file with lines such as `oom_kill 2`: a dict from name to number."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
