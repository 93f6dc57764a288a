"""`removed.jsonl`: the checkpoints that surefoot deleted, to distinguish them from lost ones.

A line such as `{"step": 20, "generation": 1, "others": [40, 60]}` holds the step of the deleted
checkpoint, the number of the attempt that wrote it, and the steps of the other checkpoints in the
folder. It reaches the disk before the checkpoint is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from surefoot.contract import events
from surefoot.contract import manifest as manifests
from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError

FILE = "removed.jsonl"


class Removal(NamedTuple):
    """Checkpoint that surefoot deleted.

    `generation` is the number of the attempt that wrote it, None if its manifest could not be read.
    `others` are the steps of the other checkpoints in the folder.
    """

    step: int
    generation: int | None
    others: tuple[int, ...]


def record(run: Path, steps: Sequence[int]) -> bool:
    """Record that the checkpoints of `steps` are deleted; return False if writing the record fails.

    Nothing is recorded in a folder without a log.
    """
    if not steps or not (run / events.FILE).is_file():
        return True
    others = [step for step in manifests.steps(run) if step not in steps]
    rows = [
        {"step": step, "generation": _generation_of(run, step), "others": others} for step in steps
    ]
    # each line also begins with a newline: a full disk may have truncated the line before
    data = "".join(f"\n{json.dumps(row)}\n" for row in rows).encode()
    try:
        descriptor = files.open_descriptor(run, FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            is_whole = os.write(descriptor, data) == len(data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return is_whole


def read(run: Path) -> list[Removal]:
    """Return the removals that the folder `run` records, in the order written.

    Lines that cannot be read are left out.
    """
    with contextlib.suppress(OSError):
        return list(_parse(files.read_bytes(run, FILE)))
    return []


def _parse(content: bytes) -> Iterator[Removal]:
    for line in content.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            removal = Removal(row["step"], row["generation"], tuple(row["others"]))
            numbers = (
                removal.step,
                *removal.others,
                *([] if removal.generation is None else [removal.generation]),
            )
            if all(type(number) is int for number in numbers):
                yield removal


def _generation_of(run: Path, step: int) -> int | None:
    try:
        return manifests.read(manifests.step_folder(run, step)).generation
    except RunFolderError:
        return None
