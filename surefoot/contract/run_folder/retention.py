"""Checkpoint retention: keep the newest, every nth step or hour, and the best by score.

Only checkpoints are deleted, no other files. On a full disk more of them may be deleted, to make
space for a new one. Then one verified checkpoint is kept, as well as the best ones and those that
the spec keeps permanently.
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

CLOCK_FILE = "clock.json"  # in a checkpoint: {"training_s": seconds}
SLACK_BYTES = 16 << 10  # by which the text files of two checkpoints may differ in size
MIN_CHECKPOINTS = 2  # checkpoints that are always kept: one of them may turn out damaged


def choose(
    steps: Sequence[int],
    *,
    keep: int,
    every: int | None,
    ranked: Sequence[int],
    keep_best: int,
    milestones: Sequence[int] = (),
) -> list[int]:
    """Return the steps to delete; `steps` are those of all checkpoints, in ascending order.

    The other steps are kept: the newest `keep` (at least two), the first `keep_best` of `ranked`,
    which has the best first, the multiples of `every`, and `milestones`.

    >>> choose([8, 9, 10, 11, 12], keep=3, every=None, ranked=[9, 12], keep_best=1)
    [8]
    """
    multiples = (step for step in steps if every and step % every == 0)
    stay = {*steps[-max(keep, MIN_CHECKPOINTS) :], *ranked[:keep_best], *multiples, *milestones}
    return [step for step in steps if step not in stay]


def find_milestones(times_s: Mapping[int, float], every_s: float) -> list[int]:
    """Return the first step at or after each multiple of `every_s` seconds of training.

    `times_s` maps each step to the training time up to it, in seconds; both are in ascending order.

    >>> find_milestones({10: 30.0, 20: 61.0, 30: 95.0, 40: 118.0, 50: 121.0}, 60.0)
    [20, 50]
    """
    first: dict[int, int] = {}
    for step, time_s in times_s.items():
        first.setdefault(int(time_s // every_s), step)
    return [step for number, step in first.items() if number > 0]


def read_times(run: Path, steps: Sequence[int]) -> dict[int, float]:
    """Return the seconds of training up to each of `steps`, summed over all attempts.

    A step whose time cannot be read is left out.
    """
    times_s = {}
    for step in steps:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            text = files.read_bytes(manifests.step_folder(run, step), CLOCK_FILE)
            time_s = float(json.loads(text)["training_s"])
            if 0 <= time_s < math.inf:
                times_s[step] = time_s
    return times_s


def find_over_budget(
    run: Path, steps: Sequence[int], protected: Sequence[int], budget_bytes: int
) -> list[int]:
    """Return the steps to delete, oldest first, so that the other checkpoints fit the budget.

    The newest two and the `protected` steps are always kept. A file that is hard-linked from
    several checkpoints counts once.
    """
    doomed: list[int] = []
    left = list(steps)
    for step in steps[:-MIN_CHECKPOINTS]:
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
    run: Path,
    *,
    keep: int,
    every: int | None = None,
    every_s: float | None = None,
    keep_best: int = 1,
    budget_bytes: int | None = None,
) -> list[int]:
    """Return the steps of the checkpoints that `retain` would delete, in ascending order.

    The parameters are those of `retain`. Nothing is deleted.
    """
    steps = manifests.steps(run)
    ranked = commits.rank(run, steps)
    milestones = [] if every_s is None else find_milestones(read_times(run, steps), every_s)
    doomed = choose(
        steps, keep=keep, every=every, ranked=ranked, keep_best=keep_best, milestones=milestones
    )
    if budget_bytes is not None:
        rest = [step for step in steps if step not in doomed]
        doomed += find_over_budget(run, rest, ranked[:keep_best], budget_bytes)
    return sorted(doomed)


def retain(
    run: str | Path,
    *,
    keep: int,
    every: int | None = None,
    every_s: float | None = None,
    keep_best: int = 1,
    budget_bytes: int | None = None,
) -> list[int]:
    """Delete the checkpoints that need not be kept, oldest first.

    The newest checkpoint is verified first: if it is damaged, nothing is deleted.

    Args:
        run: The run folder.
        keep: Number of newest checkpoints to keep; at least two are kept, because one of them
            may turn out to be damaged.
        every: Keep the checkpoints of steps that are multiples of this; None for none.
        every_s: Keep the first checkpoint after each multiple of this many seconds of training;
            None for none.
        keep_best: Number of checkpoints with the best scores to keep.
        budget_bytes: Maximum size of all checkpoints together; the oldest, except the newest
            two and the best, are deleted until the others fit. None for no limit.

    Returns:
        The steps of the deleted checkpoints.

    Raises:
        InputError: For a `keep` below 1.
    """
    if keep < 1:
        raise InputError(
            f"keep must be at least 1; got {keep}",
            hint="give 1 or more; the newest two checkpoints are always kept",
        )
    run = Path(run)
    try:
        doomed = find_doomed(
            run,
            keep=keep,
            every=every,
            every_s=every_s,
            keep_best=keep_best,
            budget_bytes=budget_bytes,
        )
        if doomed:
            commits.check(manifests.step_folder(run, manifests.steps(run)[-1]))
    except (OSError, RunFolderError):
        # the disk does not answer, or the newest checkpoint is damaged
        return []
    return _delete(run, doomed)


def find_in_the_way(
    run: Path,
    need_bytes: int,
    free_bytes: int,
    *,
    every: int | None = None,
    every_s: float | None = None,
    keep_best: int = 1,
) -> list[int]:
    """Return the steps to delete, oldest first, to make space for a checkpoint of `need_bytes`.

    The result is empty if enough space cannot be made. The best `keep_best`, multiples of `every`,
    and the first checkpoint after each `every_s` seconds of training are kept. All others may be
    deleted, as long as one checkpoint remains.
    """
    steps = manifests.steps(run)
    milestones = [] if every_s is None else find_milestones(read_times(run, steps), every_s)
    multiples = [step for step in steps if every and step % every == 0]
    stay = {*commits.rank(run, steps)[:keep_best], *multiples, *milestones}
    loose = [step for step in steps if step not in stay]
    # where there is space enough, a quota refuses, or inodes are missing
    before_bytes, free_bytes = _bytes_of(run, steps), free_bytes if free_bytes < need_bytes else 0
    for count in range(1, len(loose) + 1):
        left = [step for step in steps if step not in loose[:count]]
        if left and free_bytes + before_bytes - _bytes_of(run, left) >= need_bytes:
            return loose[:count]
    return []


def make_room(
    run: str | Path, *, every: int | None = None, every_s: float | None = None, keep_best: int = 1
) -> list[int]:
    """Delete checkpoints to make space for a new one on a full disk; return their steps.

    The new checkpoint is assumed to be as large as the newest one. Nothing is deleted if that would
    not make enough space, or if the newest remaining checkpoint is damaged.
    """
    run = Path(run)
    try:
        steps = manifests.steps(run)
        if len(steps) < MIN_CHECKPOINTS:
            return []
        need_bytes = manifests.read(manifests.step_folder(run, steps[-1])).num_bytes - SLACK_BYTES
        free_bytes = shutil.disk_usage(run).free
        doomed = find_in_the_way(
            run, need_bytes, free_bytes, every=every, every_s=every_s, keep_best=keep_best
        )
        if doomed:
            commits.check(
                manifests.step_folder(run, max(step for step in steps if step not in doomed))
            )
    except (OSError, RunFolderError):
        # the disk does not answer, or the checkpoint to keep is damaged
        return []
    return _delete(run, doomed)


def _delete(run: Path, doomed: Sequence[int]) -> list[int]:
    gone = []
    is_recorded = removals.record(run, doomed)
    for step in doomed:
        with contextlib.suppress(OSError):
            # a folder that cannot be deleted does no harm; the next checkpoint tries again
            commits.remove(manifests.step_folder(run, step))
            gone.append(step)
    if not is_recorded:  # the disk was full, and has space now
        removals.record(run, gone)
    return gone
