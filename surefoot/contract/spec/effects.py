"""Keys of a spec that have an effect only with certain values of other keys, as one table.

A key with its default value is never refused. The keys of [schedule] that only some curves use are
in `core/schedule/settings`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

Read = Callable[[str], Any]  # returns the value of a key such as optim.name, given or default


@dataclass(frozen=True)
class When:
    """Condition that the key `key` has one of `values`, or, if `is_not` is True, none of them."""

    key: str
    values: tuple[Any, ...]
    is_not: bool = False

    def holds(self, read: Read) -> bool:
        return (read(self.key) in self.values) is not self.is_not

    @property
    def way(self) -> str:
        """Advice on which value to set so that the condition is met."""
        if not self.is_not:
            *first, last = map(json.dumps, self.values)
            return f"set {self.key} to {', '.join(first)}{' or ' * bool(first)}{last}"
        return (
            f"set {self.key}"
            if self.values == (None,)
            else f"set {self.key} to another value than {json.dumps(self.values[0])}"
        )


@dataclass(frozen=True)
class Need:
    """Requirement: each of `keys` has an effect only if at least one condition of `any_of` is met.

    `why` is the reason in words; "" for none.
    """

    keys: tuple[str, ...]
    any_of: tuple[When, ...]
    why: str = ""


def _one_of(key: str, *values: Any) -> tuple[When, ...]:
    return (When(key, values),)


def _not(key: str, value: Any) -> tuple[When, ...]:
    return (When(key, (value,), is_not=True),)


NEEDS: tuple[Need, ...] = (
    Need(("data.max_bad",), _one_of("data.on_bad", "skip")),
    Need(("data.window",), _one_of("data.shuffle", True)),
    Need(
        ("loader.kind", "loader.prefetch", "loader.start", "loader.timeout", "loader.memory"),
        _not("loader.workers", 0),
    ),
    Need(("loader.start",), _not("loader.kind", "thread")),
    Need(("optim.betas", "optim.eps"), _one_of("optim.name", "adam", "adamw", "muon", "lamb")),
    Need(("optim.momentum",), _one_of("optim.name", "sgd", "muon", "lars")),
    Need(
        ("optim.momentum",),
        _not("schedule.name", "one_cycle") + _one_of("schedule.cycle_momentum", False),
        "one_cycle changes the momentum from momentum_high to momentum_low and back",
    ),
    Need(("optim.nesterov",), _one_of("optim.name", "sgd", "muon")),
    Need(("optim.trust_coefficient",), _one_of("optim.name", "lars")),
    Need(("optim.fused",), _not("optim.name", "task")),
    Need(("optim.ema_ramp", "optim.ema_buffers"), _not("optim.ema", None)),
    Need(("optim.scaling",), _not("optim.reference_batch", None)),
    Need(
        ("schedule.warmup_shape",),
        _not("schedule.warmup", "0 steps") + _one_of("schedule.name", "warmup"),
    ),
    Need(("schedule.warmup_start",), _one_of("schedule.warmup_shape", "exponential")),
    Need(
        ("schedule.momentum_low", "schedule.momentum_high"), _not("schedule.cycle_momentum", False)
    ),
    Need(
        ("precision.init_scale", "precision.growth_interval", "precision.min_scale"),
        _one_of("precision.compute", "fp16", "auto"),
        "the other formats have the range of fp32 and need no loss scaling",
    ),
    Need(
        ("precision.master",),
        _one_of("precision.weights", "bf16"),
        "fp32 weights have no master weights",
    ),
    Need(("precision.emulate",), _one_of("precision.compute", "float8")),
    Need(
        ("precision.keep",),
        _one_of("precision.compute", "bf16", "fp16", "float8", "auto"),
        "autocast is off for this dtype",
    ),
    Need(
        ("memory.blocks",),
        _not("memory.activation_checkpointing", "none") + _not("layout.shard", 1),
    ),
    Need(("compile.blocks",), _one_of("compile.what", "blocks")),
    Need(
        ("evaluate.score", "evaluate.patience", "checkpoint.keep_best"),
        _not("evaluate.every", "never"),
    ),
    Need(
        (
            "compile.mode",
            "compile.dynamic",
            "compile.on_failure",
            "compile.budget",
            "compile.over_budget",
        ),
        _not("compile.what", "none"),
    ),
    Need(("layout.zero_stage",), _not("layout.shard", 1)),
    Need(
        ("layout.bucket_size", "layout.first_bucket_size"),
        _one_of("layout.shard", 1) + _one_of("layout.zero_stage", 1),
        "stages 2 and 3 reduce the gradients of one block at a time",
    ),
    Need(("layout.compress_rank",), _one_of("layout.compress", "powersgd")),
    Need(
        ("nccl.adapter", "nccl.infiniband_timeout", "nccl.infiniband_retries"),
        _not("nccl.infiniband", False),
    ),
    Need(("stability.max_skips",), _one_of("stability.nonfinite", "skip")),
)


def find_idle(read: Read, default: Read, decided: Collection[str] = ()) -> dict[str, Need]:
    """Return the keys with a non-default value but no effect, each with its unmet requirement.

    Args:
        read: Returns the value of a key in the spec.
        default: Returns the default value of a key.
        decided: Keys that the command sets itself; requirements on their values are not
            checked.
    """
    found: dict[str, Need] = {}
    for need in NEEDS:
        if any(each.key in decided or each.holds(read) for each in need.any_of):
            continue
        found |= {key: need for key in need.keys if key not in found and read(key) != default(key)}
    return found


def describe(key: str, need: Need, read: Read, default: Read) -> tuple[str, str]:
    """Return the error message and the hint for a key that has no effect."""
    because = " and ".join(dict.fromkeys(_state(each.key, read, default) for each in need.any_of))
    why = f" ({need.why})" if need.why else ""
    ways = ", or ".join(each.way for each in need.any_of)
    return (
        f"{key} = {_format_value(read(key))} has no effect {because}{why}",
        f"leave {key} out, or {ways}",
    )


def _state(key: str, read: Read, default: Read) -> str:
    value = read(key)
    shown = f"without {key}" if value is None else f"with {key} = {_format_value(value)}"
    return f"{shown}, its default" if value == default(key) and value is not None else shown


def _format_value(value: Any) -> str:
    return json.dumps(value, default=str)


def keys_of(needs: Iterable[Need] = NEEDS) -> set[str]:
    """Return every key that has a requirement."""
    return {key for need in needs for key in need.keys}
