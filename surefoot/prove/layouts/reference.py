"""Reference in a comparison of layouts: the step of one process with the whole batch.

The operators in this step decide which bound applies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.contract.spec import RunSpec
from surefoot.core.ranks.layout import Layout
from surefoot.prove.layouts.compare import (
    NARROW,
    UNIT,
    WIDE,
    Arrays,
    LayoutComparison,
    LayoutTrial,
    compare,
)

OPERATOR_UNITS = {"float32": UNIT, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MIN_UNIT = 2.0**-3  # unit of any format with fewer bits
NUM_NAMED = 3
Operators = Sequence[Mapping[str, str]]


@dataclass
class Reference:
    """First step of one process with the whole batch, in float64 if the task supports it.

    Args:
        run: Runs of the comparison.
        cut: Spec that splits the batch into microbatches.
        arrays: Tensors of the step; None if it does not run.
        narrow: Operators of the task that compute in fewer bits than float64.
        is_wide: Whether the step is computed in float64.
        compute: Format in which the spec computes.
        notes: Texts for the reader of the verdict.
    """

    run: LayoutTrial
    cut: RunSpec
    arrays: Arrays | None
    narrow: Operators
    is_wide: bool
    compute: str  # of the spec
    notes: list[str] = field(default_factory=list)

    def compare(self, whole: Arrays, batch: int) -> list[LayoutComparison]:
        """Compare one process that splits its batch with this step, which uses the whole batch.

        If they cannot be compared, no row is returned and a note is added.
        """
        if self.arrays is None:
            return []
        found = self._compare_microbatches(self.arrays, whole, batch)
        if found.holds:
            return [found]
        flags = ("--plain", *self._flags)
        uncut, facts = self.run.run(
            _without_microbatches(self.cut),
            Layout(),
            "one process, the whole batch, plain",
            "--record",
            *flags,
            steps=1,
        )
        if "failed" in facts:
            return [found]
        again, _ = self.run.run(self.cut, Layout(), "one process, plain", *flags, steps=1)
        plain, draws = self._compare_microbatches(uncut, again, batch), json.loads(facts["draws"])
        if plain.holds:
            self.notes.append(
                f"{plain.layout}: compared with BatchNorm and dropout as in evaluation, "
                "since both depend on the microbatch"
            )
        elif draws:
            self.notes.append(
                f"{plain.layout}: not compared with the whole batch, "
                f"since the task draws numbers: {describe(draws)}"
            )
            return []
        else:
            self.notes.append(
                f"{plain.layout}: the loss of microbatches does not add up to that of the whole "
                "batch; where it compares samples with "
                "each other, return it with additive=False and leave train.microbatch out"
            )
        return [plain]

    def judge(
        self,
        layout: str,
        is_wide: bool,
        whole: Arrays,
        found: Arrays,
        batch: int,
        *,
        only_first: bool = False,
    ) -> LayoutComparison:
        """Compare the tensors `found` with those of `whole` and return the result.

        The bound is 1e-10 in float64, and otherwise the effect of rounding in the first step in the
        spec's precision. If that fails and the task has operators that compute in fewer bits, the
        bound is the effect of their rounding.
        """
        compute = self.compute
        precision, unit = (
            ("float64", 0.0) if is_wide else (compute, NARROW.get(compute, NARROW["bf16"]))
        )
        allowed = WIDE if is_wide else batch * unit
        exact = compare(
            layout, precision, whole, found, allowed, only_first=only_first or not is_wide
        )
        least = max(
            (OPERATOR_UNITS.get(each["dtype"], MIN_UNIT) for each in self.narrow), default=0.0
        )
        if exact.holds or least <= unit:
            return exact
        told = (
            f"the task computes in fewer bits than {precision}, whose bound is used: "
            f"{describe(self.narrow)}"
        )
        if told not in self.notes:
            self.notes.append(told)
        return compare(layout, precision, whole, found, batch * least, only_first=True)

    @property
    def _flags(self) -> tuple[str, ...]:
        return ("--float64",) if self.is_wide else ()

    def _compare_microbatches(self, uncut: Arrays, cut: Arrays, batch: int) -> LayoutComparison:
        return self.judge(
            f"1,microbatch={self.cut.train.microbatch}",
            self.is_wide,
            uncut,
            cut,
            batch,
            only_first=True,
        )


def take_reference(run: LayoutTrial, wide: RunSpec, cut: RunSpec) -> Reference:
    """Run the first step with the whole batch in float64, and return it as the reference.

    If the task keeps values in fewer bits and therefore fails in float64, the step runs in the
    precision of `cut` instead.
    """
    flags, compute = ("--record", "--float64"), cut.precision.compute
    arrays, facts = run.run(
        _without_microbatches(wide),
        Layout(),
        "one process, the whole batch, float64",
        *flags,
        steps=1,
    )
    narrow = json.loads(facts["narrow"])
    if "failed" not in facts:
        return Reference(run, wide, arrays, narrow, True, compute)
    if not narrow:
        return Reference(
            run,
            wide,
            None,
            (),
            True,
            compute,
            [f"not compared with the whole batch, whose step fails: {facts['failed']}"],
        )
    why = (
        f"not compared in float64, since the task keeps numbers in fewer bits: {describe(narrow)}; "
        f"{facts['failed']}"
    )
    arrays, facts = run.run(
        _without_microbatches(cut),
        Layout(),
        f"one process, the whole batch, {cut.precision.compute}",
        "--record",
        steps=1,
    )
    if "failed" not in facts:
        return Reference(run, cut, arrays, narrow, False, compute, [why])
    return Reference(
        run,
        cut,
        None,
        narrow,
        False,
        compute,
        [why, f"not compared with the whole batch, whose step fails: {facts['failed']}"],
    )


def describe(operators: Operators) -> str:
    """Describe the first few operators with module and line, and the number of the others."""
    named = [
        f"{each['operator']}"
        f"{' to ' + each['dtype'] if each['dtype'] else ''}"
        f"{' in ' + each['module'] if each['module'] else ''} ({each['line']})"
        for each in operators[:NUM_NAMED]
    ]
    more = len(operators) - len(named)
    return ", ".join(named) + (f", and {more} more" if more > 0 else "")


def _without_microbatches(spec: RunSpec) -> RunSpec:
    return spec.replace(
        train={"microbatch": None}, layout={"virtual_ranks": None}, observe={"noise": False}
    )
