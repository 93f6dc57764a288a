"""Check of the sample numbers that are requested from a source."""

from __future__ import annotations

import numpy as np

from surefoot.core.errors import DataError


def check_asked(ids: np.ndarray, length: int) -> None:
    """Raise DataError for a number that is not a sample of a source of `length` samples.

    numpy would count negative numbers from the end.
    """
    # as uint64, a negative number exceeds any length
    if len(ids) and ids.astype(np.uint64).max() >= length:
        wrong = int(ids[(ids < 0) | (ids >= length)][0])
        raise DataError(
            f"sample {wrong:,} was requested",
            hint=f"the source has the samples 0 to {length - 1:,}",
        )
