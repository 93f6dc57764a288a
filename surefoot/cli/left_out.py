"""Spec keys that each command ignores, for the note that the command prints about them.

`GROUPS` lists every spec key once. `LEFT_OUT` lists every command that accepts `--set`, with the
keys that it ignores; the command uses every other key or rejects it. Ignored keys from the command
line are always reported. Ignored keys from a spec file are reported only if they concern several
ranks: the result of one process could otherwise be mistaken for that of the distributed run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.contract.spec import RunSpec
    from surefoot.contract.spec_file import Origin


def _name_keys(text: str) -> tuple[str, ...]:
    """Return the full names of keys from lines such as `data: folder shuffle`.

    >>> _name_keys("data: folder shuffle\\ntrain: seed")
    ('data.folder', 'data.shuffle', 'train.seed')
    """
    lines = [line.split(":") for line in text.strip().splitlines()]
    return tuple(f"{table.strip()}.{key}" for table, keys in lines for key in keys.split())


# group -> its keys, except the parameters of the task, which every command uses
GROUPS: Mapping[str, tuple[str, ...]] = {
    "task": ("task.use",),
    "step": _name_keys("""
        data: folder shuffle window shards last_batch draws on_bad max_bad
        optim: name lr weight_decay betas eps momentum nesterov trust_coefficient reference_batch
        optim: scaling clip clip_value no_decay lr_multipliers freeze fused state
        optim: ema ema_ramp ema_buffers
        schedule: name warmup warmup_shape warmup_start length every cycle stable decay_length
        schedule: timescale milestones floor factor start_factor final_factor power cycle_factor
        schedule: peak shape sequence cycle_momentum momentum_low momentum_high mode patience
        schedule: threshold
        train: length batch accumulate microbatch ramp batchnorm seed memory_format attention
        stability: nonfinite
        observe: noise
    """),
    "precision": _name_keys("""
        precision: compute emulate init_scale growth_interval min_scale keep weights master
        precision: contract
    """),
    "memory": (
        "memory.activation_checkpointing",
        "memory.blocks",
        "memory.offload",
        "memory.update_in_backward",
    ),
    "machine": _name_keys("train: deterministic device threads keep_freed_memory cudnn_benchmark"),
    "compile": _name_keys("compile: what blocks mode dynamic on_failure budget over_budget"),
    "loader": _name_keys("loader: workers kind prefetch start timeout memory"),
    "layout": ("layout.replicate", "layout.shard", "layout.zero_stage", "layout.virtual_ranks"),
    "communication": _name_keys("""
        layout: sync_buffers transport bucket_size first_bucket_size compress compress_rank
        layout: check_every hang_timeout timeout
        nccl: debug interface infiniband adapter infiniband_timeout infiniband_retries algorithm
        nccl: protocol peer_access
    """),
    "evaluation": _name_keys("evaluate: split score every batch batches patience"),
    "run": _name_keys("""
        checkpoint: every keep keep_every keep_best budget max_unsaved store background
        stability: max_skips diverged
        observe: every tensorboard
        memory: predict on_oom
        fault: forget
    """),
}
# command -> keys that it sets itself; a spec key that needs other values of them is not rejected
DECIDED: Mapping[str, tuple[str, ...]] = {
    "tune-loader": ("loader.workers",),
    "whatif compile": ("compile.what",),
    "whatif kernels": ("compile.what",),
    "whatif activation-checkpointing": ("memory.activation_checkpointing",),
    "whatif fit": ("memory.activation_checkpointing",),
    "verify --compile": ("compile.what",),
    "verify --precision": ("precision.compute",),
    "verify --layouts": ("layout.shard", "layout.zero_stage"),
}
OF_RANKS = ("layout", "communication")
_EVALUATING = ("evaluate.every", "evaluate.batch", "evaluate.batches", "evaluate.patience")
_ONE_PROCESS = (*OF_RANKS, "run", *_EVALUATING)  # single steps in this process
_UNRECORDED = ("checkpoint.store", "observe.tensorboard", "observe.noise")
_STEADY = (
    "train.length",
    "evaluate.every",
    "checkpoint.every",
    "checkpoint.keep_every",
    "checkpoint.store",
)

# command -> the groups and keys that it ignores, and what it does instead
LEFT_OUT: Mapping[str, tuple[tuple[str, ...], str]] = {
    "train": ((), ""),
    "resume": ((), ""),
    "spec show": ((), ""),
    "spec check": ((), ""),
    "profile": ((), ""),
    "memory": (
        ("machine", "compile", "loader", "communication", "evaluation", "run"),
        "it predicts one training step on a CPU, in eager mode",
    ),
    "bench step": (_ONE_PROCESS, "it times single steps of one process"),
    "bench comm": (("run", *_EVALUATING), "it times single steps"),
    "roofline": (_ONE_PROCESS, "it times single steps of one process"),
    "explain": (_ONE_PROCESS, "it runs the first step in one process"),
    "formats": (
        (*_ONE_PROCESS, *(key for key in GROUPS["precision"] if key != "precision.init_scale")),
        "it computes the gradients of the first step in fp32, in one process",
    ),
    "tune-loader": (
        (*_ONE_PROCESS, "loader.workers", "loader.prefetch"),
        "it times single steps of one process",
    ),
    "ladder": (("checkpoint.store",), "it compares runs and copies none of their checkpoints"),
    "whatif batch": (
        ("train.batch", "train.accumulate", "train.microbatch", "train.ramp", *_UNRECORDED),
        "it measures the given batches",
    ),
    "whatif compile": (
        ("compile.mode", "compile.on_failure", *_STEADY),
        "it measures every compile option, for a few steps",
    ),
    "whatif kernels": (
        (*_ONE_PROCESS, "compile.on_failure"),
        "it compiles the first step in one process",
    ),
    "whatif activation-checkpointing": (
        ("memory.activation_checkpointing", *_STEADY),
        "it measures every way of activation checkpointing, for a few steps",
    ),
    "whatif fit": (
        ("train.microbatch", "memory.on_oom", *_UNRECORDED),
        "it searches for the largest microbatch",
    ),
    "whatif noise": (_ONE_PROCESS, "it computes gradients in one process"),
    "verify": (
        (
            "checkpoint.every",
            "checkpoint.keep",
            "checkpoint.keep_every",
            "checkpoint.store",
            "observe.every",
            "observe.tensorboard",
        ),
        "it sets how often its trials save and record",
    ),
    "verify --layouts": (
        (
            "layout.replicate",
            "layout.shard",
            "layout.zero_stage",
            "train.threads",
            "checkpoint.every",
            "checkpoint.store",
            "observe.every",
            "observe.tensorboard",
            "evaluate.every",
        ),
        "it runs the layouts of --layouts",
    ),
    "verify --precision": (
        ("checkpoint.store", "observe.tensorboard"),
        "it compares runs and copies none of their checkpoints",
    ),
    "verify --compile": (
        ("compile.on_failure", "checkpoint.store"),
        "it compares runs and copies none of their checkpoints",
    ),
}


def find_left_out(command: str, origin: Origin) -> list[str]:
    """Return the spec keys that `command` ignores and should report.

    These are the ignored keys that command-line flags set, and ignored keys about ranks that differ
    from their defaults.

    Args:
        command: a key of `LEFT_OUT`, such as "bench step".
        origin: the spec, with the origin of each value.
    """
    left_out = set(_keys(LEFT_OUT[command][0]))
    of_ranks = set(_keys(OF_RANKS))
    stated = _find_stated(origin.spec)
    return [
        key
        for key in _keys(GROUPS)
        if key in left_out
        and (origin.places.get(key, "").startswith("--") or (key in of_ranks and key in stated))
    ]


def name_left_out(command: str, origin: Origin) -> list[str]:
    """Print a note with the spec keys that `find_left_out` returns, if any; return the keys."""
    found = find_left_out(command, origin)
    if found:
        print(
            f"note: {command} does not use {', '.join(found)}: {LEFT_OUT[command][1]}",
            file=sys.stderr,
            flush=True,
        )
    return found


def _keys(names: tuple[str, ...] | Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name in names:
        yield from GROUPS.get(name, (name,))


def _find_stated(spec: RunSpec) -> set[str]:
    """Return the spec keys, as `table.key`, whose values differ from the defaults."""
    tables = spec.model_dump(exclude_defaults=True, mode="python")
    return {
        f"{table}.{key}" for table, keys in tables.items() if isinstance(keys, dict) for key in keys
    }
