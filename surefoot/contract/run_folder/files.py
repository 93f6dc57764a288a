"""Files below a folder, opened without following a link: every file of a run folder is read and written by these functions.

A run folder may come from a stranger, and a link in it would read or overwrite a file of whoever opens it. The run folder itself may
be behind links (`runs/latest`, a folder on another disk): they are the user's own. New files get their mode from the umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # and no waiting for a pipe's other end
ANY_ACCESS = getattr(os, "O_PATH", os.O_RDONLY)  # a folder on the way needs no right to list it
LINK_REFUSED = "it is a symbolic link, and no file of a run folder is opened through one"
RANKS = "ranks"  # the folder of what the other ranks than the first log
HAS_FOLDER_DESCRIPTORS = os.open in os.supports_dir_fd
STATUS_FILE = Path("/proc/self/status")


def open_descriptor(folder: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file `name` below `folder`, for instance `profile/facts.json`.

    Raises OSError: with ELOOP where the file or a folder between it and `folder` is a symbolic link, with EINVAL for a pipe, a
    folder or a device.
    """
    path = folder / name
    try:
        descriptor = _open(folder, name, flags | getattr(os, "O_CLOEXEC", 0) | NO_LINK)
    except OSError as error:
        check_no_link(folder, name)
        error.filename = str(path)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refusal(errno.EINVAL, "it is no regular file", path)
    return descriptor


def _open(folder: Path, name: str, flags: int) -> int:
    """Open folder after folder, so that none is exchanged for a link after it was checked."""
    if not HAS_FOLDER_DESCRIPTORS:  # pragma: no cover - not on Linux
        check_no_link(folder, name)
        return os.open(folder / name, flags, 0o666)
    *above, last = Path(name).parts
    parent = os.open(folder, ANY_ACCESS | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in above:
            child = os.open(part, ANY_ACCESS | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(last, flags, 0o666, dir_fd=parent)
    finally:
        os.close(parent)


def check_no_link(folder: Path, name: str) -> None:
    """Raise OSError (ELOOP) where `name` below `folder`, or a folder between the two, is a symbolic link."""
    path = folder
    for part in Path(name).parts:
        path /= part
        if path.is_symlink():
            raise _refusal(errno.ELOOP, LINK_REFUSED, path)


def is_regular(folder: Path, name: str) -> bool:
    """Whether a regular file of that name is there that `open_descriptor` would open."""
    try:
        check_no_link(folder, name)
        return stat.S_ISREG((folder / name).stat().st_mode)
    except OSError:
        return False


def opened(folder: Path, name: str) -> BinaryIO:
    """The file `name` below `folder`, for reading bytes. Raises OSError as `open_descriptor` does."""
    return os.fdopen(open_descriptor(folder, name), "rb")


def read_bytes(folder: Path, name: str) -> bytes:
    """The content of the file `name` below `folder`. Raises OSError as `open_descriptor` does."""
    with opened(folder, name) as file:
        return file.read()


def read_text(folder: Path, name: str) -> str:
    """The content of a text file in UTF-8. Raises OSError as `open_descriptor` does, UnicodeDecodeError for another encoding."""
    return read_bytes(folder, name).decode("utf-8")


def open_new(folder: Path, name: str) -> BinaryIO:
    """A new file for writing in place of the one of that name, or of a link of that name, which is removed. Raises OSError."""
    check_no_link(folder, str(Path(name).parent))
    with contextlib.suppress(FileNotFoundError):
        (folder / name).unlink()
    return os.fdopen(open_descriptor(folder, name, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+b")


def write_whole(folder: Path, name: str, content: bytes, *, sync: bool = False) -> None:
    """Write a file aside and rename it: readers find the old content or the new, and a link of that name is replaced.

    Raises OSError; then the file is as it was.
    """
    draft = draft_of(name)
    try:
        with open_new(folder, draft) as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())  # or a power cut may leave the name without the text
        (folder / draft).replace(folder / name)
    except OSError:
        with contextlib.suppress(OSError):
            check_no_link(folder, str(Path(name).parent))
            (folder / draft).unlink()
        raise


def draft_of(name: str) -> str:
    """The name of a file while it is being written: `.spec.toml.draft` for `spec.toml`."""
    path = Path(name)
    return str(path.with_name(f".{path.name[:200]}.draft"))


def make_folder(folder: Path, name: str) -> Path:
    """Make the folder `name` below `folder` where it is not there, and give its path. Raises OSError, for a link too."""
    check_no_link(folder, name)
    (folder / name).mkdir(parents=True, exist_ok=True)
    return folder / name


def apply_umask(path: Path) -> None:
    """Give a file that a library wrote for its user alone the mode that a new file gets here. Raises OSError."""
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Read from the kernel: to ask `os.umask` is to change it, for other threads too."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(STATUS_FILE.read_text().partition("\nUmask:")[2].split()[0], 8)
    current = os.umask(0o077)
    os.umask(current)
    return current


def _refusal(number: int, reason: str, path: Path) -> OSError:
    """A link, a pipe, a folder or a device in the place of a file: callers handle it as what the system itself refuses."""
    return OSError(number, reason, str(path))
