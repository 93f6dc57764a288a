"""Tables of a spec: what is trained, for how long, and what is evaluated, saved and logged."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from surefoot.contract.spec.values import (
    EACH,
    Count,
    DurationText,
    Fraction,
    Never,
    Positive,
    SpecTable,
    TimeText,
    checked_by,
    show,
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
        description="Name of a built-in task, file.py:Class or package.module:Class.",
    )

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class DataTable(SpecTable):
    folder: str | None = Field(None, description="Folder of the data set, or its parent folder.")
    shuffle: bool = Field(
        True, description="Draw a new order each epoch, as a pure function of (seed, epoch)."
    )
    window: Positive | None = Field(
        None,
        description=(
            "Number of shards whose samples are shuffled together, for sources that have "
            "shards; none: all shards."
        ),
    )
    shards: Positive | None = Field(
        None,
        description=(
            "Number of shards of a stream: a step has a batch of each, and ranks share them; the "
            "task's `data(split, shard)` returns one. None: one for each rank."
        ),
    )
    last_batch: Literal["keep", "drop"] = Field(
        "keep",
        description=(
            "Keep or drop the last step of an epoch if it has fewer samples than the others; "
            "evaluation never drops any."
        ),
    )
    draws: Literal["batch", "sample"] | None = Field(
        None,
        description=(
            "Random numbers that the dataset of a DataLoader draws depend on the batch and its "
            "worker, or on the sample alone; none: batch, and sample if batches are divided."
        ),
    )
    on_bad: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "On a sample that cannot be read: stop the run, or skip the sample and record it."
        ),
    )
    max_bad: float = Field(
        0.001,
        ge=0,
        le=1,
        description=(
            "Largest share of unreadable samples that `skip` accepts, rounded up to whole "
            "samples; more stop the run."
        ),
    )


class OptimTable(SpecTable):
    name: Literal["sgd", "adam", "adamw", "muon", "lars", "lamb", "task"] = Field(
        "adamw",
        description="Optimizer; `task`: the optimizer that the task's `optimizer()` returns.",
    )
    lr: float = Field(1e-3, ge=0, description="Base learning rate; the schedule multiplies it.")
    weight_decay: float = Field(
        0.01, ge=0, description="Weight decay; norms, biases and embeddings are exempt."
    )
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.999),
        description="Coefficients of the running averages of adam, adamw, muon and lamb.",
    )
    eps: float = Field(
        1e-8, gt=0, description="Epsilon of adam, adamw, muon and lamb; the LAMB paper uses 1e-6."
    )
    momentum: Fraction = Field(0.9, description="Momentum of sgd, muon and lars.")
    nesterov: bool = Field(False, description="Use Nesterov momentum in sgd and muon.")
    trust_coefficient: float = Field(
        0.001,
        gt=0,
        description="LARS trust coefficient: layer lr = coefficient * norm(w) / norm(g).",
    )
    reference_batch: Positive | None = Field(
        None,
        description=(
            "Batch size that lr was tuned for: the learning rate is scaled by the samples of a "
            "step, train.batch * train.accumulate, / reference_batch; none: no scaling."
        ),
    )
    scaling: Literal["linear", "sqrt"] = Field(
        "linear",
        description=(
            "Scale the learning rate by that ratio, or by its square root (for Adam-like "
            "optimizers)."
        ),
    )
    clip: float = Field(1.0, ge=0, description="Largest global gradient norm; 0: no clipping.")
    clip_value: float | None = Field(
        None,
        gt=0,
        description=(
            "Largest absolute value of a gradient element; clipping by value changes the "
            "gradient's direction."
        ),
    )
    no_decay: tuple[str, ...] = Field(
        (), description="Patterns of further parameters without weight decay."
    )
    lr_multipliers: dict[str, float] = Field(
        default_factory=dict, description="Learning rate multiplier for each pattern of parameters."
    )
    freeze: tuple[str, ...] = Field((), description="Patterns of parameters that are not trained.")
    fused: bool = Field(
        True,
        description=(
            "Use torch's fused kernels for the optimizer step where torch has them; false: "
            "torch's default implementation."
        ),
    )
    state: Literal["fp32", "8bit"] = Field(
        "fp32",
        description=(
            "Format of the moments of adam and adamw; 8bit: tensors of fewer than 4,096 "
            "elements keep fp32."
        ),
    )
    ema: Fraction | None = Field(
        None,
        description=(
            "Decay d of an exponential moving average of the weights: min(d, (1 + n) / (10 "
            "+ n)) after n steps; the average is evaluated and saved."
        ),
    )
    ema_ramp: bool = Field(
        True, description="false: use the decay d of the average from the first step."
    )
    ema_buffers: bool = Field(
        False,
        description=(
            "Average floating-point buffers too, such as BatchNorm's statistics, by the "
            "same formula; integer buffers are copied."
        ),
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.clip_value is not None and self.clip:
            raise ValueError(
                f"clip_value = {self.clip_value} contradicts {show(self, 'clip')}; "
                "set clip = 0, or leave clip_value out"
            )
        if self.state == "8bit" and (self.name not in ("adam", "adamw") or not self.fused):
            given = show(self, "name" if self.fused else "fused")
            raise ValueError(
                f'state = "8bit" needs the adam or adamw of surefoot, not {given}; '
                'use "adamw" or "adam", or leave state out'
            )
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        for pattern, rate in self.lr_multipliers.items():
            if rate < 0:
                raise ValueError(f"lr_multipliers is {rate} for {pattern!r}; use 0 or more")
        return self


# a run that is over before its first step would train nothing, and count as finished
MIN_RUN_S = 0.01


class TrainTable(SpecTable):
    length: DurationText = Field(
        "10 epochs",
        description="Length of the run; a time covers all attempts of the run together.",
    )
    batch: Positive = Field(
        128,
        description=(
            "Samples of one optimizer step, over all microbatches and ranks (global batch size); "
            "with train.accumulate, a step has several such batches."
        ),
    )
    accumulate: Positive = Field(
        1,
        description=(
            "Batches of one optimizer step (gradient accumulation): each of train.batch samples, "
            "or a batch of the task's DataLoader. Losses are divided by the counts of the "
            "whole step."
        ),
    )
    microbatch: Positive | None = Field(
        None, description="Samples of one forward pass; none: the whole batch."
    )
    ramp: tuple[tuple[Count, Positive], ...] = Field(
        (),
        max_length=8,
        description=(
            "Batch size warm-up: pairs (samples seen, batch size from there on), from 0 up "
            "to train.batch."
        ),
    )
    batchnorm: Literal["keep", "group", "layer", "sync"] = Field(
        "keep",
        description=(
            "BatchNorm layers: keep them, replace them by GroupNorm or by LayerNorm over "
            "channels and positions, or use SyncBatchNorm over the ranks."
        ),
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of weights, data order, augmentation and dropout."
    )
    deterministic: bool = Field(True, description="Use deterministic kernels where torch has them.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: the GPU if there is one."
    )
    threads: Annotated[int, Field(gt=0, le=4096)] | None = Field(
        None, description="Intra-op CPU threads (`torch.set_num_threads`); none: torch's default."
    )
    keep_freed_memory: bool = Field(
        True, description="Keep freed host memory in the process, which avoids page faults."
    )
    memory_format: Literal["contiguous", "channels_last"] = Field(
        "contiguous",
        description=(
            "Memory format of convolution weights; most convolution kernels are fastest in "
            "channels_last."
        ),
    )
    attention: Literal["auto", "fused", "math"] = Field(
        "auto",
        description=(
            "Kernels of scaled_dot_product_attention: auto: torch's choice; fused: a fused "
            "kernel, else the run stops at step 1; math: no fused kernel."
        ),
    )
    cudnn_benchmark: bool = Field(
        False, description="Let cuDNN time its algorithms for each convolution and use the fastest."
    )

    @property
    def step_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.batch * self.accumulate

    @property
    def cut_keys(self) -> tuple[str, ...]:
        """Given keys that make a step several microbatches."""
        accumulates = ("train.accumulate",) if self.accumulate > 1 else ()
        return accumulates if self.microbatch is None else (*accumulates, "train.microbatch")

    def pass_size(self, num_ranks: int) -> int | None:
        """Return the samples of one forward pass; None for an equal part of a step's samples."""
        if self.microbatch is None and self.accumulate > 1:
            return -(-self.batch // num_ranks)
        return self.microbatch

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        # without `batch`, the batch may be that of a DataLoader
        if (
            self.microbatch is not None
            and self.batch % self.microbatch
            and "batch" in self.model_fields_set
        ):
            legal = [size for size in range(1, self.batch + 1) if self.batch % size == 0]
            raise ValueError(
                f"microbatch = {self.microbatch} does not divide {show(self, 'batch')}; "
                f"use one of {legal}"
            )
        self._check_ramp()
        length = Duration.parse(self.length)
        if length.unit == "%":
            raise ValueError(
                f"length = {self.length} is a percentage of length; give the length "
                "in epochs, steps or another unit"
            )
        if length.unit == "s" and length.value < MIN_RUN_S:
            raise ValueError(
                f"length = {self.length} ends before the first step; "
                f"use at least {MIN_RUN_S} s, or 1 step"
            )
        return self

    def _check_ramp(self) -> None:
        if not self.ramp:
            return
        if self.accumulate > 1:
            raise ValueError(
                f"accumulate = {self.accumulate} cannot be used with ramp, which sets the samples "
                f"of each step; use batch = {self.step_batch} and microbatch = {self.batch}"
            )
        starts, batches = zip(*self.ramp, strict=True)
        form = (
            f"; it is [[0, SMALL], ..., [SAMPLES, {self.batch}]]: samples that rise from 0, "
            f"and at last {show(self, 'batch')}"
        )
        if (
            starts[0] != 0
            or any(later <= before for before, later in pairwise(starts))
            or batches[-1] != self.batch
        ):
            raise ValueError(f"ramp = {[list(stage) for stage in self.ramp]} is not a ramp{form}")
        wrong = [size for size in batches if size % (self.microbatch or 1)]
        if wrong:
            legal = [
                size for size in range(1, math.gcd(*batches) + 1) if math.gcd(*batches) % size == 0
            ]
            raise ValueError(
                f"microbatch = {self.microbatch} does not divide {wrong[0]}, a batch of ramp; "
                f"use one of {legal}"
            )


class EvaluateTable(SpecTable):
    split: str | tuple[str, ...] = Field(
        "test",
        description=(
            "Split that is evaluated during training, or several; the task's `data(split)` "
            "returns it. The first one decides the score and the best checkpoint."
        ),
    )
    every: Annotated[DurationText | Never | tuple[DurationText, ...], EACH] = Field(
        "1 epoch",
        description=(
            "Interval between evaluations, or one for each split; the end of the run is evaluated "
            "too; never: the run evaluates nothing."
        ),
    )
    batch: Positive | None = Field(None, description="Batch size of evaluation; none: train.batch.")
    batches: Positive | None = Field(
        None,
        description=(
            "Evaluate at most so many batches of a split, spread evenly over samples that are read "
            "by number, or else the first ones; none: the whole split."
        ),
    )
    score: str | None = Field(
        None,
        description=(
            "Metric that selects the best checkpoint; none: the task's first metric, else the loss."
        ),
    )
    patience: Positive | None = Field(
        None, description="Stop after this many evaluations without a better score."
    )

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,) if isinstance(self.split, str) else self.split

    @property
    def first_split(self) -> str:
        """Split that decides the score."""
        return self.splits[0]

    @property
    def intervals(self) -> dict[str, str]:
        """Interval of each split."""
        given = self.every
        texts = (given,) * len(self.splits) if isinstance(given, str) else given
        return dict(zip(self.splits, texts, strict=True))

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if not (self.split and all(self.splits)) or len(set(self.splits)) < len(self.splits):
            given = self.split if isinstance(self.split, str) else list(self.split)
            raise ValueError(
                f"split = {given!r} names no split, or one of them twice; name one split or more"
            )
        if not isinstance(self.every, str) and len(self.every) != len(self.splits):
            raise ValueError(
                f"every = {list(self.every)} has {len(self.every)} intervals for "
                f"{len(self.splits)} splits; give one for all of them, or one for each"
            )
        return self


