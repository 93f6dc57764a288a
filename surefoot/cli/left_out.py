"""The keys of a spec that each command ignores, so that the command can name them.

`GROUPS` lists every key of a spec once, `LEFT_OUT` every command that takes `--set`. A key that is
not listed for a command takes effect, or the command refuses it. Ignored keys from the command line
are always named. Ignored keys from a spec file are named only if they concern several ranks, since
a result of one process would otherwise pass for a result of the layout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.contract.spec import RunSpec
    from surefoot.contract.spec_file import Origin

# group -> its keys, except the parameters of the task, which every command uses
GROUPS: Mapping[str, tuple[str, ...]] = {
    "task": ("task.use",),
    "step": (
        "data.folder",
        "data.shuffle",
        "data.window",
        "data.last_batch",
        "data.on_bad",
        "data.max_bad",
        "optim.name",
        "optim.lr",
        "optim.weight_decay",
        "optim.betas",
        "optim.eps",
        "optim.momentum",
        "optim.nesterov",
        "optim.trust_coefficient",
        "optim.reference_batch",
        "optim.scaling",
        "optim.clip",
        "optim.clip_value",
        "optim.no_decay",
        "optim.lr_multipliers",
        "optim.freeze",
        "optim.fused",
        "optim.state",
        "optim.ema",
        "optim.ema_ramp",
        "optim.ema_buffers",
        "schedule.name",
        "schedule.warmup",
        "schedule.warmup_shape",
        "schedule.warmup_start",
        "schedule.length",
        "schedule.every",
        "schedule.cycle",
        "schedule.stable",
        "schedule.decay_length",
        "schedule.timescale",
        "schedule.milestones",
        "schedule.floor",
        "schedule.factor",
        "schedule.start_factor",
        "schedule.final_factor",
        "schedule.power",
        "schedule.cycle_factor",
        "schedule.peak",
        "schedule.shape",
        "schedule.sequence",
        "schedule.cycle_momentum",
        "schedule.momentum_low",
        "schedule.momentum_high",
        "schedule.mode",
        "schedule.patience",
        "schedule.threshold",
        "train.length",
        "train.batch",
        "train.microbatch",
        "train.ramp",
        "train.batchnorm",
        "train.seed",
        "train.memory_format",
        "train.attention",
        "stability.nonfinite",
        "observe.noise",
    ),
    "precision": (
        "precision.compute",
        "precision.emulate",
        "precision.init_scale",
        "precision.growth_interval",
        "precision.min_scale",
        "precision.keep",
        "precision.weights",
        "precision.master",
        "precision.contract",
    ),
    "memory": (
        "memory.activation_checkpointing",
        "memory.blocks",
        "memory.offload",
        "memory.update_in_backward",
    ),
    "machine": (
        "train.deterministic",
        "train.device",
        "train.threads",
        "train.keep_freed_memory",
        "train.cudnn_benchmark",
    ),
    "compile": (
        "compile.what",
        "compile.blocks",
        "compile.mode",
        "compile.dynamic",
        "compile.on_failure",
        "compile.budget",
        "compile.over_budget",
    ),
    "loader": (
        "loader.workers",
        "loader.kind",
        "loader.prefetch",
        "loader.start",
        "loader.timeout",
        "loader.memory",
    ),
    "layout": ("layout.replicate", "layout.shard", "layout.zero_stage", "layout.virtual_ranks"),
    "communication": (
        "layout.sync_buffers",
        "layout.transport",
        "layout.bucket_size",
        "layout.first_bucket_size",
        "layout.compress",
        "layout.compress_rank",
        "layout.check_every",
        "layout.hang_timeout",
        "layout.timeout",
        "nccl.debug",
        "nccl.interface",
        "nccl.infiniband",
        "nccl.adapter",
        "nccl.infiniband_timeout",
        "nccl.infiniband_retries",
        "nccl.algorithm",
        "nccl.protocol",
        "nccl.peer_access",
    ),
    "evaluation": (
        "evaluate.split",
        "evaluate.score",
        "evaluate.every",
        "evaluate.batch",
        "evaluate.patience",
    ),
    "run": (
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.keep_every",
        "checkpoint.keep_best",
        "checkpoint.budget",
        "checkpoint.max_unsaved",
        "checkpoint.store",
        "checkpoint.background",
        "stability.max_skips",
        "stability.diverged",
        "observe.every",
        "observe.tensorboard",
        "memory.predict",
        "memory.on_oom",
        "fault.forget",
    ),
}
# command -> keys that it sets itself: keys that need other values of these are not refused
DECIDED: Mapping[str, tuple[str, ...]] = {
    "tune-loader": ("loader.workers",),
    "whatif --compile": ("compile.what",),
    "whatif --save-kernels": ("compile.what",),
    "whatif --recompute": ("memory.activation_checkpointing",),
    "whatif --fit": ("memory.activation_checkpointing",),
    "verify --compile": ("compile.what",),
    "verify --precision": ("precision.compute",),
    "verify --layouts": ("layout.shard", "layout.zero_stage"),
}
OF_RANKS = ("layout", "communication")
_EVALUATING = ("evaluate.every", "evaluate.batch", "evaluate.patience")
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
    "data convert": (
        tuple(
            key
            for group in GROUPS
            if group != "task"
            for key in GROUPS[group]
            if key != "data.folder"
        ),
        "it writes the samples of the task as they are",
    ),
    "bench step": (_ONE_PROCESS, "it times single steps of one process"),
    "bench comm": (("run", *_EVALUATING), "it times single steps"),
    "roofline": (_ONE_PROCESS, "it times single steps of one process"),
    "explain": (_ONE_PROCESS, "it takes the first step in one process"),
    "formats": (
        (*_ONE_PROCESS, *(key for key in GROUPS["precision"] if key != "precision.init_scale")),
        "it computes the gradients of the first step in fp32, in one process",
    ),
    "tune-loader": (
        (*_ONE_PROCESS, "loader.workers", "loader.prefetch"),
        "it times single steps of one process",
    ),
    "ladder": (("checkpoint.store",), "it compares runs that are copied nowhere"),
    "whatif --batch": (
        ("train.batch", "train.microbatch", "train.ramp", *_UNRECORDED),
        "it measures the batches of --batch",
    ),
    "whatif --compile": (
        ("compile.mode", "compile.on_failure", *_STEADY),
        "it measures every way to compile, for a few steps",
    ),
    "whatif --save-kernels": (
        (*_ONE_PROCESS, "compile.on_failure"),
        "it compiles the first step in one process",
    ),
    "whatif --recompute": (
        ("memory.activation_checkpointing", *_STEADY),
        "it measures every way to recompute, for a few steps",
    ),
    "whatif --fit": (
        ("train.microbatch", "memory.on_oom", *_UNRECORDED),
        "it looks for the largest microbatch",
    ),
    "whatif --noise": (_ONE_PROCESS, "it computes gradients in one process"),
    "verify": (
        (
            "checkpoint.every",
            "checkpoint.keep",
            "checkpoint.keep_every",
            "checkpoint.store",
            "observe.every",
            "observe.tensorboard",
        ),
        "it saves and records its trials in its own rhythm",
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
        "it compares runs that are copied nowhere",
    ),
    "verify --compile": (
        ("compile.on_failure", "checkpoint.store"),
        "it compares runs that are copied nowhere",
    ),
}


def find_left_out(command: str, origin: Origin) -> list[str]:
    """Return the keys that `command` ignores and should name.

    These are ignored keys from command-line flags, and ignored keys of ranks that differ from their
    defaults.
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
    """Print one line with the keys that `command` ignores, if there are any; return the keys."""
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
    """Return the keys whose values differ from the defaults."""
    tables = spec.model_dump(exclude_defaults=True, mode="python")
    return {
        f"{table}.{key}" for table, keys in tables.items() if isinstance(keys, dict) for key in keys
    }
