"""Objects with a state that no checkpoint holds, such as schedulers, scalers and averages."""

from __future__ import annotations

import gc
import math
import re
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import FrameType
from typing import Any, final

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract.state import learning_rate_of
from surefoot.core.units import name_some
from surefoot.runtime.attributes.generators import find_generators, sign_generator
from surefoot.runtime.attributes.values import parts_of
from surefoot.train.assemble import Assembly
from surefoot.train.record.noticed.attribute_notes import OptimizerAttributes, optimizers_in
from surefoot.train.record.noticed.moved_outside import walk

LOST = "no checkpoint holds the state of {name} ({kind}), so a resumed {what} starts with a new one"
DRAWN = (
    "the {what} draws from {name}, but no checkpoint holds its state, so a resumed "
    "{what} draws different random numbers"
)
OF_LOOP = "give it to attach: state={{{key!r}: {name}}}"
OF_OPTIMIZER = "give it to attach: optimizer=[..., {name}]"
OF_TASK = "return it from the task's state(): {{{key!r}: {name}}}"
REPLACED = (
    "no checkpoint holds the state of an optimizer ({kind}) that trains the model and that the "
    "loop did not pass to attach, so a resumed loop starts with a new one: create it before "
    "attach, and pass every optimizer of the loop: optimizer=[first, second]"
)
UNTRAINED = (
    "the loop has unfrozen or added parameters that are in no optimizer of attach, so that no "
    "step of it trains them: {names}; add them: optimizer.add_param_group({{'params': [...]}})"
)
UNLESS = "; a copy that never changes need not be saved"
CHANGED = "; a copy that the loop writes anew before each use need not be saved"
SEARCH_SHARE = 100  # time between two searches of the memory, in durations of a search
DEPTH = 2  # of a search below variables, such as an attribute of an attribute
MAX_PARTS = 100  # entries of one list or dict that are searched


