"""Start of an attempt at an attached loop: its objects, its folder and its saved state."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from surefoot.components.data.sources.watched import ObservedLoader
from surefoot.components.observe.console import Console
from surefoot.components.optim.groups import check_shaped
from surefoot.components.profiler.phases.clock import LOGGING, PhaseClock
from surefoot.contract.run_folder.attached import SPEC_ID
from surefoot.contract.task import Guarantee, check_not_importing
from surefoot.core import place
from surefoot.runtime.comm.group import Group
from surefoot.train import environment
from surefoot.train.attach import loop_ranks
from surefoot.train.attach.arguments import (
    RESUMED_BY_TRAINER,
    check_given,
    describe_changes,
    describe_guarantee,
    find_guarantee,
    find_script,
    given_settings,
    length_of,
    make_started_record,
    name_objects,
)
from surefoot.train.attach.loop_keeper import LoopKeeper
from surefoot.train.attach.loop_progress import LoopProgress
from surefoot.train.attach.loop_ranks import RankedLedger
from surefoot.train.attach.loop_session import LoopLog, LoopSession
from surefoot.train.record.noticed.unheld import UnheldObjects, variables
from surefoot.train.record.telling import RunDamage
from surefoot.train.resume.program import Program
from surefoot.train.session import folder


@dataclass(frozen=True, kw_only=True)
class LoopRequest:
    """Request for an attempt at a loop; the fields are the arguments of `attach`.

    `resumes_itself` is True for a trainer that reads `data` and restores its state by itself, and
    calls only `step_done`, `close_window`, `save` and the end of the session.
    """

    model: nn.Module
    optimizer: Any
    data: Iterable[Any]
    folder: Path | None
    every: int
    save: str | None
    state: Mapping[str, Any] | None
    resumes_itself: bool = False

    @property
    def guarantee(self) -> tuple[Guarantee, str]:
        """Guarantee for a resume in the middle of an epoch, and the reason."""
        return RESUMED_BY_TRAINER if self.resumes_itself else find_guarantee(self.data)

    def settings(self, objects: Mapping[str, Any]) -> dict[str, str]:
        """Return the settings that the script has given, without those that a trainer restored."""
        return {} if self.resumes_itself else given_settings(objects, self.data)


@dataclass(frozen=True, kw_only=True)
class LoopObjects:
    """Objects of a loop that a checkpoint holds, by name, and what was found beside them."""

    objects: Mapping[str, Any]
    unheld: UnheldObjects
    notes: Sequence[str]  # on objects that no checkpoint holds
    notes_on_resume: Sequence[str]


def open_loop(asked: LoopRequest, caller: FrameType) -> LoopSession:
    """Check the objects of a loop, open its folder, and restore a checkpoint if any.

    Variables of `caller` are searched for objects with state that were not given. Raises what
    `attach` raises.
    """
    _check_process()
    optimizers = check_given(asked.model, asked.optimizer, asked.data, asked.state)
    check_shaped(asked.model, "before attach")
    group = loop_ranks.find_group(asked.folder)
    made = _find_objects(asked, optimizers, group, caller)
    device = next((each.device for each in asked.model.parameters()), torch.device("cpu"))
    clock, started_s = PhaseClock(device), time.perf_counter()
    clock.start(LOGGING)
    model = made.objects["model"]
    program = Program.of(find_script(), model)
    choose = functools.partial(
        folder.choose,
        folder.RunFolderRequest(asked.folder),
        SPEC_ID,
        type(model).__name__.lower(),
        program,
        fresh=False,
        accept_code_change=True,
        closed_by=(),
    )
    # closed last: the folder is given back under its lock
    with ExitStack() as unless_open, loop_ranks.acquire_folder(group, choose) as (chosen, lock):
        opened = ExitStack()
        unless_open.callback(opened.close)
        opened.callback(lock.release)
        where, root = folder.make_absolute(chosen.folder), chosen.folder.absolute()
        watched, progress = ObservedLoader(asked.data), LoopProgress(length=length_of(asked.data))
        keeper = LoopKeeper(root, lock, made.objects, watched, asked.save, group)
        settings = functools.partial(asked.settings, made.objects)
        given = settings()
        resumed = _resume(keeper, progress, made, settings, where()) if chosen.is_again else ()
        notes = (*chosen.notes, *resumed, *made.notes)
        ledger = group.settle(lambda: RankedLedger(group, root, watched.promise, lock.generation))
        opened.callback(ledger.close)
        started = functools.partial(
            make_started_record,
            model,
            asked.data,
            asked.guarantee,
            program,
            generation=lock.generation,
            step=progress.step,
            notes=(*notes, describe_guarantee(*asked.guarantee), *loop_ranks.describe(group)),
        )
        journal = loop_ranks.begin_journal(group, root, started)
        console = Console(total_steps=None, unit="samples", quiet=True)
        telling = LoopLog(journal, console, clock, lock.generation, group, opened)
        opened.callback(lambda: telling.journal.abandon())
        opened.callback(watched.close)
        opened.callback(clock.listen_to_collections())
        session = LoopSession(
            optimizers=optimizers,
            program=program,
            given=given,
            every=max(1, asked.every),
            group=group,
            folder=where,
            lock=lock,
            progress=progress,
            keeper=keeper,
            ledger=ledger,
            telling=telling,
            watched=watched,
            unheld=made.unheld,
            clock=clock,
            device=device,
            started_s=started_s,
        )
        _tell(session, chosen, notes if group.is_first else ())
        clock.begin_steps()
        unless_open.pop_all()
    return session


def _check_process() -> None:
    # if not checked, the loop has initialized torch.distributed itself
    if not environment.has_process_group():
        place.check_launcher()
    check_not_importing()


def _find_objects(
    asked: LoopRequest, optimizers: list[Any], group: Group, caller: FrameType
) -> LoopObjects:
    bare = loop_ranks.unwrap_ddp(asked.model, group)
    objects, notes = group.settle(
        lambda: name_objects(bare, optimizers, asked.state or {}, variables(caller))
    )
    unheld = UnheldObjects(objects, optimizers, asked.data)
    return LoopObjects(
        objects=objects,
        unheld=unheld,
        notes=(*notes, *unheld.find(caller)),
        notes_on_resume=loop_ranks.describe_buckets(group, asked.model),
    )


def _resume(
    keeper: LoopKeeper,
    progress: LoopProgress,
    made: LoopObjects,
    settings: Callable[[], Mapping[str, str]],
    run: Path,
) -> tuple[str, ...]:
    """Resume from the newest checkpoint; return the messages for the user.

    `settings` returns those of the objects, which are the script's until the checkpoint is loaded.
    """
    given = settings()
    loop, troubles = keeper.resume()
    if loop is None:
        return ("no checkpoint was found: the loop starts from step 0",)
    progress.restore(loop)
    return (
        *(f"a damaged checkpoint was set aside: {trouble}" for trouble in troubles),
        f"resuming after step {progress.step:,}, with the saved learning rates and settings",
        *keeper.describe_position(),
        *describe_changes(loop.get("given", {}), given, settings(), run),
        *keeper.unfrozen,
        *made.notes_on_resume,
    )


def _tell(session: LoopSession, chosen: folder.Chosen, notes: Sequence[str]) -> None:
    """Print the notes at the start of a loop, and record the damage found in its folder."""
    for note in notes:
        session.telling.warn(note)
    step = session.progress.step
    damage = RunDamage(log=chosen.damaged, lost_commits=session.keeper.lost_commits)
    session.telling.tell_damage(damage, step)
    for fault in session.keeper.find_read_ahead(step):
        session.telling.fault(fault)
