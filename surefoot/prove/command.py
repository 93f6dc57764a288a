"""Test of any training command: whether a kill and a restart change the files that it leaves.

Every trial starts without the state folder. The files that exist at the end are compared.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from surefoot.core.errors import InputError, TaskError
from surefoot.core.place import child_environment
from surefoot.core.process.signals import exit_on_signal
from surefoot.prove.leavings import compare, list_files, list_timed, list_unfollowed

LOOK_S = 0.005
MAX_TRIES = 20
TOLD_LINES, TOLD_BYTES = 12, 1 << 16
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CommandVerdict:
    """Results of the test of a command.

    `repeat` is the first difference between two uninterrupted runs, and `resume` the first
    difference of the run that was killed and restarted; None means that there is none.
    `num_changes` is the number of changes of the state folder in an uninterrupted run, and `kills`
    is the number of changes before each kill. `unfollowed` are links out of the folder, of which
    only the name of the target was compared.
    """

    seed: int
    num_files: int
    num_changes: int
    elapsed_s: float
    kills: tuple[int, ...] = ()
    repeat: str | None = None
    resume: str | None = None
    by_digest: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unfollowed: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.repeat is None and self.resume is None


def verify_command(
    command: str, state: Path, folder: Path, *, kills: int, seed: int, tell: Tell
) -> CommandVerdict:
    """Run `command` twice without interruption, then with `kills` kills and restarts.

    Each run writes into the folder `state`; the results are moved to `folder` and compared.

    Raises:
        InputError: If `state` exists already or the command cannot be run.
        TaskError: If the command fails without a kill.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(
            f"--command cannot be read: {error}: {command}", hint="quote it as you would in a shell"
        ) from None
    if not words:
        raise InputError("--command is empty", hint='give one such as "python train.py"')
    if state.exists():
        raise InputError(
            f"--state {state} exists already",
            hint="each run starts without this folder: move it away, or give another",
        )
    with exit_on_signal():
        return _verify(words, state, folder, kills, seed, tell)


def _verify(
    words: list[str], state: Path, folder: Path, kills: int, seed: int, tell: Tell
) -> CommandVerdict:
    for name in ("first", "second"):
        tell(f"{name} unbroken run")
        pace = _run_whole(words, state)
        unfollowed = list_unfollowed(state)  # before it is moved, since its links may be relative
        _keep(state, folder / name)
    found = CommandVerdict(
        seed=seed,
        num_files=len(list_files(folder / "first")),
        num_changes=pace.num_changes,
        elapsed_s=pace.took_s,
        left_out=list_timed(folder / "first"),
        unfollowed=unfollowed,
    )
    repeat, by_digest = compare(folder / "first", folder / "second")
    if repeat is not None:
        return replace(found, repeat=repeat, by_digest=by_digest)
    done = _run_killed(words, state, pace, kills, random.Random(seed), tell)
    _keep(state, folder / "killed")
    resume, by_digest = compare(folder / "first", folder / "killed")
    return replace(found, kills=done, resume=resume, by_digest=by_digest)


@dataclass(frozen=True)
class RunPace:
    """Timing of an uninterrupted run.

    Args:
        took_s: Seconds of the run.
        first_s: Seconds from its start to the first change of the state folder.
        num_changes: Number of changes of the state folder that were seen.
    """

    took_s: float
    first_s: float
    num_changes: int


