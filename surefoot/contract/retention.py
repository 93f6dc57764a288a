"""Which commits stay: the newest, every nth step for ever, the best by their score. Foreign names are never touched."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

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


def over_budget(run: Path, steps: Sequence[int], protected: Sequence[int], budget_bytes: int) -> list[int]:
    """The oldest of `steps` whose going brings the rest within the budget; the newest two and the protected stay whatever it says.

    A file that several commits link counts once.
    """
    doomed: list[int] = []
    left = list(steps)
    for step in steps[:-LEAST]:
        if _bytes_of(run, left) <= budget_bytes:
            break
        if step not in protected:
            left.remove(step)
            doomed.append(step)
    return doomed


def _bytes_of(run: Path, steps: Sequence[int]) -> int:
    sizes: dict[tuple[int, int], int] = {}
    for step in steps:
        with contextlib.suppress(OSError):
            for path in manifests.step_folder(run, step).iterdir():
                status = path.lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def find_doomed(
    run: Path, *, keep: int, every: int | None = None, keep_best: int = 1, budget_bytes: int | None = None
) -> list[int]:
    """The commits that need not stay, the oldest first; nothing is deleted."""
    steps = manifests.steps(run)
    ranked = commits.rank(run, steps)
    doomed = choose(steps, keep=keep, every=every, ranked=ranked, keep_best=keep_best)
    if budget_bytes is not None:
        rest = [step for step in steps if step not in doomed]
        doomed += over_budget(run, rest, ranked[:keep_best], budget_bytes)
    return sorted(doomed)


def retain(run: Path, *, keep: int, every: int | None = None, keep_best: int = 1, budget_bytes: int | None = None) -> list[int]:
    """Delete the commits that need not stay, the oldest first, once the newest was verified; gives the steps deleted.

    Where the newest does not verify, nothing is deleted.
    """
    doomed = find_doomed(run, keep=keep, every=every, keep_best=keep_best, budget_bytes=budget_bytes)
    if not doomed:
        return []
    try:
        commits.check(manifests.step_folder(run, manifests.steps(run)[-1]))
    except RunFolderError:
        return []
    gone = []
    for step in doomed:
        with contextlib.suppress(OSError):  # a folder that cannot be deleted harms nothing; the next commit tries again
            commits.remove(manifests.step_folder(run, step))
            gone.append(step)
    return gone
