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
    show,
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
            "Dtype of forward and backward pass; float8: in linear layers; auto: bf16, "
            "fp16 or fp32, the first with device support; weights and optimizer state stay fp32."
        ),
    )
    emulate: bool = Field(
        False,
        description=(
            "Emulate float8: round to float8 and multiply in fp32, on any device, slowly."
        ),
    )
    init_scale: float = Field(
        2.0**16, gt=0, description="Initial loss scale of fp16, a power of two."
    )
    growth_interval: Positive = Field(
        2000, description="Double the loss scale after this many steps without overflow."
    )
    min_scale: float = Field(1.0, gt=0, description="Abort when the loss scale falls below this.")
    keep: tuple[str, ...] = Field(
        (),
        description="Patterns of modules, or of their parameters, that compute in fp32.",
    )
    weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Dtype of the stored weights; norms and the modules of `keep` stay fp32.",
    )
    master: Literal["fp32", "none"] = Field(
        "fp32",
        description=(
            "Dtype of the master weights of bf16 weights; none: no master weights, so "
            "small updates are lost."
        ),
    )
    contract: dict[Role, Format] = Field(
        default_factory=dict,
        description=(
            "Dtype that each role must have for every trained parameter in step 1, such as "
            'master = "fp32"; else the run stops.'
        ),
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if math.frexp(self.init_scale)[0] != 0.5:
            raise ValueError(
                f"init_scale = {self.init_scale:g} is not a power of two; use one, for example "
                "65536.0, so that scaling is exact"
            )
        if self.min_scale > self.init_scale:
            scales = f"{show(self, 'min_scale')} is above {show(self, 'init_scale')}"
            is_given = "min_scale" in self.model_fields_set
            raise ValueError(
                f"{scales}; use a {'smaller min_scale' if is_given else 'larger init_scale'}"
            )
        if self.weights == "bf16" and self.compute != "bf16":
            raise ValueError(
                f"weights = 'bf16' with {show(self, 'compute')} converts the "
                "weights in each forward pass; set compute = 'bf16'"
            )
        return self


class MemoryTable(SpecTable):
    activation_checkpointing: Annotated[str, checked_by(RecomputeChoice.parse)] = Field(
        "none", description=f"What to recompute in the backward pass: {WORDS}."
    )
    blocks: tuple[str, ...] = Field(
        (),
        description=(
            "Patterns of the modules to checkpoint; none: the repeated blocks of the model."
        ),
    )
    offload: Literal["none", "activations", "optimizer"] = Field(
        "none",
        description=(
            "Tensors that are moved to host memory while the GPU does not need them; GPUs only."
        ),
    )
    update_in_backward: bool = Field(
        False,
        description=(
            "Update each parameter as soon as its gradient is computed, and free the gradient."
        ),
    )
    on_oom: Literal["stop", "halve"] = Field(
        "stop",
        description=(
            "If a step runs out of memory: stop, or repeat it, and run all later steps, "
            "with half the microbatch."
        ),
    )
    predict: bool = Field(
        False,
        description=(
            "Predict the peak memory of a step before step 1, and compare it with the peak "
            "of step 3."
        ),
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.offload == "optimizer" and self.update_in_backward:
            raise ValueError(
                'offload = "optimizer" collects gradients on the host; leave offload out, '
                "or set update_in_backward = false"
            )
        return self


def _suggest_alternative(given: Any) -> Any:
    """Raise ValueError, with an alternative, for a tool that does not speed up training."""
    name = str(given).lower()
    if name in ("torchscript", "jit"):
        raise ValueError(
            'TorchScript is deprecated and does not speed up training; use "model", '
            "and torch.export for serving"
        )
    if name in ("tensorrt", "trt"):
        raise ValueError('TensorRT runs inference only; use "model", and torch.export for serving')
    return given


class CompileTable(SpecTable):
    what: Annotated[
        Literal["none", "blocks", "model", "step"], BeforeValidator(_suggest_alternative)
    ] = Field(
        "none",
        description=(
            "What torch.compile compiles: each block of the model (equal blocks share one "
            "compilation), the whole model, or the whole step."
        ),
    )
    blocks: tuple[str, ...] = Field(
        (),
        description=(
            "Patterns of the modules that are compiled as blocks; none: the repeated "
            "blocks of the model."
        ),
    )
    mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        "default", description="`mode` of torch.compile."
    )
    dynamic: bool | None = Field(
        None,
        description=(
            "`dynamic` of torch.compile: true if shapes differ from step to step; none: "
            "torch assumes dynamic shapes after the second shape."
        ),
    )
    on_failure: Literal["eager", "stop"] = Field(
        "eager",
        description="If a region cannot be compiled: run it in eager mode, or stop the run.",
    )
    budget: Positive = Field(
        8, description="Number of recompilations after which over_budget applies."
    )
    over_budget: Literal["warn", "stop"] = Field(
        "warn", description="At a further recompilation: warn, or stop the run."
    )


class LoaderTable(SpecTable):
    workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = Field(
        0,
        description=(
            "Workers that read batches ahead; auto: measure how many are needed; 0: the "
            "training process reads each batch."
        ),
    )
    kind: Literal["auto", "thread", "process"] = Field(
        "auto",
        description=(
            "Kind of the workers; auto: threads if the source allows them, else processes."
        ),
    )
    prefetch: Positive | None = Field(
        None, description="Microbatches that each worker prefetches; none: 2."
    )
    start: Literal["auto", "fork", "spawn"] = Field(
        "auto",
        description=(
            "Start method of worker processes; auto: fork on Linux, else spawn, which "
            "needs a source that can be pickled."
        ),
    )
    timeout: float = Field(
        4.0, gt=0, description="Seconds without a batch after which a worker is restarted."
    )
    memory: Annotated[str, checked_by(parse_bytes)] = Field(
        "2 GiB", description="Largest size of all prefetched batches together."
    )


class LayoutTable(SpecTable):
    """Ranks per axis; the launcher decides how many ranks there are."""

    replicate: Positive | None = Field(
        None,
        description=(
            "Data-parallel replicas: ranks with the same weights and other samples; none: "
            "world size / shard."
        ),
    )
    shard: Positive = Field(
        1,
        description=(
            "Ranks over which the state of zero_stage is sharded; replicate * shard is the "
            "world size."
        ),
    )
    zero_stage: Literal[1, 2, 3] = Field(
        3,
        description=(
            "ZeRO stage, what is sharded: 1 the optimizer state, 2 also the gradients, 3 "
            "also the weights."
        ),
    )
    sync_buffers: bool = Field(
        True,
        description=(
            "Compute BatchNorm's running statistics over all ranks, as one process would; "
            "false: keep those of rank 0."
        ),
    )
    virtual_ranks: Annotated[int, AfterValidator(power_of_two)] | None = Field(
        None,
        description=(
            "Exact mode: sum as this many ranks would, a power of two; every number of "
            "ranks that divides it gives the same bits."
        ),
    )
    transport: Transport = Field(
        "auto",
        description=(
            "Transport between ranks on CPUs: shared memory of one host, or gloo's "
            "sockets; auto: shared memory if all ranks are on one host."
        ),
    )
    bucket_size: Size = Field(
        "25 MiB",
        description=(
            "Gradients are reduced in buckets of this size; `surefoot bench comm SPEC` "
            "measures which size is fastest."
        ),
    )
    first_bucket_size: Size = Field(
        "1 MiB",
        description=(
            "Size of the first bucket of a step, whose reduction starts while most of the "
            "backward pass remains."
        ),
    )
    compress: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        "none",
        description=(
            "Gradient compression: none, 16 bits, or PowerSGD (low rank with error feedback)."
        ),
    )
    compress_rank: Positive = Field(
        4, description="Rank of PowerSGD's approximation of a gradient matrix."
    )
    check_every: DurationText | Never = Field(
        "100 steps",
        description=(
            "Interval at which the weights of all ranks are compared; never: no comparison."
        ),
    )
    hang_timeout: float = Field(
        60.0,
        gt=0,
        description=(
            "Seconds that one rank may block the others before the hang is reported with "
            "its rank and line and the run ends."
        ),
    )
    timeout: float = Field(
        1800.0,
        ge=0.01,
        le=3e7,
        description="Seconds that a rank waits in a collective before it fails.",
    )


