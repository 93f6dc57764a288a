"""Which commits stay: the newest, every nth step for ever, the best by their score. Foreign names are never touched."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from surefoot.components.checkpoint.save import remove
from surefoot.contract import commits
from surefoot.contract import manifest as manifests
from surefoot.core.errors import RunFolderError

LEAST = 2  # commits that stay whatever is asked for: one of them may turn out damaged


def choose(steps: Sequence[int], *, keep: int, every: int | None, ranked: Sequence[int], keep_best: int) -> list[int]:
    """Of the ascending `steps`, those to delete: not among the newest `keep`, the best `keep_best`, nor a multiple of `every`.

    >>> choose([8, 9, 10, 11, 12], keep=3, every=None, ranked=[9, 12], keep_best=1)
    [8]
    """
    stay = {*steps[-max(keep, LEAST) :], *ranked[:keep_best], *(step for step in steps if every and step % every == 0)}
    return [step for step in steps if step not in stay]


def retain(run: Path, *, keep: int, every: int | None = None, keep_best: int = 1) -> list[int]:
    """Delete the commits that need not stay, the oldest first, once the newest was verified; gives the steps deleted.

    Where the newest does not verify, nothing is deleted.
    """
    steps = manifests.steps(run)
    doomed = choose(steps, keep=keep, every=every, ranked=commits.rank(run, steps), keep_best=keep_best)
    if not doomed:
        return []
    try:
        commits.check(manifests.step_folder(run, steps[-1]))
    except RunFolderError:
        return []
    gone = []
    for step in doomed:
        with contextlib.suppress(OSError):  # a folder that cannot be deleted harms nothing; the next commit tries again
            remove(manifests.step_folder(run, step))
            gone.append(step)
    return gone
