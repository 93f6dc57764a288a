"""Profiler windows in a new run, in a repetition of a finished run, and in a running process."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from surefoot.components.profiler.tracing.window import Window
from surefoot.contract import events, runlock, spec_file
from surefoot.contract.events import Started
from surefoot.contract.run_folder import files
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, RunFolderError, hint_unwritten
from surefoot.core.units import Duration
from surefoot.train.record.profiling import ANSWER_FILE, FOLDER, REQUEST_FILE
from surefoot.train.resume.start import Start, newest_sound
from surefoot.train.run import Run

POLL_S = 0.1
REPEATED = ".repeated-"  # folders in which a run is repeated
# folder whose lock is held by the process that waits for a profiler window of a running run
ASKING = ".asking"
Tell = Callable[[str], None]


def record(
    attempt: Run, window: Window, levels: Sequence[str], tell: Tell, *, nvtx: bool = False
) -> Path:
    """Run an attempt until the profiler window is recorded; return the profile folder."""
    with attempt:
        fitted = attempt.session.profiling.begin(window, levels, attempt.step, nvtx=nvtx)
        if fitted != window:
            tell(f"the run has too few steps for {window}: recording {fitted}")
        for _ in attempt.steps():
            if attempt.session.profiling.is_done:
                attempt.stop("the profile window was recorded")
    if attempt.outcome == "interrupted":
        raise KeyboardInterrupt
    return attempt.folder / FOLDER


def record_again(
    run: Path,
    window: Window,
    levels: Sequence[str],
    tell: Tell,
    *,
    warn: Tell,
    nvtx: bool = False,
    use: str | None = None,
) -> Path:
    """Repeat a run from its newest undamaged checkpoint for the length of the window.

    The repetition changes only `profile/` in the run folder.

    Args:
        run: the run folder.
        window: the steps to record.
        levels: additional data to record: any of "shapes", "stacks" and "memory".
        tell: prints progress.
        warn: prints warnings about damaged checkpoints.
        nvtx: whether to emit NVTX ranges.
        use: the current name of the task (`file.py:Task`); None for the name in the spec.

    Raises:
        RunFolderError: for a run without a checkpoint, or a folder that cannot be written.
        InputError: for a run whose task was built in a script.
    """
    spec = spec_file.read_of_run(run, task=use).spec
    if spec.task.use is None:
        raise InputError(
            f"the task of {run} was built in a script, so only that script can repeat it",
            hint=(
                "use surefoot.profiler.Profiler around the loop of that script, or, while it runs: "
                f"surefoot profile {shlex.quote(str(run))}"
            ),
        )
    step, troubles = newest_sound(run)
    for trouble in troubles:
        warn(f"{trouble}; the previous checkpoint is used")
    try:
        files.make_folder(run, FOLDER)
        _clear_killed(run / FOLDER)
        place = Path(tempfile.mkdtemp(prefix=REPEATED, dir=run / FOLDER))
    except OSError as error:
        raise RunFolderError(
            f"{run / FOLDER} cannot be written: {error.strerror}",
            hint="copy the run folder, and profile the copy",
        ) from None
    try:
        with runlock.RunLock(place):
            attempt = Run(
                _lengthen(run, spec, step, window),
                folder=place / "run",
                quiet=True,
                start=Start(run, step),
            )
            tell(f"repeating {run} after step {step:,}")
            made = record(attempt, window, levels, tell, nvtx=nvtx)
            for path in made.iterdir() if made.is_dir() else ():
                os.replace(path, run / FOLDER / path.name)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return run / FOLDER


def _clear_killed(folder: Path) -> None:
    """Remove the folders of killed repetitions; a repetition that still runs holds its lock."""
    for place in folder.glob(f"{REPEATED}*"):
        if (place / runlock.FILE).is_file() and not runlock.is_held(place):
            shutil.rmtree(place, ignore_errors=True)


def _lengthen(run: Path, spec: RunSpec, step: int, window: Window) -> RunSpec:
    """Return the spec with a longer run if fewer steps are left than the window needs.

    The schedule is then constant, because the learning rate does not change the time of a step.
    """
    # without [checkpoint], whose store belongs to the run
    own = ("checkpoint", "observe")
    tables = {name: table for name, table in spec.as_tables().items() if name not in own}
    tables["observe"] = {"tensorboard": False}
    beside = spec.replace_all(tables)
    started = [each for each in events.read(run, Started) if isinstance(each, Started)]
    total = started[-1].total_steps if started else None
    if Duration.parse(spec.train.length).unit == "s" or (
        total is not None and total - step >= window.num_steps
    ):
        return beside
    return beside.replace(
        train={"length": f"{step + window.num_steps} steps"}, schedule={"name": "constant"}
    )


def ask(run: Path, window: Window, levels: Sequence[str], tell: Tell) -> Path:
    """Request a profile from the process that trains `run`, and wait for it; return its folder.

    Raises InputError if the request fails or a different process is waiting for a profile.
    """
    folder = run / FOLDER
    asking = folder / ASKING
    try:
        files.make_folder(run, f"{FOLDER}/{ASKING}")
    except OSError as error:
        raise _make_unwritten_error(folder, error) from None
    if runlock.is_held(asking):
        raise InputError(
            f"another `surefoot profile` is waiting for a profile of {run}",
            hint="run this command again when that profile is written",
        )
    with runlock.RunLock(asking):
        try:
            found = _wait_for(run, window, levels, tell)
        finally:
            shutil.rmtree(asking, ignore_errors=True)
    if found.get("outcome") != "done":
        raise InputError(
            f"{run} could not record the profile: {found.get('words')}",
            hint="record fewer levels: --with ''",
        )
    return folder


def _wait_for(run: Path, window: Window, levels: Sequence[str], tell: Tell) -> dict[str, object]:
    """Write the request file and wait for the answer. Raises InputError if the run ends before."""
    name, folder = uuid.uuid4().hex, run / FOLDER
    request, answer = folder / REQUEST_FILE, folder / ANSWER_FILE
    asked = {"version": 1, "id": name, "active": window.active, "levels": list(levels)}
    try:
        files.write_whole(run, f"{FOLDER}/{REQUEST_FILE}", json.dumps(asked).encode())
    except OSError as error:
        raise _make_unwritten_error(folder, error) from None
    tell(f"{run} is running: requested a profile of its next {window.active} steps")
    try:
        while True:
            is_over = not runlock.is_held(run)
            found = _read(run, ANSWER_FILE)
            if found.get("id") == name:
                break
            if is_over:
                raise InputError(
                    f"{run} ended before the profile window",
                    hint=f"repeat its last steps: surefoot profile {shlex.quote(str(run))}",
                )
            time.sleep(POLL_S)
    finally:
        if _read(run, REQUEST_FILE).get("id") == name:
            request.unlink(missing_ok=True)
    answer.unlink(missing_ok=True)
    return found


def _make_unwritten_error(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder} cannot be written: {error.strerror}", hint=hint_unwritten(error))


def _read(run: Path, name: str) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        row = json.loads(files.read_bytes(run, f"{FOLDER}/{name}"))
        return row if isinstance(row, dict) else {}
    return {}
