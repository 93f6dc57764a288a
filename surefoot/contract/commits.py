"""Find the checkpoints of a run on disk and check them against their manifests, without torch.

A file is opened without following links. Before its data is read, its size, and the header of a
safetensors file, are compared with the manifest; then every byte is hashed. Data that is loaded is
hashed in the memory that receives it, so nothing can change between the check and the use.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from surefoot.contract import digest, manifest
from surefoot.contract.manifest import Entry, Manifest, Piece
from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError
from surefoot.core.place import yield_to_others

NUM_THREADS = 2
MANY_THREADS = 6  # where nothing else runs: while some threads wait for the disk, others hash
NICE = 10
DIGITS = re.compile(r"[0-9]{1,18}")  # str.isdigit also takes what int() refuses
SAVED_WHEN = "a run saves checkpoints at evaluations, every checkpoint.every and at its end"
SHOWN = 40  # characters of an invalid step in a message
LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
BAD, GONE, DRAFT, OLD = ".bad-", ".gone-", ".draft-", ".old-"


@contextlib.contextmanager
def hashing(num_threads: int = NUM_THREADS, nice: int = NICE) -> Iterator[Executor]:
    """Provide a pool of threads for hashing, with a lower priority than the calling thread.

    A thread that writes a checkpoint can then resume at once when the disk is ready. `nice` is the
    amount by which the priority is lowered.
    """
    with ThreadPoolExecutor(
        num_threads,
        thread_name_prefix="surefoot-digest",
        initializer=yield_to_others,
        initargs=(nice,),
    ) as pool:
        yield pool


def has_draft(run: Path) -> bool:
    """Return whether `run` has an incomplete checkpoint.

    Such a checkpoint is being written, or its process died while writing it.
    """
    return any((run / manifest.FOLDER).glob(f"{DRAFT}*"))


def readable_steps(run: Path) -> list[int]:
    """Return the steps of `run` whose checkpoint has a folder, ascending.

    If a kill interrupted the replacement of a folder, the old folder counts.
    """
    folders = (run / manifest.FOLDER).glob(f"{OLD}*")
    found = (manifest.STEP_FOLDER.match(path.name.removeprefix(OLD)) for path in folders)
    return sorted({*manifest.named_steps(run), *(int(match.group(1)) for match in found if match)})


def find_folder(run: Path, step: int) -> Path | None:
    """Return the folder from which the checkpoint of `step` is read; None if there is none.

    It is the step's folder. While that is being replaced, or after a kill during the replacement,
    it is the old folder.
    """
    folder = manifest.step_folder(run, step)
    return next(
        (path for path in (folder, folder.with_name(f"{OLD}{folder.name}")) if path.is_dir()), None
    )


def check(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and check every file against it.

    Raises RunFolderError, which names the first damaged file.
    """
    made = manifest.read(folder)
    with hashing() as pool:
        for entry in made.files:
            check_file(folder, entry, pool)
    return made


def check_file(folder: Path, entry: Entry, pool: Executor) -> None:
    """Check every byte of one file against its entry in the manifest. Raises RunFolderError."""
    with open_file(folder, entry) as file:
        if entry.tensors is None:
            found = digest.begin_read(pool, file, {entry.name: (0, entry.num_bytes)}).finish()[
                entry.name
            ]
        else:
            header = read_header(file, folder / entry.name, entry)
            parts = digest.begin_read(pool, file, spans(len(header), entry.tensors)).finish()
            _name_damage(folder / entry.name, entry.tensors, parts)
            found = digest_of(header, parts, entry.tensors)
        if found != entry.sha256:
            raise RunFolderError(f"{folder / entry.name} is damaged: its digest does not match")


def _name_damage(path: Path, pieces: Mapping[str, Piece], found: Mapping[str, str]) -> None:
    for name, piece in pieces.items():
        if found[name] != piece.sha256:
            raise RunFolderError(f"{path} is damaged: the digest of {name} does not match")


def digest_of(header: bytes, found: Mapping[str, str], pieces: Mapping[str, Piece]) -> str:
    """Return the digest of a safetensors file, from its header and the digests of its tensors.

    `found` has the digest of each tensor, `pieces` its position in the file.
    """
    order = sorted(pieces, key=lambda name: (pieces[name].start, pieces[name].num_bytes, name))
    return digest.combine(
        [
            bytes.fromhex(digest.digest_of_bytes(header)),
            *(bytes.fromhex(found[name]) for name in order),
        ]
    )


def spans(data: int, pieces: Mapping[str, Piece]) -> dict[str, tuple[int, int]]:
    """Return (first byte, byte after the last) of each tensor in a safetensors file.

    `data` is the position of the first byte after the header.
    """
    return {
        name: (data + piece.start, data + piece.start + piece.num_bytes)
        for name, piece in pieces.items()
    }


