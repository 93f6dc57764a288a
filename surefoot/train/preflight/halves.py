"""Check that each loss term is a sum: compare the loss of a batch with those of its two halves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from surefoot.contract.task import Batch, Loss, Term
from surefoot.core.errors import TaskError

UNCHECKED = "could not be checked"
SAME = 1e-6  # relative
TOLERANCE = 1e-3  # relative; the two halves of a sum and of a mean differ by a factor of two
SMALLEST = 1e-5  # relative; below this a penalty is not distinguished from rounding in fp32
# relative; rounding in 16 bits can cause this difference
ROUNDING = 2e-2
NUM_DRAWS = 8  # seeds under which a loss that draws random numbers is computed
CERTAIN, COMPATIBLE = 6.0, 4.0  # in standard errors of the mean over the seeds
SUM_HINT = (
    'give the sum and its count: Loss.sum(cross_entropy(..., reduction="sum"), count); a term that '
    "does not depend on the batch, such as a penalty on weights, is Term(..., fixed=True)"
)
WAYS_OUT = (
    "a penalty that does not depend on the batch goes in a separate term: Term(..., "
    "fixed=True); a loss that compares samples with each other is returned with additive=False, "
    "and train.microbatch and train.accumulate are left out (on several ranks it uses "
    "surefoot.all_gather)"
)
Verdict = Literal["sum", "mean", "other", "unknown"]


@dataclass(frozen=True)
class LossTrial:
    """Loss in evaluation mode, whether it drew random numbers, and whether it called all_gather."""

    loss: Loss
    draws: bool
    gathers: bool = False


class _Broadcasts(TorchFunctionMode):
    """Recorder of the last call that broadcast the samples of one tensor against those of another.

    For example, tensors of shapes (B, 1) and (B,) give a result of shape (B, B).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = [
            tuple(each.shape)
            for each in (*args, *(kwargs or {}).values())
            if isinstance(each, Tensor) and each.ndim
        ]
        if (
            len(shapes) == 2
            and shapes[0][0] == shapes[1][0] > 1
            and {len(shape) for shape in shapes} >= {1}
        ):
            wide = max(shapes, key=len)
            is_indexed = isinstance(result, Tensor) and tuple(result.shape) == wide
            if len(wide) > 1 and wide[-1] == 1 and not is_indexed:
                self.found = (
                    f"{getattr(func, '__name__', func)} takes tensors of shapes {shapes[0]} and "
                    f"{shapes[1]}, and broadcasts every sample against every other "
                    "sample: if this is not intended, give both the same shape, "
                    f"for example with .squeeze(-1) on the tensor of shape {wide}"
                )
        return result


Try = Callable[[Batch, int], LossTrial]  # the loss of a batch under a seed


def start_with(first: LossTrial, batch: Batch, attempt: Try) -> Try:
    """Return `attempt` that gives `first` for its first call with `batch` and seed 0."""
    known = [first]

    def attempt_or_known(given: Batch, seed: int) -> LossTrial:
        return known.pop() if known and given is batch and not seed else attempt(given, seed)

    return attempt_or_known


def cut_batch(batch: Batch, size: int | None = None) -> list[Batch] | None:
    """Return the two halves of a batch; None if its samples cannot be separated.

    `size` is the number of samples, if known. A batch can be cut if all of its tensors have the
    same first dimension, or if its parts are sequences of the same length.
    """
    found = [
        (lengths, is_sequences)
        for lengths, is_sequences in (
            (set(_lengths(batch)), False),
            (_lengths_of_parts(batch), True),
        )
    ]
    ways = {
        min(lengths): is_sequences
        for lengths, is_sequences in reversed(found)
        if len(lengths) == 1 and lengths != {-1}
    }
    number = size if size in ways else min(ways) if len(ways) == 1 and size is None else 0
    if number is None or number < 2:
        return None
    is_sequences = ways[number]
    middle = number // 2
    try:
        return [
            _part(batch, number, half, is_sequences)
            for half in (slice(0, middle), slice(middle, number))
        ]
    # a user-defined container that cannot be built from parts
    except Exception:  # noqa: BLE001
        return None


def double_batch(batch: Batch) -> Batch | None:
    """Return a batch with the single sample of `batch` twice; None if it has several samples."""
    if set(_lengths(batch)) != {1}:
        return None
    try:
        return _part(batch, 1, [0, 0], is_sequences=False)
    except Exception:  # noqa: BLE001 - as above
        return None


