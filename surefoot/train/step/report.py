"""Report of a step, made from its input and its updates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from surefoot.contract.state import StepReport, learning_rate_of
from surefoot.train.step.program import StepDone, StepInput, UpdateDone
from surefoot.train.step.update import Totals


def join_updates(given: StepInput, updates: list[UpdateDone]) -> StepDone:
    """Return a step after its updates: it was applied if all of them were."""
    was_applied: bool | Tensor = True
    overflowed: bool | Tensor = False
    for number, (_, _, applied) in enumerate(updates):
        was_applied = was_applied & applied.was_applied if number else applied.was_applied
        overflowed = overflowed | applied.overflowed
    return StepDone(given, updates, was_applied, overflowed)


def make_report(done: StepDone, num_samples: int, names: Sequence[str]) -> StepReport:
    """Return the report of a step on `num_samples` samples of all ranks.

    `names` are the names of all updates of the task; with several, a loss term is reported as
    `update.term`.
    """
    given, totals, keys = done.given, Totals(), dict[str, tuple[str, ...]]()
    rate: float | Tensor | None = 0.0
    for update, gradients, _ in done.updates:
        mine = gradients.totals
        if len(names) > 1:
            mine = {f"{update.name}.{name}": row for name, row in mine.items()}
        totals.update(mine)
        keys[update.name] = tuple(mine)
        rate = learning_rate_of(update.guarded.optimizers[0].param_groups[0])
    if not given.is_sized:  # the batches do not tell their size
        num_samples = round(float(next((count for _, count, _ in totals.values()), 0)))
    report = StepReport(
        step=given.number,
        epoch=given.epoch,
        num_samples=num_samples,
        learning_rate=rate,
        totals=totals,
        norm=done.updates[0].applied.norm if len(done.updates) == 1 else None,
        was_applied=done.was_applied,
        waiting_s=given.waiting_s,
    )
    report.updates.update(keys)
    return report
