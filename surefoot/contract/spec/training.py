"""Tables of a spec: what is trained, for how long, and what is evaluated, saved and logged."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from surefoot.contract.spec.values import (
    Count,
    DurationText,
    Fraction,
    Never,
    Positive,
    SpecTable,
    TimeText,
    checked_by,
)
from surefoot.core.units import Duration, parse_bytes


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


# a run that is over before its first step would train nothing, and count as finished
SHORTEST_RUN_S = 0.01


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


class CheckpointTable(SpecTable):
    every: DurationText | Never = Field(
        "10 min", description="commit so often, besides the best and the last"
    )
    keep: Annotated[int, Field(ge=2)] = Field(3, description="how many of the newest commits stay")
    keep_every: DurationText | None = Field(
        None, description="commits at its multiples stay; of a time, the first after each"
    )
    keep_best: Positive = Field(1, description="how many of the best by evaluate.score stay")
    budget: Annotated[str, checked_by(parse_bytes)] | None = Field(
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
