"""The largest microbatch that fits into some memory, and the cheapest recomputation for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError
from surefoot.core.units import format_bytes
from surefoot.train.assemble import load_task
from surefoot.train.preflight.predicted import Prediction, predict
from surefoot.train.preflight.rank_memory import find_layout
from surefoot.train.step.reading import read_split

WAYS = ("none", "operators", "every 2", "full")  # the cheapest first
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Fit:
    """A microbatch and recomputation that fit, and the predicted memory."""

    microbatch: int
    recompute: str
    prediction: Prediction

    def as_row(self) -> dict[str, Any]:
        return {
            "microbatch": self.microbatch,
            "recompute": self.recompute,
            **self.prediction.as_row(),
        }


def find_sizes(spec: RunSpec) -> list[int]:
    """Return the microbatches that divide every batch of `spec`, the whole batch first.

    For several ranks, the whole is a rank's part of the batch.

    >>> find_sizes(RunSpec(task={"use": "digits"}, train={"batch": 12}))
    [12, 6, 4, 3, 2, 1]
    >>> find_sizes(RunSpec(task={"use": "digits"}, train={"batch": 12}, layout={"shard": 2}))
    [6, 4, 3, 2, 1]
    """
    batch = -(-spec.train.batch // find_layout(spec).world_size)
    if spec.memory.update_in_backward:
        return [batch]
    smaller = math.gcd(spec.train.batch, *(stage for _, stage in spec.train.ramp))
    return [size for size in range(batch, 0, -1) if size == batch or smaller % size == 0]


def check_divisible(
    spec: RunSpec,
    purpose: str = "a fit looks for a train.microbatch",
    instead: str = "without --fit surefoot memory predicts a step of its batches",
) -> None:
    """Raise SpecError if the task's data gives whole batches, whose size no key of a spec sets.

    The message begins with `purpose`; the hint ends with `instead`, a command for such data.
    """
    source = read_split(load_task(spec), "train")
    if isinstance(source, Iterated):
        raise SpecError(
            f"{purpose}, but the source gives whole batches: {source.describe()}",
            hint=f"give the task's DataLoader another batch_size; {instead}",
        )


def fit(spec: RunSpec, budget_bytes: int, tell: Tell) -> Fit:
    """Return the largest microbatch whose predicted peak is at most `budget_bytes`, with margin.

    Raises InputError if none fits, with the least memory that is needed; SpecError for data of
    whole batches.
    """
    check_divisible(spec)
    spec = spec.replace(observe={"noise": False})  # not every microbatch allows it
    ways, least = list(WAYS), None
    sizes = find_sizes(spec)
    for size in sizes:
        for way in ways:
            blocks = spec.memory.blocks if way != "none" else ()
            train = {"microbatch": size if size < sizes[0] else None}
            try:
                found = predict(
                    _changed(spec, train, {"activation_checkpointing": way, "blocks": blocks})
                )
            except InputError:
                if way == "none":
                    raise
                ways = ["none"]  # the model has no blocks
                break
            needs = found.interval[1]
            tell(f"microbatch {size}, recompute {way}: up to {format_bytes(needs)}")
            if needs <= budget_bytes:
                return Fit(size, way, found)
            least = needs if least is None else min(least, needs)
    raise InputError(
        f"nothing fits into {format_bytes(budget_bytes)}: "
        f"one sample at a time needs up to {format_bytes(least)}",
        hint='use a smaller model, or an optimizer with less state: optim.name = "sgd"',
    )


def _changed(spec: RunSpec, train: dict[str, Any], memory: dict[str, Any]) -> RunSpec:
    tables = spec.as_tables()
    changed = {
        "train": {**tables.get("train", {}), **train},
        "memory": {**tables.get("memory", {}), **memory},
    }
    return spec.replace_all(
        {**tables, **changed},
        [f"{table}.{key}" for table in ("train", "memory") for key in changed[table]],
    )
