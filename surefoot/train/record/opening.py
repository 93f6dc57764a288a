"""Outputs of a run, opened: its log, TensorBoard, and the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.components.observe import Console, Journal, NoJournal, TensorBoard
from surefoot.components.stability import Guard
from surefoot.train.folder import Chosen
from surefoot.train.record.compiling import watch
from surefoot.train.record.noticed.movement import Movement
from surefoot.train.record.telling import Telling

if TYPE_CHECKING:
    from surefoot.train.run import Run


def open_records(run: Run, home: Path, chosen: Chosen) -> tuple[Journal | NoJournal, TensorBoard]:
    """Open the log and TensorBoard of a rank below `home`; neither, if the run has ended."""
    is_wanted = run.group.is_first and chosen.done is None
    tensorboard = TensorBoard(
        home / "tensorboard",
        wanted=run.spec.observe.tensorboard if is_wanted else False,
        purge_step=run.step + 1 if chosen.is_again else None,
    )
    return Journal(home) if chosen.done is None else NoJournal(), tensorboard


def open_console(run: Run, *, quiet: bool) -> Console:
    """Return the console of a run, on which rank 0 alone prints."""
    return Console(
        total_steps=run.assembly.course.total_steps,
        unit=run.task.unit,
        quiet=quiet or not run.group.is_first,
        done_steps=run.step,
    )


def make_telling(
    run: Run, journal: Journal | NoJournal, tensorboard: TensorBoard, console: Console, guard: Guard
) -> Telling:
    """Return what an attempt at a run is recorded with."""
    engine = run.assembly.engine
    return Telling(
        journal,
        tensorboard,
        console,
        guard,
        engine.stepper.clock,
        run.generation,
        watch(engine.compiled, run.spec.compile),
        Movement(run.model, run.step),
    )