class NcclTable(SpecTable):
    """Settings of NCCL, the communication library of GPUs; NCCL chooses what is not given."""

    debug: Literal["version", "warn", "info", "trace"] | None = Field(
        None, description="NCCL_DEBUG: log level."
    )
    interface: str | None = Field(
        None,
        min_length=1,
        description=(
            'NCCL_SOCKET_IFNAME: prefixes of network interfaces; "=eth0": exactly that '
            'one, "^docker": all others.'
        ),
    )
    infiniband: bool | None = Field(
        None, description="Use InfiniBand or RoCE (NCCL_IB_DISABLE, inverted)."
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description=('NCCL_IB_HCA: InfiniBand adapters, such as "mlx5_0,mlx5_1" or "=mlx5_0:1".'),
    )
    infiniband_timeout: Annotated[int, Field(ge=1, le=22)] | None = Field(
        None, description="NCCL_IB_TIMEOUT: the timeout is 4.096 us * 2^value."
    )
    infiniband_retries: Annotated[int, Field(ge=1, le=7)] | None = Field(
        None,
        description="NCCL_IB_RETRY_CNT: retries before a link fails.",
    )
    algorithm: tuple[
        Literal["tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"], ...
    ] = Field((), description="NCCL_ALGO: algorithms that NCCL may choose from; none: all.")
    protocol: tuple[Literal["ll", "ll128", "simple"], ...] = Field(
        (),
        description=(
            "NCCL_PROTO: protocols that NCCL may choose from; none: all that are safe on "
            "this machine."
        ),
    )
    peer_access: bool | None = Field(
        None,
        description="Copy directly between the GPUs of a host (NCCL_P2P_DISABLE, inverted).",
    )
