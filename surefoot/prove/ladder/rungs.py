"""Rungs of a ladder: the optimizations that it adds to a plain training loop, one at a time.

To add a rung, add it to the rungs of its subject, and add the value without it to `PLAIN`.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, get_args

from surefoot.contract import signature, spec_file
from surefoot.contract.spec import RunSpec
from surefoot.contract.spec.renamed import current_key
from surefoot.core.errors import InputError, SpecError, hint_nearest

Kind = Literal["nothing", "rounding", "algorithm"]
Purpose = Literal["time", "wall time", "memory"]

# keys that the baseline leaves out
_LEFT_OUT = """
    compile.blocks compile.mode layout.bucket_size layout.compress layout.compress_rank
    layout.first_bucket_size layout.replicate layout.shard layout.zero_stage layout.virtual_ranks
    observe.noise optim.state loader.kind loader.prefetch memory.blocks memory.offload
    memory.update_in_backward precision.growth_interval precision.init_scale precision.min_scale
    precision.master precision.weights precision.contract train.cudnn_benchmark
    train.memory_format train.microbatch task.chunked_loss
"""
# the baseline: one thread, 32 bits, the whole batch at once, and no optimization
PLAIN: Mapping[str, Any] = {
    **dict.fromkeys(_LEFT_OUT.split()),
    "compile.what": "none",
    "optim.fused": False,
    "loader.workers": 0,
    "memory.activation_checkpointing": "none",
    "precision.compute": "fp32",
    "train.attention": "math",
    "train.keep_freed_memory": False,
    "train.threads": 1,
}
RESERVED = ("start", "below", "best")
MAX_RANKS = 8  # the most ranks that a ladder starts at a time
_GIVEN = re.compile(r"\s*([\w.+-][\w .+-]*?)\s*(?:\((\w+)\)\s*)?:\s*(.+)", re.DOTALL)


@dataclass(frozen=True)
class Rung:
    """Optimization that a ladder tries: a change of the spec.

    Args:
        name: Name of the rung.
        change: Values by dotted key of the spec.
        kind: How much the rung may change the results.
        purpose: Measure that the rung must improve to be kept.
        expected: Ratios to the rung below that people commonly expect, by measure.
        needs: Description of a requirement; None if there is none.
        is_here: Whether this machine and the spec meet the requirement. Whether the model supports
            the rung is known only when its process runs.
    """

    name: str
    change: Mapping[str, Any]
    _: KW_ONLY
    kind: Kind = "nothing"
    purpose: Purpose = "time"
    expected: Mapping[str, float] = field(default_factory=dict)
    needs: str | None = None
    is_here: bool = True

    def on(self, spec: RunSpec) -> RunSpec:
        """Return `spec` with the change of this rung.

        Raises:
            SpecError: For a key or value that no spec can have.
            InputError: If the change has no effect.
        """
        changed = change(spec, self.change)
        if _meaning(changed) == _meaning(spec):
            raise InputError(
                f"the rung {self.name!r} changes nothing: "
                f"{self.words} is what the spec below it has",
                hint="leave it out",
            )
        return changed

    @property
    def takes_ranks(self) -> bool:
        """True if this optimization trains on several ranks."""
        return any(key.startswith("layout.") for key in self.change)

    @property
    def words(self) -> str:
        """The change in the format of the option `--set`."""
        return ", ".join(f"{key}={value}" for key, value in self.change.items())


ON_CPU, ON_GPU, COMPILER = "training on a CPU", "a GPU", "a compiler for C++"
# other kernels for the same arithmetic
KERNELS = (
    Rung("allocator", {"train.keep_freed_memory": True}, expected={"time": 0.9}, needs=ON_CPU),
    Rung("fused", {"optim.fused": True}, expected={"time": 0.95}),
    Rung(
        "channels last",
        {"train.memory_format": "channels_last"},
        expected={"time": 0.9},
        needs="a model with convolutions",
    ),
    Rung(
        "attention",
        {"train.attention": "fused"},
        expected={"time": 0.9, "memory": 0.7},
        needs="a model with attention",
    ),
    Rung("kernels", {"train.deterministic": False}, expected={"time": 0.95}, needs=ON_GPU),
    Rung(
        "chunked loss",
        {"task.chunked_loss": True},
        purpose="memory",
        expected={"memory": 0.5},
        needs="a task with the parameter chunked_loss",
    ),
    Rung("compile", {"compile.what": "model"}, expected={"time": 0.7}, needs=COMPILER),
    Rung(
        "cuda graphs",
        {"compile.what": "model", "compile.mode": "reduce-overhead"},
        expected={"time": 0.9},
        needs=ON_GPU,
    ),
    Rung(
        "cudnn search",
        {"train.cudnn_benchmark": True, "train.deterministic": False},
        expected={"time": 0.95},
        needs=ON_GPU,
    ),
)
# from the most bits to the fewest
PRECISIONS = tuple(
    Rung(name, change, kind="rounding", expected=expected, needs=needs)
    for name, change, expected, needs in (
        ("tf32", {"precision.compute": "tf32"}, {"time": 0.6}, ON_GPU),
        ("bf16", {"precision.compute": "bf16"}, {"time": 0.5, "memory": 0.5}, None),
        ("fp16", {"precision.compute": "fp16"}, {"time": 0.5, "memory": 0.5}, ON_GPU),
        ("float8", {"precision.compute": "float8"}, {"time": 0.8}, ON_GPU),
        (
            "masters",
            {"precision.compute": "bf16", "precision.weights": "bf16"},
            {"time": 0.95},
            None,
        ),
    )
)


def find_rungs(
    spec: RunSpec, *, device: str, cores: int, devices: int = 1, blocks: Sequence[str] = ()
) -> tuple[Rung, ...]:
    """Return all optimizations (rungs) in the order in which a ladder tries them.

    Rungs that do not change results come first, so that the others are compared with a sound
    baseline. Rungs with several ranks come last: one rank per core, or per GPU of `devices`, as
    many as share a batch evenly. `blocks` are the names of the blocks to recompute, if they have
    names.
    """
    gpu = device == "cuda"
    batch = math.gcd(*(batch for _, batch in spec.train.ramp)) or spec.train.batch
    part = find_microbatch(batch)
    most = min(devices if gpu else cores, MAX_RANKS)
    ranks = next(size for size in range(most, 0, -1) if batch % size == 0)
    several = f"two {'GPUs' if gpu else 'cores'} or more, and a batch that they can share"
    is_met: dict[str | None, bool] = {
        ON_CPU: not gpu,
        ON_GPU: gpu,
        COMPILER: gpu or _has_compiler(),
        "a task with the parameter chunked_loss": _takes(spec, "chunked_loss"),
        "a CPU with two cores or more": cores > 1 and not gpu,
        "two cores or more": cores > 1,
        "a batch that can be divided": part is not None,
        "adam or adamw": spec.optim.name in ("adam", "adamw"),
        "a batch of one size": not spec.train.ramp,
        several: ranks > 1,
    }
    every = (
        *KERNELS,
        *PRECISIONS,
        Rung(
            "threads",
            {"train.threads": cores},
            purpose="wall time",
            expected={"wall": 1 / cores},
            needs="a CPU with two cores or more",
        ),
        Rung(
            "workers",
            {"loader.workers": min(cores, 4)},
            purpose="wall time",
            expected={"wall": 0.9},
            needs="two cores or more",
        ),
        *_memory_rungs(spec, part, blocks),
        Rung(
            "whole step",
            {"optim.fused": True, "compile.what": "step"},
            expected={"time": 0.8},
            needs=COMPILER,
        ),
        Rung(
            "8-bit state",
            {"optim.fused": True, "optim.state": "8bit"},
            kind="algorithm",
            purpose="memory",
            expected={"memory": 0.8},
            needs="adam or adamw",
        ),
        Rung(
            "large batch",
            _enlarge_batch(spec),
            kind="algorithm",
            expected={"time": 0.9},
            needs="a batch of one size",
        ),
        Rung(
            "data parallel",
            {"layout.replicate": ranks, **({} if gpu else {"train.threads": 1})},
            purpose="wall time",
            expected={"wall": 1 / ranks},
            needs=several,
        ),
    )
    return tuple(replace(rung, is_here=is_met.get(rung.needs, True)) for rung in every)


def _memory_rungs(spec: RunSpec, part: int | None, blocks: Sequence[str]) -> tuple[Rung, ...]:
    """Return the rungs that reduce the memory of a step; `part` is the size of the microbatch."""
    named = {"memory.blocks": tuple(blocks)} if blocks else {}
    return (
        Rung(
            "microbatch",
            {"train.microbatch": part},
            purpose="memory",
            expected={"memory": 1.0 if part is None else part / spec.train.batch},
            needs="a batch that can be divided",
        ),
        Rung(
            "recompute",
            {"memory.activation_checkpointing": "full", **named},
            purpose="memory",
            expected={"memory": 0.5, "time": 1.3},
            needs="a model with blocks",
        ),
        Rung(
            "offload",
            {"memory.offload": "activations"},
            purpose="memory",
            expected={"memory": 0.5, "time": 1.2},
            needs=ON_GPU,
        ),
        Rung(
            "update in backward",
            {"optim.fused": True, "memory.update_in_backward": True},
            purpose="memory",
            expected={"memory": 0.9},
        ),
    )


def _enlarge_batch(spec: RunSpec) -> dict[str, Any]:
    """Return the change to four times the batch, with the matching scaling of the learning rate."""
    optim = spec.optim
    rule = "linear" if optim.name in ("sgd", "lars") else "sqrt"
    scaled = (
        {}
        if optim.reference_batch is not None
        else {"optim.reference_batch": spec.train.step_batch, "optim.scaling": rule}
    )
    return {"train.batch": 4 * spec.train.batch, **scaled}


def _has_compiler() -> bool:
    """Return whether a C++ compiler is installed, which torch.compile needs on a CPU."""
    return any(map(shutil.which, ("g++", "clang++", "cl")))


def _takes(spec: RunSpec, parameter: str) -> bool:
    use = spec.task.use
    return use is not None and bool(signature.has_parameter(use, parameter))


def find_microbatch(batch: int) -> int | None:
    """Return a quarter of the batch, or the next smaller divisor; None for a batch of 1.

    >>> find_microbatch(64), find_microbatch(50), find_microbatch(7), find_microbatch(1)
    (16, 10, 1, None)
    """
    return (
        next((size for size in range(max(1, batch // 4), 0, -1) if batch % size == 0), None)
        if batch > 1
        else None
    )


def make_plain_spec(spec: RunSpec) -> RunSpec:
    """Return the spec of the plain training loop, with which the ladder of `spec` begins."""
    return change(spec, PLAIN)


def change(spec: RunSpec, changes: Mapping[str, Any]) -> RunSpec:
    """Return the spec with `table.key` set to each value; None removes the key.

    A different `task.use` removes the parameters of the task.
    """
    tables: dict[str, dict[str, Any]] = {
        name: dict(keys) for name, keys in spec.as_tables().items()
    }
    changes = {current_key(key): value for key, value in changes.items()}
    for key, value in changes.items():
        table, _, inner = key.partition(".")
        if key == "task.use":
            tables["task"] = {}
        into = tables.setdefault(table, {})
        *path, last = inner.split(".")
        for part in path:
            into[part] = dict(into.get(part, {}))
            into = into[part]
        into.pop(last, None)
        if value is not None:
            into[last] = value
    return spec.replace_all(tables, list(changes))


def _meaning(spec: RunSpec) -> Any:
    return spec.model_dump(mode="python"), spec.task.parameters


def parse_rung(text: str) -> Rung:
    """Return the optimization (rung) that a text of the command line describes.

    Examples are `name: table.key=value` and `name (rounding): a.b=1, c.d=2`.

    Raises:
        SpecError: If the text has a different form.
    """
    found = _GIVEN.fullmatch(text)
    kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
    hint = (
        'for example --rung "half the batch (algorithm): train.batch=32"; '
        f"the kinds are {', '.join(kinds)}"
    )
    if found is None:
        raise SpecError(f"--rung {text!r} is not name: table.key=value", hint=hint)
    name, kind, stated = found.groups()
    if kind is not None and kind not in kinds:
        raise SpecError(f"--rung {text!r}: {kind!r} is not a kind of rung", hint=hint)
    try:
        changes = [spec_file.parse_set(each.strip()) for each in _split(stated)]
    except SpecError as error:
        raise SpecError(f"--rung {text!r}: {error.message.partition(' ')[2]}", hint=hint) from None
    made = Rung(
        name=name,
        kind=kinds.get(kind or "", "nothing"),
        change={key: value for key, value, _ in changes},
    )
    return replace(made, purpose="wall time") if made.takes_ranks else made


def _split(text: str) -> list[str]:
    """Split the text at commas before a new `table.key=`; commas inside a list do not split it."""
    return re.split(r",\s*(?=\w+\.[\w.]+\s*=)", text)


def choose(given: Sequence[str], rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """Return the optimizations (rungs) with the names `given`, in that order.

    Raises:
        InputError: For an unknown name, and for a repeated one.
    """
    named = {rung.name: rung for rung in rungs}
    for name in given:
        if name not in named:
            raise InputError(
                f"there is no rung {name!r}",
                hint=f"{hint_nearest(name, named)}there are: {', '.join(named)}",
            )
    check_names([named[name] for name in given])
    return tuple(named[name] for name in given)


def check_names(rungs: Sequence[Rung]) -> None:
    """Check that the names of optimizations (rungs) are unique and not reserved.

    Raises:
        InputError: If two rungs have the same name, or one has a reserved name.
    """
    taken = next((rung.name for rung in rungs if rung.name in RESERVED), None)
    if taken is not None:
        raise InputError(
            f"no rung can be named {taken!r}",
            hint="the ladder uses this name itself; choose a different one",
        )
    twice = next(
        (
            rung.name
            for number, rung in enumerate(rungs)
            if rung.name in {each.name for each in rungs[:number]}
        ),
        None,
    )
    if twice is not None:
        raise InputError(f"two rungs are named {twice!r}", hint="give each a name of its own")
