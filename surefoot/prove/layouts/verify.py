"""Comparison of layouts with one process, on the same global batches.

Loss, gradient norm, gradients, weights and buffers are compared. First, two single processes are
compared in float64: one with the whole batch, and one that splits the batch into the microbatches
that ranks share. They differ if the loss depends on how its batch is split. If they differ and the
model has BatchNorm or draws random numbers, they are compared once more with BatchNorm and dropout
as in evaluation.

Then each layout is compared twice with the process that splits its batch. In float64 only a wrong
sum differs by more than 1e-10, after any number of steps. In the spec's precision the first step
may differ by the effect of a different order of summation: the error of a sum of n numbers of 24
bits is at most (n - 1) 2^-24 of the sum of their magnitudes (Higham, Accuracy and Stability of
Numerical Algorithms, 4.2); n is the number of samples in the batch. The difference of a tensor is
given as a share of its largest value, or of a thousandth of the largest of all gradients. Later
steps in the spec's precision have no bound, because rounding errors grow in any two runs. The same
bound holds in float64 for a model whose operators compute in fp32 or less by themselves. A model
that cannot compute in float64 is compared only in the spec's precision.

With `layout.virtual_ranks` all steps must be bitwise identical. The cost is then reported: the time
of a step of each layout with and without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError
from surefoot.core.ranks.layout import Layout
from surefoot.prove.layouts.compare import Arrays, LayoutComparison, LayoutTrial, Tell
from surefoot.prove.layouts.reference import take_reference
from surefoot.train.assemble import load_task
from surefoot.train.assemble.reading import read_split
from surefoot.trial import check_finite


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """Seconds of a step of one layout, as the median over the steps after the first.

    `exact_s` is the time with `layout.virtual_ranks`, `plain_s` the time without.
    """

    layout: str
    exact_s: float
    plain_s: float


@dataclass(frozen=True, kw_only=True)
class LayoutVerdict:
    """Results of a comparison of layouts."""

    num_steps: int
    batch: int
    microbatch: int
    rows: tuple[LayoutComparison, ...]
    costs: tuple[LayoutCost, ...] = ()
    notes: tuple[str, ...] = ()
    narrow: tuple[Mapping[str, str], ...] = ()

    @property
    def holds(self) -> bool:
        return all(row.holds for row in self.rows)


def as_trial(spec: RunSpec, layouts: Sequence[Layout], steps: int) -> RunSpec:
    """Return the spec of a trial, which uses the same microbatches in every layout.

    Raises:
        SpecError: For a spec without a task name, with synchronized BatchNorm or compression, or
            with a batch that cannot be split for all layouts.
    """
    if spec.task.use is None:
        raise SpecError(
            "the spec names no task, so fresh processes cannot build it",
            hint='name it: [task] use = "my_task.py:MyTask"',
        )
    if spec.train.batchnorm == "sync":
        raise SpecError(
            'train.batchnorm is "sync", which joins what ranks see: '
            "other numbers of ranks compute something else on purpose",
            hint="verify with --set train.batchnorm=keep",
        )
    if spec.layout.compress != "none":
        raise SpecError(
            f'layout.compress is "{spec.layout.compress}", which sends less than the gradients: '
            "several ranks compute something else "
            "on purpose",
            hint="verify with --set layout.compress=none",
        )
    most, (batch, draws) = max(each.world_size for each in layouts), _batch_of(spec)
    microbatch = spec.train.microbatch or next(
        (size for size in range(batch // most, 0, -1) if batch % size == 0), 0
    )
    if microbatch < 1 or -(-batch // microbatch) < most:
        cut = f" in microbatches of {microbatch}" if microbatch else ""
        raise SpecError(
            f"a batch of {batch}{cut} has no piece for each of {most} ranks",
            hint="compare layouts of fewer ranks, or set train.microbatch",
        )
    return spec.replace(
        train={"microbatch": microbatch, "threads": 1},
        data={"draws": draws},
        layout={"replicate": None, "shard": 1},
        checkpoint={"every": "never", "store": None},
        observe={"every": "1 step", "tensorboard": False},
        evaluate={} if spec.evaluate.every == "never" else {"every": f"{10 * steps} steps"},
    )


def _batch_of(spec: RunSpec) -> tuple[int, str | None]:
    """Return the samples of a step, and the `data.draws` under which it can be divided.

    Raises SpecError for data that come as whole batches of unknown samples.
    """
    source = read_split(load_task(spec), "train")
    if not isinstance(source, Iterated):
        return spec.train.batch, spec.data.draws
    size = getattr(getattr(source.loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int) or "batch" in spec.train.model_fields_set:
        raise SpecError(
            f"layouts divide each batch, but the source gives whole batches: {source.describe()}",
            hint="give a DataLoader with a map-style dataset and a batch_size, and leave "
            "train.batch out",
        )
    return size, "sample"


def verify_layouts(
    spec: RunSpec, layouts: Sequence[Layout], folder: Path, *, steps: int, tell: Tell
) -> LayoutVerdict:
    """Run each layout in `folder`, in float64 if possible and in the spec's precision, and compare.

    Raises:
        SpecError: For a spec that cannot be tested.
        TaskError: For a layout that does not run.
    """
    cut, run = as_trial(spec, layouts, steps), LayoutTrial(folder, steps, tell)
    compute = cut.precision.compute
    wide = (
        cut.replace(precision={"compute": "fp32", "weights": "fp32"}) if compute != "fp32" else cut
    )
    is_exact = cut.layout.virtual_ranks is not None
    reference = take_reference(run, wide, cut)
    rows: list[LayoutComparison] = []
    costs: list[LayoutCost] = []
    facts: Mapping[str, str] = {}
    for precision, tried in (("float64", wide), (compute, cut)):
        is_wide = precision == "float64"
        if is_wide and not reference.is_wide:
            continue
        flags = ("--float64",) if is_wide else ()
        whole, facts = run.run(tried, Layout(), f"one process, {precision}", *flags)
        check_finite(whole, f"one process in {precision}")
        if is_wide == reference.is_wide:
            rows += reference.compare(whole, int(facts["batch"]))
        for each in layouts:
            if each.world_size == 1:
                continue
            found, told = run.run(tried, each, f"{each}, {precision}", *flags)
            if is_exact:
                rows.append(_compare_bits(each, precision, whole, found))
                if not is_wide:
                    costs.append(_cost(run, tried, each, told))
                continue
            rows.append(reference.judge(str(each), is_wide, whole, found, int(facts["batch"])))
    if is_exact:
        costs.insert(0, _cost(run, cut, Layout(), facts))
    return LayoutVerdict(
        num_steps=int(facts["steps"]),
        batch=int(facts["batch"]),
        microbatch=cut.train.microbatch or 0,
        rows=tuple(rows),
        costs=tuple(costs),
        notes=tuple(reference.notes),
        narrow=tuple(reference.narrow),
    )


def _cost(run: LayoutTrial, spec: RunSpec, layout: Layout, exact: Mapping[str, str]) -> LayoutCost:
    _, told = run.run(
        spec.replace(layout={"virtual_ranks": None}), layout, f"{layout}, without the same bits"
    )
    return LayoutCost(
        layout=str(layout), exact_s=float(exact["step_s"]), plain_s=float(told["step_s"])
    )


def _compare_bits(layout: Layout, precision: str, whole: Arrays, found: Arrays) -> LayoutComparison:
    """Compare all tensors bitwise and return the worst one; -0.0 differs from 0.0."""
    both = whole.keys() & found.keys()
    apart = [
        name
        for name in {**whole, **found}
        if name not in both or whole[name].tobytes() != found[name].tobytes()
    ]
    off = {
        name: float(np.abs(np.subtract(whole[name], found[name])).max(initial=0.0))
        for name in apart
        if name in both
    }
    worst = max(apart or whole, key=lambda name: off.get(name, np.inf))
    return LayoutComparison(
        layout=str(layout),
        precision=precision,
        worst=worst,
        off=off.get(worst) if apart else 0.0,
        allowed=0.0,
        count=len(whole),
        num_bad=len(apart),
    )
