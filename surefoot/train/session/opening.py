"""Start of an attempt at a run: its ranks, its parts, its folder, and the state to resume from."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.components.checkpoint import SaveResult
from surefoot.components.observe.console import Console
from surefoot.components.profiler.phases import clock as phases
from surefoot.contract.runlock import RunLock
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import RunFolderError
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.mesh import Mesh
from surefoot.train import environment, preflight
from surefoot.train.assemble import Assembly, assemble, take_task
from surefoot.train.failure.ending import StopRequests
from surefoot.train.record.profiling import Profiling
from surefoot.train.record.telling import RunDamage, make_telling, open_records
from surefoot.train.resume import together
from surefoot.train.resume.keeper import CheckpointManager
from surefoot.train.resume.program import Program
from surefoot.train.resume.start import (
    RunStart,
    Start,
    begin,
    check_as_stated,
    check_can_restart,
    check_same_data,
)
from surefoot.train.session import folder
from surefoot.train.session.folder import Chosen, RunFolderRequest, make_absolute
from surefoot.train.session.session import Progress, RunSession


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Request for an attempt at a run; the fields are the arguments of `Run`."""

    spec: RunSpec
    task: Any
    wanted: RunFolderRequest
    fresh: bool
    accept_code_change: bool
    accept_data: bool
    quiet: bool
    start: Start | None


class PreparedRun(NamedTuple):
    """A checked run before its folder is opened: program, parts, and choice of its folder."""

    program: Program
    assembly: Assembly
    choose: Callable[[], Chosen]
    damaged: Sequence[str]  # messages on damage of the log
    notes: list[str]


def open_session(asked: RunRequest, opened: ExitStack, stops: StopRequests) -> RunSession:
    """Build and check a run on all ranks, open its folder, and restore a checkpoint if any.

    What has to be closed at the end is added to `opened`. Raises InputError before anything is
    written.
    """
    join_notes: list[str] = []  # messages on the connection of the ranks
    group = opened.enter_context(together.join_ranks(asked.spec, join_notes))
    mesh = together.make_mesh(group, asked.spec)
    made = group.settle(lambda: _prepare(asked, mesh))
    made.assembly.warnings.extend(join_notes)
    together.check_alike(group, made.assembly, made.program, asked.wanted())
    spec = environment.as_run(made.assembly.spec) if asked.start is None else None
    with together.acquire_run_folder(group, made.choose, spec) as (chosen, lock):
        opened.callback(lock.release)
        session = _open(asked, made, group, chosen, lock, opened, stops)
    say = session.telling.console.say
    stops.listen(opened, session.keeper.ask, say, lambda: session.progress.step)
    made.assembly.engine.steps.clock.switch(phases.OTHER)
    return session


def _prepare(asked: RunRequest, mesh: Mesh) -> PreparedRun:
    """Build all parts of a run, choose its folder and check the run before it starts.

    Nothing is written. Raises InputError for a run that cannot be started.
    """
    environment.set_seeds(asked.spec.train.seed)
    task, spec = take_task(asked.spec, asked.task)
    program = Program.of(task.importable, task.task)
    # before any code of the task may change the working folder
    spec = environment.with_whole_paths(spec)
    choose = functools.partial(
        folder.choose,
        asked.wanted,
        spec.id,
        task.name,
        program,
        fresh=asked.fresh,
        accept_code_change=asked.accept_code_change,
        is_fork=asked.start is not None,
        checks_log=False,
        spec=spec,
    )
    chosen = choose(checks_log=mesh.whole.is_first)
    check_as_stated(chosen, spec, task)  # before the data are read
    assembly = assemble(spec, task, mesh=mesh)
    checked = preflight.check(assembly, is_again=chosen.is_again)
    return PreparedRun(program, assembly, choose, chosen.damaged, [*assembly.notes, *checked])


