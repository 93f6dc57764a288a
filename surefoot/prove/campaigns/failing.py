"""Campaigns with failing disks: full, over quota, failing in one call, read-only, or slow.

Training must continue, and each save that fails must be recorded once. A full disk is a small file
system. A read-only folder is mounted read-only over the run. strace makes single calls fail.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from surefoot.contract import manifest
from surefoot.contract.events import Committed
from surefoot.core.errors import InputError, TaskError
from surefoot.prove.campaigns import strace
from surefoot.prove.campaigns.outcome import TrialResult
from surefoot.prove.campaigns.probe import EVERY, STEPS, VARIANTS, ProbedRun
from surefoot.prove.campaigns.strace import SystemCall
from surefoot.prove.campaigns.workshop import (
    PATIENCE_S,
    Child,
    Workshop,
    find_damage,
    find_difference,
    read_events,
    read_faults,
)

# a disk fails before the save of step AT and works again before that of step UNTIL
AT, UNTIL = 2 * EVERY, 3 * EVERY
WIDTH = 64  # so that a checkpoint has many pages, at which a write can fail
IN_MEMORY = ("-t", "tmpfs", "-o", "size=16M", "none")
PERCENTS = tuple(range(0, 101, 5))
CALLS = (
    "openat",
    "write",
    "fsync",
    "mkdir",
    "rename",
    "link",
    "linkat",
    "unlink",
    "unlinkat",
    "rmdir",
    "ftruncate",
    "close",
)
ON_CALLS = ("-e", f"trace={','.join(CALLS)}")
ERRORS = ("ENOSPC", "EDQUOT", "EIO")
# delay and number of fsync calls: a save has about eight, so that it overlaps the next one
SLOW_S, NUM_SLOW = 0.1, 12
FOLDER = re.compile(rf"/(run|{manifest.FOLDER}|[^/]*step-\d+)$")
OF_RUN = "".join(f"\\x{letter:02x}" for letter in b"/run")  # as strace prints it
CANNOT = "a file system of our own cannot be mounted here"


def fail(
    workshop: Workshop,
    attempt: ProbedRun,
    what: str,
    begin: Callable[[Child], AbstractContextManager[object]],
    *,
    until: int | None = UNTIL,
) -> tuple[Child, str | None]:
    """Train a run whose disk fails from before the save of step AT.

    `begin` starts the failure while the run waits, and returns a context. The context ends the
    failure at step `until`, or at the end of the run if `until` is None.

    Returns the process of the run, and the error that it shows; None if it is correct.
    """
    golden = workshop.golden(attempt)
    child = workshop.train(attempt)
    child.wait_for(f"paused {attempt.pauses[0]}")
    # the mark of the first checkpoint precedes its rename
    first = manifest.step_folder(attempt.folder, EVERY)
    if f"step {EVERY}" in child.marks:
        child.wait_until(first.exists, PATIENCE_S)
    wrong = None
    with begin(child):
        child.go()
        if until is None:
            child.wait()
        else:
            child.wait_for(f"paused {until}")
            wrong = find_damage(attempt.folder, golden)
    child.go()
    status = child.wait()
    wrong = (
        wrong or _find_wrong(attempt, status, child.said) or find_difference(attempt.folder, golden)
    )
    return child, wrong and f"{what}: {wrong}"


# ---- a full disk


def fill_the_disk(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Fill the disk so that it has room for 0, 5, ... 100 % of one save.

    The save is made in the background or not, depending on the seed.
    """
    percent = PERCENTS[seed % len(PERCENTS)]
    disk = folder / "disk"
    disk.mkdir()
    with mount_memory_disk(disk, IN_MEMORY):
        attempt = ProbedRun(
            folder=disk / "run",
            variant=list(VARIANTS)[seed % len(VARIANTS)],
            task={"width": WIDTH},
            background=bool(seed // len(PERCENTS) % 2),
            pauses=(AT, UNTIL),
        )
        _, wrong = fail(
            workshop,
            attempt,
            f"room for {percent} %",
            lambda child: fill_disk(attempt.folder, percent),
        )
        is_given_up = bool(_find_lost_steps(attempt.folder))
    return TrialResult(wrong, ("given up" if is_given_up else "saved",))


@contextlib.contextmanager
def fill_disk(run: Path, percent: int) -> Iterator[None]:
    """Return a context in which the disk is full except for a share of a checkpoint's size.

    The free space is `percent` % of the bytes of the run's first checkpoint.
    """
    room = (
        sum(path.stat().st_blocks * 512 for path in manifest.step_folder(run, EVERY).iterdir())
        * percent
        // 100
    )
    status, ballast = os.statvfs(run), run.with_name("ballast")
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_bsize - room))
    yield
    ballast.unlink()


