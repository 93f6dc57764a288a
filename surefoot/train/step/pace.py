"""Compute time of each rank per step, exchanged in the all-reduce of the next step's losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from surefoot.components.data.feed import count_numbers
from surefoot.components.profiler.phases.device_line import make_cuda_event
from surefoot.contract.task import Batch
from surefoot.core.ranks.stragglers import Pace, Straggler, StragglerWatch, find_lags
from surefoot.runtime.comm.group import Group

NUM_FIELDS = len(Pace._fields)
# the time, and the total time waited in collectives until then, in nanoseconds
Mark = tuple[int, int]


@final
class Paces:
    """Compute time of this rank per step, and one step later that of all ranks.

    The all-reduce of the next step's losses carries the times, so that no extra message is sent.
    Time that the host waits in collectives is not counted. On a CUDA device, CUDA events time only
    the forward and backward passes. On rank 0, `told` holds the stragglers that were detected and
    the ranks that have recovered since the last call of `take_told`.
    """

    def __init__(self, group: Group, make_event: Callable[[], Any] = make_cuda_event) -> None:
        self._group = group
        self._passes = (
            [make_event(), make_event()]
            if group.device.type == "cuda" and not group.is_alone
            else []
        )
        self._began: Mark = (0, 0)
        self._ready: Mark = (0, 0)
        self._ended: Mark | None = None  # the step before
        self._work, self._num_items = (0.0, 0.0), 0.0
        self._mine: Pace | None = None  # of the step before
        self._watch = StragglerWatch()
        self._window: list[list[Pace]] = []
        self.told: list[tuple[list[Straggler], list[int]]] = []

    def _now(self) -> Mark:
        return time.perf_counter_ns(), self._group.waiting.ns

    def begin(self) -> None:
        """Record the start of a step, before its samples are requested."""
        self._began, self._num_items = self._now(), 0.0

    def ready(self, num_samples: int, batches: Sequence[Batch]) -> None:
        """Record that this rank's samples of the step have been read, as `batches`."""
        self._ready = self._now()
        if self._passes:
            self._passes[0].record()
        self._work = float(num_samples), float(sum(map(count_numbers, batches)))

    def end_passes(self) -> None:
        """Record the end of this rank's forward and backward passes."""
        if self._passes:
            self._passes[1].record()

    def count(self, terms: Iterable[Mapping[str, tuple[Any, float | Tensor, float]]]) -> None:
        """Set the number of items of the step from this rank's loss terms.

        Each element of `terms` maps the name of a term to (total, count, weight); the counts of
        their first terms are added.
        """
        self._num_items = sum(float(next(iter(row.values()))[1]) for row in terms if row)

    def end(self) -> None:
        """Record the end of a step."""
        now = self._now()
        other_s = 0.0 if self._ended is None else _seconds_between(self._ended, self._began)
        compute_s = _seconds_between(self._ready, now)
        if self._passes:  # both are complete, because the all-reduce of the losses is
            compute_s = self._passes[0].elapsed_time(self._passes[1]) / 1e3
        self._mine = Pace(
            _seconds_between(self._began, self._ready),
            compute_s,
            other_s,
            self._work[0],
            self._num_items,
            self._work[1],
        )
        self._ended = now

    def row(self) -> list[float]:
        """Return the values for the all-reduce: this rank's times, and zeros for other ranks."""
        found = [0.0] * (0 if self._group.is_alone else NUM_FIELDS * self._group.size)
        if found and self._mine is not None:
            first = NUM_FIELDS * self._group.rank
            found[first : first + NUM_FIELDS] = self._mine
        return found

    def hear(self, summed: Sequence[float]) -> None:
        """Store the result of the all-reduce: the times of every rank in the previous step.

        Only rank 0 stores it.
        """
        if not summed or not self._group.is_first or self._mine is None:
            return
        paces = [Pace(*summed[at : at + NUM_FIELDS]) for at in range(0, len(summed), NUM_FIELDS)]
        self._window.append(paces)
        found = self._watch.add(paces)
        if any(found):
            self.told.append(found)

    def take_told(self) -> list[tuple[list[Straggler], list[int]]]:
        """Return the stragglers detected and the ranks recovered since the last call."""
        told, self.told = self.told, []
        return told

    def take(self) -> dict[str, tuple[float, ...]]:
        """Return statistics of the steps since the last call, for a Step record.

        Each value has one entry per rank: in how many steps the rank was the slowest (`last`), for
        how many seconds the median of the other ranks waited for it in these steps (`waited_s`),
        and the sums of the fields of `Pace`. The result is empty without data.
        """
        window, self._window = self._window, []
        if not window:
            return {}
        size = self._group.size
        last, waited_s = [0.0] * size, [0.0] * size
        for paces in window:
            lags_s = find_lags([pace.busy_s for pace in paces])
            slowest = lags_s.index(max(lags_s))
            last[slowest] += 1
            waited_s[slowest] += lags_s[slowest]
        sums = [
            [sum(paces[rank][at] for paces in window) for rank in range(size)]
            for at in range(NUM_FIELDS)
        ]
        found = {"last": last, "waited_s": waited_s} | dict(zip(Pace._fields, sums, strict=True))
        return {key: tuple(round(value, 7) for value in values) for key, values in found.items()}


def _seconds_between(earlier: Mark, later: Mark) -> float:
    """Return the seconds between two marks, without the time spent waiting in collectives."""
    return max(0, later[0] - earlier[0] - (later[1] - earlier[1])) / 1e9
