"""What may happen to a file of a run: each function does one thing to it, by draws that a seed repeats."""

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
class Place:
    """A file of a run, another run of other numbers, and a folder outside of both."""

    path: Path
    other: Path
    outside: Path
    draws: random.Random

    @property
    def commits(self) -> Path:
        """The folder of commits where the file is in one, else the run."""
        return self.path.parents[1] if manifest.STEP_FOLDER.match(self.path.parent.name) else self.path.parent


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def truncate(at: Place) -> None:
    os.truncate(at.path, at.draws.randrange(at.path.stat().st_size))


def empty(at: Place) -> None:
    os.truncate(at.path, 0)


def zero_a_block(at: Place) -> None:
    size = at.path.stat().st_size
    start = at.draws.randrange(size) // BLOCK_BYTES * BLOCK_BYTES
    with at.path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(min(BLOCK_BYTES, size - start)))


def lose(at: Place) -> None:
    at.path.unlink()


def link_by_name(at: Place) -> None:
    """The very bytes, but in a file elsewhere to which a symbolic link leads."""
    shutil.move(at.path, at.outside / "elsewhere")
    at.path.symlink_to(at.outside / "elsewhere")


def link_elsewhere(at: Place) -> None:
    """A second name outside of the run: no damage."""
    (at.outside / "linked").hardlink_to(at.path)


def add_a_file(at: Place) -> None:
    """One that no manifest names: no damage."""
    shutil.copy2(at.path, at.path.with_name("more.safetensors"))


def make_a_folder(at: Place) -> None:
    at.path.unlink()
    at.path.mkdir()


def make_a_pipe(at: Place) -> None:
    """Whoever opens it to read waits for a writer who never comes."""
    at.path.unlink()
    os.mkfifo(at.path)


def swap(at: Place) -> None:
    """Change places with a file of other bytes, of the same size if there is one."""
    own = at.path.read_bytes()
    others = [path for path in sorted(at.commits.rglob("*")) if path.is_file() and path.read_bytes() != own]
    same = [path for path in others if path.stat().st_size == len(own)]
    other = at.draws.choice(same or others)
    at.path.write_bytes(other.read_bytes())
    other.write_bytes(own)


def splice(at: Place) -> None:
    """The file of the same name of another step, or of another run."""
    runs = (at.commits, at.other)
    others = [path for run in runs for path in sorted(run.glob(f"**/{at.path.name}")) if path != at.path]
    at.path.write_bytes(at.draws.choice(others).read_bytes())


def duplicate(at: Place) -> None:
    """The whole commit under the name of a later step; of what is in no commit a second copy."""
    step = manifest.STEP_FOLDER.match(at.path.parent.name)
    if step is None:
        shutil.copy2(at.path, at.path.with_name("copy"))
    else:
        shutil.copytree(at.path.parent, at.path.parent.with_name(f"step-{int(step[1]) + 100:012d}"))


def link_the_folder(at: Place) -> None:
    """The folder of the file lies elsewhere, and a symbolic link leads to it."""
    if at.commits != at.path.parent:
        shutil.move(at.path.parent, at.outside / "folder")
        at.path.parent.symlink_to(at.outside / "folder")


KINDS: Mapping[str, Callable[[Place], None]] = {
    "truncated": truncate, "empty": empty, "4 KiB zeroed": zero_a_block, "missing": lose, "swapped": swap, "spliced": splice,
    "duplicated": duplicate, "extra file": add_a_file, "symbolic link": link_by_name, "linked elsewhere": link_elsewhere,
    "a folder": make_a_folder, "a pipe": make_a_pipe, "folder linked": link_the_folder,
}  # fmt: skip
