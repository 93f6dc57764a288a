"""The tables of a spec; their names and keys are the field's standard terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from surefoot.core.errors import SpecError
from surefoot.core.ranks.layout import Transport
from surefoot.core.recompute import WORDS, RecomputeChoice
from surefoot.core.units import Duration, parse_bytes

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _checked_by(parse: Callable[[str], object]) -> BeforeValidator:
    """Return a validator that accepts what `parse` accepts, and reports the SpecError of `parse`.

    A number without its unit is also passed to `parse`.
    """

    def check(given: Any) -> Any:
        try:
            parse(given)
        except SpecError as error:
            # so that pydantic adds the key
            raise ValueError(f"{error.message}; {error.hint}") from None
        return given

    return BeforeValidator(check)


def _canonical_duration(text: str) -> str:
    length = Duration.parse(text)
    if length.value == 0:
        raise ValueError(f"{text} is nothing; use at least 1 step")
    return str(length)


def _some_time(text: str) -> None:
    if Duration.parse(text).unit != "s":
        raise SpecError(
            f"{text} is not a time", hint='a time has its unit: "90 s", "10 min", "6 h"'
        )


def _power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError("use a power of two: 1, 2, 4, 8 ...")
    return value


def _some_bytes(text: str) -> None:
    if parse_bytes(text) < 1:
        raise SpecError(
            f"{text} is nothing", hint='a size has its unit: "512 B", "1.5 GiB", "80 GB"'
        )


Size = Annotated[str, _checked_by(_some_bytes)]
DurationText = Annotated[str, _checked_by(Duration.parse), AfterValidator(_canonical_duration)]
TimeText = Annotated[str, _checked_by(_some_time), AfterValidator(_canonical_duration)]
Never = Annotated[
    Literal["never"], BeforeValidator(lambda given: "never" if given is None else given)
]
# a run that is over before its first step would train nothing, and count as finished
SHORTEST_RUN_S = 0.01


class SpecTable(BaseModel):
    """A table of the spec: frozen, without unknown keys, type conversion or NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )


