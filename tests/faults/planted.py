"""Faults that a forked trial may be asked to plant.

Each breaks one thing that surefoot does right.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit
from surefoot.contract import commits, manifest
from surefoot.contract.runlock import RunLock
from surefoot.core.process import signals
from surefoot.prove.campaigns.jobs import Job, Line
from surefoot.prove.campaigns.probe import ProbedRun
from surefoot.prove.campaigns.workshop import Child, Workshop
from surefoot.train.resume.keeper import CheckpointManager
from surefoot.train.run import Run

SYNC = os.fsync
# the module, which a function of the package hides
save = sys.modules["surefoot.components.checkpoint.save"]


class PlantedWorkshop(Workshop):
    """A workshop whose trials have the fault `plant`.

    What they are compared with is made without it; a recording of file operations has it.
    """

    plant: Callable[[], None] | None = None

    def fork(self, job: Job, attempt: ProbedRun) -> Child:
        return super().fork(
            job if self.plant is None else partial(run_planted, self.plant, job), attempt
        )

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if "recording" in key:
            return super().cached((*key, self.plant), make)
        plant, self.plant = self.plant, None
        try:
            return super().cached(key, make)
        finally:
            self.plant = plant


def run_planted(plant: Callable[[], None], job: Job, attempt: ProbedRun, line: Line) -> int:
    plant()
    return job(attempt, line)


def sync_unless(is_kind: Callable[[int], bool]) -> None:
    os.fsync = lambda descriptor: (
        None if is_kind(os.fstat(descriptor).st_mode) else SYNC(descriptor)
    )


def no_sync_of_files() -> None:
    sync_unless(stat.S_ISREG)


def no_sync_of_folders() -> None:
    sync_unless(stat.S_ISDIR)


def no_sync_of_new_parents() -> None:
    save._make_folders = lambda run, draft: draft.mkdir(parents=True, mode=0o700)


def rename_before_sync() -> None:
    late: list[int] = []
    replace = save._replace

    def replace_and_sync(final: Path, draft: Path) -> None:
        replace(final, draft)
        for descriptor in late:
            SYNC(descriptor)
            os.close(descriptor)
        late.clear()

    os.fsync = lambda descriptor: late.append(os.dup(descriptor))
    save._replace = replace_and_sync


def old_ones_deleted_first() -> None:
    commit = checkpoint.commit

    def commit_after(run: Path, *given: Any, **more: Any) -> Any:
        for step in manifest.steps(run):
            commits.remove(manifest.step_folder(run, step))
        return commit(run, *given, **more)

    checkpoint.commit = commit_after


def a_pointer_taken_as_truth() -> None:
    commit = checkpoint.commit

    def commit_pointed(run: Path, content: Any, *given: Any, **more: Any) -> Any:
        (run / "latest").write_text(str(content.step))
        return commit(run, content, *given, **more)

    def newest(run: Path, load: Callable[[Commit], None]) -> tuple[int, list[str]]:
        step = int((run / "latest").read_text())
        load(Commit(run, step))
        return step, []

    checkpoint.commit, checkpoint.newest_loadable = commit_pointed, newest


def after_resume(then: Callable[[CheckpointManager], None]) -> None:
    resume = CheckpointManager.resume

    def resume_and(self: CheckpointManager) -> Any:
        found = resume(self)
        if found[0] is not None:
            then(self)
        return found

    CheckpointManager.resume = resume_and


def a_last_bit_off_on_resume() -> None:
    def move(keeper: CheckpointManager) -> None:
        weight = next(keeper._assembly.model.parameters())
        weight.data.flatten()[0] *= 1 + torch.finfo(weight.dtype).eps

    after_resume(move)


def begun_anew_on_resume() -> None:
    CheckpointManager.resume = lambda self: (None, 0, [])


def a_loaded_commit_is_used_up() -> None:
    after_resume(
        lambda keeper: shutil.rmtree(manifest.step_folder(keeper._folder, keeper.saved_step))
    )


def deaf_to_sigterm() -> None:
    signals.listen = lambda number, on_signal, once=True: lambda: None


def nothing_saved_at_the_end() -> None:
    commit = Run._commit
    Run._commit = lambda self, last=False: (
        None if last and self.is_stopping == "interrupted" else commit(self, last=last)
    )


def no_lock() -> None:
    RunLock._lock = lambda self, folder: None


def a_stale_attempt_may_commit() -> None:
    RunLock._is_current = lambda self: True


def the_newest_by_time() -> None:
    steps = commits.readable_steps
    commits.readable_steps = lambda run: sorted(
        steps(run), key=lambda step: manifest.step_folder(run, step).stat().st_mtime
    )
