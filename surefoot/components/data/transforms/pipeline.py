"""Pipelines of augmentation steps, each with its own random draws.

`Pipeline` also measures the cost of each step, and returns the pipeline for evaluation.
"""

# B batch, H height, W width, C channels

from __future__ import annotations

import dataclasses
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from surefoot.components.data.order import Keys, derive
from surefoot.core.errors import DataError

Step = Callable[[Any, Keys], Any]
ROUNDS = 5  # timed calls of a measurement; the median is used
STREAM = 3  # of the run's seed: the order has 1, the draws of a task have 2


def keys_of(keys: Keys, name: str, number: int = 0) -> Keys:
    """Return the random draws for one step of a pipeline.

    `name` is the name of the step; `number` counts the steps of this name, from 0. The draws are
    independent of those of all other steps, and do not depend on which steps of other names exist.
    """
    return dataclasses.replace(
        keys, seed=derive(keys.seed, STREAM, zlib.crc32(name.encode()), number)
    )


@dataclasses.dataclass(frozen=True)
class TransformCost:
    """Cost of a pipeline step: milliseconds for 1,000 images, and its share of the total cost."""

    name: str
    ms_per_1000: float
    share: float


@final
class Pipeline:
    """Pipeline of augmentation steps, which are called one after another with (images, keys).

    Example: `Pipeline(Crop(224, 224), Mirror(), Jitter(0.4, 0.4, 0.4, 0.1))`. Each step draws from
    a separate random stream, which is named after the type of the step. Adding or removing a step
    therefore does not change the draws of steps of other types.

    Args:
        *steps: Callables with the arguments (images, keys) that return images.

    Raises:
        DataError: If no step is given, or if a step is a class or cannot be called.
    """

    def __init__(self, *steps: Step) -> None:
        bad = [step for step in steps if not callable(step) or isinstance(step, type)]
        if bad or not steps:
            raise DataError(
                f"{bad[0]!r} is not a step of a pipeline" if bad else "a pipeline needs a step",
                hint="pass steps that can be called with (images, keys), such as Mirror()",
            )
        self.steps = steps
        names = [getattr(step, "__name__", type(step).__name__) for step in steps]
        before: Counter[str] = Counter()
        self._streams: list[tuple[str, int]] = []
        for name in names:
            self._streams.append((name, before[name]))
            before[name] += 1

    def __call__(self, images_BHWC: Tensor, keys: Keys) -> Tensor:
        for step, stream in zip(self.steps, self._streams, strict=True):
            images_BHWC = step(images_BHWC, keys_of(keys, *stream))
        return images_BHWC

    def __repr__(self) -> str:
        return f"Pipeline({', '.join(map(repr, self.steps))})"

    def evaluation(self) -> Pipeline | None:
        """Return the pipeline for evaluation, without random draws; None if it has no steps.

        Its steps are those that `settled()` of each step returns. Raises DataError for a step
        without a method `settled`.
        """
        left: list[Step] = []
        for step in self.steps:
            settled = getattr(step, "settled", None)
            if not callable(settled):
                raise DataError(
                    f"{step!r} has no method settled(), which evaluation calls",
                    hint=(
                        "define settled(): it returns the steps for evaluation, () for none "
                        "or (self,) for the same step"
                    ),
                )
            left += settled()
        return Pipeline(*left) if left else None

    def costs(self, images_BHWC: Tensor, keys: Keys) -> list[TransformCost]:
        """Measure the cost of each step for these images; return the most expensive step first.

        Each cost is the median of 5 calls, after one call that is not timed.
        """
        took: list[tuple[str, float]] = []
        for step, (name, number) in zip(self.steps, self._streams, strict=True):
            own, given, elapsed_s = keys_of(keys, name, number), images_BHWC, []
            for _ in range(ROUNDS + 1):
                started_s = time.perf_counter()
                images_BHWC = step(given, own)
                elapsed_s.append(time.perf_counter() - started_s)
            took.append((name, 1e6 * statistics.median(elapsed_s[1:]) / max(1, len(given))))
        total = sum(each for _, each in took) or 1.0
        return sorted(
            (TransformCost(name, each, each / total) for name, each in took),
            key=lambda cost: -cost.ms_per_1000,
        )
