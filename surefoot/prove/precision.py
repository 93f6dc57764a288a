"""Comparison of runs in lower precision with runs in fp32, by their scores.

The runs of a pair have the same seed, and each run is a fresh process.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec, key_names
from surefoot.core.errors import InputError, SpecError, TaskError
from surefoot.prove.attempts import find_last_error
from surefoot.prove.ladder import rungs
from surefoot.prove.ladder.gate import MIN_SEEDS, Score, SeedScores, decide_by_scores
from surefoot.trial import Arm, run_arm
from surefoot.trial.arm import REPORT, WORK, absolute

WIDE, NARROW = "fp32", "bf16"  # NARROW is compared with WIDE if the spec computes in fp32
Tell = Callable[[str], None]


def verify_precision(spec: RunSpec, *, steps: int, seeds: int, tell: Tell) -> tuple[str, Score]:
    """Compare the scores of `spec` after `steps` steps with those in fp32.

    If `seeds` pairs of runs show a worse score, twice as many further pairs are run, and all pairs
    decide.

    Args:
        spec: The spec; if it computes in fp32, bf16 is compared with it.
        steps: Number of steps of each run.
        seeds: Number of pairs of runs; the runs of a pair have the same seed.

    Returns:
        The precision that was compared with fp32, and the comparison.

    Raises:
        InputError: For too few seeds or no steps.
        SpecError: For a task without a name.
        TaskError: If a run fails or has no score.
    """
    if seeds < MIN_SEEDS:
        raise InputError(
            f"--seeds is {seeds}",
            hint=f"use {MIN_SEEDS} or more: fewer pairs of runs show nothing",
        )
    if steps < 1:
        raise InputError(
            f"--steps is {steps}", hint="use 1 step or more: as many as it takes to learn something"
        )
    if spec.task.use is None:
        raise SpecError(
            "the spec names no task, so fresh processes cannot build it",
            hint='name it: [task] use = "my_task.py:MyTask"',
        )
    wide = rungs.change(spec, {f"precision.{key}": None for key in key_names("precision")})
    narrow = (
        spec
        if spec.precision.compute != WIDE
        else rungs.change(spec, {"precision.compute": NARROW})
    )
    name = narrow.precision.compute

    def take(chosen: range) -> tuple[SeedScores, SeedScores]:
        found: dict[str, dict[int, float]] = {WIDE: {}, name: {}}
        facts: dict[str, str] = {}
        for seed in chosen:
            for kind, each in ((WIDE, wide), (name, narrow)):
                tell(f"seed {seed} in {kind}")
                found[kind][seed], facts = _score(kind, each, seed, steps)
        one, other = (
            SeedScores(found[kind], facts["score"], facts["better"], facts["unit"])
            for kind in (WIDE, name)
        )
        return one, other

    score = decide_by_scores(range(spec.train.seed, spec.train.seed + seeds), take)
    assert score is not None  # both have every seed
    return name, score


def _score(name: str, spec: RunSpec, seed: int, steps: int) -> tuple[float, dict[str, str]]:
    quiet = rungs.change(spec, {"checkpoint.store": None, "observe.tensorboard": False})
    command = (
        sys.executable,
        "-m",
        "surefoot.prove.ladder.child",
        "scores",
        f"{WORK}/spec.toml",
        "--report",
        REPORT,
        "--run",
        f"{WORK}/run",
        "--steps",
        str(steps),
        "--seed",
        str(seed),
    )
    arm = Arm(
        name=name,
        command=command,
        files={"spec.toml": spec_file.write(quiet.replace(**absolute(quiet, Path())))},
        threads=spec.train.threads or 1,
        timeout_s=3600.0,
    )
    with tempfile.TemporaryDirectory(prefix="surefoot-precision-") as folder:
        outcome = run_arm(arm, Path(folder) / "run")
    if outcome.ended != "done":
        raise TaskError(
            f"seed {seed} in {name}: {find_last_error(outcome.error or outcome.ended)}",
            hint="check that surefoot train SPEC runs with this seed",
        )
    if "score_0" not in outcome.measures:
        told = outcome.facts.get("score")
        raise TaskError(
            f"seed {seed} in {name}: "
            + (f"its score {told} is not a finite number" if told else "the run has no score"),
            hint="compare by another one, with evaluate.score, or by the loss, without metrics",
        )
    return outcome.measures["score_0"], dict(outcome.facts)
