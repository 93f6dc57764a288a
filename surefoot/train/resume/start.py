"""Start of a run from a checkpoint of a different run: a fork with all state, or weights only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit
from surefoot.contract import commits, events, manifest, spec_file
from surefoot.contract.events import Committed, Started
from surefoot.contract.manifest import Piece
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import master_of, part_of
from surefoot.contract.task import ResolvedTask
from surefoot.core.errors import RunFolderError, SpecError
from surefoot.core.units import name_some
from surefoot.runtime.comm.group import ALONE
from surefoot.train import environment
from surefoot.train.assemble import Assembly
from surefoot.train.resume import same
from surefoot.train.resume.program import Program, late_modules_after, tell_commit, tell_versions
from surefoot.train.resume.state import LiveState
from surefoot.train.session.folder import Chosen

if TYPE_CHECKING:
    from surefoot.train.resume.changes import Change

MAX_SHOWN = 8


@dataclass(frozen=True)
class Start:
    """Checkpoint from which a new run starts.

    The new run takes over all of its state unless `weights_only` is true.

    Args:
        run: Run folder of the checkpoint.
        step: Step of the checkpoint.
        weights_only: Start at step 0 with only the weights.
        partial: With `weights_only`, load the weights that fit by name and shape. False requires
            that all weights fit.
    """

    run: Path
    step: int
    weights_only: bool = False
    partial: bool = True


@dataclass(frozen=True)
class RunStart:
    """State from which a new run starts: its first `step`, and the counters `saved`.

    `parent` describes the checkpoint, for the manifests of the new run.
    """

    step: int
    parent: Mapping[str, Any]
    notes: tuple[str, ...]
    saved: Mapping[str, Any] | None = None


def begin(start: Start, assembly: Assembly) -> RunStart:
    """Load the checkpoint `start` into the objects of the new run.

    Raises RunFolderError if the checkpoint is damaged or does not fit the model, and SpecError if
    the spec does not fit the checkpoint.
    """
    from surefoot.train.resume import changes

    ranks = assembly.engine.steps.collectives.ranks
    group = ALONE if ranks is None else ranks.group
    commit = same.open_same(group, start.run, start.step)
    parent = {
        "folder": str(start.run.resolve()),
        "step": start.step,
        "spec_id": commit.manifest.spec_id,
    }
    if start.weights_only:
        return RunStart(
            0,
            {**parent, "weights_only": True},
            (_load_weights(commit, assembly, partial=start.partial),),
        )
    before = spec_of(start.run)
    found = changes.find(before, assembly.spec)
    changes.check_fork(found)
    total = assembly.course.total_steps
    if total is not None and start.step >= total:
        raise SpecError(
            f"train.length is {assembly.spec.train.length}, but the fork starts after "
            f"step {start.step:,}: no step is left",
            hint=(
                f"make the run longer: --steps {2 * max(1, start.step)}, or start "
                "from an older checkpoint: --from STEP"
            ),
        )
    table = assembly.spec.checkpoint
    if table.store is not None and table.store == before.checkpoint.store:
        raise SpecError(
            f"checkpoint.store = {table.store!r} is also the store of {start.run}",
            hint="give another store: --set checkpoint.store=URL",
        )
    is_other_task = any(change.key.startswith("task.") for change in found)
    evaluated = assembly.spec.evaluate
    sizes = ("evaluate.batch", *(("train.batch",) if evaluated.batch is None else ()))
    scores_anew = changes.starts_scores_anew(found, () if evaluated.batches is None else sizes)
    state = LiveState(assembly)
    saved = state.restore(
        commit,
        lambda tree: _remove_replaced_state(tree, found, scores=scores_anew),
        keep_buffers=is_other_task,
    )
    same.check_alike(group, state, start.step)
    if total is None:
        _check_time_left(commit, saved, assembly)
    return RunStart(
        start.step,
        parent,
        (
            *_notes(start, found, scores_anew=scores_anew),
            *_note_other_changes(start.run, assembly),
        ),
        saved,
    )


def _check_time_left(commit: Commit, saved: Mapping[str, Any], assembly: Assembly) -> None:
    with checkpoint.as_run_folder_errors(commit.folder):
        spent_s = float(saved["clock"]["training_s"])
    if spent_s >= assembly.course.length.value:
        raise SpecError(
            f"train.length is {assembly.spec.train.length}, but {commit.folder} was "
            f"saved after {spent_s:.0f} s of training: no time is left",
            hint=(
                "make the run longer: --set "
                f"'train.length={max(1, round(2 * spent_s))} s', or start from an "
                "older checkpoint: --from STEP"
            ),
        )


def spec_of(run: Path) -> RunSpec:
    """Return the spec of a run folder. Raises RunFolderError for a folder that is not a run."""
    return spec_file.read_of_run(run, checks_task=False).spec


def _remove_replaced_state(tree: dict[str, Any], found: Sequence[Change], *, scores: bool) -> None:
    """Remove the state from `tree` that the changed keys replace; with `scores`, the best score."""
    from surefoot.train.resume import changes

    if changes.changes_settings(found):
        for update in tree["optimizer"].values():
            for each in update["optimizers"]:
                if "groups" in each:
                    each["groups"] = None
    if any(change.key.startswith("schedule.") for change in found):
        tree["plateau"] = None
    sizes = ("train.batch", "train.accumulate", "train.microbatch", "train.ramp")
    if any(change.key in sizes for change in found):
        tree["microbatch"] = None
    if scores:
        tree["scores"], tree["plateau"] = None, None


def _notes(start: Start, found: Sequence[Change], *, scores_anew: bool) -> tuple[str, ...]:
    notes = [f"forked from {start.run} after step {start.step:,}"]
    notes += [f"changed: {change}" for change in found if change.rule.verdict != "in place"]
    if scores_anew:
        notes.append("the best score is reset: evaluations now measure another quantity")
    return tuple(notes)


def _note_other_changes(run: Path, assembly: Assembly) -> list[str]:
    """Return notes on changes outside of the spec: training data, code of the task, versions."""
    before, late = None, dict[str, str]()
    for event in events.read(run, Started, Committed) if (run / events.FILE).is_file() else ():
        before, late = (
            event if isinstance(event, Started) else before,
            late_modules_after(late, event),
        )
    if before is None:
        return []
    notes = []
    if before.data.get("digest") != assembly.feed.source.digest:
        notes.append(f"the training data differ from those of {run}")
    program = Program.of(assembly.task.importable, assembly.task.task)
    if changed := program.changes(before, late):
        notes.append(f"the code differs from that of {run}: {', '.join(changed)}")
    notes += tell_versions(before.versions, environment.versions())
    notes += tell_commit(before, program)
    return notes


def newest_sound(run: Path) -> tuple[int, list[str]]:
    """Return the step of the newest undamaged checkpoint, and the errors found in newer ones.

    Nothing is moved or deleted. Raises RunFolderError if there is no undamaged checkpoint.
    """
    if not manifest.named_steps(run):
        raise RunFolderError(
            f"{run} holds no checkpoint",
            hint=(
                "train from step 0 in a new folder: surefoot train "
                f"{shlex.quote(str(run / spec_file.FILE))} --run NEW"
            ),
        )
    troubles: list[str] = []
    for step in reversed(manifest.steps(run)):
        try:
            if commits.check(manifest.step_folder(run, step)).is_whole_state:
                return step, troubles
        except RunFolderError as error:
            troubles.append(error.message)
    told = f": {troubles[0]}" if troubles else ""
    raise RunFolderError(
        f"{run} holds no undamaged checkpoint of a whole state{told}",
        hint=f"surefoot checkpoint check {shlex.quote(str(run))}",
    )


def check_as_stated(chosen: Chosen, spec: RunSpec, task: ResolvedTask) -> None:
    """Raise SpecError if the spec overrides different parts of the task than at the run's start.

    A key that is given with its default value overrides the task's part too, although it does not
    change the id of the spec.
    """
    if not chosen.stated:
        return
    before, now = (_overridden_parts(tables, task) for tables in (chosen.stated, spec.as_tables()))
    for key in (key for key in now if now[key] != before[key]):
        how = "sets" if now[key] else "does not set"
        raise SpecError(
            f"the spec {how} {key}, unlike when {chosen.folder} was started, and "
            f"{key} overrides the value of the task",
            hint=(
                "resume with the old spec: surefoot resume "
                f"{shlex.quote(str(chosen.folder))}; or give "
                "another --run folder, or --fresh"
            ),
        )


def _overridden_parts(tables: Mapping[str, Any], task: ResolvedTask) -> dict[str, bool]:
    """Return which parts of the task the spec overrides by giving a key, whatever its value."""
    table = tables.get("optim", {})
    is_named = task.optimizer is not None and table.get("name", "task") != "task"
    has_rate = task.optimizer is not None and not is_named and "lr" in table
    return {
        "optim.name": is_named,
        "optim.lr": has_rate,
        "[schedule]": task.schedule is not None and "schedule" in tables,
    }


def check_same_data(chosen: Chosen, digest: str) -> None:
    """Raise RunFolderError if the resumed run was started with different data.

    `digest` is that of the training data now.
    """
    if chosen.data_digest is not None and chosen.data_digest != digest:
        raise RunFolderError(
            f"the training data differ from those that {chosen.folder} was started with",
            hint=(
                "give the same data with --data, or fork the run: surefoot resume "
                f"{shlex.quote(str(chosen.folder))} --fork NEW"
            ),
        )


def check_can_restart(chosen: Chosen) -> None:
    """Raise RunFolderError if a run without an undamaged checkpoint cannot restart at step 0.

    A run cannot restart if it is finished, or if it started from a checkpoint of a different run. A
    run that was stopped before its first step can, since it ended with the initial state.
    """
    if chosen.done_after == 0:
        return
    if chosen.done is not None:
        raise RunFolderError(
            f"{chosen.folder} is {chosen.done[0]}, but all of its checkpoints are "
            "damaged or weights-only",
            hint="train from step 0 in a new folder: Run(..., fresh=True)",
        )
    if chosen.parent:
        source, step = chosen.parent.get("folder"), chosen.parent.get("step")
        words = (
            f"{shlex.quote(str(source))} --from "
            f"{step}{' --weights-only' if chosen.parent.get('weights_only') else ''}"
        )
        raise RunFolderError(
            f"{chosen.folder} started from the state of {source} after step {step}, "
            "and has no whole checkpoint",
            hint=f"make the fork again: surefoot resume {words} --fork NEW",
        )


# ---- weights alone


def _load_weights(commit: Commit, assembly: Assembly, *, partial: bool) -> str:
    """Load the weights that fit by name and shape; return text on which were loaded.

    Raises RunFolderError if no weight fits, or, unless `partial`, if one does not fit.
    """

    from surefoot.components.optim.masters import publish

    stored = commit.pieces(checkpoint.MODEL)
    own = {
        name: master_of(each)
        for name, each in checkpoint.module_state(assembly.model, stored).tensors.items()
    }
    # with sharding, a rank holds only some rows of each
    shapes = {name: checkpoint.whole_shape(each) for name, each in own.items()}
    fits = {name for name, piece in stored.items() if shapes.get(name) == piece.shape}
    reshaped = [
        f"{n} {list(p.shape)}, now {list(shapes[n])}"
        for n, p in stored.items()
        if n in own and n not in fits
    ]
    unexpected = [name for name in stored if name not in own]
    held = {
        checkpoint.identity(own[name]) for name in fits if own[name].numel() or part_of(own[name])
    }
    missing = [
        name
        for name, each in own.items()
        if name not in stored and checkpoint.identity(each) not in held
    ]
    told = _describe_loaded(
        len(fits),
        len(stored),
        {"missing": missing, "of a different shape": reshaped, "unexpected": unexpected},
    )
    if not fits or (not partial and (missing or reshaped or unexpected)):
        prefix = _find_prefix({name: piece.shape for name, piece in stored.items()}, shapes)
        strip = f"import the file again with checkpoint import --strip {shlex.quote(prefix)}"
        strip = f"{strip}, so that the names match" if prefix else "build the model that was saved"
        raise RunFolderError(
            f"the weights of {commit.folder} fit only a part of the model: {told}"
            if fits
            else f"no weight of {commit.folder} fits the model: {told}",
            hint=f"{strip}; or add --partial-weights to load only the weights that fit"
            if fits
            else strip,
        )

    def give(name: str, piece: Piece) -> Tensor:
        if name not in fits:
            return checkpoint.create(name, piece)
        # the parameter itself knows which rows it holds
        return own[name] if part_of(own[name]) else own[name].detach()

    commit.read(checkpoint.MODEL, give)
    publish(assembly.model.parameters())
    _reset_average(assembly)
    return f"started with the weights of {commit.folder}: {told}"


def _find_prefix(
    stored: Mapping[str, tuple[int, ...]], model: Mapping[str, tuple[int, ...]]
) -> str:
    """Return the prefix whose removal lets the most stored weights fit the model.

    Weights fit by name and shape. The result is "" if no removal lets more of them fit, or if two
    weights would have the same name.

    >>> _find_prefix({"module.a": (2,), "module.b": (3,)}, {"a": (2,), "b": (3,)})
    'module.'
    """
    prefixes = {
        name[:start]
        for name in stored
        for start in (each.end() for each in re.finditer(r"\.", name))
        if name[start:] in model
    }
    found, most = "", sum(model.get(name) == shape for name, shape in stored.items())
    for prefix in sorted(prefixes, key=len):
        stripped = {name.removeprefix(prefix): shape for name, shape in stored.items()}
        num_fits = sum(model.get(name) == shape for name, shape in stripped.items())
        if num_fits > most and len(stripped) == len(stored):
            found, most = prefix, num_fits
    return found


@torch.no_grad()
def _reset_average(assembly: Assembly) -> None:
    """Set the average of the weights to the loaded weights."""
    average = assembly.engine.average
    if average is not None:
        average.begin_again()


def _describe_loaded(num_loaded: int, num_stored: int, others: Mapping[str, Sequence[str]]) -> str:
    parts = [f"loaded {num_loaded} of {num_stored} tensors"]
    for what, names in others.items():
        if names:
            parts.append(f"{what}: {name_some(names, MAX_SHOWN)}")
    return "; ".join(parts)
