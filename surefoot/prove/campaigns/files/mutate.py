"""Changes of a file of a run: each function makes one, with draws that a seed repeats."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot.contract import manifest

BLOCK_BYTES = 4096


@dataclass(frozen=True)
class MutationTarget:
    """A file of a run, another run with other values, and a folder outside of both."""

    path: Path
    other: Path
    outside: Path
    draws: random.Random

    @property
    def commits(self) -> Path:
        """Folder of all checkpoints if the file is in a checkpoint, else the run folder."""
        return (
            self.path.parents[1]
            if manifest.STEP_FOLDER.match(self.path.parent.name)
            else self.path.parent
        )


Kind = Callable[[MutationTarget], object]


def flip(at: MutationTarget) -> None:
    data = bytearray(at.path.read_bytes())
    data[at.draws.randrange(len(data))] ^= 1 << at.draws.randrange(8)
    at.path.write_bytes(data)


def zero_a_block(at: MutationTarget) -> None:
    data = bytearray(at.path.read_bytes())
    start = at.draws.randrange(len(data)) // BLOCK_BYTES * BLOCK_BYTES
    data[start : start + BLOCK_BYTES] = bytes(len(data[start : start + BLOCK_BYTES]))
    at.path.write_bytes(data)


def link_by_name(at: MutationTarget) -> None:
    """Move the file elsewhere, and leave a symbolic link to it."""
    at.path.symlink_to(at.path.rename(at.outside / "elsewhere"))


def in_its_place(make: Callable[[Path], object]) -> Kind:
    """Return a change that makes something else under the name of the file.

    A process that opens a pipe to read waits for a writer that never comes.
    """

    def do(at: MutationTarget) -> None:
        at.path.unlink()
        make(at.path)

    return do


def swap(at: MutationTarget) -> None:
    """Swap the contents with a file of other bytes, of the same size if there is one."""
    own = at.path.read_bytes()
    others = [
        path
        for path in sorted(at.commits.rglob("*"))
        if path.is_file() and path.read_bytes() != own
    ]
    same = [path for path in others if path.stat().st_size == len(own)]
    other = at.draws.choice(same or others)
    at.path.write_bytes(other.read_bytes())
    other.write_bytes(own)


def splice(at: MutationTarget) -> None:
    """Overwrite the file with the file of that name from another step or another run."""
    runs = (at.commits, at.other)
    others = [
        path for run in runs for path in sorted(run.glob(f"**/{at.path.name}")) if path != at.path
    ]
    at.path.write_bytes(at.draws.choice(others).read_bytes())


def duplicate(at: MutationTarget) -> None:
    """Copy the whole checkpoint under the name of a later step; of any other file make a copy."""
    step = manifest.STEP_FOLDER.match(at.path.parent.name)
    if step is None:
        shutil.copy2(at.path, at.path.with_name("copy"))
    else:
        shutil.copytree(at.path.parent, at.path.parent.with_name(f"step-{int(step[1]) + 100:012d}"))


def link_the_folder(at: MutationTarget) -> None:
    """Move the folder of the file elsewhere, and leave a symbolic link to it."""
    if at.commits != at.path.parent:
        at.path.parent.symlink_to(at.path.parent.rename(at.outside / "folder"))


KINDS: Mapping[str, Kind] = {
    "truncated": lambda at: os.truncate(at.path, at.draws.randrange(at.path.stat().st_size)),
    "empty": lambda at: os.truncate(at.path, 0),
    "4 KiB zeroed": zero_a_block,
    "missing": lambda at: at.path.unlink(),
    "swapped": swap,
    "spliced": splice,
    "duplicated": duplicate,
    "symbolic link": link_by_name,
    "a folder": in_its_place(Path.mkdir),
    "a pipe": in_its_place(os.mkfifo),
    "folder linked": link_the_folder,
    # no damage: a file that no manifest names, and a hard link outside of the run
    "extra file": lambda at: at.path.with_name("more.safetensors").write_bytes(
        at.path.read_bytes()
    ),
    "linked elsewhere": lambda at: (at.outside / "linked").hardlink_to(at.path),
}
