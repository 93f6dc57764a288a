"""Detect a log that lacks its last records, by checkpoints, ledger rows or attempts of later steps.

Before a checkpoint becomes visible, its step is recorded and the log is synced. The ledger is ahead
of the log by at most `observe.every` steps. So in an intact folder the log covers each checkpoint,
even after a kill or a power failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from surefoot.contract import manifest
from surefoot.contract.events import Event, Started
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import RunFolderError, SurefootError
from surefoot.core.units import Duration, name_some

MAX_SHOWN = 8


def find_last_step(records: Iterable[Event]) -> int:
    """Return the last step that `records` cover; 0 if there is none."""
    return max(map(last_step_of, records), default=0)


def last_step_of(event: Event) -> int:
    """Return the last step that is complete according to an event; 0 for an event without a step.

    For the start of an attempt it is the step before its first one.
    """
    return event.first_step - 1 if isinstance(event, Started) else getattr(event, "step", 0)


def find_attempt_gaps(records: Sequence[Event]) -> list[str]:
    """Return a message for each attempt that starts after steps that no earlier record covers.

    Two kinds of attempts are not checked: the first one, which may be a fork, and those with
    checkpoint.store, which may start from a checkpoint of that store.
    """
    last, found = 0, list[str]()
    for number, event in enumerate(records):
        after = last_step_of(event)
        if isinstance(event, Started) and number and after > last and not _has_store(event):
            found.append(
                f"attempt {event.generation} resumed after step {after:,}, but the records "
                f"before it end at step {last:,}: records are missing"
            )
        last = max(last, after)
    return found


def find_unlogged_checkpoints(
    run: Path, steps: Sequence[int], starts: Sequence[Started], last: int
) -> list[str]:
    """Return a message if checkpoints of this run are newer than the last record.

    Args:
        run: The run folder.
        steps: Steps of its checkpoints, listed before the log was read.
        starts: The Started events of the log.
        last: The last step that the log covers.
    """
    if not starts or _has_store(starts[-1]):
        return []
    ids = {event.spec_id for event in starts}
    newer = [step for step in steps if step > last and _is_of_run(run, step, ids)]
    if not newer:
        return []
    names = name_some([f"{step:,}" for step in newer], MAX_SHOWN)
    return [
        (
            f"its records end at step {last:,}, but checkpoints/ has step{'s' * (len(newer) > 1)} "
            f"{names}: records are missing"
        )
    ]


def _is_of_run(run: Path, step: int, spec_ids: set[str]) -> bool:
    """Return whether the checkpoint of `step` has the full state, and a spec id in `spec_ids`."""
    with contextlib.suppress(RunFolderError):
        found = manifest.read(manifest.step_folder(run, step))
        return found.is_whole_state and found.spec_id in spec_ids
    return False


def find_unlogged_rows(last_row: int, starts: Sequence[Started], last: int) -> list[str]:
    """Return a message if the ledger is ahead of the log by more steps than one record covers.

    `last_row` is the last step of the ledger, `starts` are the Started events of the log, and
    `last` is the last step that the log covers.
    """
    intervals = [_record_interval(event) for event in starts]
    known = [each for each in intervals if each is not None]
    if not known or len(known) < len(intervals) or last_row - last <= max(known):
        return []
    return [
        (
            f"its records end at step {last:,}, but ledger.bin has the steps up to {last_row:,}: "
            "records are missing"
        )
    ]


def _record_interval(started: Started) -> int | None:
    """Return how many steps one Step record covers; None if the spec does not give it in steps."""
    with contextlib.suppress(ValidationError, SurefootError):
        every = Duration.parse(RunSpec.of_record(dict(started.spec)).observe.every)
        return int(every.value) if every.unit == "steps" else None
    return None


def _has_store(started: Started) -> bool:
    table = started.spec.get("checkpoint")
    return isinstance(table, Mapping) and table.get("store") is not None
