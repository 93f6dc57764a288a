"""Search for the largest microbatch that fits in memory, with the cheapest recomputation."""

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
from surefoot.train.assemble.reading import read_split
from surefoot.train.preflight.predicted import Prediction, predict
from surefoot.train.preflight.rank_memory import find_layout

WAYS = ("none", "operators", "every 2", "full")  # the cheapest first
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Fit:
    """Microbatch and recomputation that fit in memory, with the predicted peak."""

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
    """Return the microbatch sizes that divide every batch of `spec`, in descending order.

    The first one is the whole batch, or with several ranks the part of one rank.

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
    """Check that the batch size of the task's data can be set in the spec.

    Args:
        spec: The spec.
        purpose: Beginning of the error message.
        instead: End of its hint: a command for data that yields whole batches.

    Raises:
        SpecError: If the data yields whole batches.
    """
    source = read_split(load_task(spec), "train")
    if isinstance(source, Iterated):
        raise SpecError(
            f"{purpose}, but the source gives whole batches: {source.describe()}",
            hint=f"give the task's DataLoader another batch_size; {instead}",
        )


def fit(spec: RunSpec, budget_bytes: int, tell: Tell) -> Fit:
    """Return the largest microbatch whose predicted peak is at most `budget_bytes`.

    The upper bound of the prediction is compared. For each size, the cheapest recomputation that
    fits is chosen.

    Raises:
        InputError: If no microbatch fits; the message has the least memory that is needed.
        SpecError: For data that yields whole batches.
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
