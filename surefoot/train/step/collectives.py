"""Communication of a step with the other ranks, and its counterpart on a single rank.

`Ranks` (in `ranks.py`) and `SingleRank` have the same methods, so that a step is written once.
Every rank calls the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, final

from torch import Tensor

if TYPE_CHECKING:
    from surefoot.components.optim.buffers import LiveBuffers
    from surefoot.runtime.comm.gathered import Gathering
    from surefoot.train.step.program import StepDone, StepInput, Totals
    from surefoot.train.step.ranks import Ranks


@final
class NotGathering:
    """Context of passes on a single rank, where `surefoot.all_gather` returns its argument."""

    was_used = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


NOT_GATHERING = NotGathering()


class Collectives(Protocol):
    """Collective parts of a step.

    Attributes:
        ranks: The same object if there are several ranks or virtual ranks; None on a single rank.
        size: Number of ranks.
        splits: Whether losses and gradients of this rank are only parts of those of the step.
        is_even: Whether all ranks must run the same number of forward passes (stages 2 and 3).
    """

    @property
    def ranks(self) -> Ranks | None: ...

    @property
    def size(self) -> int: ...

    @property
    def splits(self) -> bool: ...

    @property
    def is_even(self) -> bool: ...

    def begin_reading(self, number: int) -> None:
        """Record the start of step `number`, before its samples are requested."""

    def begin(self, given: StepInput) -> None:
        """Start the computation of a step."""

    def begin_next_update(self) -> None:
        """Prepare the buffers for another update of the same step."""

    def begin_passes(self, index: int, given: StepInput) -> int:
        """Start the passes of update `index`; return how many placeholder passes must follow."""

    def gathering(self) -> Gathering | NotGathering:
        """Return the context of the passes, in which `surefoot.all_gather` communicates."""

    def begin_pass(self, position: int) -> None:
        """Record that the forward pass of microbatch `position` of the step starts."""

    def begin_last_backward(self, index: int) -> None:
        """Start to reduce gradients while the last backward pass computes them."""

    def end_pass(self, index: int, done: int, totals: Totals) -> None:
        """Record that microbatches up to number `done` are done; `totals` holds their terms."""

    def reduce(self, index: int, totals: Totals) -> Totals:
        """Return the loss terms of all ranks; the gradients of update `index` are reduced too."""

    def sum_counts(self, update: str, counted: Sequence[Any]) -> Mapping[str, float] | float:
        """Return the item counts of all ranks; `counted` holds those of this rank's batches."""

    def finish(self, index: int, factor: float | Tensor) -> None:
        """Finish a reduction of gradients that had to wait for their factor."""

    def end(self, done: StepDone, buffers: LiveBuffers) -> None:
        """Finish the collectives of a step; `buffers` are restored if it was skipped."""

    def end_step(self, given: StepInput) -> int:
        """Record the end of a step; return its number of samples on all ranks."""

    def scaled_by(self, given: StepInput) -> int:
        """Return a number of samples near the item count of the step, equal on all ranks."""


@final
class SingleRank:
    """Collectives of a single rank: nothing is sent."""

    ranks = None
    size = 1
    splits = is_even = False

    def begin_reading(self, number: int) -> None: ...

    def begin(self, given: StepInput) -> None: ...

    def begin_next_update(self) -> None: ...

    def begin_passes(self, index: int, given: StepInput) -> int:
        return 0

    def gathering(self) -> NotGathering:
        return NOT_GATHERING

    def begin_pass(self, position: int) -> None: ...

    def begin_last_backward(self, index: int) -> None: ...

    def end_pass(self, index: int, done: int, totals: Totals) -> None: ...

    def reduce(self, index: int, totals: Totals) -> Totals:
        return totals

    def sum_counts(self, update: str, counted: Sequence[Any]) -> Mapping[str, float] | float:
        if isinstance(counted[0], Mapping):
            return {name: float(sum(each[name] for each in counted)) for name in counted[0]}
        return float(sum(counted))

    def finish(self, index: int, factor: float | Tensor) -> None: ...

    def end(self, done: StepDone, buffers: LiveBuffers) -> None:
        if done.was_applied is not True:
            buffers.restore_unless(done.was_applied)

    def end_step(self, given: StepInput) -> int:
        return given.num_samples

    def scaled_by(self, given: StepInput) -> int:
        return sum(given.sizes)


SINGLE_RANK = SingleRank()
