"""Integrity check of a run folder, without torch.

The check covers the spec, the event log, the ledger, and every checkpoint that the log names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.cli import options
from surefoot.cli.operate import stored
from surefoot.contract import commits, events, loop_ledger, spec_file
from surefoot.contract import ledger as ledgers
from surefoot.contract.events import Event, Started
from surefoot.contract.run_folder import attached, gone, log_end
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import RunFolderError, SurefootError
from surefoot.core.units import format_bytes

MAX_SHOWN = 10
WHOLE, DAMAGED, LOST, REMOVED = "whole", "damaged", "lost", "removed"


@dataclass(frozen=True)
class RunPart:
    """Result of checking one part of a run: the spec, the event log, the ledger or a checkpoint.

    `state` is "whole", "damaged", "lost", or "removed" for a checkpoint that retention deleted.
    `found` describes the contents, and `problems` has a message for each problem.
    """

    name: str
    state: str
    found: str
    problems: tuple[str, ...] = ()
    step: int | None = None  # step of a checkpoint

    @property
    def is_whole(self) -> bool:
        return self.state in (WHOLE, REMOVED)

    def as_row(self) -> dict[str, Any]:
        """Return the result as a JSON-compatible dict."""
        named = {"part": self.name} if self.step is None else {"step": self.step}
        return {**named, "state": self.state, "found": self.found, "problems": list(self.problems)}


def _part(name: str, found: str, problems: Sequence[str] = ()) -> RunPart:
    return RunPart(name, DAMAGED if problems else WHOLE, found, tuple(problems))


def check(run: Path) -> list[RunPart]:
    """Check the spec, the event log, the ledger and every byte of every checkpoint of a run.

    Raises:
        RunFolderError: if the folder is not a run.
    """
    damaged: list[str] = []
    # listed before the log is read, which has their steps also while the run continues
    steps = commits.readable_steps(run)
    records = list(events.read(run, damaged=damaged))
    starts = [event for event in records if isinstance(event, Started)]
    problems = [*damaged, *([] if starts else ["it has no 'started' record"])]
    ledger, last_row = _check_ledger(run, starts, records, is_log_whole=not damaged)
    if not problems:
        problems = _find_missing_records(run, records, steps, last_row)
    log = _part(
        "log",
        f"{len(records):,} records, {len(starts):,} attempt{'s' * (len(starts) != 1)}",
        problems,
    )
    return [_check_spec(run, starts), log, ledger, *_check_commits(run, records)]


def _find_missing_records(
    run: Path, records: Sequence[Event], steps: Sequence[int], last_row: int
) -> list[str]:
    """Return a message for each sign that records are missing in a readable event log.

    Signs are an attempt that resumed after steps that the log does not have, and checkpoints or
    ledger rows that the log does not have.

    Args:
        run: run folder.
        records: records of the log.
        steps: steps of the checkpoints in the folder.
        last_row: last step in the ledger.
    """
    starts = [event for event in records if isinstance(event, Started)]
    last = log_end.find_last_step(records)
    found = [
        *log_end.find_attempt_gaps(records),
        *log_end.find_unlogged_checkpoints(run, steps, starts, last),
    ]
    if found or not log_end.find_unlogged_rows(last_row, starts, last):
        return found
    # a run that continues may have written the rows after the log was read
    last = log_end.find_last_step(events.read(run, damaged=[]))
    return log_end.find_unlogged_rows(last_row, starts, last)


def find_lost(run: Path) -> list[gone.Gone]:
    """Return the checkpoints that the event log names, but that are missing and were not deleted.

    Deletions by surefoot, such as retention, do not count. Without a readable log, the list is
    empty.
    """
    with contextlib.suppress(RunFolderError):
        return [each for each in gone.find_gone(run) if each.is_lost]
    return []


def why_unread(run: Path) -> str | None:
    """Return why the event log does not show which checkpoints should exist; None if it does."""
    damaged: list[str] = []
    try:
        records = list(events.read(run, Started, damaged=damaged))
    except RunFolderError as error:
        return error.message
    return damaged[0] if damaged else None if records else "the log has no 'started' record"


def _check_commits(run: Path, records: Sequence[Event]) -> Iterator[RunPart]:
    """Check every checkpoint that is in the folder or in the log; yield one result per step."""
    steps = sorted({*commits.readable_steps(run), *gone.find_named(records)})
    folders = {step: commits.find_folder(run, step) for step in steps}
    healths = {
        step: stored.check_commit(folder) for step, folder in folders.items() if folder is not None
    }
    # includes checkpoints that retention deleted meanwhile
    missing = {each.step: each for each in gone.find_gone(run, records)}
    for step in steps:
        if step in missing:
            yield _part_of_missing(missing[step])
        elif step in healths:
            yield _check_present_checkpoint(step, healths[step])


def _part_of_missing(missing: gone.Gone) -> RunPart:
    name = f"step {missing.step:,}"
    if missing.is_lost:
        return RunPart(name, LOST, "", (missing.why,), missing.step)
    return RunPart(name, REMOVED, missing.why, (), missing.step)


def _check_present_checkpoint(step: int, health: stored.CommitHealth) -> RunPart:
    found = f"{health.num_files} files, {format_bytes(health.num_bytes)}"
    return RunPart(
        f"step {step:,}", WHOLE if health.is_sound else DAMAGED, found, health.damaged, step
    )


def _check_spec(run: Path, starts: Sequence[Started]) -> RunPart:
    logged = starts[-1].spec_id if starts else None
    if logged == attached.SPEC_ID:
        return _part("spec", "none: the run is a user-defined loop")
    try:
        spec = spec_file.read_of_run(run, checks_task=False).spec
    except SurefootError as error:
        return _part("spec", "", [error.message])
    if logged is not None and spec.id != logged:
        return _part(
            "spec",
            f"id {spec.id}",
            [
                f"{spec_file.FILE} has the id {spec.id}, but the log has the spec id {logged}",
            ],
        )
    return _part("spec", f"id {spec.id}")


# ---- the ledger


def _check_ledger(
    run: Path, starts: Sequence[Started], records: Sequence[Event], *, is_log_whole: bool
) -> tuple[RunPart, int]:
    """Check the ledger, the record of consumed samples, also against the event log.

    Return the result and the last step in the ledger, which is 0 if the ledger cannot be read.

    Args:
        run: run folder.
        starts: `Started` records of the log.
        records: all records of the log.
        is_log_whole: True if no record of the log is damaged.
    """
    committed = max(gone.find_named(records), default=0)
    try:
        found, last, attempts, problems = _judge_ledger(run, starts[-1] if starts else None)
    except SurefootError as error:
        return _part("ledger", "", [error.message]), 0
    except OSError as error:
        return _part("ledger", "", [f"{run / ledgers.FILE} cannot be read: {error.strerror}"]), 0
    if committed > last:
        problems.append(
            f"it ends at step {last:,}, but the log names a checkpoint of step {committed:,}"
        )
    known = {event.generation for event in starts}
    if is_log_whole and (others := sorted(set(attempts) - known)):
        problems.append(
            f"it has steps of attempt {', '.join(map(str, others))}, which the log does not have"
        )
    if len(problems) > MAX_SHOWN:
        problems[MAX_SHOWN:] = [f"and {len(problems) - MAX_SHOWN:,} more"]
    return _part("ledger", found, problems), last


def _judge_ledger(
    run: Path, started: Started | None
) -> tuple[str, int, tuple[int, ...], list[str]]:
    """Return a summary of the ledger, its last step, its attempts, and its problems."""
    if loop_ledger.is_loop_run(run):
        loop = loop_ledger.check(run)
        # an epoch that the loop has left is recorded as it was
        told = [f"{each.kind}: {each.told}" for each in loop.faults if each.kind != "left"]
        return (
            f"{_steps(0, loop.last)}, {loop.num_batches:,} batches",
            loop.last,
            loop.attempts,
            told,
        )
    options.import_torch()
    from surefoot.components.data import consumed

    plan = consumed.check(run)
    told = [f"{each.kind}: {each.told}" for each in plan.faults]
    if started is not None:
        told += _find_other_plan(plan.plan, started)
    return (
        f"{_steps(plan.after, plan.last)}, {plan.num_samples:,} samples",
        plan.last,
        plan.attempts,
        told,
    )


def _steps(after: int, last: int) -> str:
    return f"steps {after + 1:,} to {last:,}" if last > after else "no step"


def _find_other_plan(plan: ledgers.Plan, started: Started) -> list[str]:
    """Return a message for each value in the ledger's plan that differs from the logged spec."""
    try:
        spec = RunSpec.of_record(dict(started.spec))
    except SurefootError:
        return []  # reported by the check of the spec
    stated = {"seed": spec.train.seed, "batch": spec.train.step_batch}
    planned = {"seed": plan.seed, "batch": plan.batch}
    return [
        f"it has train.{key} = {planned[key]}, but the log has {stated[key]}"
        for key in stated
        if planned[key] != stated[key]
    ]
