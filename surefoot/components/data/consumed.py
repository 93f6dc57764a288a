"""Comparison of a run's ledger with its plan.

The ledger is the record of the samples that each step consumed; the plan has the settings that
determine these samples. The ledger must contain each step once, in order, with the samples that
follow from the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from surefoot.components.data.blocks import MixtureOrder, MixturePlan, Order
from surefoot.components.data.feed import Feed
from surefoot.contract import ledger, manifest, runlock
from surefoot.contract.ledger import LedgerFault, Plan, Row
from surefoot.contract.task import Source
from surefoot.core.errors import DataError, RunFolderError

SEARCHED = 1 << 20  # positions of an epoch computed at once


class Use(NamedTuple):
    """Step and epoch in which a sample was consumed, both counted from 1."""

    step: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class ConsumedCheck:
    """Result of comparing the ledger of a run with its plan.

    The ledger ends with step `last`; `num_samples` and `epochs` are what the run consumed.
    `attempts` are the numbers of the run's attempts. `num_overruled` counts the rows of steps that
    a later attempt repeated. `after` is the last step before the plan begins, in a fork of another
    run; otherwise it is 0. `torn_bytes` is the size of an incomplete last row, which a killed
    process leaves. Without `faults`, the ledger agrees with the plan.
    """

    plan: Plan
    after: int
    last: int
    attempts: tuple[int, ...]
    num_rows: int
    num_overruled: int
    num_samples: int
    epochs: float
    torn_bytes: int
    faults: tuple[LedgerFault, ...]

    @property
    def holds(self) -> bool:
        return not self.faults


def check(run: Path) -> ConsumedCheck:
    """Compare every step in the ledger of the run folder `run` with the plan.

    Raises RunFolderError for a folder without a ledger.
    """
    plan, after = ledger.read_plan(run), ledger.read_after(run)
    feed = make_feed_of_plan(plan)
    rows = list(ledger.read(run))
    kept, overruled = ledger.consumed(rows)
    faults = [
        *_find_attempt_faults(run, rows),
        *_order(rows, after),
        *_find_missing_end(run, kept, after),
        *_other_samples(feed, rows),
        *ledger.find_other_data(ledger.read_faults(run)),
    ]
    steps = {row.step for row in kept}
    samples = _samples(feed, steps)
    return ConsumedCheck(
        plan=plan,
        after=after,
        last=max(steps, default=after),
        attempts=tuple(sorted({row.generation for row in rows} - {0})),
        num_rows=len(rows),
        num_overruled=overruled,
        num_samples=samples,
        epochs=_epochs(feed, steps, samples),
        torn_bytes=(run / ledger.FILE).stat().st_size % ledger.ROW.size,
        faults=tuple(sorted(faults, key=lambda each: each.step)),
    )


def find_sample(run: Path, sample: int) -> list[Use]:
    """Return each step of the run that consumed sample `sample`.

    Steps that were discarded by a restart from an earlier step are left out. Raises RunFolderError
    for a sample that the data set does not have.
    """
    plan = ledger.read_plan(run)
    feed: Any = make_feed_of_plan(plan)
    num_samples = sum(feed.order.plan.sizes) if plan.mixture else plan.samples
    if not 0 <= sample < num_samples:
        raise RunFolderError(
            f"the data set has no sample {sample}",
            hint=f"the data set has {num_samples:,} samples, counted from 0",
        )
    kept = {row.step for row in ledger.consumed(ledger.read(run))[0]}
    epochs = sorted({feed.window(step - 1).epoch for step in kept})
    found = (
        Use(feed.step_of(epoch, position) + 1, epoch + 1)
        for epoch in epochs
        for position in _positions(feed, epoch, sample, num_samples)
    )
    return [use for use in found if use.step in kept]


def make_feed_of_plan(plan: Plan) -> Feed:
    """Return the `Feed` (batch sampler) that `plan` describes.

    It has no source, so it cannot read samples.
    """
    order: Any = Order(
        plan.samples, plan.seed, shuffle=plan.shuffle, chunk=plan.chunk, window=plan.window
    )
    if plan.mixture:
        try:
            mixture = MixturePlan.from_text(plan.mixture)
        except DataError as error:
            raise RunFolderError(
                f"the plan of the ledger is damaged: {error.message}",
                hint="copy the file from a backup of the run folder",
            ) from None
        order = MixtureOrder(plan.samples, plan.seed, mixture, plan.shuffle)
    return Feed(
        cast(Source, None), order, batch=plan.batch, drop_last=plan.drop_last, ramp=plan.ramp
    )


def plan_of(feed: Feed) -> Plan:
    """Return the plan of a feed: the settings that determine which samples each step consumes."""
    order = feed.order
    return Plan(
        samples=order.n,
        seed=order.seed,
        shuffle=order.shuffle,
        batch=feed.batch,
        drop_last=feed.dropped > 0,
        ramp=feed.ramp,
        chunk=order.chunk,
        window=order.window,
        mixture=order.plan.as_text() if hasattr(order, "plan") else "",
    )


def _positions(feed: Feed, epoch: int, sample: int, num_samples: int) -> Iterator[int]:
    """Yield the positions of a sample in an epoch: none if it is dropped, several in a mixture."""
    end = feed.order.n - feed.dropped
    for start in range(0, end, SEARCHED):
        found = feed.order.ids(epoch, start, min(start + SEARCHED, end)) % num_samples
        for hit in np.flatnonzero(found == sample).tolist():
            yield start + hit


def _samples(feed: Feed, steps: set[int]) -> int:
    """Return the total number of samples in the given steps.

    The last step of an epoch may have fewer samples.
    """
    return sum(feed.samples_after(step) - feed.samples_after(step - 1) for step in steps)


def _epochs(feed: Feed, steps: set[int], samples: int) -> float:
    return (
        samples / feed.order.n
        if feed.steps_per_epoch is None
        else len(steps) / feed.steps_per_epoch
    )


def _find_attempt_faults(run: Path, rows: list[Row]) -> list[LedgerFault]:
    """Return faults in the attempt numbers of the ledger rows.

    The numbers must not decrease, and must not exceed the attempt number in the run lock. Attempt 0
    marks the rows that a fork took over from its parent run.
    """
    newest = runlock.read_generation(run)
    taken_over = [row.step for row in rows if row.generation == 0]
    found, before = [], 0
    if taken_over and taken_over[-1] != _read_fork_step(run):
        found.append(
            LedgerFault(
                "damaged",
                taken_over[-1],
                (
                    f"the rows up to step {taken_over[-1]:,} belong to no attempt, and "
                    "this run is not a fork from that step"
                ),
            )
        )
    for row in rows:
        if row.generation < before or (newest and row.generation > newest):
            found.append(
                LedgerFault(
                    "damaged",
                    row.step,
                    f"attempt {row.generation} is written after attempt {before}",
                )
            )
        else:
            before = row.generation
    return found


def _read_fork_step(run: Path) -> int | None:
    """Return the step of the parent from which this run was forked; None if it is not a fork.

    The checkpoints of the run record the step.
    """
    for step in reversed(manifest.steps(run)):
        with contextlib.suppress(RunFolderError):
            parent = manifest.read(manifest.step_folder(run, step)).parent
            return None if parent is None else parent.get("step")
    return None


def _order(rows: list[Row], after: int) -> list[LedgerFault]:
    """Return faults in the step numbers of the ledger rows.

    Each attempt must have consecutive steps, and start at most one step after the last step of the
    previous attempt.
    """
    found: list[LedgerFault] = []
    before = Row(after, -1, 0)
    for row in rows:
        if row.step > before.step + 1:
            gone = (
                f"step {before.step + 1:,} is"
                if row.step == before.step + 2
                else f"steps {before.step + 1:,} to {row.step - 1:,} are"
            )
            found.append(LedgerFault("lost", before.step + 1, f"{gone} missing"))
        elif row.step <= after or (row.step < before.step and row.generation == before.generation):
            found.append(
                LedgerFault(
                    "out of order", row.step, f"step {row.step:,} follows step {before.step:,}"
                )
            )
        elif row.step == before.step and row.generation == before.generation:
            found.append(LedgerFault("twice", row.step, f"step {row.step:,} has two rows"))
        before = row
    return found


def _find_missing_end(run: Path, kept: list[Row], after: int) -> list[LedgerFault]:
    """Return a fault if the ledger lacks the last steps before the newest checkpoint.

    The rows of a step are written to disk before its checkpoint, so they should be there.
    """
    committed, last = (
        max(manifest.steps(run), default=0),
        max((row.step for row in kept), default=after),
    )
    if committed <= last:
        return []
    return [
        LedgerFault(
            "lost",
            last + 1,
            (
                f"steps {last + 1:,} to {committed:,} are missing, but there is a "
                f"checkpoint of step {committed:,}"
            ),
        )
    ]


def _other_samples(feed: Feed, rows: list[Row]) -> list[LedgerFault]:
    return [
        LedgerFault(
            "other samples", row.step, f"step {row.step:,} did not consume the samples of the plan"
        )
        for row in rows
        if row.step < 1 or ledger.checksum(feed.window(row.step - 1).ids) != row.checksum
    ]
