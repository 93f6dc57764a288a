"""Search for the largest microbatch that fits in memory, by measured peaks.

Each try is a fresh process, and a longer one confirms the result.
"""

from __future__ import annotations

import signal
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch

from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, OutOfMemory, UserCodeError
from surefoot.core.hardware import find_machine
from surefoot.core.units import format_bytes
from surefoot.prove.attempts import find_last_error
from surefoot.prove.memory import check_divisible, find_sizes, predict
from surefoot.prove.whatif.batch import QUIET, peak_of
from surefoot.train.assemble.lengths import with_largest_batch
from surefoot.train.environment import find_device
from surefoot.trial import find_conditions, resident_bytes, run_rounds, spec_arm

# share of the limit for the further needs of a longer run, its evaluations and fragmentation
MARGIN = 0.1
STEPS, STEPS_OF_THE_ANSWER = 5, 50
# the kernel kills a process with SIGKILL if it finds no memory
SHORT = (OutOfMemory.exit_code, -signal.SIGKILL)
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MicrobatchTrial:
    """Attempt to train with one microbatch size in one process.

    `peak_bytes` is None if the process ran out of memory, or failed for a different reason
    (`is_refused`); `failure` is the error. `num_steps` is lower than requested if the run is
    shorter.
    """

    microbatch: int
    num_steps: int | None = None
    peak_bytes: float | None = None
    fits: bool = False
    failure: str | None = None
    is_refused: bool = False


@dataclass(frozen=True)
class PredictedFit:
    """Largest microbatch that is predicted to fit in memory, with the peak of its tensors.

    `least_bytes` is the peak of the smallest microbatch. If not even that one fits, `microbatch` is
    None and `peak_bytes` equals `least_bytes`.
    """

    microbatch: int | None
    peak_bytes: int
    least_bytes: int


