"""Checkpoint interval: the cost of a save against the work that a failure loses.

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly,
2006, for its limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SaveAdvice:
    """The interval that loses the least time, and the share of time lost to saves and rework.

    Computed from `save_s` and `between_s`; the interval is not shorter than `write_s`.
    """

    save_s: float
    between_s: float
    interval_s: float
    lost_share: float
    write_s: float = 0.0


def advise_interval(save_s: float, between_s: float, write_s: float = 0.0) -> SaveAdvice | None:
    """Return the interval sqrt(2 * save time * mean time between failures), or None.

    None if one of the two is not a positive finite number. An asynchronous save costs training
    less than the `write_s` it takes; the next save starts after it.

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