class UnheldObjects:
    """Search for objects with a state that a user's training loop did not pass to `attach`."""

    def __init__(self, objects: Mapping[str, Any], optimizers: Sequence[Any], data: Any) -> None:
        # imported here, because a run does not need them
        from surefoot.train.record.noticed.inner_optimizers import InnerOptimizers
        from surefoot.train.record.noticed.module_watch import ModuleWatch

        self._model: nn.Module = objects["model"]
        self._objects, self._optimizers = objects, optimizers
        self._modules, self._rates = ModuleWatch(DEPTH, MAX_PARTS), list[Any]()
        self._has_changed = False  # whether parameter groups have changed since attach
        self._stepped = SteppedOptimizers()
        # the end of the last search of the memory, and the seconds that it took
        self._searched_s, self._took_s, self._num_calls = -math.inf, 0.0, 0
        parts = [getattr(data, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        self._held = _with_parts([*objects.values(), data, *parts, *_find_inner(optimizers)])
        self._generators = UnheldGenerators(
            find_generators([("data", data), *objects.items()]).values()
        )
        self._own = {id(each) for each in self._model.parameters()}
        trained = {
            id(each)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        self._apart = trained - self._own
        kept = [*objects.values(), *InnerOptimizers(objects).all()]
        self._attributes = OptimizerAttributes(optimizers, "loop", kept)
        self._lines = set[str]()  # warnings that were returned
        self._told = {name for name, each in self._model.named_parameters() if each.requires_grad}

    def begin(self) -> None:
        """Read the state that a step may change, before the first step.

        Later calls read only objects that are new.
        """
        self._attributes.begin()
        self._modules.begin()

    def find_new(self) -> list[str]:
        """Return warnings on changes since `attach` that no checkpoint will hold, each once."""
        return [
            *self.find_untrained(),
            *(describe_generator(name, "loop") for name in self._generators.find_drawn()),
            *(f"{finding}; {action}" for finding, action in self._attributes.find_changed()),
        ]

    def find_untrained(self) -> list[str]:
        """Return a warning on trainable parameters that are in no optimizer; each is named once."""
        held = {
            id(each)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        trained = {
            name: each
            for name, each in self._model.named_parameters()
            if each.requires_grad and name not in self._told
        }
        self._told |= trained.keys()
        new = [name for name, each in trained.items() if id(each) not in held]
        return [UNTRAINED.format(names=name_some(new, 3))] if new else []

    def find(self, caller: FrameType | None = None) -> list[str]:
        """Return a warning on each scheduler and each variable of the caller with unsaved state.

        Every object is reported once.
        """
        names = dict(variables(caller))
        self._generators.watch(names.items())
        found = {id(each): each for each in names.values() if self._is_state(each)}
        found |= {id(each): each for each in self._schedulers()}
        lines = self._describe_new(found, names)
        named = [each for each in found.values() if isinstance(each, nn.Module | Optimizer)]
        self._modules.add({**names, "model": self._model}, [*self._objects.values(), *named])
        self._rates = self._read_rates()
        return lines

    def find_since_attach(self) -> list[str]:
        """Return warnings on objects that the loop has made or changed since `attach`, each once.

        The first call searches the variables of the script. Later calls search for schedulers if
        the groups of an optimizer have changed: the first time, in calls 2, 4, 8 and so on, and as
        often as takes 1 % of the time, because that search of the memory is slow.
        """
        self._num_calls += 1
        is_early = self._num_calls & (self._num_calls - 1) == 0
        is_due = is_early or time.monotonic() - self._searched_s >= SEARCH_SHARE * self._took_s
        if self._num_calls == 1:
            lines = self.find()
            self._modules.begin()
        elif (rates := self._read_rates()) != self._rates and (is_due or not self._has_changed):
            self._rates, self._has_changed = rates, True
            lines = self._describe_new({id(each): each for each in self._schedulers()}, {})
        else:
            lines = []
        changed = self._modules.find_changed()
        lines += [_describe(module, name, CHANGED) for name, module in changed]
        lines += [REPLACED.format(kind=type(each).__name__) for each in self._others()]
        told, self._lines = self._lines, self._lines | set(lines)
        return [line for line in lines if line not in told]

    def _describe_new(self, found: Mapping[int, Any], names: Mapping[str, Any]) -> list[str]:
        inside = {
            part for each in found.values() for part in _with_parts([each]) if part != id(each)
        }
        known = {id(each): name for name, each in reversed(list(names.items()))}
        lines = []
        for number, each in found.items():
            if number in inside or number in self._held:
                continue
            self._held.add(number)
            lines.append(_describe(each, known.get(number) or type(each).__name__.lower()))
        return lines

    def _is_state(self, value: Any) -> bool:
        if not has_state(value) or (isinstance(value, GradScaler) and not value.is_enabled()):
            return False
        if not isinstance(value, nn.Module):
            return True
        parameters = {id(each) for each in value.parameters()}
        if parameters & self._own:
            return False  # the model, wrapped, or a part of it
        return (
            isinstance(value, AveragedModel)
            or bool(parameters & self._apart)
            or _is_copy(value, self._model)
        )

    def _read_rates(self) -> list[Any]:
        """Return the keys and the learning rate of each parameter group; schedulers change them."""
        return [
            (*group, learning_rate_of(group))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _others(self) -> list[Optimizer]:
        """Return optimizers with a state that train the model and that no checkpoint holds.

        They have made a step since `attach`. Each is returned once.
        """
        own = {id(each) for each in self._model.parameters()}
        found = [
            each
            for each in self._stepped.take()
            if id(each) not in self._held
            and any(id(key) in own for key in each.state)
            and not self._wraps_held(each)
        ]
        self._held.update(id(each) for each in found)
        return found

    def _wraps_held(self, optimizer: Optimizer) -> bool:
        return any(id(each) in self._held for each in _find_inner([optimizer]))

    def _schedulers(self) -> list[Any]:
        """Return objects with a state whose attribute `optimizer` is an optimizer of the loop.

        Some objects are in the list twice.
        """
        started_s = time.monotonic()
        optimizers = {id(each) for each in self._optimizers}
        # an object refers to what it holds itself, or through its __dict__
        referrers = gc.get_referrers(*self._optimizers)
        holders = gc.get_referrers(*(each for each in referrers if type(each) is dict))
        found = [
            each
            for each in (*referrers, *holders)
            if _may_be_scheduler(type(each))
            and id(getattr(each, "__dict__", {}).get("optimizer")) in optimizers
        ]
        self._searched_s = time.monotonic()
        self._took_s = self._searched_s - started_s
        return found


class SteppedOptimizers:
    """Optimizers of PyTorch that have made a step, recorded by a hook on the step of each of them.

    The hook is removed when this object is deleted
    (https://docs.pytorch.org/docs/stable/optim.html).
    """

    def __init__(self) -> None:
        found = self._found = dict[int, weakref.ref[Optimizer]]()

        def record(optimizer: Optimizer, *_: Any) -> None:
            found[id(optimizer)] = weakref.ref(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(record).remove)

    def take(self) -> list[Optimizer]:
        """Return the optimizers that have made a step since the last call and still exist."""
        found = [each() for each in self._found.values()]
        self._found.clear()
        return [each for each in found if each is not None]


@final
class UnheldGenerators:
    """Random generators that no checkpoint holds, watched since they were found.

    A generator that never draws again, such as one that split the data, needs no checkpoint.
    """

    def __init__(self, held: Iterable[Any]) -> None:
        self._known = {id(each) for each in held}
        # the generator, and its state when it was found
        self._watched: dict[str, tuple[Any, Any]] = {}

    def watch(self, named: Iterable[tuple[str, Any]]) -> None:
        """Add the generators that are new in the `named` objects and their attributes."""
        for name, each in find_generators(named, DEPTH).items():
            if id(each) not in self._known:
                self._known.add(id(each))
                self._watched[name] = each, sign_generator(each)

    def find_drawn(self) -> list[str]:
        """Return the names of the generators that have drawn since they were found, each once."""
        drawn = [
            name for name, (each, before) in self._watched.items() if sign_generator(each) != before
        ]
        for name in drawn:
            del self._watched[name]
        return drawn


def describe_generator(name: str, what: str) -> str:
    """Return a warning on an unsaved random generator that has drawn numbers.

    `what` is "loop" or "run": the part of the program in which it has drawn.
    """
    give, key = (OF_LOOP if what == "loop" else OF_TASK), re.findall(r"\w+", name)[-1]
    return f"{DRAWN.format(name=name, what=what)}: {give.format(key=key, name=name)}"


def has_state(value: Any) -> bool:
    """Return whether an object has the methods `state_dict` and `load_state_dict`.

    Classes and Python modules do not count.
    """
    return _saves_state(type(value))


def _may_be_scheduler(kind: type) -> bool:
    return issubclass(kind, LRScheduler) or (
        _saves_state(kind) and not issubclass(kind, nn.Module | Optimizer)
    )


def _saves_state(kind: type) -> bool:
    return all(callable(getattr(kind, part, None)) for part in ("state_dict", "load_state_dict"))


def variables(caller: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame, and attributes of its `self`, with the code that reads them.

    Without a frame, these are the globals of the script.
    """
    if caller is None:
        yield from vars(sys.modules["__main__"]).copy().items()
        return
    yield from caller.f_locals.items()
    yield from (
        (f"self.{name}", value)
        for name, value in getattr(caller.f_locals.get("self"), "__dict__", {}).items()
    )
    yield from caller.f_globals.copy().items()
    script = vars(sys.modules["__main__"])
    yield from script.copy().items() if script is not caller.f_globals else ()


def _with_parts(objects: Iterable[Any]) -> set[int]:
    """Return the ids of objects and of their direct attributes, which their state_dict contains.

    Optimizers in attributes of other objects are excepted.
    """
    found = set()
    for each in objects:
        found.add(id(each))
        values = getattr(each, "__dict__", {}).values()
        parts = chain.from_iterable(
            value if isinstance(value, list | tuple) else [value] for value in values
        )
        found.update(
            id(part)
            for part in parts
            if isinstance(each, Optimizer) or not isinstance(part, Optimizer)
        )
    return found


def _find_inner(optimizers: Iterable[Any]) -> list[Optimizer]:
    """Return the optimizers in attributes of optimizers, at any depth."""
    found, todo = dict[int, Optimizer](), list(optimizers)
    while todo:
        for value in getattr(todo.pop(), "__dict__", {}).values():
            for each in optimizers_in(value):
                if id(each) not in found:
                    found[id(each)] = each
                    todo.append(each)
    return list(found.values())


def _is_copy(module: nn.Module, model: nn.Module) -> bool:
    """Return whether `module` has the class and the shapes of `model`, like a weight average."""
    shapes, own = ([each.shape for each in one.parameters()] for one in (module, model))
    return type(module) is type(model) and bool(own) and shapes == own


def _describe(value: Any, name: str, unless: str = UNLESS) -> str:
    words = LOST.format(name=name, kind=type(value).__name__, what="loop")
    if isinstance(value, Optimizer):
        return f"{words}: {OF_OPTIMIZER.format(name=name)}"
    key = re.findall(r"\w+", name)[-1]
    return (
        f"{words}: "
        f"{OF_LOOP.format(key=key, name=name)}{unless if isinstance(value, nn.Module) else ''}"
    )


def watch_task(assembly: Assembly) -> UnheldGenerators:
    """Return the random generators of the task that are not in its `state()` or in the data."""
    task = assembly.task
    named = task.state() if task.state is not None else {}
    made = UnheldGenerators(
        find_generators(
            [("data", assembly.feed.source), ("model", assembly.model), *named.items()]
        ).values()
    )
    made.watch(
        (f"self.{name}", value) for name, value in getattr(task.task, "__dict__", {}).items()
    )
    return made


def describe_task(assembly: Assembly, generators: UnheldGenerators) -> list[str]:
    """Return a warning on each attribute of the task with a state that the run does not save.

    `generators` is the result of `watch_task`.
    """
    task, source = assembly.task, assembly.feed.source
    named = list((task.state() if task.state is not None else {}).values())
    optimizers = [each for update in assembly.updates for each in update.guarded.optimizers]
    inner = source.parts.values() if isinstance(source, Iterated) else ()
    held = _with_parts([*named, source, *inner, *optimizers, *assembly.model.modules()])
    lines = [describe_generator(name, "run") for name in generators.find_drawn()]
    reported: list[str] = []
    attributes = getattr(task.task, "__dict__", {})
    roots = {f"self.{name}": each for name, each in attributes.items()}
    inside = {name: each for name, each in roots.items() if parts_of(each) is not None}
    for name, value in {**roots, **dict(walk(inside, DEPTH, MAX_PARTS))}.items():
        if (
            id(value) in held
            or not has_state(value)
            or (isinstance(value, nn.Module) and not _is_apart(value, assembly.model, named))
            or any(name.startswith((f"{told}.", f"{told}[")) for told in reported)
        ):
            continue
        words = LOST.format(name=name, kind=type(value).__name__, what="run")
        reported.append(name)
        key = re.findall(r"\w+", name)[-1]
        unless = UNLESS if isinstance(value, nn.Module) else ""
        lines.append(f"{words}: {OF_TASK.format(key=key, name=name)}{unless}")
    return lines


def _is_apart(module: nn.Module, model: nn.Module, named: Sequence[Any]) -> bool:
    """Return whether a module has parameters, and none of them is in the model or in `named`."""
    held = {id(each) for each in (*model.parameters(), *named)}
    parameters = list(module.parameters())
    return bool(parameters) and not any(id(each) in held for each in parameters)
