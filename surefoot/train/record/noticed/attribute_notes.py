"""Reports on attributes of modules and optimizers that steps change but checkpoints do not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.components.checkpoint import read_state_dict
from surefoot.components.stability.guard import GuardFault
from surefoot.contract.state import StepReport
from surefoot.core.units import name_some
from surefoot.runtime.attributes.generators import generator_state, is_generator
from surefoot.runtime.attributes.values import Aliases, find_leaves, memory_of, parts_of, sign
from surefoot.runtime.nested_tensors import find_tensors

if TYPE_CHECKING:
    from surefoot.train.assemble import Assembly
    from surefoot.train.record.telling import Telling

UNSAVED = "{names} of the model changes while it trains, but a checkpoint cannot hold it: {resumed}"
OF_RUN = "a resumed run has the initial value of model()"
OF_LOOP = "a resumed loop has its initial value"
KEEP_ALL = (
    "keep it in a tensor, or in a list, tuple or dict of tensors; "
    "a random generator: return it from state() of the task"
)
GIVE = (
    "keep it in a tensor, or in a list, tuple or dict of tensors, or return its values from "
    "get_extra_state() of the module; an object with state_dict and load_state_dict: give it to "
    "attach: state={{{key!r}: ...}}"
)
OF_RANKS = (
    "{names} of the model changes while it trains, but each of {size} ranks has a "
    "separate copy: the copy of rank 0 is saved, and all ranks resume with it"
)
KEEP_ONE = (
    "keep only values that are the same on all ranks in it; or change a tensor in "
    "place, and return it from state() of the task, with 'per_rank' in "
    "state_on_ranks: the tensor of each rank is then saved and restored"
)
MAX_NAMED = 8
LOST = (
    "{names} of the optimizer ({kind}) changes while it trains, and its state_dict() does not "
    "contain it: no checkpoint holds it, and a resumed {what} has the initial value"
)
KEEP_IN_STATE = (
    "keep it in self.state or in param_groups, which state_dict() contains, or return it from "
    "state_dict() and read it in load_state_dict()"
)
KEEP_INNER = (
    "return the state_dict() of that optimizer from state_dict() too, under a key of its own, and "
    "load it in load_state_dict()"
)
# attributes that torch, its schedulers and GradScaler set: recomputed, or saved elsewhere
OF_TORCH = frozenset(
    {
        "defaults",
        "found_inf",
        "grad_scale",
        "param_groups",
        "state",
        "step",
        "_need_device_dtype_check_for_fused",
        "_numel_cache",
        "_opt_called",
        "_step_count",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
    }
)
MAX_HASHED = 1 << 20  # elements of an attribute; larger ones are compared by version counter
Found = tuple[str, str]


class AttributeNotes:
    """Reports on attributes of modules, with each attribute only once."""

    def __init__(self, num_ranks: int = 1, *, of_loop: bool = False) -> None:
        self._num_ranks, self._of_loop = num_ranks, of_loop
        self._reported: set[str] = set()

    def take(self, saved: Sequence[str], unsaved: Sequence[str]) -> list[tuple[str, str]]:
        """Return reports on the attributes that were not reported before, as (finding, action).

        A change of an attribute in `saved` is reported only on several ranks, of which rank 0 saves
        its copy.
        """
        notes = []
        if new := self._take_new(unsaved):
            resumed = OF_LOOP if self._of_loop else OF_RUN
            action = (
                GIVE.format(key=new.split(" ")[0].rpartition(".")[2]) if self._of_loop else KEEP_ALL
            )
            notes.append((UNSAVED.format(names=new, resumed=resumed), action))
        if self._num_ranks > 1 and (new := self._take_new(saved)):
            notes.append((OF_RANKS.format(names=new, size=self._num_ranks), KEEP_ONE))
        return notes

    def _take_new(self, names: Sequence[str]) -> str:
        new = [name for name in names if name not in self._reported]
        self._reported.update(new)
        return name_some(new, MAX_NAMED)


# ---- of optimizers


@final
class OptimizerAttributes:
    """Attributes of optimizers as `begin` read them, compared after some of the later steps."""

    def __init__(self, optimizers: Sequence[Any], what: str, held: Sequence[Any] = ()) -> None:
        """Watch `optimizers`; objects in `held` are saved, even if they are attributes."""
        self._optimizers, self._what = optimizers, what
        self._held = {id(each) for each in (*optimizers, *held)}
        self._before: list[Mapping[str, Any]] | None = None  # None until `begin`
        self._reported: set[tuple[int, str]] = set()
        self._num_asked = 0

    def begin(self) -> None:
        """Read the attributes, before the first step; later calls do nothing."""
        if self._before is None:
            self._before = [self._read(each) for each in self._optimizers]

    def find_changed(self) -> list[Found]:
        """Return each changed attribute that no checkpoint holds, once, as (finding, action).

        Attributes are compared in calls 1, 2, 4, 8, 16 and so on.
        """
        self._num_asked += 1
        if self._before is None or self._num_asked & (self._num_asked - 1):
            return []
        return [
            (LOST.format(names=names, kind=type(each).__name__, what=self._what), action)
            for number, each in enumerate(self._optimizers)
            for names, action in self._name_new(number, each, self._before[number])
        ]

    def _name_new(
        self, number: int, optimizer: Any, before: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        now = self._read(optimizer)
        changed = [
            name
            for name, signed in now.items()
            if signed is not None
            and signed != before.get(name, ())
            and (number, name) not in self._reported
        ]
        if not changed:
            return
        saved = read_state_dict(optimizer) if hasattr(optimizer, "state_dict") else {}
        new = [name for name in changed if not _is_saved(name, optimizer, saved)]
        self._reported.update((number, name) for name in new)
        inner = [name for name in new if optimizers_in(getattr(optimizer, name))]
        plain = [name for name in new if name not in inner]
        for names, action in ((plain, KEEP_IN_STATE), (inner, KEEP_INNER)):
            if names:
                yield name_some(names, MAX_NAMED), action

    def _read(self, optimizer: Any) -> dict[str, Any]:
        """Return, for each attribute of an optimizer, an object that differs if the value changes.

        Attributes that torch sets are left out.
        """
        aliases = _aliases_of(optimizer)
        return {
            name: _sign(value, aliases)
            for name, value in list(getattr(optimizer, "__dict__", {}).items())
            if name not in OF_TORCH
            and not name.startswith("_optimizer_")
            and not any(id(each) in self._held for each in optimizers_in(value))
        }


def optimizers_in(value: Any) -> list[Optimizer]:
    """Return the optimizers in an attribute: `value`, or entries of a list, tuple or dict."""
    if isinstance(value, Optimizer):
        return [value]
    return [part for _, part in parts_of(value) or () if isinstance(part, Optimizer)]


def _aliases_of(optimizer: Any) -> Aliases:
    held = [
        *find_tensors([group["params"] for group in optimizer.param_groups]),
        *find_tensors(list(getattr(optimizer, "state", {}).values())),
    ]
    return Aliases.of_tensors({str(number): each for number, each in enumerate(held)})


def _sign(value: Any, aliases: Aliases) -> Any:
    """Return an object that differs if `value` changes.

    Returns None if `value` holds no state, or only tensors of the optimizer that are saved anyway.
    """
    if is_generator(value):
        return sign(value, aliases)
    if inner := optimizers_in(value):
        value = [list(each.state.values()) for each in inner]
    leaves = find_leaves(value)
    if leaves is None:
        return None
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    own = [each for each in tensors if not aliases.is_alias(each)]
    if tensors and not own and len(tensors) == len(leaves):
        return None
    if sum(each.numel() for each in own) > MAX_HASHED:
        return [(id(each), None if each.is_inference() else each._version) for each in own]
    return sign(value, aliases)


def _is_saved(name: str, optimizer: Any, saved: Mapping[str, Any]) -> bool:
    """Return whether the state dict `saved` contains the attribute `name` of the optimizer.

    It does if it has an entry with this name, or an entry with this value outside of the states and
    groups of parameters.
    """
    none = Aliases.of_tensors({})
    value = getattr(optimizer, name)
    if inner := optimizers_in(value):
        return all(_holds(saved, list(each.state.values())) for each in inner)
    signed = generator_state(value) if is_generator(value) else value
    signed = sign(signed, none)
    own = {key: each for key, each in saved.items() if key not in ("state", "param_groups")}
    state = saved.get("state", {})
    own |= {key: each for key, each in state.items() if isinstance(key, str)}
    plain = name.strip("_")
    if any(key.strip("_") == plain for key in own if isinstance(key, str)):
        return True
    of_groups = [
        each
        for group in saved.get("param_groups", ())
        for key, each in group.items()
        if key != "params" and key.strip("_") == plain
    ]
    return any(sign(each, none) == signed for each in [*_all_parts(own), *of_groups])


def _holds(saved: Any, state: Any) -> bool:
    """Return whether a state dict contains every tensor of `state`, or a copy of it."""
    held = list(find_tensors(saved))
    known = {id(each) for each in held} | {memory_of(each) for each in held} - {None}
    return all(
        id(each) in known
        or memory_of(each) in known
        or any(each.shape == one.shape and torch.equal(each, one.to(each)) for one in held)
        for each in find_tensors(state)
    )


def _all_parts(value: Any) -> Iterator[Any]:
    for _, part in parts_of(value) or ():
        yield part
        yield from _all_parts(part)


# ---- of a run


@final
class OptimizerWatch:
    """Step function that reports attributes of optimizers that no checkpoint holds."""

    def __init__(
        self, step: Callable[[int], StepReport], assembly: Assembly, telling: Telling
    ) -> None:
        self._step, self._telling = step, telling
        optimizers = [each for update in assembly.updates for each in update.guarded.optimizers]
        self._attributes = OptimizerAttributes(optimizers, "run")

    def __call__(self, number: int) -> StepReport:
        self._attributes.begin()
        report = self._step(number)
        for finding, action in self._attributes.find_changed():
            self._telling.fault(GuardFault(number, "attributes", action, finding))
        return report