def check_sums(
    name: str,
    attempt: Try,
    whole: Batch,
    halves: Sequence[Batch],
    *,
    is_split: bool,
    is_same: bool,
    norms_batches: bool,
) -> list[str]:
    """Compare the loss terms of `whole` with those of its `halves`; return warnings.

    Args:
        name: the name of the update.
        attempt: computes the loss of a batch under a seed.
        whole: the batch.
        halves: its two halves.
        is_split: whether the run splits batches into microbatches or over ranks.
        is_same: whether the halves were cut from `whole` instead of read again.
        norms_batches: whether the model normalizes over the batch in evaluation mode too; a
            difference then proves nothing.

    Raises:
        TaskError: for a mean, and with `is_split` for any other loss that is not a sum.
    """
    try:
        tried = _try_seeds(attempt, (whole, *halves), range(1))
        if any(each.draws for each in tried[0]):
            tried += _try_seeds(attempt, (whole, *halves), range(1, NUM_DRAWS))
    except TaskError as error:
        return [
            (
                f"whether the loss of update {name} is a sum {UNCHECKED}: "
                f"half a batch failed: {error.message}"
            )
        ]
    first, found = tried[0][0], []
    for index, term in enumerate(first.loss.terms):
        if term.fixed:
            continue
        values = _values(tried, index)
        verdict = judge(values, is_same=is_same)
        can_look = verdict in ("sum", "unknown") and is_same and len(tried) == 1
        if can_look and _adds_constant(attempt, halves, index, values[0]):
            verdict = "other"
        if verdict != "sum" and _is_constant(
            [each.loss.terms[index] for each in tried[0] if index < len(each.loss.terms)]
        ):
            continue  # total and count are equal for every batch, so the mean is right
        if verdict in ("mean", "other") and (
            norms_batches or not _repeats(attempt, whole, index, values[0][0], tried)
        ):
            verdict = "unknown"
        if verdict == "mean":
            raise TaskError(
                f"the term {term.name} of update {name} is a mean, not a sum: its "
                "total does not grow with the batch",
                hint=SUM_HINT,
            )
        if verdict == "other":
            with _Broadcasts() as broadcasts:
                attempt(whole, 0)
            found.append(
                _report(
                    name,
                    term.name,
                    values[0],
                    broadcasts.found,
                    is_refused=is_split
                    and (
                        len(tried) == 1
                        or _is_confirmed(attempt, (whole, *halves), index, is_same=is_same)
                    ),
                )
            )
        if verdict == "unknown":
            found.append(f"whether the term {term.name} of update {name} is a sum {UNCHECKED}")
    return found


def judge(values: np.ndarray, *, is_same: bool = True) -> Verdict:
    """Classify a loss term as "sum", "mean", "other" or "unknown" from its values.

    `values` has shape (seeds, 3): the value for the whole batch and for each half, one row per
    seed. `is_same` means that the halves hold exactly the samples of the batch. A value about
    halfway between those of the halves is then a mean, even a weighted one.
    """
    whole, halves = values[:, 0], values[:, 1:]
    if not np.isfinite(values).all() or not values.any():
        return "unknown"
    scale = max(abs(float(part)) for part in values.mean(0))
    apart, error = _mean_and_error(halves.sum(1) - whole)
    if abs(apart) <= TOLERANCE * scale + COMPATIBLE * error:
        return "sum" if error <= 0.1 * scale else "unknown"
    low, high = float(halves.mean(0).min()), float(halves.mean(0).max())
    of_mean, error_of_mean = _mean_and_error(halves.mean(1) - whole)
    is_certain = abs(apart) > CERTAIN * error and abs(apart) > 0.25 * scale
    between = (
        low - TOLERANCE * abs(low) <= whole.mean() <= high + TOLERANCE * abs(high)
        and low * high > 0
    )
    near = is_same and between and 0.4 <= float(whole.mean()) / (low + high) <= 0.6
    if is_certain and (near or abs(of_mean) <= TOLERANCE * scale + COMPATIBLE * error_of_mean):
        return "mean"
    return "other" if abs(apart) > ROUNDING * scale + CERTAIN * error else "unknown"


def _report(
    update: str, term: str, values: Sequence[float], broadcast: str, *, is_refused: bool
) -> str:
    whole, *halves = values
    what = (
        f"the term {term} of update {update} is not a sum over samples: a batch gives "
        f"{whole:.6g}, its halves give "
        f"{' and '.join(f'{half:.6g}' for half in halves)}, together {sum(halves):.6g}"
    )
    if is_refused:
        raise TaskError(
            f"{what}, but the run divides its batches",
            hint=f"{broadcast}; {WAYS_OUT}" if broadcast else WAYS_OUT,
        )
    cause = f"; {broadcast}" if broadcast else ""
    return f"{what}{cause}; with train.microbatch or on several ranks the trained weights differ"


def is_equal(one: Loss, other: Loss) -> bool:
    """Return whether two losses have the same terms, except for rounding."""
    mine, theirs = (
        [(float(term.total.detach()), float(term.count)) for term in each.terms]
        for each in (one, other)
    )
    return len(mine) == len(theirs) and np.allclose(
        mine, theirs, rtol=SAME, atol=0.0, equal_nan=True
    )


