"""Tables of a spec: how steps are computed, in which precision, and on which ranks."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from surefoot.contract.spec.values import (
    DurationText,
    Never,
    Positive,
    Size,
    SpecTable,
    checked_by,
    power_of_two,
)
from surefoot.core.ranks.layout import Transport
from surefoot.core.recompute import WORDS, RecomputeChoice
from surefoot.core.units import parse_bytes

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
    recompute: Annotated[str, checked_by(RecomputeChoice.parse)] = Field(
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
    memory: Annotated[str, checked_by(parse_bytes)] = Field(
        "2 GiB", description="what is read ahead takes so much at the most"
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
    virtual_ranks: Annotated[int, AfterValidator(power_of_two)] | None = Field(
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
