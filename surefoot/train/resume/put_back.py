"""Functions that restore parts of a checkpoint's state into the objects of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.components.checkpoint import MODEL, Commit, as_run_folder_errors, match_buffers
from surefoot.core.errors import RunFolderError
from surefoot.runtime.comm.group import Group
from surefoot.train.assemble import Assembly
from surefoot.train.quiet import restore_entry
from surefoot.train.resume.per_rank import rank_state
from surefoot.train.resume.state_files import LIVE


def fit_model(group: Group, assembly: Assembly, commit: Commit, skeleton: Any) -> None:
    """Give the buffers of the model the shapes and dtypes that they have in the checkpoint.

    Raises RunFolderError if the step, the per-rank state or the updates do not fit the run.
    """
    step = skeleton.get("step", commit.manifest.step) if isinstance(skeleton, dict) else None
    if step != commit.manifest.step:
        raise RunFolderError(
            f"{commit.folder} holds the state after step {step}: the folder was renamed",
            hint="remove the folder, or rename it after its step",
        )
    rank_state.check_fit(group, assembly.task, commit)
    stated = set(skeleton.get("optimizer", {})) if isinstance(skeleton, dict) else set()
    own = {update.name for update in assembly.updates}
    is_averaged = bool(commit.names(LIVE))
    if stated != own or is_averaged != (assembly.engine.average is not None):
        held = f"{sorted(stated)}{' and an average of the weights' if is_averaged else ''}"
        raise RunFolderError(
            f"{commit.folder} holds the updates {held}, the task has {sorted(own)}",
            hint="resume with the task and the spec that the run was started with",
        )
    with as_run_folder_errors(commit.folder):
        forms = skeleton.get("attributes", {}).get("forms", {})
        match_buffers(assembly.model, commit.pieces(MODEL), forms)


def put_back_training(
    assembly: Assembly, names: Mapping[int, str], tree: Mapping[str, Any]
) -> None:
    """Restore the updates, the average, the schedule, the microbatch and the loss scale."""
    for update in assembly.updates:
        update.guarded.restore(tree["optimizer"][update.name], names)
    if assembly.engine.average is not None:
        assembly.engine.average.restore(tree["average"])
    assembly.schedule.restore(tree["plateau"])
    _take_microbatch(assembly, tree.get("microbatch"))
    scaler = assembly.engine.policy.scaler
    # a fork, or a checkpoint of an older version, has none
    if scaler is not None and tree.get("scaler") is not None:
        scaler.load_state_dict(tree["scaler"])


def _take_microbatch(assembly: Assembly, saved: int | None) -> None:
    """Use the saved microbatch size if it is smaller: a step that ran out of memory halved it."""
    feed = assembly.feed
    if saved is not None and saved < feed.microbatch:
        assembly.told.append(
            f"microbatch {saved:,}, not {feed.microbatch:,}: a step ran out of memory "
            "with the larger one"
        )
        feed.microbatch = saved


def put_back_task_state(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore the entries of the task's `state()`. Raises RunFolderError if the names differ."""
    if missing := [name for name in state if name not in saved]:
        raise RunFolderError(
            f"the task's state() names {missing[0]!r}, which the checkpoint does not hold"
        )
    for name, value in saved.items():
        if name not in state:
            raise RunFolderError(
                f"the checkpoint holds the task's state {name!r}, which its state() no longer names"
            )
        restore_entry(name, state[name], value)
