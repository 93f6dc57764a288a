"""Rules for changes of the spec between a run and its continuation, in one table.

A change is possible in place, with a fork, or not at all. Keys that are part of the spec id
determine the results of a run, so that their change needs a fork. Other keys (data folder, device,
logging, saving) may change in place. The documentation shows the table.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import ValidationError

from surefoot.contract import manifest
from surefoot.contract.events import Started
from surefoot.contract.run_folder import attached
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import RunFolderError, SpecError, SurefootError

MAX_SHOWN = 6
Verdict = Literal["in place", "fork", "refused"]


@dataclass(frozen=True)
class ChangeRule:
    """Verdict on a change of keys that match `pattern`, and the reason for it."""

    pattern: str
    verdict: Verdict
    why: str


RULES = (
    ChangeRule("observe.*", "in place", "logging does not change the results"),
    ChangeRule("checkpoint.*", "in place", "saving does not change the results"),
    ChangeRule(
        "data.folder",
        "in place",
        "the data may have been moved; changed data are refused when they are read",
    ),
    ChangeRule("loader.*", "in place", "the workers do not change the samples or the results"),
    ChangeRule(
        "layout.compress*",
        "fork",
        "gradients are compressed differently from the first new step",
    ),
    ChangeRule(
        "layout.virtual_ranks", "fork", "sums have a different order from the first new step"
    ),
    ChangeRule(
        "layout.*",
        "in place",
        (
            "the same batches are divided among other ranks; a forward pass has the "
            "same samples if train.microbatch is given"
        ),
    ),
    ChangeRule(
        "nccl.*",
        "in place",
        "a different NCCL algorithm may sum in a different order",
    ),
    ChangeRule(
        "train.device", "in place", "another device may give other bits; the run is the same"
    ),
    ChangeRule(
        "train.threads",
        "in place",
        "a different number of threads may give other bits; the run is the same",
    ),
    ChangeRule(
        "memory.*", "in place", "offloading and activation checkpointing do not change the results"
    ),
    ChangeRule("compile.*", "in place", "compiled code may give other bits; the run is the same"),
    ChangeRule(
        "train.cudnn_benchmark",
        "in place",
        "another algorithm may give other bits; the run is the same",
    ),
    ChangeRule(
        "train.attention", "in place", "another kernel may give other bits; the run is the same"
    ),
    ChangeRule(
        "train.keep_freed_memory", "in place", "keeping freed memory does not change the results"
    ),
    ChangeRule("task.use", "refused", "a different task has a different model"),
    ChangeRule(
        "task.*",
        "fork",
        (
            "a model whose names or shapes differ is refused when it is loaded; the "
            "best score is reset"
        ),
    ),
    ChangeRule("optim.name", "refused", "a different optimizer has a different state"),
    ChangeRule("optim.state", "refused", "the optimizer state has a different format"),
    ChangeRule("optim.freeze", "refused", "parameters that were frozen have no optimizer state"),
    ChangeRule(
        "optim.ema",
        "fork",
        (
            "a checkpoint with an average of the weights needs optim.ema, and one "
            "without needs it unset"
        ),
    ),
    ChangeRule(
        "optim.ema_buffers",
        "refused",
        "the average of the weights in a checkpoint includes the buffers, or it does not",
    ),
    ChangeRule(
        "optim.*",
        "fork",
        "the new values apply from the first new step; the optimizer's moments are kept",
    ),
    ChangeRule(
        "schedule.*", "fork", "the new curve applies from the first new step, at the run's step"
    ),
    ChangeRule(
        "precision.weights", "refused", "weights and optimizer state have a different format"
    ),
    ChangeRule(
        "precision.master", "refused", "weights and optimizer state have a different format"
    ),
    ChangeRule("train.length", "fork", "the run is longer or shorter, and so is its schedule"),
    ChangeRule(
        "train.batch",
        "fork",
        "step n reads the samples that it would read if the run had always had this batch size",
    ),
    ChangeRule(
        "train.accumulate",
        "fork",
        "step n reads the samples that it would read if steps had always had so many batches",
    ),
    ChangeRule(
        "train.ramp",
        "fork",
        "step n reads the samples that it would read if the run had always had this ramp",
    ),
    ChangeRule(
        "train.batchnorm", "refused", "a different normalization layer has a different state"
    ),
    ChangeRule(
        "train.memory_format",
        "refused",
        "Muon's state of convolution filters has their memory format",
    ),
    ChangeRule(
        "train.seed",
        "fork",
        "the data order is that of the new seed from the first new step",
    ),
    ChangeRule("data.shards", "refused", "a checkpoint has a position in each shard"),
    ChangeRule("data.*", "fork", "the data order differs from the first new step"),
    ChangeRule("evaluate.split", "fork", "the best score is reset if the first split changes"),
    ChangeRule("evaluate.score", "fork", "the best score is reset"),
    ChangeRule(
        "evaluate.batches",
        "fork",
        "the best score is reset, as by another size of these batches",
    ),
    ChangeRule("evaluate.*", "fork", "the new values apply from the first new step"),
    ChangeRule("*", "fork", "the new values apply from the first new step"),
)


@dataclass(frozen=True)
class Change:
    """A key of the spec whose value has changed, with both values and the rule for it."""

    key: str
    was: Any
    now: Any
    rule: ChangeRule

    def __str__(self) -> str:
        return f"{self.key} is {self.now!r}, was {self.was!r}"


def rule_for(key: str) -> ChangeRule:
    """Return the first rule whose pattern matches the key."""
    return next(rule for rule in RULES if fnmatchcase(key, rule.pattern))


def find(before: RunSpec, after: RunSpec) -> list[Change]:
    """Return every key whose value differs, and keys that only one spec gives explicitly."""
    ours, theirs = _values(before), _values(after)
    keys = list(dict.fromkeys((*ours, *theirs)))
    found = [
        Change(key, ours.get(key), theirs.get(key), rule_for(key))
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]
    known = {change.key for change in found}
    stated, was_stated = _find_given_keys(after) - known, _find_given_keys(before) - known
    found += [
        Change(key, "not stated", theirs.get(key), rule_for(key))
        for key in sorted(stated - was_stated)
    ]
    return found + [
        Change(key, ours.get(key), "not stated", rule_for(key))
        for key in sorted(was_stated - stated)
    ]


def _find_given_keys(spec: RunSpec) -> set[str]:
    """Return the explicitly given keys that override a part of the task, whatever their values."""
    tables = spec.as_tables()
    return {
        f"{table}.{key}"
        for table in ("optim", "schedule")
        for key in tables.get(table, {})
        if key in ("name", "lr")
    }


def _values(spec: RunSpec) -> dict[str, Any]:
    tables = spec.model_dump(mode="python")
    tables["task"] = {"use": _short_name(spec.task.use), **spec.task.parameters}
    tables["schedule"] = spec.schedule.used_keys()
    return {
        f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()
    }


def _short_name(use: str | None) -> str | None:
    """Return the name of the task with the file name alone, as in the spec id: files may move."""
    if use is None:
        return None
    file, colon, name = use.partition(":")
    return f"{PurePath(file).name}{colon}{name}"


def other_spec(run: Path, started: Started, spec_id: str, now: RunSpec | None) -> RunFolderError:
    """Return the error for a run folder that holds a run of a different spec.

    The error names each key with both values, and the command for each way to continue. If either
    run is a user's loop with `surefoot.attach`, no specs are compared, since a loop has no spec.
    """
    if started.spec_id == attached.SPEC_ID:
        return RunFolderError(
            f"{run} {attached.WORDS}: only the script of that loop can resume it",
            hint="give another --run folder, or --fresh; in Python another folder=, or fresh=True",
        )
    if spec_id == attached.SPEC_ID:
        return RunFolderError(
            f"{run} is the folder of a run with a spec, not of a loop with surefoot.attach",
            hint="give attach another folder=",
        )
    found: list[Change] = []
    if now is not None:
        # an older version may have had different keys
        with contextlib.suppress(ValidationError, SurefootError):
            found = [
                each
                for each in find(RunSpec.of_record(started.spec), now)
                if each.rule.verdict != "in place"
            ]
    if not found:
        text = f"{run} is the run of a different spec ({started.spec_id}, now {spec_id})"
        return RunFolderError(text, hint="give another --run folder, or --fresh")
    more = f", and {len(found) - MAX_SHOWN} more keys differ" if len(found) > MAX_SHOWN else ""
    return RunFolderError(
        f"{run} is the run of a different spec: {'; '.join(map(str, found[:MAX_SHOWN]))}{more}",
        hint="\n".join(_commands_to_resume(run, found)),
    )


def _commands_to_resume(run: Path, found: Sequence[Change]) -> list[str]:
    """Return the commands to resume with the old or the new values, or to start at step 0."""
    name = shlex.quote(str(run))
    newest = max(manifest.steps(run), default=0)
    is_longer = [change.key for change in found] == ["train.length"]
    purpose = (
        "extend it in a new folder" if is_longer else "resume with the new values in a new folder"
    )
    kept = (
        ""
        if all(change.rule.verdict == "fork" and not _switches_average(change) for change in found)
        else " --weights-only"
    )
    if kept:
        purpose = "start from step 0 with the weights that fit, since no other state fits"
    words = [_as_option(change) for change in found]
    given = " ".join(word for word in words if word is not None)
    weights = ", weights_only=True" if kept else ""
    ways = ["choose one:", f"  resume with the old values: surefoot resume {name}"]
    if all(word is not None for word in words):
        ways.append(f"  {purpose}: surefoot resume {name}{kept} --fork NEW {given}")
    label = "the same" if len(ways) > 2 else purpose
    start = f"Start(Path({str(run)!r}), {newest}{weights})"
    ways.append(
        f'  {label} in Python, by surefoot.Run and surefoot.Start: Run(spec, task, folder="NEW", '
        f"start={start})"
    )
    return [
        *ways,
        (
            "  train from step 0: give another --run folder, or --fresh; in Python another "
            "folder=, or fresh=True"
        ),
    ]


def _as_option(change: Change) -> str | None:
    """Return the change as option `--set KEY=VALUE`; None if it cannot be written as one."""
    if (
        change.key == "task.use"
        or change.now in (None, "not stated")
        or isinstance(change.now, dict)
    ):
        return None
    try:
        return f"--set {shlex.quote(f'{change.key}={json.dumps(change.now)}')}"
    except TypeError:
        return None


def check_in_place(changes: Sequence[Change], how: str) -> None:
    """Raise SpecError if a change needs a fork; `how` is the hint with the command for the fork."""
    wrong = [change for change in changes if change.rule.verdict != "in place"]
    if wrong:
        check_fork(changes)  # otherwise the hint would suggest a fork that is refused
        raise SpecError(
            f"{wrong[0]}: a run resumes with the values that it was "
            f"started with ({wrong[0].rule.why})",
            hint=how,
        )


def check_fork(changes: Sequence[Change]) -> None:
    """Raise SpecError if a change does not fit the state that a fork takes over."""
    wrong = [
        change
        for change in changes
        if change.rule.verdict == "refused" or _switches_average(change)
    ]
    if wrong:
        raise SpecError(
            f"{wrong[0]}: {wrong[0].rule.why}",
            hint="--weights-only starts from step 0 with the weights that fit, and no other state",
        )


def _switches_average(change: Change) -> bool:
    return change.key == "optim.ema" and (change.was is None) != (change.now is None)


def starts_scores_anew(changes: Sequence[Change], sizes: Sequence[str] = ()) -> bool:
    """Return whether an evaluation now measures a different quantity than before.

    `sizes` are the keys that set the size of its batches, which decides which samples are evaluated
    if `evaluate.batches` limits their number.
    """
    return any(
        change.key in ("evaluate.score", "evaluate.batches", *sizes)
        or change.key.startswith("task.")
        or (change.key == "evaluate.split" and _first(change.was) != _first(change.now))
        for change in changes
    )


def _first(split: Any) -> Any:
    return split if isinstance(split, str) else split[0]


def changes_settings(changes: Sequence[Change]) -> bool:
    """Return whether parameter groups use the settings of the new spec, not the saved ones."""
    return any(change.key.startswith(("optim.", "schedule.")) for change in changes)