class _CommandGroup:
    """Command in a new process group, which is killed when the context ends.

    Its stderr goes to a file, so that the command never waits for a reader.
    """

    def __init__(self, words: list[str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        try:
            self.process = subprocess.Popen(
                words,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            raise InputError(
                f"{words[0]} cannot be run: {error.strerror}",
                hint="give the command as you type it in a shell",
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._said.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        """Return the last lines of stderr after a colon, or a text that there are none."""
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - TOLD_BYTES))
        lines = self._said.read().decode(errors="replace").strip().splitlines()[-TOLD_LINES:]
        return ": " + "\n".join(lines) if lines else " and said nothing on stderr"


def _run_whole(words: list[str], state: Path) -> RunPace:
    """Run the command to its end and return its timing.

    Raises:
        TaskError: If the command fails, or leaves no files in the folder `state`.
    """
    started_s = first_s = time.monotonic()
    with _CommandGroup(words) as one:
        look, num_changes = _snapshot_state(state), 0
        while one.process.poll() is None:
            if (now := _snapshot_state(state)) != look:
                look, num_changes = now, num_changes + 1
                first_s = time.monotonic() if num_changes == 1 else first_s
            time.sleep(LOOK_S)
        if code := one.process.returncode:
            raise TaskError(
                f"the command ended with {code}{one.said()}",
                hint="make the command finish without an error first",
            )
    if state.is_symlink():  # only the link would be moved, and the next run would resume this one
        raise TaskError(
            f"the command left a link in place of the folder {state}",
            hint="name the folder itself with --state",
        )
    if not state.is_dir() or not list_files(state):
        raise TaskError(
            f"the command left nothing in {state}",
            hint="use --state to name the folder into which the command writes all its files",
        )
    return RunPace(time.monotonic() - started_s, first_s - started_s, num_changes)


def _snapshot_state(state: Path) -> tuple[tuple[str, int, int], ...]:
    """Return the path, size and modification time of each file and folder in `state`."""
    found = []
    for place, folders, names in os.walk(state):  # os.walk ignores folders that vanish meanwhile
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                path = os.path.join(place, name)
                status = os.stat(path)
                found.append((path, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def _run_killed(
    words: list[str], state: Path, pace: RunPace, kills: int, draws: random.Random, tell: Tell
) -> tuple[int, ...]:
    """Kill the command after random numbers of changes in `state`, and restart it each time.

    The last start runs to its end. Returns the number of changes before each kill. Changes are
    counted instead of seconds because a busy machine makes the command slower. All attempts
    together make fewer changes than an uninterrupted run.
    """
    done: list[int] = []
    most, longest_s = (
        max(1, pace.num_changes // (kills + 1)),
        (pace.took_s - pace.first_s) / max(1, pace.num_changes),
    )
    for _ in range(MAX_TRIES):
        if len(done) == kills:
            break
        wanted = draws.randint(1, most)
        with _CommandGroup(words) as one:
            if _kill_after(one, state, wanted, draws.uniform(0.0, longest_s)):
                done.append(wanted)
                tell(
                    f"kill {len(done)} of {kills}: "
                    f"after {wanted} of {pace.num_changes} changes in {state}"
                )
                continue
            if code := one.process.returncode:
                raise TaskError(
                    f"the restarted command ended with {code}{one.said()}",
                    hint="the restarted command must resume, or restart from step 0",
                )
        if done:
            return tuple(done)
        tell("the command ended before the kill: repeated with an earlier kill")
        shutil.rmtree(state)
        most, longest_s = max(1, most // 2), longest_s / 2
    if not done:
        raise TaskError(
            "the command ends before it can be killed",
            hint="make the command run longer, or save more often",
        )
    tell("the last start, to the end")
    _run_whole(words, state)
    return tuple(done)


def _kill_after(one: _CommandGroup, state: Path, changes: int, later_s: float) -> bool:
    """Kill the group `later_s` seconds after the folder has changed `changes` times.

    Returns False if the process ended by itself.
    """
    look, kill_s = _snapshot_state(state), math.inf
    while one.process.poll() is None and time.monotonic() < kill_s:
        if changes and (now := _snapshot_state(state)) != look:
            look, changes = now, changes - 1
            kill_s = kill_s if changes else time.monotonic() + later_s
        time.sleep(min(LOOK_S, max(0.0, kill_s - time.monotonic())))
    one.kill()
    return one.process.returncode == -signal.SIGKILL


def _keep(state: Path, where: Path) -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(state, where)
