"""Tensors that an optimizer trains although the model does not register them.

They are saved with the object that holds them; if none is found, the run is refused.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.components import checkpoint
from surefoot.contract.state import leaf_of
from surefoot.core.errors import RunFolderError, TaskError
from surefoot.core.units import name_some
from surefoot.runtime.attributes.values import find_leaves, named_attributes
from surefoot.runtime.nested_tensors import find_tensors
from surefoot.train.quiet import restore_entry
from surefoot.train.resume.state_files import read_task_state

if TYPE_CHECKING:
    from surefoot.contract.task import ResolvedTask
    from surefoot.train.step import LiveUpdate

MAX_DEPTH = 4  # attributes of attributes, lists in dicts
MAX_PARTS = 1000  # entries of one list or dict that are searched
OF_TORCH = ("_parameters", "_buffers", "_modules")  # where a module registers what it holds
OPAQUE = (Optimizer, FunctionType, MethodType, ModuleType, type, str, bytes, int, float, complex)
Holders = dict[str, nn.Module | Tensor]


def find_outside(moved: Iterable[Tensor], saved: Sequence[Any]) -> list[Tensor]:
    """Return the trained tensors of `moved` that are not saved with an object in `saved`.

    A tensor is saved if it is an object in `saved` itself, or a parameter, an attribute or an entry
    of the state dict of one.
    """
    leaves = {id(leaf): leaf for leaf in map(leaf_of, moved) if leaf.requires_grad}
    others = []
    for each in saved:
        if isinstance(each, nn.Module):
            for parameter in each.parameters():
                leaves.pop(id(parameter), None)
        elif isinstance(each, Tensor):
            leaves.pop(id(each), None)
        else:
            others.append(each)
    for each in saved if leaves else ():
        for tensor in _attributes_of(each) if isinstance(each, nn.Module) else ():
            leaves.pop(id(tensor), None)
    if leaves:
        places = {
            _memory_key(tensor)
            for each in others
            if hasattr(each, "state_dict")
            for tensor in find_tensors(checkpoint.read_state_dict(each))
        }
        return [leaf for leaf in leaves.values() if _memory_key(leaf) not in places]
    return []


def find_holders(
    outside: Sequence[Tensor], roots: Mapping[str, Any], saved: Sequence[Any]
) -> tuple[Holders, list[Tensor]]:
    """Return the modules or tensors below `roots` that hold `outside`, and the tensors not found.

    The keys are Python expressions that read each holder, such as `self.head`.
    """
    left = {id(each): each for each in outside}
    taken = {
        id(parameter)
        for each in saved
        if isinstance(each, nn.Module)
        for parameter in each.parameters()
    }
    found: Holders = {}
    for wanted in (nn.Module, Tensor):  # modules first: most parameters belong to one
        for name, value in walk(roots):
            if not left:
                break
            if isinstance(value, wanted):
                for path, each in _find_uncovered(name, value, left, taken):
                    found[path] = each
    return found, list(left.values())


def _attributes_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in plain attributes of modules, which checkpoints store if they change."""
    for value in named_attributes(module).values():
        yield from (leaf for leaf in find_leaves(value) or () if isinstance(leaf, Tensor))


