"""Checks, names and descriptions of the objects that a loop passes to `attach`."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.components import checkpoint
from surefoot.contract import events
from surefoot.contract.run_folder.attached import SPEC_ID
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError, RunFolderError, TaskError
from surefoot.train import environment
from surefoot.train.record.noticed.moved_outside import find_beside
from surefoot.train.resume.program import Program

OWN = ("loop", "data")
# values of a scheduler that follow from the learning rate, and counters
OF_OPTIMIZER = ("base_lrs", "_last_lr", "last_epoch", "_step_count")
OF_STATE = ".state_dict()"
MAX_TEXT = 200  # characters of a setting
# what `find_guarantee` returns for data whose position a trainer saves, not the loop's checkpoint
RESUMED_BY_TRAINER: tuple[Guarantee, str] = (
    "none",
    "the trainer reads them itself, and its own checkpoint holds its position",
)
PLAIN = (bool, int, float, str, tuple, list, type(None))


def check_given(model: Any, optimizer: Any, data: Any, state: Any) -> list[Any]:
    """Check the arguments of `attach` and return the optimizers as a list.

    Raises TaskError or DataError for an argument of the wrong type.
    """
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"model is {checkpoint.name_kind(model)}",
            hint="give the torch.nn.Module that the loop trains",
        )
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    bad = [each for each in optimizers if not hasattr(each, "param_groups")]
    if bad or not optimizers:
        raise TaskError(
            f"optimizer is {bad[0] if bad else optimizer!r}, which has no param_groups",
            hint="give a torch.optim.Optimizer",
        )
    if not isinstance(data, Iterable):
        raise DataError(
            f"data must be iterable; got a {type(data).__name__}",
            hint="pass the loader that the loop reads",
        )
    if not isinstance(state, Mapping | None):
        raise TaskError(
            f"state is {checkpoint.name_kind(state)}",
            hint='name each object that is saved: state={"scheduler": scheduler}',
        )
    return optimizers


def as_loss(loss: Any) -> Tensor:
    """Return a scalar loss as a tensor without a graph. Raises TaskError for any other value."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise TaskError(
            f"step_done was given a loss of shape {tuple(loss.shape)}",
            hint="give its mean over the batch: loss.mean()",
        )
    if isinstance(loss, Tensor):
        return loss.detach()
    try:
        return torch.tensor(float(loss), dtype=torch.float64)
    except (TypeError, ValueError):
        raise TaskError(
            f"step_done was given {checkpoint.name_kind(loss)}",
            hint="give the loss of the step: a number, or a tensor of one element",
        ) from None


