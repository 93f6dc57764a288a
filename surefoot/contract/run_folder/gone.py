"""Find checkpoints that the log of a run names but its folder lacks: deleted or lost ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.contract import commits, events, manifest
from surefoot.contract.events import Committed, Event, Started
from surefoot.contract.run_folder import removals
from surefoot.contract.run_folder.removals import Removal
from surefoot.contract.run_folder.retention import MIN_CHECKPOINTS
from surefoot.contract.spec import CheckpointTable


@dataclass(frozen=True)
class Gone:
    """Checkpoint that the log of a run names but its folder lacks.

    `is_lost` is False if surefoot deleted the checkpoint, or may have deleted it. `why` is the
    reason in words.
    """

    step: int
    is_lost: bool
    why: str


def find_gone(run: Path, records: Sequence[Event] | None = None) -> list[Gone]:
    """Return the checkpoints that the log of `run` names but its folder lacks, in order of steps.

    `records` are the records of the log if they were read before; None reads them. Raises
    RunFolderError for a folder that is not a run.
    """
    if records is None:
        records = list(events.read(run, Started, Committed, damaged=[]))
    named = find_named(records)
    missing = [step for step in named if commits.find_folder(run, step) is None]
    if not missing:
        return []
    removed, kept = removals.read(run), sorted(named)[-_min_num_kept(records) :]
    return [
        _explain_missing(run, step, named[step], removed, is_kept=step in kept) for step in missing
    ]


def find_named(records: Sequence[Event]) -> dict[int, int]:
    """Return the step of each checkpoint in `records` and its generation, in ascending order.

    The generation is the number of the attempt that wrote the checkpoint.
    """
    named = {
        event.step: event.generation
        for event in events.newest(
            each for each in records if isinstance(each, Started | Committed)
        )
        if isinstance(event, Committed)
    }
    return dict(sorted(named.items()))


def describe_lost(gone: Sequence[Gone], after: int) -> str:
    """Return a sentence about the lost checkpoints newer than step `after`; "" if none is lost."""
    lost = [each for each in gone if each.is_lost and each.step > after]
    if not lost:
        return ""
    steps = ", ".join(f"{each.step:,}" for each in lost)
    return (
        f"the log names the checkpoint of step{'s' if len(lost) > 1 else ''} {steps}, "
        "and it is not in checkpoints/"
    )


def _explain_missing(
    run: Path, step: int, generation: int, removed: Sequence[Removal], *, is_kept: bool
) -> Gone:
    """Return whether a missing checkpoint is lost, and why it is missing.

    A checkpoint whose deletion is recorded in `removed` is not lost. One that was set aside because
    it was damaged is lost. Any other is lost in three cases: it existed when the run first recorded
    a deletion, it was written later, or it is one that retention keeps (`is_kept`).
    """
    if any(
        each.step == step and (each.generation is None or each.generation >= generation)
        for each in removed
    ):
        return Gone(step, False, "deleted by surefoot, by the retention or by `checkpoint prune`")
    if aside := sorted(
        path.name
        for path in (run / manifest.FOLDER).glob(
            f"{commits.BAD}{manifest.step_folder(run, step).name}*"
        )
    ):
        return Gone(step, True, f"it was damaged and set aside: {aside[0]}")
    if removed:
        first = (removed[0].step, *removed[0].others)
        is_kept = is_kept or step in first or step > max(first)
    if is_kept:
        return Gone(step, True, "the log names it, and surefoot did not delete it")
    return Gone(
        step,
        False,
        "deleted by retention or by a user: this run has no record of deletions at that time",
    )


def _min_num_kept(records: Sequence[Event]) -> int:
    """Return how many of the newest checkpoints every attempt of this run keeps, by its specs."""
    specs = [event.spec for event in records if isinstance(event, Started)]
    return min((_keep_of(spec.get("checkpoint")) for spec in specs), default=MIN_CHECKPOINTS)


def _keep_of(table: object) -> int:
    stated = table if isinstance(table, Mapping) else {}
    keep = stated.get("keep", CheckpointTable().keep)
    return (
        keep
        if isinstance(keep, int) and keep >= MIN_CHECKPOINTS and stated.get("budget") is None
        else MIN_CHECKPOINTS
    )
