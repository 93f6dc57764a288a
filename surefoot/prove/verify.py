"""Test that a task is deterministic, and that a killed and resumed run ends with the same bits.

Every attempt is a separate process. First two uninterrupted runs are compared, then one of them
with a run that is killed and resumed. After each step the digests of parameters, optimizer state,
weight average, buffers, random states, schedule, task state and counters are compared. At the end
every tensor of the last checkpoint and the ledger are compared.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.contract import commits, ledger, loop_ledger, manifest, spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError, TaskError
from surefoot.core.units import Duration
from surefoot.prove.attempts import Interpreters, Kill

MIN_STEPS, SAVES = 4, 6
# longest delay of a kill after the step, or after the start of its save
KILL_MS, KILL_IN_SAVE_MS = 40.0, 10.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """First difference of two runs, with a likely cause.

    `step` is None if only the last checkpoint or the ledger shows the difference. `loss_gap` is the
    largest difference of the losses of a step.
    """

    step: int | None
    component: str
    cause: str
    loss_gap: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Results of the test of a spec.

    `repeat` is the difference between two uninterrupted runs, and `resume` the difference between
    an uninterrupted run and the killed one; None if there is none. `kills` contains for each kill
    the step, the delay in milliseconds, and whether a save was interrupted.
    """

    num_steps: int
    seed: int
    components: tuple[str, ...]
    kills: tuple[tuple[int, float, bool], ...] = ()
    repeat: Difference | None = None
    resume: Difference | None = None
    guarantee: str = "proven"
    saved_steps: tuple[int, ...] = field(default=())

    @property
    def holds(self) -> bool:
        return self.repeat is None and self.resume is None


