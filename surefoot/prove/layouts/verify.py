"""The same global batches under each layout, against one process: loss, gradient norm, every gradient, every weight and buffer.

Twice: in float64, where nothing but a wrong sum is larger than 1e-10 after any number of steps; and as the spec says, where the first
step may be off by what another order of summation does. A sum of n numbers of 24 bits is off by (n - 1) 2^-24 of the sum of their
magnitudes at the most (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); n is the samples of the batch, and what a tensor is
off by is told as a share of its largest number, or of a thousandth of the largest of all gradients. Later steps of the spec's own
precision are not held to a bound: rounding grows there in any two runs.

With `layout.virtual_ranks` no bit of any step may differ, and what that costs is told: a step of each layout with it and without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError, TaskError
from surefoot.core.ranks.layout import Layout
from surefoot.prove.attempts import last_words
from surefoot.trial import Arm, compare_arrays, read_arrays, run_arm
from surefoot.trial.arm import REPORT, WORK, absolute

WIDE = 1e-10
FIRST = ("loss/1/", "norm/1/", "gradient/1/")
UNIT = 2.0**-24  # of rounding, in fp32
NARROW = {"fp32": UNIT, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
Tell = Callable[[str], None]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One layout against one process, in one precision: the tensor that is off most for what is allowed, and how many were compared."""

    layout: str
    precision: str
    worst: str
    off: float | None
    allowed: float
    count: int
    num_bad: int

    @property
    def holds(self) -> bool:
        return self.num_bad == 0 and self.count > 0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step of one layout, the median of those after the first: with the same bits on any, and without."""

    layout: str
    exact_s: float
    plain_s: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All layouts, and what was compared."""

    num_steps: int
    batch: int
    microbatch: int
    rows: tuple[Compared, ...]
    costs: tuple[Cost, ...] = ()

    @property
    def holds(self) -> bool:
        return all(row.holds for row in self.rows)