def _try_seeds(attempt: Try, batches: Sequence[Batch], seeds: range) -> list[list[LossTrial]]:
    return [[attempt(each, seed) for each in batches] for seed in seeds]


def _values(tried: Sequence[Sequence[LossTrial]], index: int) -> np.ndarray:
    """Return the values of a term, (seeds, batches)."""
    return np.asarray([[_value(each.loss, index) for each in row] for row in tried])


def _is_confirmed(attempt: Try, batches: Sequence[Batch], index: int, *, is_same: bool) -> bool:
    """Return whether other seeds show too that a term that draws random numbers is not a sum."""
    tried = _try_seeds(attempt, batches, range(NUM_DRAWS, 3 * NUM_DRAWS))
    return judge(_values(tried, index), is_same=is_same) == "other"


def _adds_constant(attempt: Try, halves: Sequence[Batch], index: int, values: np.ndarray) -> bool:
    """Return whether a small part of a term is added once for each batch, of whatever size.

    `values` holds the values for the whole batch and for its halves. If the batch is cut into k
    parts, such a part is added k - 1 times too often. An error of rounding does not grow so.
    """
    whole, scale = values[0], float(np.abs(values).max())
    parts, found = list(halves), [float(values[1:].sum() - whole)]
    while abs(found[0]) > SMALLEST * scale and len(found) < 3:
        cut = [cut_batch(part) for part in parts]
        parts = [part for pair in cut for part in pair or ()]
        try:
            total = sum(_value(attempt(part, 0).loss, index) for part in parts)
        except TaskError:  # a model may need several samples
            break
        if len(parts) != 2 * len(cut):
            break
        found.append((total - float(whole)) / (len(parts) - 1))
    tolerance = 0.1 if len(found) == 3 else 0.02
    return len(found) > 1 and all(
        abs(each - found[0]) <= tolerance * abs(found[0]) for each in found
    )


def _repeats(
    attempt: Try, whole: Batch, index: int, value: float, tried: Sequence[Sequence[LossTrial]]
) -> bool:
    """Return whether a second computation on a batch gives the same value.

    If not, the loss draws from a generator that the seeds do not set.
    """
    if len(tried) > 1:
        return True
    return abs(_value(attempt(whole, 0).loss, index) - value) <= TOLERANCE * abs(value)


def _is_constant(terms: Sequence[Term]) -> bool:
    values = [(float(term.total.detach()), float(term.count)) for term in terms]
    return bool(np.allclose(values, values[0], rtol=SAME, atol=0.0))


def _value(loss: Loss, index: int) -> float:
    return float(loss.terms[index].total.detach()) if index < len(loss.terms) else float("nan")


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    count = len(values)
    return float(values.mean()), float(values.std(ddof=1) / count**0.5) if count > 1 else 0.0


def _is_array(part: Any) -> TypeGuard[Tensor | np.ndarray]:
    return isinstance(part, Tensor | np.ndarray)


def _lengths(batch: Any) -> Iterator[int]:
    """Yield the first dimension of each tensor and array; -1 for a part that cannot be cut."""
    if _is_array(batch):
        if (
            getattr(batch, "is_nested", False)
            or getattr(batch, "layout", torch.strided) is not torch.strided
        ):
            yield -1
        elif batch.ndim:
            yield len(batch)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _lengths(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _lengths(part)
    elif not isinstance(batch, str | bytes | int | float | bool | None) and hasattr(
        batch, "__dict__"
    ):
        yield -1  # an object with unknown parts, such as a batch of graphs


def _lengths_of_parts(batch: Any) -> set[int]:
    """Return the lengths of a batch's direct parts; -1 for any part without a length.

    Only lists, tuples and arrays have one.
    """
    parts = (
        list(batch.values())
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, list | tuple)
        else [None]
    )
    return {
        len(part) if isinstance(part, list | tuple) or (_is_array(part) and part.ndim) else -1
        for part in parts
    }


def _part(batch: Any, number: int, rows: slice | list[int], is_sequences: bool) -> Any:
    """Return `batch` with `rows` selected in every part that has `number` rows, one per sample."""
    if _is_array(batch):
        return batch[rows] if batch.ndim and len(batch) == number else batch
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)
        for key, part in batch.items():
            made[key] = _part_of_container(part, number, rows, is_sequences)
        return made
    if isinstance(batch, list | tuple):
        parts = [_part_of_container(part, number, rows, is_sequences) for part in batch]
        kind: Any = type(batch)
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    return batch


def _part_of_container(part: Any, number: int, rows: slice | list[int], is_sequences: bool) -> Any:
    is_plain = (
        isinstance(part, list | tuple)
        and len(part) == number
        and (is_sequences or not any(True for _ in _lengths(part)))
    )
    if is_plain:
        return part[rows] if isinstance(rows, slice) else type(part)(part[row] for row in rows)
    return _part(part, number, rows, is_sequences)