def given_settings(objects: Mapping[str, Any], data: Any) -> dict[str, str]:
    """Return the settings of optimizers and of `state`, and the batch size, as text.

    The keys are Python expressions, such as `optimizer.param_groups[0]['lr']` or
    `scheduler.gamma`. Values of `state` that training changes, such as counters, are among them.
    """
    grouped = {name: each for name, each in objects.items() if hasattr(each, "param_groups")}
    # with several, `attach` was given a list of optimizers
    places = {
        name: "optimizer" if len(grouped) == 1 else f"optimizer[{number}]"
        for number, name in enumerate(each for each in grouped if each.startswith("optimizer"))
    }
    found = {
        f"{places.get(name, name)}.param_groups[{number}][{key!r}]": value
        for name, each in grouped.items()
        for number, group in enumerate(each.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    found["data.batch_size"] = getattr(data, "batch_size", None)
    plain = {
        key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in found.items()
    }
    settings = {key: repr(value) for key, value in plain.items() if isinstance(value, PLAIN)}
    for name, each in objects.items():
        if checkpoint.has_state(each) and not isinstance(each, nn.Module | Optimizer):
            settings |= dict(_state_settings(name, each, each.state_dict()))
    return settings


def _state_settings(name: str, owner: Any, state: Any) -> Iterator[tuple[str, str]]:
    """Yield (expression, value as text) for the settings in the state dict of an object."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if not isinstance(key, str) or key in OF_OPTIMIZER:
            continue
        own = getattr(owner, key, None)
        if isinstance(value, Mapping) and all(isinstance(part, str) for part in value):
            yield from _state_settings(f"{name}.{key}", own, value)
        elif isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
            owners = own if isinstance(own, list | tuple) and len(own) == len(value) else value
            for number, (inner, part) in enumerate(zip(owners, value, strict=True)):
                yield from _state_settings(f"{name}.{key}[{number}]", inner, part)
        elif _is_setting(value) and len(text := repr(value)) <= MAX_TEXT:
            is_attribute = type(own) is type(value) and own == value
            yield f"{name}.{key}" if is_attribute else f"{name}{OF_STATE}[{key!r}]", text


def _is_setting(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, list | tuple | Mapping):
        return all(isinstance(part, bool | int | float | str | None) for part in parts)
    return isinstance(value, bool | int | float | str | None)


def describe_changes(
    before: Mapping[str, str], now: Mapping[str, str], kept: Mapping[str, str], folder: Path
) -> list[str]:
    """Return a note on each setting that the script has changed since the previous attempt.

    It says how to use the new value, and how to leave the folder unchanged. `kept` are the settings
    after the checkpoint was loaded: a value of `state` that training has changed is no setting.
    """
    notes = []
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    # during a warm-up from 0, only `initial_lr` shows that the learning rate has changed
    known = {key.replace("['lr']", "['initial_lr']") for key in changed if key.endswith("['lr']")}
    for key in [key for key in changed if key not in known]:
        is_of_group = ".param_groups[" in key or key == "data.batch_size"
        if not is_of_group and kept.get(key) != before[key]:
            continue
        told = f"the script sets {key} = {now[key]}, but the previous attempt had {before[key]}"
        if key == "data.batch_size":
            notes.append(f"{told}: the rest of the interrupted epoch has other batches")
        elif OF_STATE in key:
            name, _, part = key.partition(OF_STATE)
            notes.append(
                f"{told}: the saved value is kept; for the new value call {name}.load_state_dict("
                f"{name}{OF_STATE} | {{{part[1:-1]}: {now[key]}}}) after attach"
            )
        else:
            more = ", and the base_lrs of a scheduler" if key.endswith("lr']") else ""
            notes.append(
                f"{told}: the saved value is kept; for the new value set {key} = {now[key]} after "
                f"attach{more}"
            )
    if notes:
        name = str(folder)
        copied = f"cp -r {shlex.quote(name)} NEW, and folder='NEW' resumes in the copy"
        notes.append(
            f"to keep {name} as it is: {copied}; another folder trains from step 0; "
            "more epochs than before extend the loop"
        )
    return notes


def name_objects(
    model: nn.Module,
    optimizers: Sequence[Any],
    more: Mapping[str, Any],
    variables: Iterable[tuple[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """Return the objects that a loop's checkpoint holds, by name, and messages for the user.

    Objects that an optimizer trains in addition to the model are searched for in `variables`.
    Raises TaskError for an object that cannot be saved or restored, and for a trained parameter
    that no object holds.
    """
    named = {
        "model": model,
        **{
            f"optimizer-{number}" if number else "optimizer": each
            for number, each in enumerate(optimizers)
        },
    }
    for name, value in more.items():
        if name in named or name in OWN:
            raise TaskError(
                f"state names {name!r}, which is a reserved name", hint="give it another name"
            )
        if not checkpoint.is_restorable(value):
            raise TaskError(
                f"state gives {name!r} as {checkpoint.name_kind(value)}, which cannot "
                "be restored in place",
                hint=(
                    "give an object with state_dict and load_state_dict, as schedulers and "
                    "scalers have, a random generator of torch, NumPy or Python, or a tensor or "
                    "array that is changed in place"
                ),
            )
        named[name] = value
    beside, told = find_beside(named, optimizers, variables)
    named |= beside
    checkpoint.check_state(named)
    return named, told


def find_guarantee(data: Iterable[Any]) -> tuple[Guarantee, str]:
    """Return how exactly a loop can resume in the middle of an epoch, and the reason.

    With "proven" it continues at any batch, with "replayed" it reads the epoch again up to there,
    and with "none" it cannot return to its position.
    """
    if can_save_position(data):
        return "proven", "the loader saves and restores its position"
    # torch's IterableDataset inherits `__getitem__`
    is_stream = isinstance(data, torch.utils.data.IterableDataset)
    if not is_stream and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return "proven", "the loader reads any batch by its index"
    if isinstance(data, Iterator):
        return "none", "an iterator is read once and cannot be rewound"
    if getattr(data, "persistent_workers", False):
        return (
            "replayed",
            (
                "a resumed loop reads the epoch again up to its position; new "
                "workers draw different random numbers than persistent workers would have drawn"
            ),
        )
    return "replayed", "a resumed loop reads the epoch again up to its position"


def describe_guarantee(guarantee: Guarantee, why: str) -> str:
    return f"attached to a training loop of the script; the data are {guarantee}: {why}"


def can_save_position(data: Any) -> bool:
    """Return whether `data` can save its position.

    Some loaders (Accelerate's) have `state_dict`, but it raises unless they were built for it.
    """
    if not checkpoint.has_state(data):
        return False
    try:
        data.state_dict()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


def length_of(data: Iterable[Any]) -> int | None:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_kinds(objects: Mapping[str, Any], kinds: Mapping[str, str], where: str) -> None:
    """Raise RunFolderError if an object that was saved is missing now, or has another type.

    `kinds` are the names of the types in the checkpoint `where`. torch itself loads some mismatches
    without an error.
    """
    for name, kind in kinds.items():
        given = type(objects[name]).__name__ if name in objects else "nothing"
        if given != kind:
            raise RunFolderError(
                f"{where} holds the state of {name!r} as {kind}: the loop gives {given}",
                hint="give the objects that the loop started with, or start in another folder",
            )


def find_script() -> str | None:
    """Return the running script as `file.py:`, the start of a task's name; None in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return f"{file}:" if file is not None and file.endswith(".py") else None


def make_started_record(
    model: nn.Module,
    data: Iterable[Any],
    guarantee: tuple[Guarantee, str],
    program: Program,
    *,
    generation: int,
    step: int,
    notes: Sequence[str],
) -> events.Started:
    """Return the first record of an attempt at a loop, which continues after `step`."""
    kind, length = type(data).__name__, length_of(data)
    told = f"{length:,} batches of " if length is not None else "batches of "
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return events.Started(
        generation=generation,
        spec_id=SPEC_ID,
        spec={},
        task=type(model).__name__.lower(),
        seed=torch.initial_seed(),
        data={
            "describe": told + kind,
            "digest": hashlib.sha256(f"{kind} {length}".encode()).hexdigest(),
            "guarantee": guarantee[0],
        },
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        total_steps=None,
        steps_per_epoch=length,
        first_step=step + 1,
        notes=tuple(notes),
        **environment.circumstances(str(device), program),
    )