def _find_uncovered(
    name: str, value: nn.Module | Tensor, left: dict[int, Tensor], taken: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yield `value`, or only its parts without parameters of saved objects if it has some.

    `taken` holds the ids of parameters of saved objects. Tensors that the yielded parts hold are
    removed from `left`.
    """
    if isinstance(value, Tensor):
        if left.pop(id(value), None) is not None:
            yield name, value
        return
    held = {id(each) for each in value.parameters()}
    if not held & left.keys():
        return
    if not held & taken:
        for number in held:
            left.pop(number, None)
        yield name, value
        return
    for key, parameter in value.named_parameters(recurse=False):
        yield from _find_uncovered(f"{name}.{key}", parameter, left, taken)
    for key, child in value.named_children():
        yield from _find_uncovered(f"{name}.{key}", child, left, taken)


def walk(
    roots: Mapping[str, Any], max_depth: int = MAX_DEPTH, max_parts: int = MAX_PARTS
) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield every module and tensor below `roots` with the Python expression that reads it.

    Attributes, lists, tuples and dicts are searched, the nearest first.
    """
    todo, seen = deque((name, value, 0) for name, value in roots.items()), set[int]()
    while todo:
        name, value, depth = todo.popleft()
        if id(value) in seen or isinstance(value, OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module | Tensor):
            yield name, value
        if isinstance(value, Tensor) or depth == max_depth:
            continue
        todo.extend((path, part, depth + 1) for path, part in _parts(name, value, max_parts))


def _parts(name: str, value: Any, max_parts: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(value[:max_parts]))
    elif isinstance(value, dict):
        yield from (
            (f"{name}[{key!r}]", part)
            for key, part in list(value.items())[:max_parts]
            if isinstance(key, str | int)
        )
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            inside = f"{name}.{path}" if path else name
            if path:
                yield inside, module
            yield from (
                (f"{inside}.{key}", part)
                for key, part in vars(module).items()
                if key not in OF_TORCH
            )
    elif not type(value).__module__.startswith(("torch", "numpy", "pandas", "builtins")):
        yield from (
            (f"{name}.{key}", part) for key, part in list(getattr(value, "__dict__", {}).items())
        )


def describe_kept(holders: Mapping[str, Any]) -> list[str]:
    """Return a message that names the objects that are saved in addition to the model."""
    if not holders:
        return []
    told = ", ".join(f"{name} ({type(value).__name__})" for name, value in holders.items())
    return [
        f"an optimizer trains {told} outside of the model: checkpoints also hold these parameters"
    ]


def refuse(left: Sequence[Tensor], what_to_name: str) -> None:
    """Raise TaskError if `left`, the trained tensors that no known object holds, is not empty."""
    if left:
        shapes = ", ".join(str(list(each.shape)) for each in left[:3]) + (
            " ..." if len(left) > 3 else ""
        )
        raise TaskError(
            f"an optimizer trains {len(left)} parameter{'s' * (len(left) > 1)} that no checkpoint "
            f"would hold, of shape {shapes}: the model does not register them",
            hint=(
                "register them in the model (a submodule, nn.ModuleList in place of "
                f"a list), or name the object that holds them {what_to_name}; if "
                "the model was changed after its "
                "optimizer was built, build the optimizer last"
            ),
        )


# ---- of a run


def keep_outside(
    task: ResolvedTask, model: nn.Module, updates: Sequence[LiveUpdate], *, is_split: bool
) -> tuple[ResolvedTask, list[str]]:
    """Return the task with trained tensors outside of the model added to its `state()`.

    The second result is a message on them. Raises TaskError for a tensor that no object holds; with
    `is_split` for any such tensor, because ranks shard only the parameters of the model.
    """
    own = task.state
    moved = [parameter for update in updates for parameter in update.guarded.parameters]
    outside = find_outside(moved, [model])
    if not outside:
        return task, []
    if is_split:
        raise TaskError(
            f"the optimizer trains a parameter of shape {list(outside[0].shape)} outside of the "
            "model, but layout.shard splits only the parameters of the model",
            hint="register it in the model, or use layout.replicate without layout.shard",
        )
    named = list(own().values()) if own is not None else []
    outside = find_outside(
        outside, [_StateDictView(each) if isinstance(each, nn.Module) else each for each in named]
    )
    held, left = find_holders(outside, roots_of_task(task, model), [model, *named])
    refuse(left, "in the task's state()")
    if not held:
        return task, []

    def state() -> Mapping[str, Any]:
        return {**(own() if own is not None else {}), **held}

    words = {**task.state_on_ranks, **dict.fromkeys(held, "replicated")}
    kept = replace(task, state=state, state_on_ranks=words)  # type: ignore[arg-type]
    return kept, describe_kept(held)


def warn_of_unregistered(model: nn.Module, updates: Sequence[LiveUpdate]) -> list[str]:
    """Return a warning on modules in a plain list or dict whose parameters no optimizer trains."""
    known = {id(each) for each in model.parameters()}
    registered = {id(each) for each in model.modules()}
    known |= {id(leaf_of(each)) for update in updates for each in update.guarded.parameters}
    found: dict[int, str] = {}
    for name, value in walk({"model": model}):
        for parameter in (
            value.parameters()
            if isinstance(value, nn.Module) and id(value) not in registered
            else ()
        ):
            if parameter.requires_grad and id(parameter) not in known:
                found.setdefault(id(parameter), name)
    if not found:
        return []
    count, where = len(found), name_some(list(dict.fromkeys(found.values())), 3)
    what = f"{count} parameters in {where} are" if count > 1 else f"a parameter in {where} is"
    way = (
        "use nn.ModuleList or nn.ModuleDict in place of a list "
        "or dict, or requires_grad_(False) if that is intended"
    )
    return [f"{what} not registered in the model, so nothing trains or saves them: {way}"]


class _StateDictView:
    """View of a module with only its `state_dict`, which may omit parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.state_dict = module.state_dict


def roots_of_task(task: ResolvedTask, model: nn.Module) -> dict[str, Any]:
    """Return the objects in which a task may hold trained tensors, by Python expression.

    These are the model, the attributes of the task, and the globals of its file.
    """
    attributes = {
        f"self.{name}": value for name, value in getattr(task.task, "__dict__", {}).items()
    }
    module = sys.modules.get(type(task.task).__module__)
    return {"model": model, **attributes, **(vars(module).copy() if module is not None else {})}


def load_outside(task: ResolvedTask, model: nn.Module, run: Path, step: int) -> None:
    """Load the weights that a run trained outside of the model from a checkpoint into the task.

    Raises RunFolderError if the task no longer has them.
    """
    saved = read_task_state(run, step, _trains_outside)
    if not saved:
        return
    named = task.state() if task.state is not None else {}
    known: Holders = {
        name: value for name, value in named.items() if isinstance(value, nn.Module | nn.Parameter)
    }
    wanted = {name for name in saved if name not in named}
    known |= {name: value for name, value in walk(roots_of_task(task, model)) if name in wanted}
    if lost := sorted(wanted - known.keys()):
        raise RunFolderError(
            f"step {step:,} of {run} holds the weights of {lost[0]}, which the task does not have",
            hint="build all modules that its optimizer trains in model() or in the "
            "constructor of the task",
        )
    for name, value in known.items():
        if name in saved:
            restore_entry(name, value, saved[name])
            if isinstance(value, nn.Module):
                value.eval()


def _trains_outside(tree: Mapping[str, Any]) -> bool:
    """Return whether the optimizers of a checkpoint train tensors outside of the model."""
    updates = tree.get("optimizer") or {}
    return any("shapes" in each for update in updates.values() for each in update["optimizers"])


# ---- of a loop


def find_beside(
    objects: Mapping[str, Any], optimizers: Sequence[Any], variables: Iterable[tuple[str, Any]]
) -> tuple[Holders, list[str]]:
    """Return trained objects that are in no object of the loop, by file name, and a message.

    Raises TaskError for a trained tensor that no variable of the loop holds.
    """
    moved = [
        each
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    ]
    saved = list(objects.values())
    outside = find_outside(moved, saved)
    if not outside:
        return {}, []
    held, left = find_holders(outside, {"model": objects["model"], **dict(variables)}, saved)
    refuse(left, "in attach: state={'head': head}")
    made: Holders = {}
    for name, value in held.items():
        plain = (
            "".join(
                letter if letter.isalnum() and letter.isascii() else "-" for letter in name
            ).strip("-")
            or "part"
        )
        while plain in objects or plain in made:
            plain += "-2"
        made[plain] = value
    return made, describe_kept(held)


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory location of a tensor, or its id if it has no storage of its own."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
