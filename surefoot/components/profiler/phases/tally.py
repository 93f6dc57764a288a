"""What was counted: nanoseconds by phase and by step, and the steps that stood out, each with its cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from surefoot.contract.events import PHASES
from surefoot.contract.state import Timing

MOST_STEPS = 1000  # of one window
MOST_OUTLIERS = 10  # of one window
MOST_SAMPLED = 20_000  # of a run
OUTLIER_TIMES = 3  # a step that took so many times as long as usual stands out
OUTLIER_NS = 1_000_000  # if it is also so much longer: below that it is the system's noise
FEWEST = 8  # steps that tell what is usual


@final
class Tally:
    """`spent_ns` is added to from outside, by the number of the phase; steps are noted as they end, and judged when a window does."""

    def __init__(self, num_phases: int) -> None:
        self.spent_ns = [0] * num_phases
        self._window = [0] * num_phases  # as `spent_ns` stood when the window began
        self._before = [0] * num_phases  # and when the step did
        self._noted: list[tuple[int, int, int, list[int]]] = []
        self._steps: list[int] = []
        self._recent: list[int] = []
        self._outliers: list[dict[str, Any]] = []
        self._slowest: list[dict[str, Any]] = []
        self._first: tuple[int, dict[str, Any]] | None = None
        self._limit_ns = self._usual_ns = self._ended_ns = self._num_steps = 0
        self._collecting_ns = self._compiled = 0
        self._sample: list[int] = []
        self._stride = 1

    def begin_steps(self, now_ns: int) -> None:
        """The next step begins now."""
        self._ended_ns = now_ns
        self._before = self.spent_ns[:]

    def end_step(self, number: int, now_ns: int, collecting_ns: int) -> None:
        """A step ended, when so many nanoseconds of garbage collection were counted in all. Only noted: that touches little memory."""
        self._noted.append((number, now_ns, collecting_ns, self.spent_ns[:]))
        if len(self._noted) > MOST_STEPS:
            self._judge_noted(self._compiled)

    def _judge_noted(self, num_compiled: int) -> None:
        noted, self._noted = self._noted, []
        has_compiled, self._compiled = num_compiled > self._compiled, num_compiled
        for number, now_ns, collecting_ns, spent in noted:
            elapsed_ns = now_ns - self._ended_ns
            self._num_steps += 1
            if len(self._steps) < MOST_STEPS:
                self._steps.append(elapsed_ns)
            if self._num_steps == 1:  # whether it stands out is known once it is known what is usual
                cause = self._cause(elapsed_ns, 0, spent, has_compiled)
                self._first = elapsed_ns, _outlier(number, elapsed_ns, cause if cause in CAUSES else "first step")
            elif self._limit_ns and elapsed_ns > self._limit_ns and len(self._outliers) < MOST_OUTLIERS:
                cause = self._cause(elapsed_ns, collecting_ns - self._collecting_ns, spent, has_compiled)
                self._outliers.append(_outlier(number, elapsed_ns, cause))
            self._ended_ns, self._collecting_ns, self._before = now_ns, collecting_ns, spent

    def _cause(self, elapsed_ns: int, collecting_ns: int, spent: Sequence[int], has_compiled: bool) -> str:
        """What made a step slow; of the steps of a window that compiled those that computed for longer than usual did it."""
        if 2 * collecting_ns > elapsed_ns - self._usual_ns:
            return "garbage collection"
        count = max(1, self._num_steps - 1)
        grown = [now - then - then // count for now, then in zip(spent, self._before, strict=True)]
        largest = PHASES[grown.index(max(grown))]  # that grew most above what it took in the steps before
        return "compile" if has_compiled and largest in COMPILED else largest

    def take(self, num_compiled: int) -> Timing:
        """What came since the last call, when so many graphs were compiled in all."""
        self._judge_noted(num_compiled)
        spent = [now - then for now, then in zip(self.spent_ns, self._window, strict=True)]
        self._window[:] = self.spent_ns
        steps, self._steps = self._steps, []
        self._recent += steps
        if len(self._recent) >= FEWEST:
            self._usual_ns = sorted(self._recent)[len(self._recent) // 2]
            self._limit_ns = max(OUTLIER_TIMES * self._usual_ns, self._usual_ns + OUTLIER_NS)
            self._recent = []
            if self._first is not None and self._first[0] > self._limit_ns:
                self._outliers.insert(0, self._first[1])
            self._first = None
        outliers, self._outliers = self._outliers, []
        if outliers:
            self._slowest = sorted([*self._slowest, *outliers], key=lambda row: -row["elapsed_s"])[:MOST_OUTLIERS]
        self._keep(steps)
        return Timing(phases=_seconds(spent), step_s=_rounded(steps), outliers=tuple(outliers))

    def _keep(self, steps: Sequence[int]) -> None:
        """Every so many-th step of the run, so that there are never too many."""
        first = self._num_steps - len(steps)
        self._sample += [each for number, each in enumerate(steps, first) if number % self._stride == 0]
        if len(self._sample) > MOST_SAMPLED:
            del self._sample[1::2]
            self._stride *= 2

    def total(self) -> Timing:
        """Of the whole run: its phases, an even sample of its steps, the slowest of those that stood out."""
        return Timing(phases=_seconds(self.spent_ns), step_s=_rounded(self._sample), outliers=tuple(self._slowest))


COMPILED = ("forward", "backward", "optimiser")  # the phases of compiled code
CAUSES = ("compile", "checkpoint", "evaluation")  # what says more of a first step than that it was the first


def _outlier(step: int, elapsed_ns: int, cause: str) -> dict[str, Any]:
    return {"step": step, "elapsed_s": elapsed_ns / 1e9, "cause": cause}


def _seconds(spent_ns: Sequence[int]) -> dict[str, float]:
    return {name: spent / 1e9 for name, spent in zip(PHASES, spent_ns, strict=True) if spent}


def _rounded(steps_ns: Sequence[int]) -> tuple[float, ...]:
    return tuple([(each + 50) // 100 / 1e7 for each in steps_ns])  # to 0.1 us: a shorter line of the log
