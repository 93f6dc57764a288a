"""Search for the number of loader workers that a spec needs.

Measured are the samples per second of steps that never wait for data, of the loader alone with
several settings, and of steps with the loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.components.data.loader.batches import Kind, LoaderSettings, StepBatches
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.loader.pilot import (
    ENOUGH,
    GAIN,
    WorkerTiming,
    WorkerTuner,
    find_most,
)
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError
from surefoot.core.hardware import count_cores
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.train.step.inputs import InputReader

MANY_STEPS = 10**6  # more steps than any measurement takes
MIN_STEPS = 3  # fewest steps of a measurement, however long they take
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LoaderTiming:
    """Setting of the loader with its measured speed.

    `supply_per_s` is the samples per second of the loader alone, `samples_per_s` that of steps with
    it. `waiting` is the share of the steps' time in which they wait for data.
    """

    workers: int
    kind: Kind
    prefetch: int
    pinned: bool
    supply_per_s: float
    samples_per_s: float
    waiting: float


@dataclass(frozen=True, kw_only=True)
class LoaderTuning:
    """Chosen setting of the loader, and all settings that were measured.

    `demand_per_s` is the samples per second of steps whose data is already loaded. `why` is the
    reason for the choice.
    """

    demand_per_s: float
    tried: tuple[LoaderTiming, ...]
    chosen: LoaderTiming
    why: str

    def as_row(self) -> dict[str, Any]:
        return {
            "demand_per_s": self.demand_per_s,
            "tried": [asdict(each) for each in self.tried],
            "chosen": asdict(self.chosen),
            "why": self.why,
        }


class _RepeatedStepLoader:
    """Substitute for a loader that returns the batches of one step for every step."""

    def __init__(self, taken: StepBatches) -> None:
        self._taken = taken

    def take(self, number: int) -> StepBatches:
        return self._taken._replace(number=number)

    def peek(self, number: int) -> StepBatches | None:
        return self._taken._replace(number=number)


class Trials:
    """Measurements of loader settings in the steps of one process, for some seconds each.

    `tried` lists the results in the order of the measurements.
    """

    def __init__(self, rehearsal: Rehearsal, seconds: float, tell: Tell) -> None:
        self.tried: list[LoaderTiming] = []
        self._tell = tell
        self._reader: InputReader = rehearsal.assembly.engine.steps.reader
        self.loader: Loader = self._reader.loader
        self._rehearsal, self._seconds, self._step = rehearsal, seconds, 0
        self.samples = rehearsal.num_samples
        self._pins = rehearsal.device.type == "cuda"

    def measure_demand(self) -> float:
        """Return the samples per second of steps that do not wait for data."""
        again: Any = _RepeatedStepLoader(self.loader.take(1))
        self._reader.loader = again
        try:
            self._steps(MIN_STEPS)
            return self._steps(None)[0]
        finally:
            self._reader.loader = self.loader

    def measure(self, settings: LoaderSettings) -> LoaderTiming:
        """Measure the loader with `settings`, alone and in steps; add the result to `tried`."""
        self._tell(
            f"{settings.workers} workers ({settings.kind}), {settings.prefetch} ahead"
            if settings.workers
            else "no worker"
        )
        self.loader.use(settings)
        supply_per_s = self._measure_supply()
        self._steps(MIN_STEPS)
        samples_per_s, waiting = self._steps(None)
        kind = self.loader.kind if settings.workers else "auto"
        self.loader.close()
        timing = LoaderTiming(
            workers=settings.workers,
            kind=kind,
            prefetch=settings.prefetch if settings.workers else 0,
            pinned=self._pins,
            supply_per_s=supply_per_s,
            samples_per_s=samples_per_s,
            waiting=waiting,
        )
        self.tried.append(timing)
        return timing

    def _measure_supply(self) -> float:
        for _ in range(MIN_STEPS):  # the workers start
            self._take()
        begun_s, samples, done = time.perf_counter(), 0, 0
        while done < MIN_STEPS or time.perf_counter() - begun_s < self._seconds:
            samples, done = samples + self._take(), done + 1
        return samples / (time.perf_counter() - begun_s)

    def _take(self) -> int:
        """Read the batches of one more step and return the number of samples in them."""
        self._step += 1
        return len(self.loader.take(self._step).window.ids)

    def _steps(self, count: int | None) -> tuple[float, float]:
        """Run `count` steps, or as many as the time allows if `count` is None.

        Returns samples per second, and the share of the time in which the steps waited for data.
        """
        self._rehearsal.synchronize()
        begun_s, samples, waiting_s, done = time.perf_counter(), 0, 0.0, 0
        while done < (count or MIN_STEPS) or (
            count is None and time.perf_counter() - begun_s < self._seconds
        ):
            self._step, done = self._step + 1, done + 1
            report = self._rehearsal.step(self._step)
            samples, waiting_s = samples + report.num_samples, waiting_s + report.waiting_s
        self._rehearsal.synchronize()
        elapsed_s = time.perf_counter() - begun_s
        return samples / elapsed_s, waiting_s / elapsed_s


def tune(
    spec: RunSpec, *, seconds: float = 2.0, most: int | None = None, tell: Tell = lambda text: None
) -> LoaderTuning:
    """Find the loader setting with which the steps of `spec` do not wait for data.

    The number of workers is found as in a run with `loader.workers = "auto"`: 0, 1, 2, 4 and so on
    up to `most` workers are measured, each for `seconds` alone and with steps. By default `most` is
    4 to 8, depending on the number of cores. If steps still wait for data, the other type of worker
    (thread or process) and twice the prefetch are measured.

    Raises InputError if `seconds` is not above 0, and every error of a run of the spec.
    """
    if not seconds > 0 or (most is not None and most < 0):
        raise InputError(
            f"{seconds} seconds a setting, up to {most} workers, measure nothing",
            hint="use --seconds 2 --most 4",
        )
    plain = spec.replace_all({**spec.as_tables(), "loader": {"workers": 0}})
    with Rehearsal(plain, steps=MANY_STEPS) as rehearsal:
        trials = Trials(rehearsal, seconds, tell)
        tell("the steps alone")
        demand = trials.measure_demand()
        chosen = _search(spec, trials, find_most(count_cores()) if most is None else most)
    why = "the cheapest setting with which steps are as fast as with any other"
    if chosen.waiting > ENOUGH:
        why += f"; they still wait for data {chosen.waiting:.0%} of their time"
    return LoaderTuning(demand_per_s=demand, tried=tuple(trials.tried), chosen=chosen, why=why)


def _search(spec: RunSpec, trials: Trials, most: int) -> LoaderTiming:
    table = spec.loader
    settings = LoaderSettings(
        kind=table.kind, prefetch=table.prefetch or LoaderSettings.prefetch, start=table.start
    )
    tuner = WorkerTuner(most)
    while not tuner.is_done:
        timing = trials.measure(replace(settings, workers=tuner.workers))
        step_s = trials.samples / timing.samples_per_s
        tuner.record(WorkerTiming(timing.workers, step_s, timing.waiting))
    best = next(each for each in trials.tried if each.workers == tuner.workers)
    if not best.workers or best.waiting <= ENOUGH:
        return best
    settings = replace(settings, workers=best.workers, kind=best.kind)
    if table.kind == "auto" and getattr(trials.loader.source, "thread_safe", False):
        other: Kind = "process" if best.kind == "thread" else "thread"
        best = choose_faster(best, trials.measure(replace(settings, kind=other)))
    twice = replace(settings, kind=best.kind, prefetch=2 * settings.prefetch)
    return choose_faster(best, trials.measure(twice))


def choose_faster(before: LoaderTiming, after: LoaderTiming) -> LoaderTiming:
    """Return `after` if its steps are faster by more than the noise, else `before`."""
    return after if after.samples_per_s > before.samples_per_s * (1 + GAIN) else before
