"""Numerical comparison of two arms: loss, gradients and weights, with the noise of equal runs.

The distance of two tensors is max |a - b| / scale. The scale is the largest magnitude in the
reference tensor, or a thousandth of the largest magnitude in its group (all gradients of a step,
all weights of a step) if that is larger. The second value matters for a tensor whose values cancel
to almost zero, such as the gradient of a bias before a normalization: its rounding errors are those
of values as large as its group's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from surefoot.core.errors import BadRecordError, InputError, TaskError
from surefoot.core.units import format_number
from surefoot.trial.arm import Arm
from surefoot.trial.process import run_arm
from surefoot.trial.report import read_arrays

TOLERANCE = 1e-5
# the floor is the largest difference in one pair of runs; that of a different pair is seldom three
# times as large
NOISE_FACTOR = 3.0
MIN_SHARE = 1e-3
Arrays = Mapping[str, np.ndarray]
Verdict = Literal["equal", "within noise", "differs"]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Comparison of one tensor of two variants (arms).

    Args:
        distance: Distance of the arms; None if there is a `problem`.
        floor: Distance of two equal runs of the reference; None if it was not measured.
        tolerance: Largest distance that counts as equal.
        problem: Reason why there is no distance, such as different shapes.
    """

    name: str
    distance: float | None
    floor: float | None
    tolerance: float
    problem: str | None = None

    @property
    def verdict(self) -> Verdict:
        """Verdict: "equal" (within the tolerance), "within noise" (of two equal runs) or "differs".

        "within noise" does not prove that the arms are equal.
        """
        if self.distance is None:
            return "differs"
        if self.distance <= self.tolerance:
            return "equal"
        return (
            "within noise"
            if self.floor is not None and self.distance <= NOISE_FACTOR * self.floor
            else "differs"
        )


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Comparison of all tensors of two variants (arms); the worst tensor comes first."""

    arm: str
    reference: str
    gaps: tuple[Gap, ...]
    failure: str | None = None

    @property
    def verdict(self) -> Verdict | Literal["not measured"]:
        """Verdict on the worst tensor; "not measured" if an arm failed or reported no tensors."""
        if self.failure is not None or not self.gaps:
            return "not measured"
        return self.gaps[0].verdict

    @property
    def words(self) -> str:
        """The verdict as a sentence that names the worst tensor."""
        if self.failure is not None or not self.gaps:
            return (
                f"{self.arm} was not compared with {self.reference}: "
                f"{self.failure or 'no tensors were reported'}"
            )
        worst, count = self.gaps[0], len(self.gaps)
        off = f"{worst.name} {worst.problem or f'is off by {format_number(worst.distance)}'}"
        both = f"{self.arm} and {self.reference}"
        if worst.verdict == "equal":
            return (
                f"{both} are equal in all {count} tensors within {worst.tolerance:g}: the worst, "
                f"{off}"
            )
        if worst.verdict == "within noise":
            return (
                f"{both} differ no more than two equal runs: {off}, "
                f"those by {format_number(worst.floor)}"
            )
        num_bad = sum(gap.verdict == "differs" for gap in self.gaps)
        return (
            f"{both} differ in {num_bad} of {count} tensors: {off}, {worst.tolerance:g} is allowed"
        )


def compare_arrays(
    reference: Arrays,
    again: Arrays,
    other: Arrays,
    *,
    tolerance: float = TOLERANCE,
    tolerances: Mapping[str, float] | None = None,
) -> list[Gap]:
    """Compare the tensors of an arm with those of a reference; return the gaps, the worst first.

    Args:
        reference: Tensors of the reference by name.
        again: Tensors of an equal run of the reference, which give the noise.
        other: Tensors of the arm.
        tolerance: Largest distance that counts as equal.
        tolerances: Different tolerances by prefix of the tensors' names, such as `loss/2000`.
    """
    largest = _largest_by_group(reference)
    gaps = []
    for name in sorted(reference.keys() | other.keys()):
        allowed = next(
            (value for prefix, value in (tolerances or {}).items() if name.startswith(prefix)),
            tolerance,
        )
        problem = _mismatch(reference.get(name), other.get(name))
        if problem is not None:
            gaps.append(
                Gap(name=name, distance=None, floor=None, tolerance=allowed, problem=problem)
            )
            continue
        scale = max(_magnitude(reference[name]), MIN_SHARE * largest[_group(name)])
        distance, floor = _distance(reference[name], other[name], scale), None
        if _mismatch(reference[name], again.get(name)) is None:
            floor = _distance(reference[name], again[name], scale)
        found = None if distance is not None else "is not finite in one of them alone"
        gaps.append(
            Gap(name=name, distance=distance, floor=floor, tolerance=allowed, problem=found)
        )
    return sorted(gaps, key=_sort_key, reverse=True)


def check_finite(arrays: Arrays, what: str) -> None:
    """Check that `arrays` contain a finite loss (`loss/...`), since equal NaNs prove nothing.

    Raises:
        TaskError: If no loss is finite; `what` is the subject of the message.
    """
    losses = [array for name, array in arrays.items() if name.startswith("loss/")]
    if not any(np.isfinite(each.astype(np.float64)).any() for each in losses):
        reported = (
            "reports no loss"
            if not losses
            else f"has no finite loss in {len(losses)} that it reports"
        )
        raise TaskError(
            f"{what} {reported}, so there is nothing to compare",
            hint="surefoot train SPEC names the first step that is not finite",
        )


def compare_arms(
    arm: Arm,
    reference: Arm,
    *,
    tolerance: float = TOLERANCE,
    tolerances: Mapping[str, float] | None = None,
) -> Parity:
    """Run `reference` twice and `arm` once in fresh processes, and compare the reported tensors.

    Raises InputError for an arm whose command writes no report.
    """
    for each in (arm, reference):
        if not each.reports:
            raise InputError(
                f"the arm {each.name!r} reports no tensors", hint="its command needs {report}"
            )
    found: list[Arrays] = []
    with tempfile.TemporaryDirectory(prefix="surefoot-parity-") as work:
        for number, each in enumerate(
            (reference, replace(reference, name=f"{reference.name} again"), arm)
        ):
            folder = Path(work) / str(number)
            outcome = run_arm(each, folder)
            if outcome.ended != "done":
                return _failed_parity(
                    arm, reference, f"{outcome.arm} {outcome.ended}: {outcome.error}"
                )
            try:
                found.append(read_arrays(folder / "rank0" / "report.json"))
            except BadRecordError as problem:
                return _failed_parity(arm, reference, f"{outcome.arm}: {problem}")
    gaps = compare_arrays(found[0], found[1], found[2], tolerance=tolerance, tolerances=tolerances)
    return Parity(arm=arm.name, reference=reference.name, gaps=tuple(gaps))


def _failed_parity(arm: Arm, reference: Arm, failure: str) -> Parity:
    return Parity(arm=arm.name, reference=reference.name, gaps=(), failure=failure)


def _group(name: str) -> str:
    """Return the group of a tensor, such as `gradient/1` for `gradient/1/layer.weight`.

    Magnitudes are comparable within a group.
    """
    return name.rpartition("/")[0]


def _largest_by_group(arrays: Arrays) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, array in arrays.items():
        largest[_group(name)] = max(largest.get(_group(name), 0.0), _magnitude(array))
    return largest


def _magnitude(array: np.ndarray) -> float:
    finite = np.abs(array.astype(np.float64))
    finite = finite[np.isfinite(finite)]
    return float(finite.max()) if finite.size else 0.0


def _mismatch(one: np.ndarray | None, other: np.ndarray | None) -> str | None:
    if one is None or other is None:
        return "is missing in one of them"
    return f"has shapes {one.shape} and {other.shape}" if one.shape != other.shape else None


def _distance(one: np.ndarray, other: np.ndarray, scale: float) -> float | None:
    """Return max |one - other| / scale over finite values; None if the non-finite values differ."""
    first, second = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(first)
    if not np.array_equal(finite, np.isfinite(second)) or not np.array_equal(
        first[~finite], second[~finite], equal_nan=True
    ):
        return None
    gap = float(np.abs(first - second)[finite].max()) if finite.any() else 0.0
    return gap / scale if gap else 0.0


def _sort_key(gap: Gap) -> tuple[int, float]:
    order: dict[Verdict, int] = {"equal": 0, "within noise": 1, "differs": 2}
    return order[gap.verdict], float(
        "inf"
    ) if gap.distance is None else gap.distance / gap.tolerance