def as_trial(spec: RunSpec, steps: int) -> RunSpec:
    """Return the spec of a trial, which saves several checkpoints and copies none to a store.

    Raises:
        SpecError: For a task without a name.
    """
    if spec.task.use is None:
        raise SpecError(
            "the spec names no task, so fresh processes cannot build it",
            hint='name it: [task] use = "my_task.py:MyTask"',
        )
    every = max(1, steps // SAVES)
    return spec.replace(
        checkpoint={"every": f"{every} steps", "keep": 3, "keep_every": None, "store": None},
        observe={"every": "1 step", "tensorboard": False},
    )


def verify_resume(
    spec: RunSpec, folder: Path, *, steps: int, kills: int, seed: int, tell: Tell
) -> Verdict:
    """Run two uninterrupted runs and one with kills in `folder`, and compare them.

    Raises:
        TaskError: If a run fails without a kill.
        SpecError: For a spec that cannot be tested.
    """
    trial = as_trial(spec, steps)
    file = folder / "spec.toml"
    file.write_text(spec_file.write(trial), encoding="utf-8")
    with Interpreters(folder) as interpreters:
        for name in ("first", "second"):
            tell(f"{name} unbroken run of {steps} steps")
            interpreters.attempt(file, folder / name, steps=steps)
        first = _trace(folder / "first")
        if len(first) < MIN_STEPS:
            raise TaskError(
                f"the run is over after {len(first)} steps",
                hint=f"train {MIN_STEPS} steps or more: train.length, --steps",
            )
        if not any(_is_finite(row["loss"]) for row in first):
            raise TaskError(
                f"no step of {len(first)} has a finite loss, so there is no training to compare",
                hint="surefoot train SPEC names the first step that is not finite",
            )
        components, guarantee, done_steps = (
            tuple(first[0]["digests"]),
            str(first[0]["guarantee"]),
            int(first[-1]["step"]),
        )
        apart = _compare(folder / "first", folder / "second", cause=_cause_of_noise)
        if apart is not None:
            return Verdict(
                num_steps=done_steps,
                seed=seed,
                components=components,
                repeat=apart,
                guarantee=guarantee,
            )
        every = int(Duration.parse(str(trial.checkpoint.every)).value)
        planned = plan_kills(done_steps, every, kills, seed)
        done = tuple(_killed_run(interpreters, file, folder / "killed", steps, planned, tell))
        tell("the last attempt, to the end")
        interpreters.attempt(file, folder / "killed", steps=steps)
    resume = _compare(
        folder / "first",
        folder / "killed",
        cause=lambda component: _cause_of_loss(component, guarantee, spec.fault.forget),
    )
    return Verdict(
        num_steps=done_steps,
        seed=seed,
        components=components,
        kills=done,
        resume=resume,
        guarantee=guarantee,
        saved_steps=tuple(manifest.steps(folder / "killed")),
    )


def plan_kills(steps: int, every: int, kills: int, seed: int) -> list[Kill]:
    """Plan kills at increasing steps before the last step, one in each equal part of the run.

    Every second kill is in a save if its part of the run has one. A run that was killed after a
    step resumes from that step or an earlier one, so that every planned step is reached.

    >>> [(kill.step, kill.in_save) for kill in plan_kills(24, 4, 3, 0)]
    [(7, False), (12, True), (23, False)]
    """
    draws = random.Random(seed)
    parts = min(kills, steps - 1)
    planned = []
    for number in range(parts):
        places = range(1 + number * (steps - 1) // parts, 1 + (number + 1) * (steps - 1) // parts)
        saved = [step for step in places if step % every == 0]
        in_save = number % 2 == 1 and bool(saved)
        step = draws.choice(saved if in_save else places)
        planned.append(
            Kill(step, draws.uniform(0.0, KILL_IN_SAVE_MS if in_save else KILL_MS), in_save)
        )
    return planned


def _killed_run(
    interpreters: Interpreters, file: Path, run: Path, steps: int, planned: list[Kill], tell: Tell
) -> Iterator[tuple[int, float, bool]]:
    """Run attempts that each end by a kill; yield (step, milliseconds, whether a draft is left).

    Raises:
        TaskError: If an attempt reaches its end before the kill.
    """
    for number, kill in enumerate(planned, start=1):
        tell(
            f"kill {number} of {len(planned)}: "
            f"after step {kill.step}{', in its save' if kill.in_save else ''}"
        )
        if interpreters.attempt(file, run, steps=steps, kill=kill):
            raise TaskError(
                f"the run was over before it could be killed after step {kill.step}",
                hint="verify with more --steps",
            )
        yield kill.step, kill.after_ms, commits.has_draft(run)


def _trace(run: Path) -> list[dict[str, Any]]:
    """Return the trace lines of all attempts; a line that a kill truncated is left out."""
    rows = []
    for line in Path(str(run) + ".trace").read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _compare(whole: Path, other: Path, *, cause: Callable[[str], str]) -> Difference | None:
    """Return the first step and component in which the run `other` differs from `whole`, or None.

    If no step differs, the last checkpoints and then the ledgers are compared.
    """
    expected, rows = (
        {row["step"]: row for row in _trace(whole)},
        sorted(_trace(other), key=lambda row: int(row["step"])),
    )
    missing = sorted(expected.keys() - {row["step"] for row in rows})
    if missing:
        return Difference(missing[0], "the number of steps", cause("the number of steps"))
    pairs = [
        (row["loss"], expected[row["step"]]["loss"]) for row in rows if row["step"] in expected
    ]
    gap = max((abs(one - two) for one, two in pairs if None not in (one, two)), default=0.0)
    for row in rows:
        first = expected.get(row["step"])
        apart = _find_first_difference(first, row) if first is not None else "the number of steps"
        if apart is not None:
            return Difference(row["step"], apart, cause(apart), gap)
    tensor = _differing_tensor(whole, other)
    if tensor is not None:
        return Difference(None, tensor, cause(tensor))
    one, two = map(_rows, (whole, other))
    return None if one == two else Difference(None, "the ledger of samples", cause("ledger"))


def _rows(run: Path) -> list[tuple[int, object]]:
    """Return the samples that each step of a run consumed, as recorded in its ledger."""
    if loop_ledger.is_loop_run(run):
        return [(row.step, row.ids) for row in ledger.consumed(loop_ledger.read(run))[0]]
    return [(row.step, row.checksum) for row in ledger.consumed(ledger.read(run))[0]]


def _find_first_difference(first: dict[str, Any], row: dict[str, Any]) -> str | None:
    names = [name for name, value in first["digests"].items() if row["digests"].get(name) != value]
    if "random states" in names:
        return "random states"  # other differences follow from these
    is_same = row["loss"] == first["loss"] or not (
        _is_finite(row["loss"]) or _is_finite(first["loss"])
    )
    return names[0] if names else None if is_same else "the loss"


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _differing_tensor(whole: Path, other: Path) -> str | None:
    last = manifest.steps(whole)[-1]
    one, two = (manifest.read(manifest.step_folder(run, last)) for run in (whole, other))
    entries = {entry.name: entry for entry in two.files}
    for entry in one.files:
        found = entries.get(entry.name)
        if entry.name == "clock.json" or (found is not None and found.sha256 == entry.sha256):
            continue
        pieces = {} if found is None else found.tensors or {}
        for name, piece in (entry.tensors or {}).items():
            if name not in pieces or pieces[name].sha256 != piece.sha256:
                return f"{entry.name}: {name}"
        return entry.name
    return None


def _cause_of_noise(component: str) -> str:
    if component == "random states":
        return (
            "something draws from a random generator a varying number of times: once a "
            "second, once for each worker"
        )
    return (
        "a value depends on an operator without a fixed order, on the time of day, or on "
        "other processes"
    )


def _cause_of_loss(component: str, guarantee: str, forgotten: Sequence[str]) -> str:
    if forgotten:
        return f"fault.forget leaves out {', '.join(forgotten)} when the run resumes"
    if guarantee != "proven":
        return (
            f"the guarantee of the data is {guarantee}: read again, the data returned "
            "other batches than before"
        )
    if component == "random states":
        return (
            "a random draw of torch, NumPy or Python that is made once per process and "
            "not once per run"
        )
    return (
        "state that no checkpoint contains, such as an attribute or a generator of the "
        "task: return it from state()"
    )
