"""Check for skipped steps and losses that are far too high.

The check ends a run that cannot recover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.contract.spec import StabilityTable
from surefoot.contract.state import StepReport
from surefoot.core.errors import NumbersError

DIVERGED_STEPS = 5
_REMEMBERED = (
    "_applied_before",
    "_skips_in_row",
    "_high_in_row",
    "_first_loss",
    "num_skipped",
    "num_empty",
)
MIN_REFERENCE = 1.0  # a first loss near zero is not a reference for later losses


@dataclass(frozen=True)
class GuardFault:
    """Fault in a run, and the action that was taken.

    The fault is recorded as an event. If `is_printed` is true, it is also printed.
    """

    step: int
    fault: str
    action: str
    detail: str
    is_printed: bool = True  # in addition to the event


class Guard:
    """Check of step reports for skipped steps and divergence.

    The reports of a window of steps are checked together, so that the host does not wait for an
    asynchronous device after each step.

    Args:
        table: The table [stability] of a spec.
        min_scale: Loss scale below which the run ends.
        total_steps: Length of the run; None if it is not known. A run whose steps are all skipped
            as non-finite ends with an error, even if they are fewer than `max_skips`.
    """

    def __init__(
        self, table: StabilityTable, *, min_scale: float = 0.0, total_steps: int | None = None
    ) -> None:
        self._table, self._min_scale = table, min_scale
        self._most_first = min(table.max_skips, total_steps or table.max_skips)
        self._unread: list[StepReport] = []
        self._applied_before = False
        self._skips_in_row = 0
        self._high_in_row = 0
        self._first_loss: float | None = None
        self._ending: NumbersError | None = None
        # num_empty: the skipped steps whose loss counted no item
        self.num_skipped = self.num_empty = 0

    def state(self) -> dict[str, Any]:
        """Return the counters for a checkpoint.

        Call `judge` before, so that the counters include all reports.
        """
        return {name: getattr(self, name) for name in _REMEMBERED}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the counters from `state`, as the method `state` returned it for a checkpoint."""
        for name in _REMEMBERED:
            # older checkpoints have fewer fields
            setattr(self, name, state.get(name, getattr(self, name)))

    def watch(self, report: StepReport) -> None:
        self._unread.append(report)

    def judge(self, step: int) -> list[GuardFault]:
        """Check the reports since the last call, and return the faults."""
        reports, self._unread = self._unread, []
        return [fault for report in reports if (fault := self._judge(report)) is not None]

    def _judge(self, report: StepReport) -> GuardFault | None:
        loss = report.loss
        may_be_empty = loss is None or (
            not report.applied and math.isfinite(loss) and not report.overflowed
        )
        if may_be_empty and (empty := report.empty_updates):
            return self._without_items(report, empty)
        if loss is None:
            return None  # no update ran in this step
        if not report.applied:
            return (
                self._record_overflow(report)
                if report.overflowed
                else self._record_skip(report, loss)
            )
        self._applied_before = True
        self._skips_in_row = 0
        if self._first_loss is None:
            self._first_loss = max(abs(loss), MIN_REFERENCE)
        high = abs(loss) > self._table.diverged * self._first_loss
        self._high_in_row = self._high_in_row + 1 if high else 0
        if self._high_in_row >= DIVERGED_STEPS and self._ending is None:
            times = f"{self._table.diverged:g} times the first ({self._first_loss:.4g})"
            text = f"the loss is {loss:.4g}, over {times}, {DIVERGED_STEPS} steps in a row"
            self._ending = NumbersError(
                f"step {report.step}: diverged: {text}", hint="lower optim.lr, or warm up longer"
            )
            return GuardFault(report.step, "diverged", "the run ends", text)
        return None

    def _record_skip(self, report: StepReport, loss: float) -> GuardFault:
        self.num_skipped += 1
        self._skips_in_row += 1
        detail = _describe_fault(report, loss)
        reason = None
        most = self._table.max_skips if self._applied_before else self._most_first
        if self._table.nonfinite == "stop":
            reason = 'and stability.nonfinite is "stop"'
        elif self._skips_in_row >= most:
            times = self._skips_in_row
            reason = f"{times} step{'s' * (times > 1)} in a row"
            reason += "" if self._applied_before else ", before any update was applied"
        if reason is None:
            return GuardFault(
                report.step, "nonfinite", "the step was skipped, no weight changed", detail
            )
        if self._ending is None:
            self._ending = NumbersError(
                f"step {report.step}: {detail}, {reason}",
                hint="check the data and the model's output, or lower optim.lr",
            )
        return GuardFault(report.step, "nonfinite", "the run ends", f"{detail}, {reason}")

    def _without_items(self, report: StepReport, empty: tuple[str, ...]) -> GuardFault:
        """Return the fault of a step whose loss counted 0 items.

        Such data is rare but valid, so these steps never end a run. `empty` has the names of the
        updates that were skipped.
        """
        self.num_skipped += 1
        self.num_empty += 1
        many = self.num_empty
        which = f"update {', '.join(empty)}" if len(report.updates) > 1 else "the step"
        steps = "1 such step" if many == 1 else f"{many:,} such steps"
        action = f"{which} was skipped, no weight changed; {steps} so far"
        # after 1, 2, 4, 8, ... steps: else frequent empty batches would fill the screen
        is_printed = many & (many - 1) == 0
        return GuardFault(
            report.step, "no-items", action, f"the loss of {which} counts 0 items", is_printed
        )

    def _record_overflow(self, report: StepReport) -> GuardFault:
        """Return the fault of a step whose fp16 gradients overflowed.

        The run ends only if the loss scale is now below its minimum.
        """
        self.num_skipped += 1
        scale = report.loss_scale or 0.0
        detail = f"gradients overflowed fp16 at a loss scale of {2 * scale:g}"
        if scale >= self._min_scale:
            return GuardFault(
                report.step,
                "overflow",
                f"the step was skipped, no weight changed; the loss scale is now {scale:g}",
                detail,
            )
        text = (
            f"{detail}, and precision.min_scale is {self._min_scale:g}: the scale is below "
            "this minimum"
        )
        if self._ending is None:
            self._ending = NumbersError(
                f"step {report.step}: {text}",
                hint='use precision.compute = "bf16", which needs no scale',
            )
        return GuardFault(report.step, "overflow", "the run ends", text)

    def storage_fault(self, step: int, detail: str, given_up: str) -> GuardFault:
        return GuardFault(step, "storage", f"{given_up} was abandoned, the run continues", detail)

    def full_disk(self, step: int, deleted: str) -> GuardFault:
        detail = f"the disk had no space for the checkpoint of step {step:,}"
        return GuardFault(
            step,
            "full-disk",
            f"the checkpoint of {deleted} was deleted early, the run continues",
            detail,
        )

    @staticmethod
    def slow_save(step: int, detail: str, key: str = "checkpoint.every") -> GuardFault:
        return GuardFault(
            step,
            "slow-save",
            f"the run continues and waits for the disk; a larger {key} costs less",
            detail,
        )

    @staticmethod
    def damaged_commit(step: int, detail: str) -> GuardFault:
        return GuardFault(
            step,
            "damaged-commit",
            f"set aside; resuming {f'after step {step}' if step else 'from the start'}",
            detail,
        )

    @staticmethod
    def lost_commit(step: int, detail: str) -> GuardFault:
        return GuardFault(
            step,
            "lost-commit",
            f"resuming {f'after step {step}' if step else 'from the start'}",
            detail,
        )

    @staticmethod
    def damaged_log(step: int, detail: str) -> GuardFault:
        return GuardFault(step, "damaged-log", "the run continues without these records", detail)

    @staticmethod
    def damaged_ledger(step: int, num_lost: int) -> GuardFault:
        return GuardFault(
            step,
            "damaged-ledger",
            "the run continues; these rows stay missing",
            f"ledger.bin lost the rows of {num_lost} steps",
        )

    def raise_if_over(self, step: int) -> None:
        """Raise NumbersError if the run cannot recover."""
        if self._ending is not None:
            raise self._ending


def _describe_fault(report: StepReport, loss: float) -> str:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    norm = report.gradient_norm
    if norm is None:
        return "the gradient norm of an update is not finite"
    return (
        "no parameter received a gradient"
        if math.isfinite(norm)
        else f"the gradient norm is {norm}"
    )
