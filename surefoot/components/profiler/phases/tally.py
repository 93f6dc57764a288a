"""Counts of the phase clock: time by phase and by step, and the outlier steps with their causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, final

from surefoot.contract.events import PHASES
from surefoot.contract.state import Timing

MAX_STEPS = 1000  # of one window
MAX_OUTLIERS = 10  # of one window
MAX_SAMPLED = 20_000  # of a run
OUTLIER_TIMES = 3  # an outlier takes this many times the usual time
OUTLIER_NS = 1_000_000  # and is longer by this much: below that it is system noise
FEWEST = 8  # steps needed to know the usual time
OFTEN = 100  # steps after which the usual time is updated; at once if most are outliers
# a step's number, when it ended, nanoseconds of collections and of each phase until then
Noted = tuple[int, int, int, list[int]]


@final
class Tally:
    """Time of a run by phase and by step, in nanoseconds.

    The clock adds to `spent_ns`, which is indexed by phase. Outlier steps are found at the end of a
    reporting window. After a training step, this code is no longer in the CPU caches. Its cost is
    therefore determined by the amount of code that runs, not by how often it runs.
    """

    def __init__(self, num_phases: int, count_compiled: Callable[[], int]) -> None:
        self.spent_ns = [0] * num_phases
        self._window = [0] * num_phases  # `spent_ns` at the start of the window
        self._last: Noted = (0, 0, 0, [0] * num_phases)  # the start of the first recorded step
        self._noted: list[Noted] = []
        self._steps: list[int] = []
        self._recent: list[int] = []  # steps since the last _update_limits()
        self._outliers: list[dict[str, Any]] = []
        self._slowest: list[dict[str, Any]] = []
        self._first: tuple[int, dict[str, Any]] | None = None
        self._limit_ns = self._usual_ns = self._num_steps = 0
        self._count_compiled, self._compiled = count_compiled, count_compiled()
        self._sample: list[int] = []
        self._stride = 1

    def begin_steps(self, now_ns: int) -> None:
        """Start the next step at `now_ns`, a time of the monotonic clock."""
        self._last = (0, now_ns, self._last[2], self.spent_ns[:])

    def end_step(self, number: int, now_ns: int, collecting_ns: int) -> None:
        """End step `number` at `now_ns`.

        `collecting_ns` is the total time of garbage collection in the run so far.
        """
        self._noted.append((number, now_ns, collecting_ns, self.spent_ns[:]))
        if len(self._noted) > MAX_STEPS:
            self._flush_steps()

    def take(self) -> Timing:
        """Return the timing since the last call of `take`."""
        self._flush_steps()
        has_changed = 2 * len(self._outliers) > len(self._steps) or not self._usual_ns
        if len(self._recent) >= (FEWEST if has_changed else OFTEN):
            self._update_limits()
        phases = _seconds(self.spent_ns, self._window)
        self._window[:] = self.spent_ns
        steps, self._steps = self._steps, []
        outliers, self._outliers = self._outliers, []
        return Timing(phases=phases, step_s=_rounded(steps), outliers=tuple(outliers))

    def _flush_steps(self) -> None:
        """Add the recorded steps to the window; if one of them is slow, look for outliers."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        ended_ns, steps = self._last[1], []
        for _, now_ns, _, _ in noted:
            steps.append(now_ns - ended_ns)
            ended_ns = now_ns
        if max(steps) > self._usual_ns + OUTLIER_NS:  # no compilation is faster
            self._explain([self._last, *noted])
        self._num_steps += len(steps)
        del steps[MAX_STEPS - len(self._steps) :]
        self._steps += steps
        self._recent += steps
        self._last = noted[-1]

    def _explain(self, noted: Sequence[Noted]) -> None:
        """Find the cause of each outlier step, and the cause of the first step of a run.

        The first step may be an outlier, too. That is decided later, when the usual step time is
        known.
        """
        before, self._compiled = self._compiled, self._count_compiled()
        has_compiled = self._compiled > before
        for done, (begun, ended) in enumerate(pairwise(noted), self._num_steps):
            elapsed_ns = ended[1] - begun[1]
            if done == 0:
                cause = self._cause(begun, ended, done, has_compiled)
                self._first = (
                    elapsed_ns,
                    _outlier(ended[0], elapsed_ns, cause if cause in CAUSES else "first step"),
                )
            elif 0 < self._limit_ns < elapsed_ns and len(self._outliers) < MAX_OUTLIERS:
                self._add_outlier(
                    _outlier(ended[0], elapsed_ns, self._cause(begun, ended, done, has_compiled))
                )

    def _cause(self, begun: Noted, ended: Noted, done: int, has_compiled: bool) -> str:
        """Return the most likely cause of a slow step.

        `done` is the number of steps before it. Compilation is the cause only if the phase that
        grew most, compared with the earlier steps, is forward, backward or optimizer.
        """
        if done and 2 * (ended[2] - begun[2]) > ended[1] - begun[1] - self._usual_ns:
            return "garbage collection"
        grown = [
            now - then - then // max(1, done) for now, then in zip(ended[3], begun[3], strict=True)
        ]
        largest = PHASES[grown.index(max(grown))]  # the phase that grew most over the earlier steps
        return "compile" if has_compiled and largest in COMPILED else largest

    def _add_outlier(self, row: dict[str, Any]) -> None:
        self._outliers.append(row)
        self._slowest.append(row)
        if len(self._slowest) > 10 * MAX_OUTLIERS:
            self._slowest = _find_slowest_steps(self._slowest)

    def _update_limits(self) -> None:
        """Update the usual step time and the outlier limit, and add the new steps to the sample."""
        recent, self._recent = self._recent, []
        newest = sorted(recent[-max(FEWEST, len(self._steps)) :])
        self._usual_ns = newest[len(newest) // 2]
        self._limit_ns = max(OUTLIER_TIMES * self._usual_ns, self._usual_ns + OUTLIER_NS)
        if self._first is not None and self._first[0] > self._limit_ns:
            self._add_outlier(self._first[1])
        self._first = None
        self._keep(recent)

    def _keep(self, steps: Sequence[int]) -> None:
        self._sample += self._subsample(steps)
        if len(self._sample) > MAX_SAMPLED:
            del self._sample[1::2]
            self._stride *= 2

    def _subsample(self, steps: Sequence[int]) -> Sequence[int]:
        """Return every `_stride`-th step of `steps`, so that the sample of a long run stays small.

        `steps` are the newest steps of the run; the stride is counted from the start of the run.
        """
        return steps[-(self._num_steps - len(steps)) % self._stride :: self._stride]

    def total(self) -> Timing:
        """Return the timing of the whole run.

        It has the time of each phase, an evenly spaced sample of the step times, and the slowest
        outlier steps.
        """
        phases = _seconds(self.spent_ns, [0] * len(self.spent_ns))
        sample = [*self._sample, *self._subsample(self._recent)]
        return Timing(
            phases=phases,
            step_s=_rounded(sample),
            outliers=tuple(_find_slowest_steps(self._slowest)),
        )


COMPILED = ("forward", "backward", "optimizer")  # the phases of compiled code
CAUSES = ("compile", "checkpoint", "evaluation")  # causes more specific than "first step"


def _outlier(step: int, elapsed_ns: int, cause: str) -> dict[str, Any]:
    return {"step": step, "elapsed_s": elapsed_ns / 1e9, "cause": cause}


def _seconds(spent_ns: Sequence[int], before_ns: Sequence[int]) -> dict[str, float]:
    found = {}
    for name, spent, before in zip(PHASES, spent_ns, before_ns, strict=True):
        if spent != before:
            found[name] = (spent - before) / 1e9
    return found


def _rounded(steps_ns: Sequence[int]) -> tuple[float, ...]:
    # to 0.1 us: a shorter line of the log
    return tuple([(each + 50) // 100 / 1e7 for each in steps_ns])


def _find_slowest_steps(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -row["elapsed_s"])[:MAX_OUTLIERS]
