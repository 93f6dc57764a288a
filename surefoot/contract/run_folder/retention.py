"""Which commits stay: the newest, every nth step or hour for ever, the best by their score. Foreign names are never touched.

On a full disk one verified commit is enough: the others, but those that the spec keeps for ever or as the best, make room for a new one.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot.contract import commits
from surefoot.contract import manifest as manifests
from surefoot.contract.run_folder import files, removals
from surefoot.core.errors import InputError, RunFolderError

CLOCK_FILE = "clock.json"  # of a commit: {"training_s": seconds}
SLACK_BYTES = 16 << 10  # by which the texts of one commit may be longer than those of another
LEAST = 2  # commits that stay whatever is asked for: one of them may turn out damaged


def choose(
    steps: Sequence[int], *, keep: int, every: int | None, ranked: Sequence[int], keep_best: int, milestones: Sequence[int] = ()
) -> list[int]:  # fmt: skip
    """Of the ascending `steps`, those to delete: not among the newest `keep`, the best `keep_best`, a multiple of `every`, a milestone.

    >>> choose([8, 9, 10, 11, 12], keep=3, every=None, ranked=[9, 12], keep_best=1)
    [8]
    """
    multiples = (step for step in steps if every and step % every == 0)
    stay = {*steps[-max(keep, LEAST) :], *ranked[:keep_best], *multiples, *milestones}
    return [step for step in steps if step not in stay]


def find_milestones(times_s: Mapping[int, float], every_s: float) -> list[int]:
    """The first step at or after each multiple of `every_s`; `times_s` is the training time of each step, ascending.

    >>> find_milestones({10: 30.0, 20: 61.0, 30: 95.0, 40: 118.0, 50: 121.0}, 60.0)
    [20, 50]
    """
    first: dict[int, int] = {}
    for step, time_s in times_s.items():
        first.setdefault(int(time_s // every_s), step)
    return [step for number, step in first.items() if number > 0]


def read_times(run: Path, steps: Sequence[int]) -> dict[int, float]:
    """The seconds of training, over all attempts, that led to each of `steps`; one that cannot be read is left out."""
    times_s = {}
    for step in steps:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            text = files.read_bytes(manifests.step_folder(run, step), CLOCK_FILE)
            time_s = float(json.loads(text)["training_s"])
            if 0 <= time_s < math.inf:
                times_s[step] = time_s
    return times_s


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
    run: Path, *, keep: int, every: int | None = None, every_s: float | None = None, keep_best: int = 1,
    budget_bytes: int | None = None,
) -> list[int]:  # fmt: skip
    """The commits that need not stay, the oldest first; nothing is deleted."""
    steps = manifests.steps(run)
    ranked = commits.rank(run, steps)
    milestones = [] if every_s is None else find_milestones(read_times(run, steps), every_s)
    doomed = choose(steps, keep=keep, every=every, ranked=ranked, keep_best=keep_best, milestones=milestones)
    if budget_bytes is not None:
        rest = [step for step in steps if step not in doomed]
        doomed += over_budget(run, rest, ranked[:keep_best], budget_bytes)
    return sorted(doomed)


def retain(
    run: str | Path, *, keep: int, every: int | None = None, every_s: float | None = None, keep_best: int = 1,
    budget_bytes: int | None = None,
) -> list[int]:  # fmt: skip
    """Delete the commits that need not stay, the oldest first, once the newest was verified; gives the steps deleted.

    The newest `keep` stay, two at least: one of them may turn out damaged. Where the newest does not verify, nothing is deleted.
    Raises InputError for fewer than one.
    """
    if keep < 1:
        raise InputError(f"keep is {keep}", hint="keep 1 or more: the newest two stay in any case")
    run = Path(run)
    try:
        doomed = find_doomed(run, keep=keep, every=every, every_s=every_s, keep_best=keep_best, budget_bytes=budget_bytes)
        if doomed:
            commits.check(manifests.step_folder(run, manifests.steps(run)[-1]))
    except (OSError, RunFolderError):  # the disk does not answer, or the newest is damaged
        return []
    return _delete(run, doomed)


def find_in_the_way(
    run: Path, need_bytes: int, free_bytes: int, *, every: int | None = None, every_s: float | None = None, keep_best: int = 1
) -> list[int]:  # fmt: skip
    """The oldest commits whose deletion makes room for one of `need_bytes`; none where that takes one that must stay.

    The best `keep_best`, multiples of `every` and milestones stay; of the others all may go, the newest last, while one commit is left.
    """
    steps = manifests.steps(run)
    milestones = [] if every_s is None else find_milestones(read_times(run, steps), every_s)
    multiples = [step for step in steps if every and step % every == 0]
    stay = {*commits.rank(run, steps)[:keep_best], *multiples, *milestones}
    loose = [step for step in steps if step not in stay]
    before_bytes, free_bytes = (
        _bytes_of(run, steps),
        free_bytes if free_bytes < need_bytes else 0,
    )  # else a quota refuses, or inodes do
    for count in range(1, len(loose) + 1):
        left = [step for step in steps if step not in loose[:count]]
        if left and free_bytes + before_bytes - _bytes_of(run, left) >= need_bytes:
            return loose[:count]
    return []


def make_room(run: str | Path, *, every: int | None = None, every_s: float | None = None, keep_best: int = 1) -> list[int]:
    """Delete the commits that stand in the way of another one on a full disk, once one that stays was verified; gives their steps.

    A new commit is taken to be as large as the newest. Nothing is deleted where all that may go would not be enough.
    """
    run = Path(run)
    try:
        steps = manifests.steps(run)
        if len(steps) < LEAST:
            return []
        need_bytes = manifests.read(manifests.step_folder(run, steps[-1])).num_bytes - SLACK_BYTES
        free_bytes = shutil.disk_usage(run).free
        doomed = find_in_the_way(run, need_bytes, free_bytes, every=every, every_s=every_s, keep_best=keep_best)
        if doomed:
            commits.check(manifests.step_folder(run, max(step for step in steps if step not in doomed)))
    except (OSError, RunFolderError):  # the disk does not answer, or what would stay is damaged
        return []
    return _delete(run, doomed)


def _delete(run: Path, doomed: Sequence[int]) -> list[int]:
    gone = []
    is_recorded = removals.record(run, doomed)
    for step in doomed:
        with contextlib.suppress(OSError):  # a folder that cannot be deleted harms nothing; the next commit tries again
            commits.remove(manifests.step_folder(run, step))
            gone.append(step)
    if not is_recorded:  # a full disk, which has room now
        removals.record(run, gone)
    return gone
