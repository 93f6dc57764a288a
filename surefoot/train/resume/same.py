"""Checks that all ranks resume from the same checkpoint and hold the same state afterwards.

If a rank differs, the error names the rank and its host before the first new step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from surefoot.components.checkpoint import Commit
from surefoot.contract import digest, manifest
from surefoot.contract.run_folder import files
from surefoot.core import place
from surefoot.core.errors import NumbersError, RunFolderError
from surefoot.runtime.comm.group import Group

if TYPE_CHECKING:
    from surefoot.train.resume.state import LiveState

HINT = (
    "give all ranks one folder on a shared disk, or give each rank a copy of the folder of rank 0"
)


def open_same(group: Group, run: Path, step: int) -> Commit:
    """Return the checkpoint of `step` in this rank's folder `run`; rank 0 has verified its own.

    Every rank must call this. Raises RunFolderError on all ranks if a rank does not have this
    checkpoint, has a different one of this step, or has a newer one than rank 0.
    """
    if group.is_alone:
        return Commit(run, step)
    commit, seen = None, ""
    try:
        commit = Commit(run, step)
        seen = digest.digest_of_bytes(files.read_bytes(commit.folder, manifest.FILE))
    except (RunFolderError, OSError):
        seen = ""
    _compare(group, run, f"resumes after step {step:,}", seen)
    assert commit is not None, "what rank 0 has all have"
    return commit


def check_none(group: Group, run: Path) -> None:
    """Raise RunFolderError on all ranks if rank 0 has no checkpoint but a different rank has one.

    Every rank must call this.
    """
    if not group.is_alone:
        _compare(group, run, "starts from step 0", "")


def _compare(group: Group, run: Path, what: str, seen: str) -> None:
    mine = [seen, max(manifest.steps(run), default=-1), place.here().host, str(run)]
    rows = [json.loads(text) for text in group.exchange(json.dumps(mine))]
    first, newest_of_first, host_of_first, _ = rows[0]
    for rank, (theirs, newest, host, folder) in enumerate(rows):
        other = "" if newest < 0 else f": its newest checkpoint is of step {newest:,}"
        if newest > newest_of_first:
            found = f"a newer checkpoint in {folder}, of step {newest:,}"
        elif theirs == first:
            continue
        else:
            found = (
                f"another checkpoint of that step in {folder}"
                if theirs
                else f"no checkpoint of that step in {folder}{other}"
            )
        raise RunFolderError(
            f"rank 0 on {host_of_first} {what}, and rank {rank} of {group.size} on {host} has "
            f"{found}",
            hint=HINT,
        )


def load_together(group: Group, state: LiveState, step: int, load: Callable[[], None]) -> None:
    """Load the checkpoint of `step`, then compare the loaded state between ranks.

    Every rank must call this. If loading fails on a rank, that rank raises its error, and the
    others raise LostRank. Ranks that hold parts of the state exchange rows while they load, and
    notice a failed rank then. Raises NumbersError if the state of a rank differs from that of its
    replicas.
    """
    if state.is_shared:
        load()
    else:
        group.settle(load)
    check_alike(group, state, step)


def check_alike(group: Group, state: LiveState, step: int) -> None:
    """Raise NumbersError on all ranks if a rank has a different state after loading `step`.

    The error names the rank, its host and the tensor.
    """
    if group.is_alone:
        return
    found: dict[int, str] = {}
    for among, words, tensors in state.replicated_state(group):
        found |= {
            rank: what
            for rank, what in _find(group, among, words, tensors).items()
            if rank not in found
        }
    rows = [json.loads(text) for text in group.exchange(json.dumps([place.here().host, found]))]
    for _, told in rows:  # all ranks raise, even those whose own replicas agree
        for rank, what in told.items():
            raise NumbersError(
                f"after loading step {step:,} rank {rank} of {group.size} on {rows[int(rank)][0]} "
                f"differs from {what}",
                hint=(
                    "the memory or the disk of that host changed the data that it "
                    "read; the checkpoint is undamaged: restart without that host"
                ),
            )


def _find(group: Group, among: Group, words: str, tensors: Mapping[str, Tensor]) -> dict[int, str]:
    """Return the ranks that differ from the others of `among`, with the name of what differs."""

    from surefoot.components.parallel.alike import find_apart

    if among.is_alone:
        return {}
    names = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
    rows = [json.loads(text) for text in among.exchange(json.dumps([group.rank, words, names]))]
    ranks = [rank for rank, _, _ in rows]
    other = {
        rank: f"rank {ranks[0]}: counters and names" for rank, *held in rows if held != rows[0][1:]
    }
    if other:
        return other
    return {
        ranks[
            each.rank
        ]: f"{'most other ranks' if each.is_certain else f'rank {ranks[0]}'}: {each.name}"
        for each in find_apart(among, tensors)
    }
