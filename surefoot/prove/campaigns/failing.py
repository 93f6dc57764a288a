"""Failing disks: full, over quota, refusing one call, read-only for a while, slow. Training goes on, and each lost save is told once.

Full disks are small file systems of their own, read-only ones are mounted so over the run, single calls are made to fail by strace.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from surefoot.contract import commits, events, manifest
from surefoot.contract.events import Committed, Fault
from surefoot.core.errors import InputError, TaskError
from surefoot.prove.campaigns.power import trace
from surefoot.prove.campaigns.power.trace import Call, Tracer
from surefoot.prove.campaigns.probe import EVERY, STEPS, VARIANTS, Attempt
from surefoot.prove.campaigns.workshop import LOOK_S, PATIENCE_S, Child, Workshop, find_damage, find_difference
from surefoot.prove.outcome import Campaign, Result

AT, UNTIL = 2 * EVERY, 3 * EVERY  # a disk fails before the save of step AT and is mended before that of step UNTIL
WIDTH = 64  # so that a commit has pages enough to be cut among
DISK_BYTES = 16 << 20
PERCENTS = tuple(range(0, 101, 5))
CALLS = ("openat", "write", "fsync", "mkdir", "rename", "link", "linkat", "unlink", "unlinkat", "rmdir", "ftruncate", "close")
ERRORS = ("ENOSPC", "EDQUOT", "EIO")
SLOW_S, NUM_SLOW = 0.1, 12  # of fsync: a save has about eight, so that the next one comes while it goes on
CANNOT = "a file system of our own cannot be mounted here"


# ---- a full disk


def fill_the_disk(workshop: Workshop, seed: int) -> Result:
    """A disk with room for so many percent of one save: 0, 5 ... 100, in the background and not."""
    percent, is_background = PERCENTS[seed % len(PERCENTS)], bool(seed // len(PERCENTS) % 2)
    variant = list(VARIANTS)[seed % len(VARIANTS)]
    golden = workshop.golden(variant, WIDTH)
    with workshop.scratch("full") as folder, mounted(folder / "disk", f"size={DISK_BYTES}") as disk:
        attempt = Attempt(run=str(disk / "run"), variant=variant, width=WIDTH, background=is_background, pauses=(AT, UNTIL))
        child = workshop.train(attempt)
        child.wait_for(f"paused {AT}")
        first = _wait_for_first(child, attempt)
        fill(disk, leaving=sum(path.stat().st_blocks * 512 for path in first.iterdir()) * percent // 100)
        child.go()
        child.wait_for(f"paused {UNTIL}")
        wrong = find_damage(attempt.folder, golden)
        (disk / "ballast").unlink()
        child.go()
        status = child.wait()
        wrong = wrong or _find_wrong(attempt, status, child.said) or find_difference(attempt.folder, golden)
        told = _told(attempt.folder)
        return Result(wrong and f"room for {percent} %: {wrong}", ("given up" if told else "saved",))


def _wait_for_first(child: Child, attempt: Attempt) -> Path:
    """The folder of the first commit, once it is there: it is marked just before it is named."""
    child.wait_for(f"name {EVERY}")
    folder, until_s = manifest.step_folder(attempt.folder, EVERY), time.monotonic() + PATIENCE_S
    while not folder.exists() and time.monotonic() < until_s and not child.ends_within(LOOK_S):
        pass
    return folder


def fill(disk: Path, *, leaving: int) -> None:
    """Take all of the disk's room but so much."""
    status = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_bsize - leaving))


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory. Raises TaskError where mounting is not permitted."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", options, "none", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TaskError(f"{CANNOT}: {done.stderr.strip()[-200:]}", hint="it takes the rights of root, as in a container")


def cannot_mount() -> str | None:
    """Why nothing can be mounted here, None where it can."""
    try:
        if os.geteuid() != 0:
            return CANNOT
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(mounted(Path(made) / "disk", "size=1M"))
    except (TaskError, OSError) as error:
        return str(error)
    return None


# ---- a call that fails


