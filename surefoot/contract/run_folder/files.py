"""Open files below a folder without following symbolic links.

Every file of a run folder is opened by this module. A run folder may come from an untrusted source,
and a link in it would make surefoot read or overwrite other files of the user. The path of the run
folder itself may contain links (`runs/latest`, a folder on another disk), because the user made
them. New files get their mode from the umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from surefoot.core.errors import RunFolderError, find_nearest

# never through a link, and without waiting for the other end of a pipe
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
# a folder on the way needs no permission to list it
ANY_ACCESS = getattr(os, "O_PATH", os.O_RDONLY)
LINK_REFUSED = "it is a symbolic link, and no file of a run folder is opened through one"
RANKS = "ranks"  # the folder of the logs of all ranks but rank 0
HAS_FOLDER_DESCRIPTORS = os.open in os.supports_dir_fd
BLOCK_BYTES = 1 << 16
STATUS_FILE = Path("/proc/self/status")


def no_run(folder: Path, name: str) -> RunFolderError:
    """Return the error for a folder that is not a run: it lacks the file `name`, or does not exist.

    For a folder that does not exist, the hint suggests runs with similar names in the same parent
    folder.
    """
    if os.path.lexists(folder):
        words = "it is a file" if folder.is_file() else f"it holds no {name}"
        return RunFolderError(
            f"{folder} is not a run: {words}", hint="surefoot runs lists the runs below a folder"
        )
    runs: list[str] = []
    with contextlib.suppress(OSError):
        beside = sorted(folder.parent.iterdir(), key=lambda each: (len(each.name), each.name))
        runs = [each.name for each in beside if (each / name).exists()]
    near = [each for each in runs if each.startswith(f"{folder.name}-")][::-1]
    near = near or find_nearest(folder.name, runs)
    guess = " or ".join(str(folder.parent / each) for each in near[:3])
    return RunFolderError(
        f"{folder} does not exist",
        hint=f"did you mean {guess}?" if guess else "surefoot runs lists the runs below a folder",
    )


def open_descriptor(folder: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of the regular file `name` below `folder`, such as `profile/facts.json`.

    Raises OSError: ELOOP if the file, or a folder between it and `folder`, is a symbolic link,
    EINVAL for a pipe, a folder or a device.
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
        raise _refusal(errno.EINVAL, "it is not a regular file", path)
    return descriptor


def _open(folder: Path, name: str, flags: int) -> int:
    """Open the folders in `name` one by one, so that none can become a link after its check."""
    if not HAS_FOLDER_DESCRIPTORS:  # pragma: no cover - not on Linux
        check_no_link(folder, name)
        return os.open(folder / name, flags, 0o666)
    *above, last = Path(name).parts
    parent = os.open(folder, ANY_ACCESS | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in above:
            child = os.open(
                part, ANY_ACCESS | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent
            )
            os.close(parent)
            parent = child
        return os.open(last, flags, 0o666, dir_fd=parent)
    finally:
        os.close(parent)


def check_no_link(folder: Path, name: str) -> None:
    """Raise OSError (ELOOP) if `name` below `folder`, or a folder between, is a symbolic link."""
    path = folder
    for part in Path(name).parts:
        path /= part
        if path.is_symlink():
            raise _refusal(errno.ELOOP, LINK_REFUSED, path)


def is_regular(folder: Path, name: str) -> bool:
    """Return whether `name` below `folder` is a regular file without symbolic links in its path."""
    try:
        check_no_link(folder, name)
        return stat.S_ISREG((folder / name).stat().st_mode)
    except OSError:
        return False


def cut_torn_line(descriptor: int) -> None:
    """Cut off an incomplete last line of a log, which a killed process may have left."""
    end = size = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)


def append_whole(descriptor: int, data: bytes) -> None:
    """Append `data` to a log: all of it, or nothing if an error occurs. Raises OSError."""
    written = 0
    try:
        # after a partial write the next one raises the reason: a full disk, or a limit
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        # cut a partial write off, so that the next record starts a new line
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open the file `name` below `folder` for reading bytes.

    Raises OSError as `open_descriptor` does.
    """
    return os.fdopen(open_descriptor(folder, name), "rb")


def read_bytes(folder: Path, name: str) -> bytes:
    """Return the content of the file `name` below `folder`.

    Raises OSError as `open_descriptor` does.
    """
    with open_file(folder, name) as file:
        return file.read()


def read_text(folder: Path, name: str) -> str:
    """Return the content of a UTF-8 text file.

    Raises OSError as `open_descriptor` does, and UnicodeDecodeError for a different encoding.
    """
    return read_bytes(folder, name).decode("utf-8")


def open_new(folder: Path, name: str) -> BinaryIO:
    """Open a new file for reading and writing. Raises OSError.

    An existing file or link of that name is removed first.
    """
    check_no_link(folder, str(Path(name).parent))
    with contextlib.suppress(FileNotFoundError):
        (folder / name).unlink()
    return os.fdopen(open_descriptor(folder, name, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+b")


def write_whole(folder: Path, name: str, content: bytes, *, sync: bool = False) -> None:
    """Replace the content of a file at once: write a draft file and rename it.

    Readers see the old content or the new one, never a part. A link of that name is replaced. With
    `sync` the content is on disk before the file is renamed. Raises OSError; the file is then
    unchanged.
    """
    draft = draft_of(name)
    try:
        with open_new(folder, draft) as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())  # else a power cut may leave the name without the content
        (folder / draft).replace(folder / name)
    except OSError:
        with contextlib.suppress(OSError):
            check_no_link(folder, str(Path(name).parent))
            (folder / draft).unlink()
        raise


def draft_of(name: str) -> str:
    """Return the name of the draft of a file: `.spec.toml.draft` for `spec.toml`."""
    path = Path(name)
    return str(path.with_name(f".{path.name[:200]}.draft"))


def make_folder(folder: Path, name: str) -> Path:
    """Make the folder `name` below `folder` if it is missing, and return its path.

    Raises OSError, for example if the path contains a symbolic link.
    """
    check_no_link(folder, name)
    (folder / name).mkdir(parents=True, exist_ok=True)
    return folder / name


def apply_umask(path: Path) -> None:
    """Give a file the mode that the umask gives to new files. Raises OSError.

    This is for files that a library made readable by their user only.
    """
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Return the umask, from /proc if possible.

    `os.umask` can only read the umask by changing it for a moment, which affects other threads too.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(STATUS_FILE.read_text().partition("\nUmask:")[2].split()[0], 8)
    current = os.umask(0o077)
    os.umask(current)
    return current


def _refusal(number: int, reason: str, path: Path) -> OSError:
    """Return the OSError for a path that is a link, a pipe, a folder or a device instead of a file.

    Callers handle it like an error of the operating system.
    """
    return OSError(number, reason, str(path))
