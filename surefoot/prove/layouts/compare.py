"""Runs in a comparison of layouts, and the comparison of the tensors of two runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import TaskError
from surefoot.core.ranks.layout import Layout
from surefoot.prove.attempts import find_last_error
from surefoot.trial import Arm, compare_arrays, read_arrays, run_arm
from surefoot.trial.arm import REPORT, WORK, absolute

WIDE = 1e-10
FIRST = ("loss/1/", "norm/1/", "gradient/1/")
UNIT = 2.0**-24  # unit of rounding in fp32
NARROW = {"fp32": UNIT, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
Tell = Callable[[str], None]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """Comparison of a layout with one process, in one precision.

    Args:
        layout: The layout.
        precision: Format of the computation.
        worst: Tensor with the largest difference relative to the allowed difference.
        off: Difference of that tensor.
        allowed: Allowed difference.
        count: Number of tensors that were compared.
        num_bad: Number of tensors that differ by more than is allowed.
    """

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


@dataclass(frozen=True)
class LayoutTrial:
    """Runs in a comparison of layouts, each in fresh processes and a new folder in `folder`."""

    folder: Path
    steps: int
    tell: Tell

    def run(
        self, spec: RunSpec, layout: Layout, name: str, *flags: str, steps: int | None = None
    ) -> tuple[Arrays, Mapping[str, str]]:
        """Run a spec with a layout; return its tensors and facts.

        `flags` are options of the child process, and `name` describes the run.

        Raises:
            TaskError: If the run fails without `--record`.
        """
        self.tell(name)
        place = self.folder / name.replace("=", "").replace(",", " ").replace(" ", "-")
        command = (
            sys.executable,
            "-m",
            "surefoot.prove.layouts.child",
            f"{WORK}/spec.toml",
            "--report",
            REPORT,
            "--run",
            str(place / "run"),
            "--steps",
            str(steps or self.steps),
            *flags,
        )
        spec = spec.replace(layout={"shard": layout.shard, "zero_stage": layout.stage})
        whole = spec.replace(**absolute(spec, Path.cwd()))
        arm = Arm(
            name=place.name,
            command=command,
            files={"spec.toml": spec_file.write(whole)},
            folder=Path.cwd(),
            ranks=layout.world_size,
        )
        outcome = run_arm(arm, place)
        if outcome.ended != "done":
            words = find_last_error(outcome.error or outcome.ended)
            hint: str | None = "check that surefoot train SPEC runs with this layout"
            if "hint: " in words:  # the error has a hint already
                hint = None
            elif "--float64" in flags:
                hint = "the task may keep fp32 tensors, which limit the accuracy in float64"
            raise TaskError(f"{name}: {words}", hint=hint)
        return read_arrays(place / "rank0" / "report.json"), outcome.facts


def compare(
    layout: str, precision: str, whole: Arrays, found: Arrays, allowed: float, *, only_first: bool
) -> LayoutComparison:
    """Compare the tensors `found` with those of `whole`, one by one.

    With `only_first`, only loss, gradient norm and gradients of the first step are compared.
    """

    def kept(arrays: Arrays) -> dict[str, np.ndarray]:
        return {
            name: each
            for name, each in arrays.items()
            if not only_first or f"{name}/".startswith(FIRST)
        }

    gaps = compare_arrays(kept(whole), kept(whole), kept(found), tolerance=allowed)
    worst = gaps[0]
    return LayoutComparison(
        layout=layout,
        precision=precision,
        worst=worst.name,
        off=worst.distance,
        allowed=allowed,
        count=len(gaps),
        num_bad=sum(gap.verdict == "differs" for gap in gaps),
    )
