"""Benchmark harness, which runs variants (arms) interleaved in fresh processes. No torch.

Compare two arms, the second with one setting changed:

    unclipped = spec.replace(optim={"clip": 0.0})
    arms = [spec_arm("plain", spec, steps=200), spec_arm("unclipped", unclipped, steps=200)]
    outcomes = tuple(run_rounds(arms, rounds=15))
    names = tuple(arm.name for arm in arms)
    trial = Trial(title="clipping", arms=names, rounds=15, seed=0, outcomes=outcomes)
    find_effect(trial, "unclipped", "plain", "cpu_s_per_step").words

A change for speed must not change results. `compare_arms` compares loss, gradients and weights; the
difference between two equal runs serves as the noise.
"""

from surefoot.trial.arm import Arm, spec_arm
from surefoot.trial.effect import (
    Bar,
    Effect,
    Trial,
    find_effect,
    find_effects,
    format_measure,
    judge,
)
from surefoot.trial.parity import Gap, Parity, check_finite, compare_arms, compare_arrays
from surefoot.trial.process import Outcome, run_arm
from surefoot.trial.report import (
    Clock,
    ProcessReport,
    capture,
    peak_bytes,
    read_arrays,
    read_report,
    resident_bytes,
    write_report,
)
from surefoot.trial.schedule import plan_rounds, run_rounds
from surefoot.trial.table import (
    as_json,
    as_line,
    effect_rows,
    effects_markdown,
    find_conditions,
    from_json,
    markdown,
    read_trial,
    write_trial,
)

__all__ = [
    "Arm",
    "Bar",
    "Clock",
    "Effect",
    "Gap",
    "Outcome",
    "Parity",
    "ProcessReport",
    "Trial",
    "as_json",
    "as_line",
    "capture",
    "check_finite",
    "compare_arms",
    "compare_arrays",
    "effect_rows",
    "effects_markdown",
    "find_conditions",
    "find_effect",
    "find_effects",
    "format_measure",
    "from_json",
    "judge",
    "markdown",
    "peak_bytes",
    "plan_rounds",
    "read_arrays",
    "read_report",
    "read_trial",
    "resident_bytes",
    "run_arm",
    "run_rounds",
    "spec_arm",
    "write_report",
    "write_trial",
]