@contextlib.contextmanager
def open_file(folder: Path, entry: Entry) -> Iterator[int]:
    """Open a file of a checkpoint for reading, and yield its descriptor.

    Raises RunFolderError for a link, a missing file or a file of a different size.
    """
    path = folder / entry.name
    try:
        descriptor = files.open_descriptor(folder, entry.name)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.num_bytes:
            raise RunFolderError(f"{path} is missing or does not have {entry.num_bytes} bytes")
        yield descriptor
    except RunFolderError as error:
        if str(path) in error.message:
            raise
        # the file was truncated while it was read
        raise RunFolderError(f"{path}: {error.message}", hint=error.hint) from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def read_header(descriptor: int, path: Path, entry: Entry) -> bytes:
    """Return the header of a safetensors file, after comparing it with the manifest.

    Raises RunFolderError if they differ.
    """
    pieces = entry.tensors or {}
    num_data = sum(piece.num_bytes for piece in pieces.values())
    if entry.num_bytes - num_data > manifest.MAX_BYTES:
        raise RunFolderError(
            f"{path} has a header of more than {manifest.MAX_BYTES >> 20} MiB, "
            "which no safetensors file has"
        )
    header = os.pread(descriptor, entry.num_bytes - num_data, 0)
    stated = int.from_bytes(header[:LENGTH_BYTES], "little")
    if len(header) < LENGTH_BYTES or stated != len(header) - LENGTH_BYTES:
        raise RunFolderError(
            f"{path} is damaged: its header does not have the size that the manifest states"
        )
    digest.read_directly(descriptor, [piece.num_bytes for piece in pieces.values()])
    try:
        rows: dict[str, Any] = manifest.parse_json(header[LENGTH_BYTES:], path)
        rows.pop("__metadata__", None)
        fits = rows == {
            name: {
                "dtype": piece.dtype,
                "shape": list(piece.shape),
                "data_offsets": [piece.start, piece.start + piece.num_bytes],
            }
            for name, piece in pieces.items()
        }
    except (TypeError, AttributeError):
        fits = False
    if not fits:
        raise RunFolderError(f"{path} is damaged: its header names other tensors than the manifest")
    return header


def find_step(run: Path, step: int | str) -> int:
    """Return the step of a checkpoint that is given by number or by name.

    Args:
        run: The run folder.
        step: A number or its digits, "last", or "best", which is the step with the best score
            in the manifests, or the last step if no manifest has a score.

    Raises:
        RunFolderError: For a folder that is not a run or holds no such checkpoint.
    """
    run = Path(run)
    steps = manifest.steps(run)
    if not steps and not run.exists():
        raise files.no_run(run, manifest.FOLDER)
    if not steps:
        raise RunFolderError(f"{run} holds no checkpoint", hint=SAVED_WHEN)
    if step == "last":
        return steps[-1]
    if step == "best":
        best = find_best(run, steps)
        return steps[-1] if best is None else best
    number = int(step) if isinstance(step, int) or DIGITS.fullmatch(step) else None
    if number is not None and number in steps:
        return number
    raise RunFolderError(
        f"{run} holds no checkpoint of step {str(step)[:SHOWN]}",
        hint=f'it holds {", ".join(map(str, steps))}; or use "best", "last"',
    )


def find_best(run: Path, steps: list[int]) -> int | None:
    """Return the step with the best score in its manifest; of equal scores the earliest step.

    None if no step has a finite score.
    """
    ranked = rank(run, steps)
    return ranked[0] if ranked else None


def rank(run: Path, steps: list[int]) -> list[int]:
    """Return the steps whose manifest has a finite score, the best first."""
    scored = []
    for step in steps:
        with contextlib.suppress(RunFolderError):
            score = manifest.read(manifest.step_folder(run, step)).score
            value = None if score is None else score.get("value")
            if score is not None and isinstance(value, int | float) and math.isfinite(value):
                scored.append((-value if score.get("better") == "higher" else value, step))
    return [step for _, step in sorted(scored)]


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to a free hidden name, and return its new path."""
    number = 1
    while (
        aside := folder.with_name(f"{BAD}{folder.name}" + (f"-{number}" if number > 1 else ""))
    ).exists():
        number += 1
    try:
        folder.rename(aside)
    except OSError as error:
        raise RunFolderError(
            f"{folder} is damaged and could not be set aside: {error.strerror}"
        ) from None
    return aside


def remove(folder: Path) -> None:
    """Delete a checkpoint: rename it to a hidden name, then delete the files.

    Thus neither a kill nor a power cut leaves a partial folder that looks like a checkpoint.
    """
    hidden = folder.with_name(f"{GONE}{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    sync_folder(folder.parent)
    shutil.rmtree(hidden)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that its new and changed file names are on disk when the call returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
