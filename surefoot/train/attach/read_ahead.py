"""Batches that a loop has read but not trained on yet, and loops that read ahead of their steps.

A loop reads ahead if it holds batches of later steps while it trains. For example, it requests the
next batch to learn whether the current one is the last, or a prefetcher copies it to the GPU.
"""

from __future__ import annotations

from typing import NamedTuple, final

from surefoot.components.stability.guard import GuardFault
from surefoot.core.errors import InputError

FAULT = "read-ahead"
MIN_STEPS = 3  # steps after which reading ahead is recognized


class ReadBatch(NamedTuple):
    """A batch that was read: its epoch, its index there, its sample ids, and their number."""

    number_of_pass: int
    place: int
    ids: tuple[int, ...]
    num_samples: int


@final
class PendingBatches:
    """Queue of the batches that no step has consumed; `ahead` of them belong to later steps."""

    def __init__(self) -> None:
        self.ahead = 0
        self._is_declared = self._was_reported = False
        self._batches: list[ReadBatch] = []
        self._has_ended = False  # whether the epoch has ended
        self._per_step = 1
        # batches of the first steps of this epoch, and whether later steps equal the last of them
        self._counts: list[int] = []
        self._is_steady = True
        self._excess = 0  # of an earlier epoch

    def begin_epoch(self, ahead: int | None) -> None:
        """Start an epoch in which the loop reads `ahead` batches ahead; None if it does not say.

        Raises InputError if `ahead` is not a number of batches.
        """
        if ahead is not None and (type(ahead) is not int or ahead < 0):
            raise InputError(
                f"run.batches(ahead={ahead!r}) is not a number of batches",
                hint="give the number of batches that the loop reads ahead, such as ahead=1",
            )
        self.leave_epoch()
        self._excess = self.find_excess()
        self.ahead, self._is_declared = ahead or 0, ahead is not None
        self._has_ended, self._counts, self._is_steady = False, [], True

    def leave_epoch(self) -> None:
        """Remove what the loop had read ahead when it left the epoch."""
        if self.ahead and not self._has_ended:
            del self._batches[-self.ahead :]
            self.ahead = 0

    def end_epoch(self) -> None:
        self._has_ended = True

    def add(self, batch: ReadBatch) -> None:
        self._batches.append(batch)

    @property
    def is_last_step_done(self) -> bool:
        """True if the epoch has ended and no batch that was read ahead is left."""
        return self._has_ended and not (self.ahead and self._batches)

    @property
    def is_ending(self) -> bool:
        """True if the epoch has ended and steps on batches that were read ahead still follow."""
        return self._has_ended and not self.is_last_step_done

    @property
    def num_in_hand(self) -> int:
        """Number of batches that were read ahead, which a resumed loop reads again."""
        return min(self.ahead, len(self._batches))

    def is_between_steps(self, number_of_pass: int) -> bool:
        """Return whether all pending batches belong to later steps, and to this epoch."""
        return len(self._batches) <= self.ahead and all(
            batch.number_of_pass == number_of_pass for batch in self._batches
        )

    def take(self) -> list[ReadBatch]:
        """Return the batches of the step that has ended, and remove them."""
        count = max(0, len(self._batches) - self.ahead)
        if self._has_ended and self.ahead:
            count = min(len(self._batches), max(count + 1, self._per_step))
        elif count:
            self._per_step = count
        taken, self._batches = self._batches[:count], self._batches[count:]
        if len(self._counts) > 1 and count != self._counts[1] and not self._has_ended:
            self._is_steady = False
        if len(self._counts) < MIN_STEPS:
            self._counts.append(count)
        return taken

    def find_excess(self) -> int:
        """Return the number of batches that the loop may read ahead without declaring it.

        It is the number by which the batches of the first step of an epoch exceed those of each
        later step.
        """
        if self._is_declared:
            return 0
        if len(self._counts) < MIN_STEPS or not self._is_steady or not self._counts[1]:
            return self._excess
        return max(self._excess, self._counts[0] - self._counts[1])

    def find_fault(self, step: int, num_taken: int) -> GuardFault | None:
        """Return a fault, once, if the loop reads more or fewer batches ahead than it declares.

        `num_taken` batches belong to `step`, which has ended.
        """
        if self._was_reported or num_taken:
            return None
        if self._has_ended:
            first, second = (*self._counts, 0)[:2]
            # this epoch is too short to determine the number
            if second == 0 or first <= second:
                return None
            # a step followed the last batch, and the first step seemed to have more batches
            ahead = self.ahead + first - second
        elif len(self._counts) == 1 and self._batches:
            ahead = max(0, len(self._batches) - 1)
        else:
            return None
        self._was_reported = True
        if not self._is_declared:
            self._excess = max(self._excess, ahead)
        return GuardFault(step, FAULT, make_hint(ahead), describe(ahead, self.ahead))


def describe(ahead: int, declared: int) -> str:
    """Return a sentence on a loop that reads `ahead` batches ahead, but declares `declared`."""
    told = "" if not declared else f", not {declared:,}"
    return (
        f"the loop reads {count_batches(ahead)} ahead of its steps{told}, so the ledger assigns "
        "batches to the wrong steps, and a resume in mid-epoch would lose or repeat batches"
    )


def make_hint(ahead: int) -> str:
    return f"iterate over run.batches(ahead={ahead}), with which a resume is exact"


def make_resume_fault(step: int, excess: int) -> GuardFault:
    """Return a fault for a resumed loop that seems to read ahead without declaring it."""
    return GuardFault(
        step,
        FAULT,
        f"{make_hint(excess)}, or over run.batches(ahead=0) if it does not read ahead",
        f"the first step of the epoch read {count_batches(excess)} more than each later step: if "
        f"the loop reads ahead of its steps, it had read {count_batches(excess)} beyond step "
        f"{step:,} at the save, on which no step trains now",
    )


def count_batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"
