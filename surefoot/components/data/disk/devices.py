"""What files lie on, and what of them the system holds in memory: read from /proc and /sys, where these are there (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KINDS = {  # file systems whose kind says where the bytes are
    "memory": ("tmpfs", "ramfs"),
    "network": (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "ceph",
        "glusterfs",
        "beegfs",
        "9p",
        "virtiofs",
        "fuse.sshfs",
        "fuse.s3fs",
    ),
}
VIRTUAL = ("vd", "xvd")  # disks that a hypervisor gives: what they say of themselves is not what they are
PIECE_BYTES = 1 << 20
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has it from 3.13 on
MOUNTS, BLOCKS = Path("/proc/self/mountinfo"), Path("/sys/dev/block")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a folder lies on. `kind` is HDD, SSD, NVMe, memory, network, virtual disk, or None where nothing says."""

    name: str | None
    kind: str | None
    file_system: str | None

    def __str__(self) -> str:
        said = " on ".join(dict.fromkeys(each for each in (self.file_system, self.name) if each))
        return f"{self.kind or 'a device of unknown kind'} ({said})" if said else self.kind or "a device of unknown kind"


def find_device(path: Path, *, mounts: Path = MOUNTS, blocks: Path = BLOCKS) -> Device:
    """What the file or folder lies on, by the mount that is nearest above it. What cannot be found out is None."""
    real = os.path.realpath(path)
    best, found = "", ("", "", "")
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="surrogateescape").splitlines():
            fields, _, more = line.partition(" - ")
            words, after = fields.split(" "), more.split(" ")
            if len(words) < 5 or len(after) < 2:
                continue
            point = _plain(words[4])
            is_above = real == point or real.startswith(point.rstrip("/") + "/")
            if is_above and len(point) >= len(best):
                best, found = point, (words[2], after[0], _plain(after[1]))
    number, file_system, name = found
    if not file_system:
        return Device(name=None, kind=None, file_system=None)
    kind = next((kind for kind, systems in KINDS.items() if file_system in systems), None)
    return Device(name=name or None, kind=kind or _kind_of_disk(number, name, blocks), file_system=file_system)


def _plain(text: str) -> str:
    """A field of mountinfo: blanks stand there as \\040."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _kind_of_disk(number: str, name: str, blocks: Path) -> str | None:
    """HDD, SSD, NVMe or virtual disk, as the kernel has it of a disk, or of the one that a part belongs to."""
    with contextlib.suppress(OSError):
        place = (blocks / number).resolve(strict=True)
        disk = place if (place / "queue").is_dir() else place.parent
        if disk.name.startswith(VIRTUAL):
            return "virtual disk"
        if disk.name.startswith("nvme"):
            return "NVMe"
        return "HDD" if (disk / "queue" / "rotational").read_text().strip() == "1" else "SSD"
    return (
        "NVMe"
        if name.startswith("/dev/nvme")
        else "virtual disk"
        if name.startswith(tuple(f"/dev/{each}" for each in VIRTUAL))
        else None
    )


def drop_cached(paths: Iterable[Path]) -> bool:
    """Ask the system to forget what it holds of these files in memory; whether it was seen to, so that they will be read from the disk.

    What is not written yet is written first. Files in memory stay there, and so may those that others have open.
    """
    forgotten = hasattr(os, "posix_fadvise")
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                os.fdatasync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            forgotten = forgotten and cached_share(descriptor) == 0.0
        finally:
            os.close(descriptor)
    return forgotten


def cached_share(descriptor: int) -> float | None:
    """The share of a file's pages that are in memory (mincore(2)); None where that cannot be known.

    Nothing is read: a read that would not wait (RWF_NOWAIT) starts reading ahead, and what was cold is no longer. Of the file of
    another user, which one may not write, the system does not say it.
    """
    status = os.fstat(descriptor)
    may_know = os.geteuid() in (0, status.st_uid) or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)
    if not status.st_size or not may_know or sys.platform != "linux":
        return None
    held = (ctypes.c_ubyte * -(-status.st_size // mmap.PAGESIZE))()
    try:
        flags, access = (
            mmap.MAP_PRIVATE | NORESERVE,
            mmap.PROT_READ | mmap.PROT_WRITE,
        )  # ctypes takes what it could write alone
        with mmap.mmap(descriptor, status.st_size, flags=flags, prot=access) as content:
            first = ctypes.c_char.from_buffer(content)
            failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(status.st_size), held)
            del first  # or the map could not be closed
    except (OSError, ValueError, AttributeError):
        return None
    return None if failed else float((np.frombuffer(bytes(held), dtype=np.uint8) & 1).mean())


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Bytes a second of files read in a row; `cold` says whether they came from the device, and not from memory that held them."""

    bytes_per_s: float | None
    num_bytes: int
    cold: bool


def read_speed(paths: Sequence[Path], *, most_bytes: int, most_s: float) -> Speed:
    """Read files in a row, from the device where the system forgets them, for so long or so many bytes at the most."""
    chosen, size = [], 0
    for path in paths:
        if size >= most_bytes:
            break
        chosen.append(path)
        size += path.stat().st_size
    cold = drop_cached(chosen)
    done, piece, begun_s = 0, memoryview(bytearray(PIECE_BYTES)), time.perf_counter()
    for path in chosen:
        with path.open("rb", buffering=0) as file:
            while done < most_bytes and time.perf_counter() - begun_s < most_s and (count := file.readinto(piece)):
                done += count
    elapsed_s = time.perf_counter() - begun_s
    return Speed(bytes_per_s=done / elapsed_s if done else None, num_bytes=done, cold=cold)
