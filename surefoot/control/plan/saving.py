"""How often to save: what a save costs against what a failure loses.

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, 2006, for its limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SaveAdvice:
    """The interval that loses least, and the share of time that saving and redoing then take; all from `save_s` and `between_s`, and
    no shorter than `write_s`."""

    save_s: float
    between_s: float
    interval_s: float
    lost_share: float
    write_s: float = 0.0


def advise_interval(save_s: float, between_s: float, write_s: float = 0.0) -> SaveAdvice | None:
    """sqrt(2 x save time x mean time between failures); None where one of them is 0 and nothing can be weighed.

    A save that is written beside the training costs it little, and takes `write_s`: the next one begins after it.

    >>> advice = advise_interval(save_s=2.0, between_s=3600.0)
    >>> round(advice.interval_s), round(advice.lost_share, 4)
    (120, 0.0333)
    """
    if not (save_s > 0 and between_s > 0 and math.isfinite(save_s) and math.isfinite(between_s)):
        return None
    interval_s = max(write_s, math.sqrt(2 * save_s * between_s))
    return SaveAdvice(save_s, between_s, interval_s, save_s / interval_s + interval_s / 2 / between_s, write_s)