class TaskTable(SpecTable):
    """The [task] table: `use` names the task, every other key is a parameter of its constructor.

    Without `use` the task object must be passed to Run.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    use: str | None = Field(
        None,
        min_length=1,
        description="a built-in task's name, file.py:Class or package.module:Class",
    )

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class DataTable(SpecTable):
    folder: str | None = Field(None, description="the data set's own folder, or its parent")
    shuffle: bool = Field(
        True, description="a new order each epoch, a pure function of (seed, epoch)"
    )
    window: Positive | None = Field(
        None,
        description=(
            "shards that are mixed with each other at a time, of a source that has some; "
            "none: all samples are"
        ),
    )
    last_batch: Literal["keep", "drop"] = Field(
        "keep", description="the short last training batch; evaluation never drops any"
    )
    on_bad: Literal["stop", "skip"] = Field(
        "stop", description="a sample that cannot be read ends the run, or is left out and told"
    )
    max_bad: float = Field(
        0.001,
        ge=0,
        le=1,
        description="the share of a set that skip leaves out, rounded up; more end the run",
    )


class OptimTable(SpecTable):
    name: Literal["sgd", "adam", "adamw", "muon", "lars", "lamb", "task"] = Field(
        "adamw", description="'task' is the task's own optimizer()"
    )
    lr: float = Field(1e-3, ge=0, description="base learning rate, multiplied by the schedule")
    decay: float = Field(
        0.01, ge=0, description="weight decay; norms, biases and embeddings are exempt"
    )
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="moments of Adam and lamb")
    eps: float = Field(
        1e-8, gt=0, description="epsilon of Adam and lamb; the paper of lamb has 1e-6"
    )
    momentum: Fraction = Field(0.9, description="of sgd, muon and lars")
    nesterov: bool = Field(False, description="of sgd and muon")
    trust: float = Field(
        0.001,
        gt=0,
        description=(
            "of lars: "
            "the rate of a layer is so many times the size of its weights over its gradient's"
        ),
    )
    reference_batch: Positive | None = Field(
        None,
        description=(
            "the batch that lr was found for: the rate is multiplied by train.batch over this; "
            "none: it is not"
        ),
    )
    scaling: Literal["linear", "sqrt"] = Field(
        "linear", description="by that ratio, or its square root (for Adam and its kin)"
    )
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0 is off")
    clip_value: float | None = Field(
        None, gt=0, description="largest absolute gradient element; changes the direction"
    )
    no_decay: tuple[str, ...] = Field(
        (), description="patterns of further parameters without decay"
    )
    rates: dict[str, float] = Field(
        default_factory=dict, description="pattern -> multiplier of the learning rate"
    )
    freeze: tuple[str, ...] = Field((), description="patterns of parameters that are not trained")
    fused: bool = Field(
        True,
        description=(
            "the kernels of torch that update in one pass, where it has them; "
            "false: as torch does it by itself"
        ),
    )
    state: Literal["fp32", "8bit"] = Field(
        "fp32",
        description=(
            "what adam and adamw keep their moments in; "
            "8bit: a tensor of fewer than 4,096 numbers keeps fp32"
        ),
    )
    ema: Fraction | None = Field(
        None,
        description=(
            "decay d of the average of weights, min(d, (1 + n) / (10 + n)) after n updates; "
            "evaluated and saved in their place"
        ),
    )
    ema_ramp: bool = Field(
        True, description="false: the decay of the average is d from the first update on"
    )
    ema_buffers: bool = Field(
        False,
        description=(
            "average buffers too, as BatchNorm's statistics, by the same formula, "
            "and copy those of integers"
        ),
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.clip_value is not None and self.clip:
            raise ValueError(
                f"clip = {self.clip} and clip_value = {self.clip_value} contradict each other; "
                "set clip = 0 or drop one"
            )
        if self.state == "8bit" and (self.name not in ("adam", "adamw") or not self.fused):
            given = f'name = "{self.name}"' if self.fused else "fused = false"
            raise ValueError(
                f'state = "8bit" is of the adam and adamw of surefoot, not of {given}; '
                'use "adamw" or "adam", or leave state out'
            )
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if any(rate < 0 for rate in self.rates.values()):
            raise ValueError("a multiplier in rates is negative; use 0 or more")
        return self


class TrainTable(SpecTable):
    length: DurationText = Field(
        "10 epochs", description="how long the run is; a time is that of all its attempts"
    )
    batch: Positive = Field(128, description="samples of one step, over all microbatches and ranks")
    microbatch: Positive | None = Field(
        None, description="samples of one forward pass; none: the whole batch"
    )
    ramp: tuple[tuple[Count, Positive], ...] = Field(
        (),
        max_length=8,
        description=(
            "pairs (samples seen, batch from there on), from 0 up to train.batch: "
            "a batch that grows"
        ),
    )
    batchnorm: Literal["keep", "group", "layer", "sync"] = Field(
        "keep",
        description=(
            "BatchNorm: keep it, put GroupNorm in its place, "
            "a LayerNorm over channels and positions, or join it over ranks"
        ),
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, order, augmentation, dropout")
    deterministic: bool = Field(True, description="deterministic kernels where torch has them")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: the GPU where there is one"
    )
    threads: Annotated[int, Field(gt=0, le=4096)] | None = Field(
        None, description="threads of one operator on a CPU; none: torch's own choice"
    )
    keep_freed_memory: bool = Field(
        True, description="freed host memory stays with the process: no page faults"
    )
    memory_format: Literal["contiguous", "channels_last"] = Field(
        "contiguous",
        description=(
            "how weights of convolutions lie: channels_last is what most of their kernels work in"
        ),
    )
    attention: Literal["auto", "fused", "math"] = Field(
        "auto",
        description=(
            "kernels of scaled_dot_product_attention: torch's choice; fused: so, "
            "and none in step 1 ends the run; math: none fused"
        ),
    )
    cudnn_benchmark: bool = Field(
        False, description="cuDNN times its algorithms for each convolution and takes the fastest"
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.microbatch is not None and self.batch % self.microbatch:
            legal = [size for size in range(1, self.batch + 1) if self.batch % size == 0]
            raise ValueError(
                f"microbatch = {self.microbatch} does not divide batch = {self.batch}; "
                f"use one of {legal}"
            )
        self._check_ramp()
        length = Duration.parse(self.length)
        if length.unit == "%":
            raise ValueError(
                f"length = {self.length} is a share of itself; say how long the run is, "
                "for example in epochs or steps"
            )
        if length.unit == "s" and length.value < SHORTEST_RUN_S:
            raise ValueError(
                f"length = {self.length} is over before the first step; "
                f"use at least {SHORTEST_RUN_S} s, or 1 step"
            )
        return self

    def _check_ramp(self) -> None:
        if not self.ramp:
            return
        starts, batches = zip(*self.ramp, strict=True)
        form = (
            f"; it is [[0, SMALL], ..., [SAMPLES, {self.batch}]]: samples that rise from 0, "
            "and at last train.batch"
        )
        if (
            starts[0] != 0
            or any(later <= before for before, later in pairwise(starts))
            or batches[-1] != self.batch
        ):
            raise ValueError(f"ramp = {[list(stage) for stage in self.ramp]} is no ramp{form}")
        wrong = [size for size in batches if size % (self.microbatch or 1)]
        if wrong:
            legal = [
                size for size in range(1, math.gcd(*batches) + 1) if math.gcd(*batches) % size == 0
            ]
            raise ValueError(
                f"microbatch = {self.microbatch} does not divide {wrong[0]} of ramp; "
                f"use one of {legal}"
            )


class EvaluateTable(SpecTable):
    split: str = Field(
        "test",
        min_length=1,
        description="what is evaluated while training; the task's data(split) knows it",
    )
    every: DurationText = Field("1 epoch", description="besides the end of the run")
    batch: Positive | None = Field(None, description="none: the training batch")
    score: str | None = Field(
        None,
        description="the metric that decides what is best; none: the task's first, else the loss",
    )
    patience: Positive | None = Field(
        None, description="stop after so many evaluations without a better score"
    )


Role = Literal["storage", "compute", "gradient", "reduce", "master", "state"]
Format = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]


class PrecisionTable(SpecTable):
    compute: Literal["fp32", "tf32", "bf16", "fp16", "float8", "auto"] = Field(
        "fp32",
        description=(
            "dtype of forward and backward; float8: of linear layers; auto: the best besides; "
            "weights and state stay fp32"
        ),
    )
    emulate: bool = Field(
        False,
        description="float8 by its rounding alone, multiplied in fp32: on any device, and slowly",
    )
    init_scale: float = Field(
        2.0**16, gt=0, description="the loss scale that fp16 begins with, a power of two"
    )
    growth_interval: Positive = Field(
        2000, description="so many steps without overflow double the loss scale"
    )
    min_scale: float = Field(
        1.0, gt=0, description="a loss scale below this ends the run: it would halve for ever"
    )
    keep: tuple[str, ...] = Field(
        (),
        description="patterns of modules that compute in fp32, by their names or their parameters'",
    )
    weights: Literal["fp32", "bf16"] = Field(
        "fp32", description="what weights are stored in; norms and what `keep` names stay fp32"
    )
    master: Literal["fp32", "none"] = Field(
        "fp32",
        description="what updates of bf16 weights are added up in; none: small updates are lost",
    )
    contract: dict[Role, Format] = Field(
        default_factory=dict,
        description=(
            "role -> dtype that step 1 must show of every trained parameter, as master -> fp32"
        ),
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if math.frexp(self.init_scale)[0] != 0.5:
            raise ValueError(
                f"init_scale = {self.init_scale:g} is no power of two; use one as 65536.0, "
                "so that scaling is exact"
            )
        if self.min_scale > self.init_scale:
            scales = f"min_scale = {self.min_scale:g} is above init_scale = {self.init_scale:g}"
            is_given = "min_scale" in self.model_fields_set
            raise ValueError(
                f"{scales}; use a {'smaller min_scale' if is_given else 'larger init_scale'}"
            )
        if self.weights == "bf16" and self.compute != "bf16":
            raise ValueError(
                f"weights = 'bf16' with compute = {self.compute!r} widens in each pass; "
                "set compute = 'bf16'"
            )
        return self


class MemoryTable(SpecTable):
    recompute: Annotated[str, _checked_by(RecomputeChoice.parse)] = Field(
        "none", description=f"what the backward pass computes again instead of keeping it: {WORDS}"
    )
    blocks: tuple[str, ...] = Field(
        (), description="patterns of the modules to compute again; none: those that repeat"
    )
    offload: Literal["none", "activations", "optimizer"] = Field(
        "none",
        description="what stands in host memory while the device does not need it; for a GPU alone",
    )
    update_in_backward: bool = Field(
        False,
        description=(
            "update each parameter as soon as its gradient is there, and let the gradient go"
        ),
    )
    on_oom: Literal["stop", "halve"] = Field(
        "stop",
        description=(
            "a step that runs out of memory ends the run, "
            "or is done again with half the microbatch, as all behind it"
        ),
    )
    predict: bool = Field(
        False,
        description=(
            "predict the peak of a step before the first one, and compare it with that of the third"
        ),
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.offload == "optimizer" and self.update_in_backward:
            raise ValueError(
                'offload = "optimizer" gathers gradients on the host; drop it, '
                "or set update_in_backward = false"
            )
        return self


def _pointed(given: Any) -> Any:
    """Raise ValueError for names of tools that do not speed up training, with the alternative."""
    name = str(given).lower()
    if name in ("torchscript", "jit"):
        raise ValueError(
            'TorchScript is retired, and made no training faster; use "model", '
            "and torch.export for serving"
        )
    if name in ("tensorrt", "trt"):
        raise ValueError(
            'TensorRT serves models and trains none; use "model", and torch.export for serving'
        )
    return given


class CompileTable(SpecTable):
    what: Annotated[Literal["none", "blocks", "model", "step"], BeforeValidator(_pointed)] = Field(
        "none",
        description=(
            "what torch.compile compiles: the blocks of the model, of which equal ones share it, "
            "all of it, or the whole step"
        ),
    )
    blocks: tuple[str, ...] = Field(
        (), description="patterns of the modules that are blocks; none: those that repeat"
    )
    mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        "default", description="of torch.compile"
    )
    dynamic: bool | None = Field(
        None,
        description=(
            "whether sizes may differ from step to step; "
            "none: torch assumes it after the second size"
        ),
    )
    on_failure: Literal["eager", "stop"] = Field(
        "eager", description="what a region that cannot be compiled does to the run"
    )
    budget: Positive = Field(
        8, description="how often code may be compiled again before over_budget holds"
    )
    over_budget: Literal["warn", "stop"] = Field(
        "warn", description="what one compilation more does"
    )


class LoaderTable(SpecTable):
    workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = Field(
        0,
        description=(
            "who reads ahead of the steps; auto finds how many it takes; "
            "0: each step reads by itself"
        ),
    )
    kind: Literal["auto", "thread", "process"] = Field(
        "auto",
        description=(
            "what a worker is; auto: a thread where the source says that threads may read it, "
            "else a process"
        ),
    )
    prefetch: Positive | None = Field(
        None, description="microbatches that each worker holds ahead; none: 2"
    )
    start: Literal["auto", "fork", "spawn"] = Field(
        "auto",
        description=(
            "how worker processes begin; auto: forked on Linux, else spawned, "
            "which needs a source that pickles"
        ),
    )
    timeout: float = Field(
        4.0, gt=0, description="seconds after which a worker that is waited for is replaced"
    )
    memory: Annotated[str, _checked_by(parse_bytes)] = Field(
        "2 GiB", description="what is read ahead takes so much at the most"
    )


class CheckpointTable(SpecTable):
    every: DurationText | Never = Field(
        "10 min", description="commit so often, besides the best and the last"
    )
    keep: Annotated[int, Field(ge=2)] = Field(3, description="how many of the newest commits stay")
    keep_every: DurationText | None = Field(
        None, description="commits at its multiples stay; of a time, the first after each"
    )
    keep_best: Positive = Field(1, description="how many of the best by evaluate.score stay")
    budget: Annotated[str, _checked_by(parse_bytes)] | None = Field(
        None,
        description=(
            "the disk that all commits may take; the oldest go, never the newest two nor the best"
        ),
    )
    max_unsaved: TimeText | Never = Field(
        "6 h",
        description=(
            "a run ends when the disk has refused each of its saves for this long; or never"
        ),
    )
    store: str | None = Field(
        None, min_length=1, description="a URL that fsspec knows; every commit is copied there too"
    )
    background: bool = Field(
        True,
        description=(
            "write while training goes on, at the lowest priority; "
            "costs one copy of the state in host memory"
        ),
    )


class StabilityTable(SpecTable):
    nonfinite: Literal["skip", "stop"] = Field(
        "skip", description="what a non-finite gradient does to its step"
    )
    max_skips: Positive = Field(5, description="so many skipped steps in a row end the run")
    diverged: float = Field(
        1e4,
        gt=1,
        description="a loss so many times the first one, five times in a row, ends the run",
    )


class ObserveTable(SpecTable):
    every: DurationText = Field("10 steps", description="steps that one Step event sums up")
    tensorboard: bool | None = Field(None, description="none: when the extra is installed")
    noise: bool = Field(
        False,
        description=(
            "the gradient noise scale, from the first microbatch of each step and the whole of it"
        ),
    )


class FaultTable(SpecTable):
    """Faults that are injected for experiments; results of such a run must not be used."""

    forget: tuple[Literal["optimizer", "schedule", "random", "task"], ...] = Field(
        (),
        description=(
            "parts of the state that going on leaves as a new run has them: optimizer, schedule, "
            "random, task"
        ),
    )


class LayoutTable(SpecTable):
    """Ranks per axis; the launcher decides how many ranks there are."""

    replicate: Positive | None = Field(
        None,
        description=(
            "ranks that hold the same weights and read other samples; none: all that `shard` leaves"
        ),
    )
    shard: Positive = Field(
        1,
        description=(
            "ranks that hold a part each of what `stage` says; `replicate` times it makes all ranks"
        ),
    )
    stage: Literal[1, 2, 3] = Field(
        3,
        description=(
            "what shard ranks split: 1 the optimiser's state, 2 gradients too, 3 weights too"
        ),
    )
    sync_buffers: bool = Field(
        True, description="BatchNorm's statistics as one process would have them; else rank 0's"
    )
    virtual_ranks: Annotated[int, AfterValidator(_power_of_two)] | None = Field(
        None,
        description=(
            "exact mode: sums as so many ranks would have them, a power of two, "
            "with the same bits on any that divide it"
        ),
    )
    transport: Transport = Field(
        "auto",
        description="how ranks on CPUs reach each other: "
        "through memory that those of one host share, "
        "or by gloo's sockets; "
        "auto: the memory where all are on one host",
    )
    bucket: Size = Field(
        "25 MiB",
        description=(
            "gradients are sent so many bytes at a time; "
            "surefoot bench comm SPEC measures which are best"
        ),
    )
    first_bucket: Size = Field(
        "1 MiB",
        description=(
            "the same of a step's first, which is on its way while most is still to be computed"
        ),
    )
    compress: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        "none",
        description=(
            "what gradients are sent as: as they are, in 16 bits, "
            "or as products of low rank with error feedback"
        ),
    )
    compress_rank: Positive = Field(
        4, description="with powersgd: columns of each side of a matrix's gradient"
    )
    check_every: DurationText | Never = Field(
        "100 steps",
        description="how often the weights of all ranks are held side by side; or never",
    )
    stall: float = Field(
        60.0,
        gt=0,
        description=(
            "seconds that a rank may keep the others waiting before it is named and the run ends"
        ),
    )
    timeout: float = Field(
        1800.0,
        ge=0.01,
        le=3e7,
        description="seconds that a rank waits in a collective before it gives up",
    )


class NcclTable(SpecTable):
    """Settings of NCCL, the communication library of GPUs; NCCL chooses what is not given."""

    debug: Literal["version", "warn", "info", "trace"] | None = Field(
        None, description="NCCL_DEBUG: what it tells of itself"
    )
    interface: str | None = Field(
        None,
        min_length=1,
        description=(
            'NCCL_SOCKET_IFNAME: network interfaces by how they begin; "=eth0": that one, '
            '"^docker": not these'
        ),
    )
    infiniband: bool | None = Field(
        None, description="NCCL_IB_DISABLE, the other way round: whether it uses InfiniBand or RoCE"
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description='NCCL_IB_HCA: InfiniBand adapters, as "mlx5_0,mlx5_1" or "=mlx5_0:1"',
    )
    infiniband_timeout: Annotated[int, Field(ge=1, le=22)] | None = Field(
        None, description="NCCL_IB_TIMEOUT: an answer is waited for 4.096 us times 2 to this power"
    )
    infiniband_retries: Annotated[int, Field(ge=1, le=7)] | None = Field(
        None,
        description=(
            "NCCL_IB_RETRY_CNT: so often a message is sent again before the link is given up"
        ),
    )
    algorithm: tuple[
        Literal["tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"], ...
    ] = Field((), description="NCCL_ALGO: those that it may choose from; none: all")
    protocol: tuple[Literal["ll", "ll128", "simple"], ...] = Field(
        (), description="NCCL_PROTO: those that it may choose from; none: all that are safe here"
    )
    peer_access: bool | None = Field(
        None,
        description=(
            "NCCL_P2P_DISABLE, the other way round: "
            "whether GPUs of a host copy to each other directly"
        ),
    )