def as_trial(spec: RunSpec, layouts: Sequence[Layout], steps: int) -> RunSpec:
    """The spec of a trial: cut into the same microbatches under every layout. Raises SpecError where no cut serves all of them."""
    if spec.task.use is None:
        raise SpecError(
            "the spec names no task, so fresh processes cannot build it", hint='name it: [task] use = "my_task.py:MyTask"'
        )
    if spec.train.batchnorm == "sync":
        raise SpecError(
            'train.batchnorm is "sync", which joins what ranks see: other numbers of ranks compute something else on purpose',
            hint="verify with --set train.batchnorm=keep",
        )
    if spec.layout.compress != "none":
        raise SpecError(
            f'layout.compress is "{spec.layout.compress}", which sends less than the gradients: several ranks compute something else '
            "on purpose",
            hint="verify with --set layout.compress=none",
        )
    most, batch = max(each.world_size for each in layouts), spec.train.batch
    microbatch = spec.train.microbatch or next((size for size in range(batch // most, 0, -1) if batch % size == 0), 0)
    if microbatch < 1 or -(-batch // microbatch) < most:
        cut = f" in microbatches of {microbatch}" if microbatch else ""
        raise SpecError(
            f"a batch of {batch}{cut} has no piece for each of {most} ranks",
            hint="compare layouts of fewer ranks, or set train.microbatch",
        )
    return spec.replace(
        train={"microbatch": microbatch, "threads": 1}, layout={"replicate": None, "shard": 1},
        checkpoint={"every": "never", "store": None}, observe={"every": "1 step", "tensorboard": False},
        evaluate={"every": f"{10 * steps} steps"},
    )  # fmt: skip


def verify_layouts(spec: RunSpec, layouts: Sequence[Layout], folder: Path, *, steps: int, tell: Tell) -> Verdict:
    """Run each layout twice in `folder`. Raises SpecError for a spec that cannot be tried, TaskError for a layout that does not run."""
    trial = as_trial(spec, layouts, steps)
    compute = trial.precision.compute
    wide = trial.replace(precision={"compute": "fp32", "weights": "fp32"}) if compute != "fp32" else trial
    is_exact = trial.layout.virtual_ranks is not None
    rows: list[Compared] = []
    costs: list[Cost] = []
    facts: Mapping[str, str] = {}
    for precision, tried in (("float64", wide), (compute, trial)):
        is_wide = precision == "float64"
        tell(f"one process, {precision}")
        whole, facts = _arrays(tried, Layout(), folder, f"one {precision}", steps, is_wide)
        for each in layouts:
            if each.world_size == 1:
                continue
            tell(f"{each}, {precision}")
            found, told = _arrays(tried, each, folder, f"{each} {precision}", steps, is_wide)
            if is_exact:
                rows.append(_compare_bits(each, precision, whole, found))
                if not is_wide:
                    costs.append(_cost(tried, each, folder, steps, told))
                continue
            allowed = WIDE if is_wide else int(facts["batch"]) * NARROW.get(compute, NARROW["bf16"])
            rows.append(_compare(each, precision, whole, found, allowed, only_first=not is_wide))
    if is_exact:
        costs.insert(0, _cost(trial, Layout(), folder, steps, facts))
    return Verdict(
        num_steps=int(facts["steps"]), batch=int(facts["batch"]), microbatch=trial.train.microbatch or 0, rows=tuple(rows),
        costs=tuple(costs),
    )  # fmt: skip


def _cost(spec: RunSpec, layout: Layout, folder: Path, steps: int, exact: Mapping[str, str]) -> Cost:
    plain = spec.replace(layout={"virtual_ranks": None})
    _, told = _arrays(plain, layout, folder, f"{layout} plain", steps, is_wide=False)
    return Cost(layout=str(layout), exact_s=float(exact["step_s"]), plain_s=float(told["step_s"]))


def _compare_bits(layout: Layout, precision: str, whole: Arrays, found: Arrays) -> Compared:
    """The tensor that is off most; -0.0 is not 0.0 here."""
    both = whole.keys() & found.keys()
    apart = [name for name in {**whole, **found} if name not in both or whole[name].tobytes() != found[name].tobytes()]
    off = {name: float(np.abs(np.subtract(whole[name], found[name])).max(initial=0.0)) for name in apart if name in both}
    worst = max(apart or whole, key=lambda name: off.get(name, np.inf))
    return Compared(
        layout=str(layout), precision=precision, worst=worst, off=off.get(worst) if apart else 0.0, allowed=0.0, count=len(whole),
        num_bad=len(apart),
    )  # fmt: skip


def _arrays(
    spec: RunSpec, layout: Layout, folder: Path, name: str, steps: int, is_wide: bool
) -> tuple[Arrays, Mapping[str, str]]:  # fmt: skip
    place = folder / name.replace("=", "").replace(",", " ").replace(" ", "-")
    command = (
        sys.executable, "-m", "surefoot.prove.layouts.child", f"{WORK}/spec.toml", "--report", REPORT, "--run", str(place / "run"),
        "--steps", str(steps), *(["--float64"] if is_wide else []),
    )  # fmt: skip
    spec = spec.replace(layout={"shard": layout.shard, "stage": layout.stage})
    whole = spec.replace(**absolute(spec, Path.cwd()))
    arm = Arm(
        name=place.name, command=command, files={"spec.toml": spec_file.write(whole)}, folder=Path.cwd(), ranks=layout.world_size
    )
    outcome = run_arm(arm, place)
    if outcome.ended != "done":
        hint = "in float64 the task may hold numbers of its own in fp32" if is_wide else "does surefoot train run it?"
        raise TaskError(f"{name}: {last_words(outcome.error or outcome.ended)}", hint=hint)
    return read_arrays(place / "rank0" / "report.json"), outcome.facts


def _compare(layout: Layout, precision: str, whole: Arrays, found: Arrays, allowed: float, *, only_first: bool) -> Compared:
    def kept(arrays: Arrays) -> dict[str, np.ndarray]:
        return {name: each for name, each in arrays.items() if not only_first or f"{name}/".startswith(FIRST)}

    gaps = compare_arrays(kept(whole), kept(whole), kept(found), tolerance=allowed)
    worst = gaps[0]
    return Compared(
        layout=str(layout), precision=precision, worst=worst.name, off=worst.distance, allowed=allowed, count=len(gaps),
        num_bad=sum(gap.verdict == "differs" for gap in gaps),
    )  # fmt: skip