class CheckpointTable(SpecTable):
    every: DurationText | Never = Field(
        "10 min",
        description="Interval between checkpoints; the best and the last step are saved too.",
    )
    keep: Annotated[int, Field(ge=2)] = Field(
        3, description="Number of the newest checkpoints to keep."
    )
    keep_every: DurationText | None = Field(
        None,
        description=(
            "Keep checkpoints at multiples of this; for a time, the first checkpoint after "
            "each multiple."
        ),
    )
    keep_best: Positive = Field(
        1, description="Number of the best checkpoints, by evaluate.score, to keep."
    )
    budget: Annotated[str, checked_by(parse_bytes)] | None = Field(
        None,
        description=(
            "Largest size of all checkpoints on disk; the oldest are deleted, but never "
            "the newest two or the best."
        ),
    )
    max_unsaved: TimeText | Never = Field(
        "6 h",
        description="Stop the run if all saves have failed for this long; never: do not stop.",
    )
    store: str | None = Field(
        None, min_length=1, description="fsspec URL to which each checkpoint is copied too."
    )
    background: bool = Field(
        True,
        description=(
            "Write checkpoints while training continues, at the lowest priority; needs "
            "host memory for one copy of the state."
        ),
    )


class StabilityTable(SpecTable):
    nonfinite: Literal["skip", "stop"] = Field(
        "skip", description="If a gradient is non-finite: skip the step, or stop the run."
    )
    max_skips: Positive = Field(
        5, description="Stop the run after this many skipped steps in a row."
    )
    diverged: float = Field(
        1e4,
        gt=1,
        description=(
            "Stop the run if the loss exceeds the first loss by this factor five times in a row."
        ),
    )


class ObserveTable(SpecTable):
    every: DurationText = Field("10 steps", description="Steps that one Step event summarizes.")
    tensorboard: bool | None = Field(
        None, description="Write TensorBoard files; none: if the extra is installed."
    )
    noise: bool = Field(
        False,
        description=(
            "Record the gradient noise scale, from the gradients of the first microbatch "
            "and of the whole batch of each step."
        ),
    )


class FaultTable(SpecTable):
    """Faults that are injected for experiments; results of such a run must not be used."""

    forget: tuple[Literal["optimizer", "schedule", "random", "task"], ...] = Field(
        (),
        description="Parts of the state that a resumed run does not load.",
    )
