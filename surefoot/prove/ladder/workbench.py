"""Measurement of a rung, the rung below it and the baseline in fresh processes."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import BadRecordError, InputError, StorageError, TaskError
from surefoot.core.process.memory_limits import find_available_bytes
from surefoot.core.statistics import FIRST_LOOK, Interval, looks, sequential_ratio
from surefoot.prove.attempts import find_last_error
from surefoot.prove.ladder import rungs
from surefoot.prove.ladder.gate import Arrays, SeedScores
from surefoot.trial import Arm, Outcome, Trial, as_line, read_arrays, run_arm, run_rounds, spec_arm
from surefoot.trial.arm import REPORT, SHARED, WORK, absolute, num_ranks

START, BELOW = "start", "below"
OUTCOMES = "outcomes.jsonl"
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # the cache folder of torch.compile
# the whole step is compiled after five: surefoot.train.step.program.EAGER_STEPS
WARMUP_STEPS, MIN_STEPS = 8, 8
WARMUP_S = 0.3  # processes take turns of 0.1 s, and each gets some of them during the warm-up
TARGET_S = 1.5  # duration of the baseline's measured steps if no number of samples is given
ROOM = 1.25  # allowed memory of a process, relative to the baseline
CHECKED_STEPS, CHECKED_SEEDS = 8, 4
STATES, STATE_STEPS = 3, 4  # number of states, and steps from each to the next
Measure = Literal["time", "wall", "memory", "startup"]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LadderSettings:
    """Settings with which the optimizations (rungs) of a ladder are measured.

    Args:
        pairs: Largest number of pairs of runs for each rung.
        samples: Samples per run; if None, the measured steps of the baseline take TARGET_S seconds.
        timeout_s: Seconds after which a process is killed.
        measures_refused: Measure a rung whose results failed the check up to the first interim
            analysis, to show what it would have gained.
    """

    pairs: int = 15
    samples: int | None = None
    timeout_s: float = 600.0
    measures_refused: bool = True

    def __post_init__(self) -> None:
        if self.pairs < 1 or (self.samples is not None and self.samples < 1):
            raise InputError(
                f"--pairs is {self.pairs} and --samples {self.samples}",
                hint="use 1 or more of each",
            )

    @property
    def can_decide(self) -> bool:
        """True if `pairs` pairs are enough to show a gain."""
        return bool(looks(self.pairs))


class Workbench:
    """Measurements of specs in fresh processes, compared with the baseline `start`.

    Every outcome is written to a file in `folder`, one per line.
    """

    def __init__(self, start: RunSpec, settings: LadderSettings, folder: Path) -> None:
        self.settings, self._start, self._folder = settings, start, folder
        self._seed = start.train.seed
        self.num_runs = 0

    def begin(self) -> float:
        """Run the baseline once to find its device and speed; return the seconds of a step.

        Raises:
            TaskError: If the baseline does not run.
        """
        with _work() as work:
            arm = spec_arm(
                START,
                _make_measured_spec(self._start),
                steps=MIN_STEPS,
                warmup=WARMUP_STEPS,
                whole_length=True,
            )
            outcome = run_arm(arm, work)
        # infinite if the length of the run is a time
        total_steps = outcome.measures.get("total_steps", math.inf)
        if (
            outcome.ended != "done"
            or "num_samples" not in outcome.measures
            or total_steps < WARMUP_STEPS + MIN_STEPS
        ):
            raise TaskError(
                "the start of the ladder does not run: "
                f"{find_last_error(outcome.error or 'it is over before its last measured step')}",
                hint=(
                    f"make the plain loop train {WARMUP_STEPS + MIN_STEPS} steps first: "
                    "surefoot train SPEC"
                ),
            )
        self._keep(outcome)
        self.device, self._peak_bytes = outcome.facts["device"], outcome.measures["peak_bytes"]
        self.devices = int(outcome.facts["devices"])
        per_step = outcome.measures["num_samples"] / MIN_STEPS
        step_s = outcome.measures["wall_s_per_step"]
        wanted = (
            TARGET_S / step_s if self.settings.samples is None else self.settings.samples / per_step
        )
        self._total_steps = total_steps
        self._steps = int(min(max(MIN_STEPS, math.ceil(wanted)), self._total_steps - WARMUP_STEPS))
        self.warmup_steps = self._warmup(math.ceil(WARMUP_S / step_s))
        self._epoch_steps = math.ceil(outcome.measures["samples_per_epoch"] / per_step)
        self.num_samples = round(self._steps * per_step)
        return step_s

    def _warmup(self, wanted: int) -> int:
        """Return the number of warm-up steps: `wanted`, or fewer if the run is too short."""
        return int(min(max(WARMUP_STEPS, wanted), self._total_steps - self._steps))

    def extend_warmup_for_compilation(self) -> None:
        """Lengthen the warm-up so that no process compiles while it is measured.

        The last batch of an epoch may have a different size and cause a compilation. If an epoch is
        short, that batch must therefore come before the measurement.
        """
        if self._epoch_steps < self.warmup_steps + self._steps:
            self.warmup_steps = max(
                self.warmup_steps, self._warmup(self._epoch_steps + WARMUP_STEPS)
            )

    def key(self, measure: Measure) -> str:
        """Return the name under which processes report a measure.

        On a CPU, "time" is the CPU time of all cores, which other processes do not lengthen.
        """
        on_cpu = self.device == "cpu"
        return {
            "time": "cpu_s_per_sample" if on_cpu else "wall_s_per_sample",
            "wall": "wall_s_per_sample",
            "memory": "peak_bytes" if on_cpu else "device_peak_bytes",
            "startup": "startup_s",
        }[measure]

    def ratio(self, trial: Trial, arm: str, baseline: str, measure: Measure) -> Interval | None:
        """Return the median ratio of a measure over pairs; None if no pair has both values.

        The interval is valid at interim analyses.
        """
        mine, theirs = (
            trial.pairs(arm, baseline, self.key(measure)) if baseline in trial.arms else ([], [])
        )
        return (
            sequential_ratio(mine, theirs, most=trial.rounds)
            if mine and min(*mine, *theirs) > 0
            else None
        )

    # ---- time

    def measure(
        self,
        name: str,
        spec: RunSpec,
        below: RunSpec,
        is_over: Callable[[Trial], bool],
        *,
        decides: bool = True,
    ) -> Trial:
        """Run interleaved rounds of a rung (optimization), the rung below and the baseline.

        After the first interim analysis the baseline is left out. The ratio to it is reported from
        the pairs so far.

        Args:
            name: Name of the rung.
            spec: Spec with the rung.
            below: Spec of the rung below.
            is_over: Called after each complete round and after a failure; True ends the
                measurement.
            decides: False if the decision about the rung is already known. The measurement then
                ends at the first interim analysis.
        """
        arms = [self._make_arm(BELOW, below), self._make_arm(name, spec)]
        names = (BELOW, name, START)
        more = [self._make_arm(START, self._start)] if below != self._start else []
        most, outcomes = self.settings.pairs, list[Outcome]()
        first = min(FIRST_LOOK, most)
        trial = Trial(title=name, arms=names, rounds=most, seed=self._seed)
        for offset, count, these in ((0, first, [*arms, *more]), (first, most - first, arms)):
            if count < 1 or (offset and not decides):
                break
            for number, outcome in enumerate(
                self._rounds(these, count, self._seed + offset), start=1
            ):
                self._keep(outcome)
                outcomes.append(replace(outcome, round=outcome.round + offset))
                trial = replace(trial, outcomes=tuple(outcomes))
                if (number % len(these) == 0 or outcome.ended != "done") and is_over(trial):
                    return trial
        return trial

    def measure_all(
        self,
        title: str,
        specs: Mapping[str, RunSpec],
        rounds: int,
        *,
        caches: Path | None = None,
        tell: Tell = lambda text: None,
    ) -> Trial:
        """Run `rounds` interleaved rounds of all `specs`, given by name.

        With `caches`, each spec has its own compiler cache in that folder, which all its rounds
        use.
        """
        outcomes: list[Outcome] = []
        arms = [self._make_arm(name, spec) for name, spec in specs.items()]
        if caches is not None:
            arms = [
                replace(arm, variables={CACHE: str(caches / arm.name.replace(" ", "-"))})
                for arm in arms
            ]
        for outcome in self._rounds(arms, rounds, self._seed):
            self._keep(outcome)
            outcomes.append(outcome)
            tell(f"round {outcome.round + 1} of {rounds}: {outcome.arm}: {outcome.ended}")
        return Trial(
            title=title, arms=tuple(specs), rounds=rounds, seed=self._seed, outcomes=tuple(outcomes)
        )

    def _rounds(self, arms: Sequence[Arm], rounds: int, seed: int) -> Iterator[Outcome]:
        """Run rounds of `arms`, in turns if the memory holds all processes.

        Otherwise, and on a GPU or with several ranks, the processes of a round run one after the
        other.
        """
        fits = len(arms) * self._peak_bytes * ROOM <= find_available_bytes()
        takes_turns = fits and self.device == "cpu" and all(arm.ranks == 1 for arm in arms)
        return run_rounds(arms, rounds=rounds, warmup_rounds=0, seed=seed, in_turns=takes_turns)

    def _make_arm(self, name: str, spec: RunSpec) -> Arm:
        """Return an arm for `spec`; all arms train equally many samples, whatever their batch."""
        return spec_arm(
            name,
            _make_measured_spec(spec),
            steps=self._steps_of(spec, self._steps),
            warmup=self._steps_of(spec, self.warmup_steps),
            timeout_s=self.settings.timeout_s,
            whole_length=True,
        )

    def _steps_of(self, spec: RunSpec, steps: int) -> int:
        return max(1, round(steps * self._start.train.step_batch / spec.train.step_batch))

    # ---- numbers

    def tensors(self, name: str, spec: RunSpec, *, unit: float | None = None) -> Arrays:
        """Return gradients and weights of a few steps; with `unit`, under simulated rounding.

        Raises:
            TaskError: If the process fails.
        """
        words = () if unit is None else ("--unit", repr(unit))
        return self._arrays(
            self._child(
                "tensors", name, spec, steps=CHECKED_STEPS, seeds=range(CHECKED_SEEDS), words=words
            )
        )

    def states(self, name: str, spec: RunSpec, *, units: Sequence[float] = ()) -> Arrays:
        """Return the tensors of two steps from each of a few states.

        For each unit in `units` the steps are repeated under simulated rounding.

        Raises:
            TaskError: If the process fails.
        """
        words = [word for unit in units for word in ("--unit", repr(unit))]
        return self._arrays(
            self._child("states", name, spec, steps=STATE_STEPS, seeds=range(STATES), words=words)
        )

    def _arrays(self, arm: Arm) -> Arrays:
        with _work() as work:
            outcome = run_arm(arm, work)
            self._keep(outcome)
            if outcome.ended != "done":
                raise TaskError(f"{outcome.ended}: {find_last_error(outcome.error or '')}")
            try:
                return read_arrays(work / "rank0" / "report.json")
            except BadRecordError as error:
                raise TaskError(f"gave no tensors: {error.message}") from error

    def scores(self, name: str, spec: RunSpec, seeds: range) -> SeedScores | None:
        """Return the scores of runs with the given seed numbers, or None if no run has a score.

        A run trains as many samples as a measured one. The numbers are added to the seed of the
        spec.
        """
        steps = self._steps_of(spec, self._steps + self.warmup_steps)
        with _work() as work:
            outcome = run_arm(self._child("scores", name, spec, steps=steps, seeds=seeds), work)
        self._keep(outcome)
        found = {
            number: outcome.measures.get(f"score_{place}") for place, number in enumerate(seeds)
        }
        known = {number: value for number, value in found.items() if value is not None}
        facts = outcome.facts
        return SeedScores(known, facts["score"], facts["better"], facts["unit"]) if known else None

    def _child(
        self,
        what: str,
        name: str,
        spec: RunSpec,
        *,
        steps: int,
        seeds: range,
        words: Sequence[str] = (),
    ) -> Arm:
        seeded = [word for number in seeds for word in ("--seed", str(self._seed + number))]
        whole = _make_measured_spec(spec)
        command = (
            sys.executable,
            "-m",
            "surefoot.prove.ladder.child",
            what,
            f"{WORK}/spec.toml",
            "--report",
            REPORT,
            "--run",
            f"{SHARED}/run",
            "--steps",
            str(steps),
            *seeded,
            *words,
        )
        return Arm(
            name=name,
            command=command,
            files={"spec.toml": spec_file.write(whole.replace(**absolute(whole, Path())))},
            threads=spec.train.threads or 1,
            ranks=num_ranks(spec),
            timeout_s=self.settings.timeout_s * len(seeds),
        )

    def _keep(self, outcome: Outcome) -> None:
        self.num_runs += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / OUTCOMES).open("a", encoding="utf-8") as file:
                file.write(as_line(outcome) + "\n")
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be written: {error.strerror}",
                hint="name another folder: --out",
            ) from None


def _make_measured_spec(spec: RunSpec) -> RunSpec:
    """Return the spec of a measured run, which copies no checkpoints to other storage."""
    return rungs.change(
        spec, {"checkpoint.store": None, "observe.tensorboard": bool(spec.observe.tensorboard)}
    )


@contextlib.contextmanager
def _work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="surefoot-ladder-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder) / "run"