def refuse_a_call(workshop: Workshop, seed: int) -> Result:
    """One call of a save on a file of the run ends with an error: each call in turn, with each error."""
    targets = find_calls(workshop)
    name, number = targets[seed % len(targets)]
    error = ERRORS[seed // len(targets) % len(ERRORS)]
    golden = workshop.golden("frozen")
    with workshop.scratch("refused") as folder:
        attempt = Attempt(run=str(folder / "run"), variant="frozen", background=False, pauses=(AT,))
        child = workshop.train(attempt)
        child.wait_for(f"paused {AT}")
        inject = ("-y", "-e", f"trace={','.join(CALLS)}", "-e", f"inject={name}:error={error}:when={number}")
        with Tracer(child, folder / "trace", *inject) as tracer:
            child.go()
            status = child.wait()
        calls = tracer.calls()
        if not any("INJECTED" in call.rest for call in calls):
            return Result(fell=False)
        wrong = _find_wrong(attempt, status, child.said) or find_difference(attempt.folder, golden) or find_second_fsync(calls)
        if wrong is None and name == "fsync" and AT not in _told(attempt.folder):
            wrong = f"it was not on the disk, and step {AT} was called committed"
        return Result(wrong and f"{name} number {number} ended with {error}: {wrong}", (name, error))


def find_calls(workshop: Workshop) -> list[tuple[str, int]]:
    """The calls of one save on what lies in the run folder, each as (name, how many of that name it is)."""
    if "calls" not in workshop.kept:
        with workshop.scratch("calls") as folder:
            attempt = Attempt(run=str(folder / "run"), variant="frozen", background=False, pauses=(AT, AT + 1))
            child = workshop.train(attempt)
            child.wait_for(f"paused {AT}")
            with Tracer(child, folder / "trace", "-y", "-e", f"trace={','.join(CALLS)}") as tracer:
                child.go()
                child.wait_for(f"paused {AT + 1}")
            calls = [call for call in tracer.calls() if call.thread == child.pid]
            child.wait()
            ours = "".join(f"\\x{byte:02x}" for byte in os.fsencode(attempt.run))
            numbered = zip(calls, trace.names(calls, child.pid), strict=True)
            of_run = [which for call, which in numbered if any(ours in part for part in call.arguments)]
            among = {which: sum(other[0] == which[0] for other in of_run[:place]) for place, which in enumerate(of_run)}
            workshop.kept["calls"] = sorted(
                of_run, key=lambda which: (among[which], which)
            )  # the first of each name, then the second
    found: list[tuple[str, int]] = workshop.kept["calls"]
    return found


def find_second_fsync(calls: Sequence[Call]) -> str | None:
    """A file that is synced again after its fsync failed: the second one says nothing of what the first did not write."""
    failed: set[str] = set()
    for call in calls:
        if call.name == "openat" and not call.failed and "O_CREAT" in call.arguments[2]:
            failed.discard(_named(call.rest))
        elif call.name == "rename" and not call.failed:
            failed.discard(trace.unquote(call.arguments[1]).decode())  # another file has the name now
        elif call.name == "fsync" and (path := _named(call.arguments[0])) in failed:
            return f"a file was synced again after its fsync had failed: {path}"
        elif call.name == "fsync" and call.failed and not _is_folder(path):
            failed.add(path)
    return None


def _named(descriptor: str) -> str:
    """The path that strace tells with a descriptor, `5<...>`."""
    return trace.unquote(descriptor.partition("<")[2].partition(">")[0]).decode()


def _is_folder(path: str) -> bool:
    """A folder has no data of its own to lose: its next fsync is for other entries."""
    name = Path(path).name
    return name in (manifest.FOLDER, "run") or bool(manifest.STEP_FOLDER.match(name.removeprefix(commits.DRAFT)))


# ---- a disk that turns read-only


def turn_read_only(workshop: Workshop, seed: int) -> Result:
    """At the start it is refused before anything is trained; in the middle it costs the saves until it is writable again."""
    golden = workshop.golden("plain")
    with workshop.scratch("readonly") as folder:
        attempt = Attempt(run=str(folder / "run"), background=bool(seed // 3 % 2), pauses=(AT, UNTIL))
        if seed % 3 == 2:
            return _begin_read_only(workshop, attempt)
        place = attempt.folder if seed % 3 else attempt.folder / manifest.FOLDER
        child = workshop.train(attempt)
        child.wait_for(f"paused {AT}")
        _wait_for_first(child, attempt)
        with read_only(place):
            child.go()
            child.wait_for(f"paused {UNTIL}")
            wrong = find_damage(attempt.folder, golden)
        child.go()
        status = child.wait()
        wrong = wrong or _find_wrong(attempt, status, child.said) or find_difference(attempt.folder, golden)
        if wrong is None and AT not in _told(attempt.folder):
            wrong = f"the save of step {AT} could not be written, and no event says so"
        return Result(wrong and f"{place.name} turned read-only: {wrong}", ("in the middle",))


def _begin_read_only(workshop: Workshop, attempt: Attempt) -> Result:
    attempt.folder.mkdir()
    with read_only(attempt.folder):
        child = workshop.train(attempt)
        status = child.wait()
    is_told = status == InputError.exit_code and "cannot be written" in child.said and "begun" not in child.marks
    left = sorted(path.name for path in attempt.folder.iterdir())
    wrong = None if is_told and not left else f"a read-only folder: ended with {status}, {left} is left: {child.said[-300:]}"
    return Result(wrong, ("at the start",))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder mounted over itself, read-only: files that are open stay as they are, as they do on a real disk."""
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,ro,bind", str(folder))
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


# ---- a slow disk


def slow_down(workshop: Workshop, seed: int) -> Result:
    """Every fsync of two saves takes longer than the steps between them: training waits for the save before, and nothing piles up."""
    variant = list(VARIANTS)[seed % len(VARIANTS)]
    golden = workshop.golden(variant)
    with workshop.scratch("slow") as folder:
        attempt = Attempt(run=str(folder / "run"), variant=variant, pauses=(EVERY - 1,))
        child = workshop.train(attempt)
        child.wait_for(f"paused {EVERY - 1}")
        slow = f"inject=fsync:delay_enter={int(SLOW_S * (1 + seed % 4) * 1e6)}:when=1..{NUM_SLOW}"
        with Tracer(child, folder / "trace", "-e", "trace=fsync", "-e", slow) as tracer:
            child.go()
            status = child.wait()
        tracer.calls()
        wrong = _find_wrong(attempt, status, child.said) or find_difference(attempt.folder, golden) or find_queue(child.marks)
        return Result(wrong, ("steps beside a save" if _steps_beside(child.marks) else "steps waited",))


def find_queue(marks: Sequence[str]) -> str | None:
    """Two saves at a time: one is begun before the one before it has its name."""
    open_draft: str | None = None
    for mark in marks:
        word, _, step = mark.partition(" ")
        if word == "draft":
            if open_draft is not None:
                return f"the save of step {step} began before that of step {open_draft} was done"
            open_draft = step
        elif word == "name" and step == open_draft:
            open_draft = None
    return None


def _steps_beside(marks: Sequence[str]) -> int:
    """Steps that were done while a save went on."""
    is_open, count = False, 0
    for mark in marks:
        is_open = mark.startswith("draft") or (is_open and not mark.startswith("name"))
        count += is_open and mark.startswith("step")
    return count


# ---- what must hold


def _find_wrong(attempt: Attempt, status: int, said: str) -> str | None:
    """The run came to its end, and each save that was due has one record: that it was committed, or that it was given up."""
    if status != 0 or "Traceback" in said:
        return f"the run ended with {status}: {said[-600:]}"
    told = Counter(event.step for event in events.read(attempt.folder) if isinstance(event, Committed))
    told.update(_told(attempt.folder))
    due = [step for step in range(EVERY, STEPS + 1, EVERY) if told[step] != 1]
    twice = [step for step, count in told.items() if count != 1]
    return f"each save has one record, but not those of steps {sorted({*due, *twice})}" if due or twice else None


def _told(run: Path) -> list[int]:
    return [event.step for event in events.read(run) if isinstance(event, Fault) and event.fault == "storage"]


def cannot_mount_or_trace() -> str | None:
    return cannot_mount() or trace.missing()


CAMPAIGNS = (
    Campaign(
        case="F07", title="a disk with room for 0, 5 ... 100 % of a save", trial=fill_the_disk, few=6,
        many=8 * len(PERCENTS), missing=cannot_mount,
    ),
    Campaign(
        case="F08", title="each call of a save ends with ENOSPC, EDQUOT, EIO", trial=refuse_a_call, few=12, many=1_000,
        sweep=lambda workshop: len(ERRORS) * len(find_calls(workshop)), missing=trace.missing,
    ),
    Campaign(
        case="F09", title="a folder that turns read-only, or is", trial=turn_read_only, few=3, many=20,
        missing=cannot_mount,
    ),
    Campaign(
        case="F10", title="fsync that takes longer than training", trial=slow_down, few=1, many=10,
        missing=trace.missing,
    ),
)  # fmt: skip
