"""Storage device of a file, the share of the file in the page cache, and read speed."""

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
from typing import Any

import numpy as np
import psutil

FILE_SYSTEMS = {  # file systems whose type names the kind of storage
    **dict.fromkeys(("tmpfs", "ramfs"), "memory"),
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "glusterfs", "beegfs"), "network"
    ),
    **dict.fromkeys(("9p", "virtiofs", "fuse.sshfs", "fuse.s3fs"), "network"),
}
# by the prefix of a block device's name
DISKS = {"vd": "virtual disk", "xvd": "virtual disk", "nvme": "NVMe"}
PIECE_BYTES = 1 << 20
BLOCKS = Path("/sys/class/block")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Storage device of a folder.

    `kind` is HDD, SSD, NVMe, memory, network, virtual disk, or None if it is unknown.
    """

    name: str | None = None
    kind: str | None = None
    file_system: str | None = None

    def __str__(self) -> str:
        details = " on ".join(dict.fromkeys(each for each in (self.file_system, self.name) if each))
        kind = self.kind or "a device of unknown kind"
        return f"{kind} ({details})" if details else kind


def find_device(path: Path, *, blocks: Path = BLOCKS) -> Device:
    """Return the storage device of the nearest mount point above a file or folder.

    Fields that are unknown are None.
    """
    real, mounts = Path(os.path.realpath(path)), list[Any]()
    with contextlib.suppress(OSError):
        mounts = [
            each
            for each in psutil.disk_partitions(all=True)
            if real.is_relative_to(each.mountpoint)
        ]
    if not mounts:
        return Device()
    # of two mounts at one path, the later hides the other
    mount = max(reversed(mounts), key=lambda each: len(each.mountpoint))
    kind = FILE_SYSTEMS.get(mount.fstype) or _kind_of_disk(
        Path(os.path.realpath(mount.device)).name, blocks
    )
    return Device(name=mount.device or None, kind=kind, file_system=mount.fstype)


def _kind_of_disk(name: str, blocks: Path) -> str | None:
    kind = next((kind for begin, kind in DISKS.items() if name.startswith(begin)), None)
    disk = (blocks / name).resolve()
    for folder in (disk, disk.parent):  # a partition's folder is inside that of its disk
        with contextlib.suppress(OSError):
            kind = kind or (
                "HDD" if (folder / "queue" / "rotational").read_text().strip() == "1" else "SSD"
            )
    return kind


def drop_cached(paths: Iterable[Path]) -> bool:
    """Flush files to disk, and drop them from the page cache (POSIX_FADV_DONTNEED).

    Returns True if no page of the files is left in the cache. Files on tmpfs, and pages that
    another process maps, are not dropped. fio's `invalidate` does the same.
    """
    dropped = hasattr(os, "posix_fadvise")
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                os.fdatasync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        dropped = dropped and cached_share(path) == 0.0
    return dropped


def cached_share(path: Path) -> float | None:
    """Return the share of a file's pages that are in the page cache, according to mincore(2).

    Returns None if the system does not report the share, for example for a file of another user
    without write permission. A read with RWF_NOWAIT is not used, because it would start read-ahead,
    and thereby cache the file.
    """
    status = path.stat()
    is_reported = os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)
    if not status.st_size or not is_reported or sys.platform != "linux":
        return None
    held = np.zeros(-(-status.st_size // mmap.PAGESIZE), dtype=np.uint8)
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError):
        return None
    failed = ctypes.CDLL(None).mincore(
        *map(ctypes.c_void_p, (content.ctypes.data, content.size, held.ctypes.data))
    )
    return None if failed else float((held & 1).mean())


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of a sequential read.

    `bytes_per_s` is None if no byte was read. `cold` is True if no page of the files was in the
    page cache before the read.
    """

    bytes_per_s: float | None
    num_bytes: int
    cold: bool


def read_speed(paths: Sequence[Path], *, most_bytes: int, most_s: float) -> Speed:
    """Drop files from the page cache, read them sequentially, and return the speed.

    Reading stops after `most_bytes` bytes or `most_s` seconds, whichever comes first.
    """
    cold, done, piece = drop_cached(paths), 0, memoryview(bytearray(PIECE_BYTES))
    begun_s = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while (
                done < most_bytes
                and time.perf_counter() - begun_s < most_s
                and (count := file.readinto(piece))
            ):
                done += count
    elapsed_s = time.perf_counter() - begun_s
    return Speed(bytes_per_s=done / elapsed_s if done else None, num_bytes=done, cold=cold)