def _open(
    asked: RunRequest,
    made: PreparedRun,
    group: Group,
    chosen: Chosen,
    lock: RunLock,
    opened: ExitStack,
    stops: StopRequests,
) -> RunSession:
    """Open the files of the run, restore a checkpoint if any, and write the Started record."""
    assembly, spec = made.assembly, made.assembly.spec
    where, root = make_absolute(chosen.folder), chosen.folder.absolute()
    stops.outcome = chosen.done
    progress = Progress(assembly)
    together.clear_drafts(group, where())
    begun = None
    if asked.start is not None:
        begun = _begin_with(asked.start, chosen, where, progress, assembly, group)
    keeper = CheckpointManager(root, lock, assembly, None if begun is None else begun.parent, group)
    if begun is None:
        first, troubles = list[SaveResult](), _resume(asked, chosen, keeper, progress, assembly)
    else:
        first, troubles = _commit_first(begun.step, where(), keeper, progress, assembly, group), []
    home = together.home_of(group, root)
    journal, tensorboard = open_records(
        home, chosen, is_first=group.is_first, wanted=spec.observe.tensorboard, step=progress.step
    )
    opened.callback(tensorboard.abandon)  # after the log is closed
    opened.callback(journal.abandon)
    ledger = together.open_ledger(group, root, assembly, lock.generation)
    opened.callback(ledger.close)
    clock = assembly.engine.steps.clock
    opened.callback(clock.listen_to_collections())
    started_s = time.perf_counter()
    clock.start(phases.LOGGING)
    since = progress.step if progress.is_resumed else None
    notes = chosen.describe_start(since) if begun is None else begun.notes
    messages = (*chosen.notes, *notes, *assembly.said)
    warnings = (*keeper.disk_note(), *assembly.warnings)
    start_fields = environment.as_run(spec), made.program, (*messages, *warnings, *made.notes)
    journal.begin(
        assembly.make_started_record(
            lock.generation, *start_fields, first_step=progress.step + 1, parent=keeper.parent or {}
        )
    )
    tensorboard.begin(lock.generation)
    opened.callback(together.release_other_ranks(group, assembly))
    console = _make_console(assembly, progress.step, quiet=asked.quiet or not group.is_first)
    opened.callback(console.close)
    telling = make_telling(assembly, lock.generation, journal, tensorboard, console, progress)
    opened.callback(telling.subscribe(assembly.engine.steps.reader.loader))
    profiling = Profiling(home, assembly, console.say)
    opened.callback(profiling.close)
    session = RunSession(
        assembly=assembly,
        program=made.program,
        group=group,
        folder=where,
        home=home,
        lock=lock,
        progress=progress,
        keeper=keeper,
        ledger=ledger,
        telling=telling,
        profiling=profiling,
        stops=stops,
        started_s=started_s,
    )
    damage = RunDamage(
        log=made.damaged,
        commits=troubles,
        lost_commits=keeper.lost_commits,
        num_lost_rows=ledger.count_lost(progress.step),
        other_data=progress.other_data,
    )
    telling.tell_damage(damage, progress.step)
    telling.begin((*messages, f"run folder {where()}"), warnings if group.is_first else ())
    for saved in first:
        session.on_save(saved)
    return session


def _make_console(assembly: Assembly, done_steps: int, *, quiet: bool) -> Console:
    """Return the console of a rank, on which ranks other than 0 print nothing but warnings."""
    return Console(
        total_steps=assembly.course.total_steps,
        unit=assembly.task.unit,
        quiet=quiet,
        done_steps=done_steps,
    )


def _resume(
    asked: RunRequest,
    chosen: Chosen,
    keeper: CheckpointManager,
    progress: Progress,
    assembly: Assembly,
) -> list[str]:
    """Resume from the newest undamaged checkpoint, if any; return messages on damage."""
    if not chosen.is_again and assembly.spec.checkpoint.store is None:
        return []
    if chosen.is_again:
        check_same_data(chosen, assembly.feed.source.digest)
    saved, step, troubles = keeper.resume()
    if saved is None:
        check_can_restart(chosen)
    else:
        progress.restore(step, saved, accept_data=asked.accept_data)
    return troubles


def _begin_with(
    start: Start,
    chosen: Chosen,
    where: Callable[[], Path],
    progress: Progress,
    assembly: Assembly,
    group: Group,
) -> RunStart:
    """Load `start`. Raises RunFolderError if it does not fit or the folder holds a run."""
    if chosen.is_again:
        raise RunFolderError(
            f"{chosen.folder} already holds a run, and stays unchanged",
            hint=(
                "resume an unfinished run without start=: surefoot resume "
                f"{str(chosen.folder)!r}; else start in a new folder"
            ),
        )
    begun = begin(start, assembly)
    if begun.saved is not None:
        progress.restore(begun.step, begun.saved, accept_data=True)
        progress.scores.begin_fork(progress.num_samples, progress.training_s)
        if group.is_first:
            together.begin_fork(start.run, where(), assembly.feed, begun.step)
    return begun


def _commit_first(
    step: int,
    run: Path,
    keeper: CheckpointManager,
    progress: Progress,
    assembly: Assembly,
    group: Group,
) -> list[SaveResult]:
    """Save the initial state before the first record, so that a killed fork can resume."""
    clock, done = progress.scores.clock(progress.training_s), list[SaveResult]()
    keeper.saved_step = -1
    if group.is_first:
        folder.announce_fork(run, environment.as_run(assembly.spec))
    score = progress.scores.score_of(step)
    keeper.save(step, progress.state(), clock, score, done.append, last=True)
    for problem in filter(None, (each.error for each in done)):
        raise problem
    return done