@contextlib.contextmanager
def mount_memory_disk(folder: Path, *mounts: tuple[str, ...]) -> Iterator[None]:
    """Return a context in which a file system is mounted over `folder`.

    `mounts` are the arguments of the `mount` commands.

    Raises:
        TaskError: If mounting is not permitted.
    """
    try:
        for words in mounts:
            done = subprocess.run(
                ["mount", *words, str(folder)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise TaskError(
                    f"{CANNOT}: {done.stderr.strip()[-200:]}",
                    hint="it takes the rights of root, as in a container",
                )
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def read_only(folder: Path) -> AbstractContextManager[None]:
    """Return a context in which `folder` is mounted read-only over itself.

    Files that are already open remain writable, as on a real disk.
    """
    return mount_memory_disk(folder, ("--bind", str(folder)), ("-o", "remount,ro,bind"))


def cannot_mount() -> str | None:
    """Return why nothing can be mounted on this machine; None if mounting works."""
    try:
        with tempfile.TemporaryDirectory() as made, mount_memory_disk(Path(made), IN_MEMORY):
            return None
    except (TaskError, OSError) as error:
        return str(error)


# ---- a call that fails


def refuse_a_call(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Make one system call of a save fail, on a file of the run.

    Consecutive seeds go through the calls and the errors.
    """
    targets = find_calls(workshop)
    name, number = targets[seed % len(targets)]
    error = ERRORS[seed // len(targets) % len(ERRORS)]
    attempt = ProbedRun(folder=folder / "run", variant="frozen", background=False, pauses=(AT,))
    injection = f"inject={name}:error={error}:when={number}"
    _, wrong = fail(
        workshop,
        attempt,
        f"{name} number {number} ended with {error}",
        lambda child: strace.trace_child(child, folder / "trace", "-y", *ON_CALLS, "-e", injection),
        until=None,
    )
    calls = list(strace.read(folder / "trace"))
    if not any("INJECTED" in call.rest for call in calls):
        return TrialResult(fell=False)
    wrong = wrong or find_second_fsync(calls)
    if wrong is None and name == "fsync" and AT not in _find_lost_steps(attempt.folder):
        wrong = f"it was not on the disk, and step {AT} was called committed"
    return TrialResult(wrong, (name, error))


def find_calls(workshop: Workshop) -> list[tuple[str, int]]:
    """Return the system calls of one save on files of the run, as pairs of name and number.

    The number counts the calls of the same name from 1.
    """
    traced = strace.trace_a_save(workshop, AT, "-y", *ON_CALLS, variant="frozen")
    main = min(call.thread for *_, call in traced)
    of_run = [
        (name, number)
        for name, number, call in traced
        if call.thread == main and OF_RUN in "".join(call.arguments)
    ]
    first = dict(reversed(of_run))
    # the first call of each name, then the second
    return sorted(of_run, key=lambda each: (each[1] - first[each[0]], each))


def find_second_fsync(calls: Sequence[SystemCall]) -> str | None:
    """Return a message for a file that is synced again after its fsync failed, or None.

    A second fsync may succeed although the data of the first one was lost.
    """
    failed: set[str] = set()
    for call in calls:
        if not call.failed and (
            call.name == "rename" or (call.name == "openat" and "O_CREAT" in call.arguments[2])
        ):
            failed.discard(strace.paths(call)[-1])  # the name belongs to a different file now
        if (
            call.name == "fsync"
            and (path := strace.path_of_descriptor(call.arguments[0])) in failed
        ):
            return f"a file was synced again after its fsync had failed: {path}"
        if call.name == "fsync" and call.failed and not FOLDER.search(path):
            # a folder has no data to lose
            failed.add(path)
    return None


# ---- a disk that turns read-only, and a slow one


def turn_read_only(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Make a folder read-only, before the run or during it.

    Before the run, nothing may be trained. During the run, saves fail until the folder is writable
    again.
    """
    attempt = ProbedRun(folder=folder / "run", background=bool(seed // 3 % 2), pauses=(AT, UNTIL))
    if seed % 3 == 2:
        return _begin_read_only(workshop, attempt)
    place = attempt.folder if seed % 3 else attempt.folder / manifest.FOLDER
    what = f"{place.name} turned read-only"
    _, wrong = fail(workshop, attempt, what, lambda child: read_only(place))
    if wrong is None and AT not in _find_lost_steps(attempt.folder):
        wrong = f"the save of step {AT} could not be written, and no event records it"
    return TrialResult(wrong, ("in the middle",))


def _begin_read_only(workshop: Workshop, attempt: ProbedRun) -> TrialResult:
    attempt.folder.mkdir()
    with read_only(attempt.folder):
        child = workshop.train(attempt)
        status = child.wait()
    is_well = (
        status == InputError.exit_code
        and "cannot be written" in child.said
        and "begun" not in child.marks
        and not any(attempt.folder.iterdir())
    )
    wrong = f"a read-only folder: ended with {status}: {child.said[-300:]}"
    return TrialResult(None if is_well else wrong, ("at the start",))


def slow_down(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Make each fsync of two saves take longer than the steps between the saves.

    Training must wait for the previous save, so that saves do not queue up.
    """
    attempt = ProbedRun(
        folder=folder / "run",
        variant=list(VARIANTS)[seed % len(VARIANTS)],
        pauses=(EVERY - 1,),
    )
    slow = f"inject=fsync:delay_enter={int(SLOW_S * (1 + seed % 4) * 1e6)}:when=1..{NUM_SLOW}"
    child, wrong = fail(
        workshop,
        attempt,
        "slow",
        lambda child: strace.trace_child(child, folder / "trace", "-e", "trace=fsync", "-e", slow),
        until=None,
    )
    return TrialResult(wrong or find_queue(child.marks))


def find_queue(marks: Sequence[str]) -> str | None:
    """Return a message for a save that starts before the previous save has ended, or None.

    A save ends when its checkpoint is renamed to its final name.
    """
    saving = ""
    for word, _, step in (mark.partition(" ") for mark in marks):
        if word == "draft" and saving:
            return f"the save of step {step} began before that of step {saving} was done"
        if word == "draft" or (word == "name" and step == saving):
            saving = step if word == "draft" else ""
    return None


# ---- what must hold


def _find_wrong(attempt: ProbedRun, status: int, said: str) -> str | None:
    """Return the error that a run shows at its end; None if it is correct.

    Each save must have exactly one record: that it was committed, or that it was abandoned.
    """
    if status != 0 or "Traceback" in said:
        return f"the run ended with {status}: {said[-600:]}"
    told = Counter(event.step for event in read_events(attempt.folder, Committed))
    told.update(_find_lost_steps(attempt.folder))
    odd = sorted(step for step in {*told, *range(EVERY, STEPS + 1, EVERY)} if told[step] != 1)
    return f"each save has one record, but not those of steps {odd}" if odd else None


def _find_lost_steps(run: Path) -> list[int]:
    """Return the steps whose save was abandoned according to the log."""
    return [event.step for event in read_faults(run, "storage")]
