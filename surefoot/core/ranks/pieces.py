"""Check whether the batches of a run can be divided among its ranks."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.core.errors import SpecError


def check_divides(batch: int, microbatch: int | None, *, is_given: bool) -> None:
    """Raise SpecError if batches cannot be cut into whole microbatches.

    `is_given` is False if `batch` is the default.
    """
    if microbatch is not None and batch % microbatch:
        legal = [size for size in range(1, batch + 1) if batch % size == 0]
        default = "" if is_given else " (the default)"
        raise SpecError(
            f"train.microbatch = {microbatch} does not divide train.batch = {batch}{default}",
            hint=f"use one of {legal}",
        )


def check_pieces(batches: Iterable[int], microbatch: int | None, num_ranks: int) -> None:
    """Raise SpecError if the smallest batch has fewer microbatches than there are ranks.

    `batches` are the batch sizes of the run. If `microbatch` is None, a microbatch may be a single
    sample.
    """
    smallest = min(batches)
    pieces = smallest if microbatch is None else -(-smallest // microbatch)
    if pieces < num_ranks:
        cut = "" if microbatch is None else f" in microbatches of {microbatch}"
        raise SpecError(
            f"a batch of {smallest}{cut} has {pieces} microbatch{'es' * (pieces != 1)} "
            f"for {num_ranks} ranks",
            hint=f"use fewer ranks, or train.microbatch = {smallest // num_ranks} or less"
            if smallest >= num_ranks
            else f"use fewer ranks, or batches of {num_ranks} and more",
        )


def check_equal_passes(
    batches: Iterable[int], microbatch: int | None, num_ranks: int, *, has_ramp: bool = False
) -> None:
    """Raise SpecError if ranks would compute different numbers of forward passes in a step.

    With synchronized BatchNorm a rank with more passes would wait for the others. `batches` are the
    batch sizes of the run. A run with a batch ramp (`has_ramp`) is always refused.
    """
    for batch in batches:
        size = microbatch or -(-batch // num_ranks)
        if has_ramp or -(-batch // size) % num_ranks:
            raise SpecError(
                f'train.batchnorm is "sync", and a batch of {batch} in microbatches of {size} '
                f"does not give each of {num_ranks} ranks the same number",
                hint=(
                    'set data.last_batch = "drop", '
                    "and train.batch to a multiple of train.microbatch times the ranks; no ramp"
                ),
            )


def check_virtual(virtual_ranks: int, num_ranks: int) -> None:
    """Raise SpecError if the number of virtual ranks is not a multiple of the number of ranks."""
    if virtual_ranks % num_ranks:
        legal = [str(each) for each in range(1, virtual_ranks + 1) if virtual_ranks % each == 0]
        raise SpecError(
            f"layout.virtual_ranks is {virtual_ranks}, but there are {num_ranks} ranks",
            hint=f"start {' or '.join(legal)} ranks",
        )
