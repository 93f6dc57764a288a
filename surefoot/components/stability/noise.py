"""Gradient noise scale: the batch size above which more samples per step help little.

S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018,
https://arxiv.org/abs/1812.06162, appendix A. The gradient of a batch of b samples is the true
gradient G plus noise of variance S / b. Its mean squared norm is therefore |G_b|^2 = |G|^2 + S / b.
From the norms for two batch sizes, |G|^2 and S follow. The simple noise scale is S / |G|^2, in
samples.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from torch import Tensor

LEVEL, RESAMPLED = 0.95, 1000
LEAST, MOST = 8, 200  # least and most steps of an estimate: older steps had other weights


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Estimate of the gradient noise scale, in samples, from the last `num_steps` steps.

    `low` and `high` are the ends of its 95 % confidence interval. If the gradient cannot be
    distinguished from its noise, `scale` and `high` are None, and the scale is at least `low`.
    """

    scale: float | None
    low: float
    high: float | None
    num_steps: int

    def advise(self, batch: int) -> str:
        """Return advice about the batch size `batch`.

        In the model of McCandlish et al. (2018), a run with batch size B takes S = S_min (1 + scale
        / B) steps and E = E_min (1 + B / scale) samples.
        """
        if self.scale is None or self.high is None:
            return (
                f"the noise scale is {self.low:,.0f} samples or more: "
                f"a batch above {batch:,} saves steps nearly in proportion"
            )
        steps, samples = (
            f"{1 + share:.3g}x" for share in (self.scale / batch, batch / max(self.scale, 1e-9))
        )
        costs = (
            f"a batch of {batch:,} needs {steps} the minimum of steps and {samples} "
            "the minimum of samples"
        )
        if batch < self.low:
            return (
                f"{costs}: a larger batch, up to about {self.scale:,.0f}, saves steps "
                "nearly in proportion; raise the learning rate with it"
            )
        if batch > self.high:
            return f"{costs}: a smaller batch, down to about {self.scale:,.0f}, saves samples"
        return f"{costs}: a larger batch would save few steps"


class GradientNoise:
    """Collector of squared gradient norms: of a part of each batch, and of the whole batch.

    Args:
        most: Number of steps in the estimate; only the newest are used.
    """

    def __init__(self, most: int = MOST) -> None:
        self._unread: deque[tuple[float | Tensor, float | Tensor, int, int]] = deque(maxlen=most)
        # estimates of |G|^2 and S, each without bias
        self._pairs: deque[tuple[float, float]] = deque(maxlen=most)

    def add(
        self, part_square: float | Tensor, whole_square: float | Tensor, part: int, whole: int
    ) -> None:
        """Add the squared gradient norms of one step; the host does not wait for the device.

        Args:
            part_square: Squared norm of the mean gradient over `part` samples of the step.
            whole_square: Squared norm of the mean gradient over all `whole` samples of the step.
            part: Number of samples in the part.
            whole: Number of samples in the step.
        """
        self._unread.append((part_square, whole_square, part, whole))

    def _read(self) -> None:
        """Convert the collected norms into estimates of |G|^2 and S.

        Steps with non-finite norms are left out.
        """
        while self._unread:
            one, other, part, whole = self._unread.popleft()
            part_square, whole_square = float(one), float(other)
            if 0 < part < whole and math.isfinite(part_square) and math.isfinite(whole_square):
                signal = (whole * whole_square - part * part_square) / (whole - part)
                self._pairs.append((signal, (part_square - whole_square) / (1 / part - 1 / whole)))

    def estimate(self) -> Noise | None:
        """Return the estimated noise scale, with a confidence interval.

        The scale is the ratio of the mean estimates over the steps, and the interval is a bootstrap
        interval over the steps. Return None if there are fewer than eight steps, or all gradients
        are 0.
        """
        self._read()
        if len(self._pairs) < LEAST:
            return None
        pairs = np.array(self._pairs)
        drawn = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLED, len(pairs)))
        signals, noises = pairs[:, 0][drawn].mean(1), pairs[:, 1][drawn].mean(1)
        ratios = np.sort(
            np.where(signals > 0, np.maximum(noises, 0) / np.where(signals > 0, signals, 1), np.inf)
        )
        tail = (1 - LEVEL) / 2
        low, high = ratios[int(tail * RESAMPLED)], ratios[int((1 - tail) * RESAMPLED)]
        signal, noise = pairs.mean(0)
        if not math.isfinite(low):  # only noise: the scale is known to exceed the batches
            low = (
                ratios[0]
                if math.isfinite(ratios[0])
                else max(0.0, noise) / abs(signal)
                if signal
                else math.inf
            )
        if not math.isfinite(low):
            return None
        is_known = signal > 0 and math.isfinite(high)
        return Noise(
            scale=float(max(noise, 0) / signal) if is_known else None,
            low=float(low),
            high=float(high) if is_known else None,
            num_steps=len(pairs),
        )