@dataclass(frozen=True, kw_only=True)
class FitSearch:
    """All tries of a search in order; the last one confirms the result.

    `microbatch` is the largest that fits, or None if none does.
    """

    batch: int
    limit_bytes: int
    tries: tuple[MicrobatchTrial, ...]
    microbatch: int | None
    predicted: PredictedFit | None
    conditions: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of the longer run that confirmed the result."""
        return None if self.microbatch is None else self.tries[-1].peak_bytes

    @property
    def beside_bytes(self) -> float | None:
        """Memory that the smallest try needed beyond its predicted tensors; None if unknown."""
        smallest = min(
            (each for each in self.tries if not each.is_refused),
            key=lambda each: each.microbatch,
            default=None,
        )
        if self.predicted is None or smallest is None or smallest.peak_bytes is None:
            return None
        return max(0.0, smallest.peak_bytes - self.predicted.least_bytes)

    def as_row(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "margin": MARGIN,
            "usable_bytes": subtract_margin(self.limit_bytes),
            "peak_bytes": self.peak_bytes,
        }


def subtract_margin(limit_bytes: int) -> float:
    """Return the memory limit minus a safety margin of MARGIN."""
    return (1 - MARGIN) * limit_bytes


def find_limit(spec: RunSpec, asked_bytes: int | None) -> int:
    """Return the requested memory limit, or the whole memory of the GPU that `spec` uses.

    Raises:
        InputError: If the limit exceeds the memory, or none is given for a CPU.
    """
    device = find_device(spec.train.device)
    is_gpu = device.type == "cuda"
    there = (
        torch.cuda.get_device_properties(device).total_memory
        if is_gpu
        else find_machine().memory_bytes
    )
    if asked_bytes is None and not is_gpu:
        raise InputError(
            "the run is on a CPU, which shares its memory with other programs, "
            "so whatif fit needs a limit",
            hint="set a limit, for example 2GiB",
        )
    limit = there if asked_bytes is None else asked_bytes
    if not 0 < limit <= there:
        raise InputError(
            f"the limit is {format_bytes(limit)}, but there are {format_bytes(there)}",
            hint="give a part of that",
        )
    return limit


def find_largest(sizes: Sequence[int], start: int, fits: Callable[[int, int], bool]) -> int | None:
    """Return the largest of the ascending `sizes` for which `fits(size, steps)` is true, or None.

    The search uses few steps; more steps confirm the result. From `start` the size is doubled or
    halved until one size fits and one does not. The range between them is then bisected. A larger
    size is assumed to need no less memory.

    >>> find_largest([1, 2, 4, 8, 16], 1, lambda size, steps: size <= 5)
    4
    """
    low, high, size = 0, sizes[-1] + 1, start
    while size:
        low, high = (size, high) if fits(size, STEPS) else (low, size)
        size = _choose_next_size(
            [each for each in sizes if low < each < high], low, high if high in sizes else None
        )
    if not low or fits(low, STEPS_OF_THE_ANSWER):
        return low or None
    smaller = sizes[: sizes.index(low)]
    return find_largest(smaller, smaller[-1], fits) if smaller else None


def _choose_next_size(between: Sequence[int], low: int, high: int | None) -> int:
    """Return the size in `between` to try next; 0 if none is left.

    `low` is the largest size that fits, or 0 if none does. `high` is the smallest size that does
    not fit, or None if it is unknown.
    """
    if not between:
        return 0
    if high is None:
        return max((size for size in between if size <= 2 * low), default=between[0])
    if not low:
        return min((size for size in between if 2 * size >= high), default=between[-1])
    return between[len(between) // 2]


def measure_largest(
    spec: RunSpec, limit_bytes: int, *, tell: Tell = lambda text: None
) -> FitSearch:
    """Find the largest microbatch of the spec that fits in memory, by the peaks of real runs.

    The search starts from the size that is predicted to fit.

    Raises:
        InputError: For a batch that the data does not fill.
        SpecError: For data that yields whole batches.
        UserCodeError: If a try fails for a reason other than memory.
    """
    check_divisible(spec)
    sizes, most = find_sizes(spec)[::-1], subtract_margin(limit_bytes)
    made = with_largest_batch(spec).replace(**QUIET, memory={"on_oom": "stop"})
    specs = {
        size: made.replace(train={"microbatch": size if size < spec.train.batch else None})
        for size in sizes
    }
    predicted = _predict(specs, most, tell)
    tries: list[MicrobatchTrial] = []

    @cache
    def fits(size: int, steps: int) -> bool:
        tries.append(_try_microbatch(specs[size], size, steps, most))
        tell(
            f"microbatch {size}, {steps} steps: "
            f"{tries[-1].failure or format_bytes(tries[-1].peak_bytes)}"
        )
        if len(tries) == len(sizes[:2]) and all(each.is_refused for each in tries):
            # one refusal may be due to the size: BatchNorm refuses one sample
            raise UserCodeError(
                f"a microbatch of {tries[0].microbatch} could not be measured: {tries[0].failure}",
                hint="check that surefoot train SPEC runs with this microbatch",
            )
        return tries[-1].fits

    found = find_largest(sizes, (predicted and predicted.microbatch) or sizes[0], fits)
    larger = [size for size in sizes if size > tries[-1].microbatch]
    if found is None and tries[-1].is_refused and larger:
        # BatchNorm, for example, refuses one sample
        found = find_largest(larger, larger[0], fits)
    return FitSearch(
        batch=spec.train.batch,
        limit_bytes=limit_bytes,
        tries=tuple(tries),
        microbatch=found,
        predicted=predicted,
        conditions=find_conditions(("torch", "surefoot"), threads=spec.train.threads or 1),
    )


def _predict(specs: Mapping[int, RunSpec], most: float, tell: Tell) -> PredictedFit | None:
    """Predict the largest microbatch that fits, by the memory of tensors as in `surefoot memory`.

    On a CPU the process needs further memory, which is estimated by the present use of this
    process. Returns None if the memory cannot be predicted.
    """
    sizes, first = list(specs), next(iter(specs.values()))
    budget = most - (resident_bytes() if find_device(first.train.device).type == "cpu" else 0)
    peak = cache(lambda size: predict(specs[size]).interval[1])
    try:
        number = bisect_right(sizes, budget, key=peak)
        least = peak(sizes[0])
        return (
            PredictedFit(sizes[number - 1], peak(sizes[number - 1]), least)
            if number
            else PredictedFit(None, least, least)
        )
    except InputError as error:
        tell(f"no prediction to begin with: {error.message}")
        return None


def _try_microbatch(spec: RunSpec, size: int, steps: int, most: float) -> MicrobatchTrial:
    arm = spec_arm(
        f"microbatch {size}", spec, steps=steps, warmup=0, timeout_s=3600.0, whole_length=True
    )
    (outcome,) = run_rounds([arm], rounds=1, warmup_rounds=0)
    if outcome.exit_code in SHORT:
        return MicrobatchTrial(
            microbatch=size,
            failure="out of memory"
            if outcome.exit_code > 0
            else "killed, as a process without memory is",
        )
    if outcome.ended != "done":
        return MicrobatchTrial(
            microbatch=size,
            failure=find_last_error(outcome.error or "").splitlines()[0],
            is_refused=True,
        )
    num_samples = outcome.measures["samples_per_epoch"]
    if num_samples < spec.train.step_batch:
        raise InputError(
            f"there are {num_samples:,.0f} samples, fewer than the {spec.train.step_batch:,} of a "
            "step",
            hint="give --set train.batch=N",
        )
    peak = peak_of(outcome.measures)
    return MicrobatchTrial(
        microbatch=size,
        num_steps=round(outcome.measures["num_steps"]),
        peak_bytes=peak,
        fits=peak <= most,
    )
