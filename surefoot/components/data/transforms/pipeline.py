"""Steps in a row, each with draws of its own; what each of them costs; and what stands for them in evaluation."""

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
ROUNDS = 5  # of a measurement; the median counts
STREAM = 3  # of the run's seed: order has 1, the draws of a task of its own 2


def keys_of(keys: Keys, name: str, number: int = 0) -> Keys:
    """Draws of the step `name`, the `number`th of that name: independent of those of all others, and of which others there are."""
    return dataclasses.replace(keys, seed=derive(keys.seed, STREAM, zlib.crc32(name.encode()), number))


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step takes: milliseconds for 1,000 images, and its share of the whole."""

    name: str
    ms_per_1000: float
    share: float


@final
class Pipeline:
    """Steps called one after the other with (images, keys): `Pipeline(Crop(224, 224), Mirror(), Jitter(0.4, 0.4, 0.4, 0.1))`.

    A step is anything that is called so and gives images. Each draws from a stream of its own, named for its kind: another step put in
    or taken out leaves the draws of the rest alone. Raises DataError for no step, or one that cannot be called.
    """

    def __init__(self, *steps: Step) -> None:
        bad = [step for step in steps if not callable(step) or isinstance(step, type)]
        if bad or not steps:
            raise DataError(
                f"a pipeline of {bad[0]!r} has no step" if bad else "a pipeline has no step",
                hint="give steps that are called with (images, keys), as Mirror()",
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
        """The pipeline for evaluation, in which nothing is drawn: what each step's `settled()` says; None where nothing is left.

        Raises DataError for a step that does not say it.
        """
        left: list[Step] = []
        for step in self.steps:
            settled = getattr(step, "settled", None)
            if not callable(settled):
                raise DataError(
                    f"{step!r} does not say what stands for it in evaluation",
                    hint="give it a method settled() that returns () for nothing, or (self,) for itself",
                )
            left += settled()
        return Pipeline(*left) if left else None

    def costs(self, images_BHWC: Tensor, keys: Keys) -> list[Cost]:
        """What each step takes for these images, the costliest first: the median of 5, after one that is not timed."""
        took: list[tuple[str, float]] = []
        for step, (name, number) in zip(self.steps, self._streams, strict=True):
            own, given, elapsed_s = keys_of(keys, name, number), images_BHWC, []
            for _ in range(ROUNDS + 1):
                started_s = time.perf_counter()
                images_BHWC = step(given, own)
                elapsed_s.append(time.perf_counter() - started_s)
            took.append((name, 1e6 * statistics.median(elapsed_s[1:]) / max(1, len(given))))
        total = sum(each for _, each in took) or 1.0
        return sorted((Cost(name, each, each / total) for name, each in took), key=lambda cost: -cost.ms_per_1000)
