"""What a source is asked for, held against what it has."""

from __future__ import annotations

import numpy as np

from surefoot.core.errors import DataError


def check_asked(ids: np.ndarray, length: int) -> None:
    """Raise DataError for a number that is no sample of a source of `length`; numpy would count negative ones from the end."""
    if len(ids) and ids.astype(np.uint64).max() >= length:  # a negative one is larger than any number of samples
        wrong = int(ids[(ids < 0) | (ids >= length)][0])
        raise DataError(f"sample {wrong:,} was asked for", hint=f"the source has the samples 0 to {length - 1:,}")
