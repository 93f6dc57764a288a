"""Checkpoint interval that loses the least time to saves and to failures.

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly,
2006, for its limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SaveAdvice:
    """Checkpoint interval that loses the least time, and the share of time that it loses.

    The time is lost to saves and to the repetition of steps after failures. The other fields are
    the arguments of `advise_interval`, all in seconds.
    """

    save_s: float
    between_s: float
    interval_s: float
    lost_share: float
    write_s: float = 0.0


def advise_interval(save_s: float, between_s: float, write_s: float = 0.0) -> SaveAdvice | None:
    """Recommend the checkpoint interval sqrt(2 * save time * mean time between failures).

    Return None if `save_s` or `between_s` is not a positive finite number.

    Args:
        save_s: seconds that training waits for a save.
        between_s: mean seconds between two failures.
        write_s: seconds until a checkpoint is on disk, which is longer than `save_s` if saves are
            asynchronous; the interval is not shorter.

    >>> advice = advise_interval(save_s=2.0, between_s=3600.0)
    >>> round(advice.interval_s), round(advice.lost_share, 4)
    (120, 0.0333)
    """
    if not (save_s > 0 and between_s > 0 and math.isfinite(save_s) and math.isfinite(between_s)):
        return None
    interval_s = max(write_s, math.sqrt(2 * save_s * between_s))
    return SaveAdvice(
        save_s, between_s, interval_s, save_s / interval_s + interval_s / 2 / between_s, write_s
    )
