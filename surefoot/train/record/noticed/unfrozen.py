"""Parameters unfrozen during a run: they are added to the optimizers, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.build import table_of
from surefoot.components.optim.groups import GroupedParameter, build_groups, find_trained
from surefoot.contract.state import StepReport, leaf_of
from surefoot.core.errors import UserCodeError
from surefoot.core.units import name_some, parse_bytes

if TYPE_CHECKING:
    from surefoot.train.assemble import Assembly
    from surefoot.train.record.telling import Telling

MAX_NAMED = 3
FROM_START = (
    "leave it unfrozen in model(); or train in two runs, "
    "the second of which starts with --weights FIRST_RUN"
)


@final
class TrainedSet:
    """Parameters of the model as built, and those that were unfrozen later, in order."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built = dict(model.named_parameters())
        self._known = {id(each) for each in self._built.values()}
        self._tables: list[dict[str, Any]] = []  # dicts of children and parameters
        self._registered: list[Any] = []  # their values at the last call of `has_changed`
        # names, in one list per moment of unfreezing; saved in checkpoints
        self.unfrozen: list[list[str]] = []

    def frozen(self) -> list[nn.Parameter]:
        """Return the parameters that are currently frozen."""
        return [each for each in self._model.parameters() if not each.requires_grad]

    def has_changed(self) -> bool:
        """Return whether modules or parameters have changed since the last call.

        They may have been added, replaced or removed.
        """
        now = [*chain.from_iterable(map(dict.values, self._tables))]
        if now and len(now) == len(self._registered) and all(map(is_, now, self._registered)):
            return False
        self._tables = [
            table
            for module in self._model.modules()
            for table in (module._modules, module._parameters)
        ]
        self._registered = [*chain.from_iterable(map(dict.values, self._tables))]
        return True

    def take_new(self, assembly: Assembly) -> list[str]:
        """Add trainable parameters that are in no optimizer to the update; return their names.

        Raises UserCodeError if they cannot be added.
        """
        held = {
            id(leaf_of(each)) for update in assembly.updates for each in update.guarded.parameters
        }
        new = {
            name: each
            for name, each in self._model.named_parameters()
            if each.requires_grad and id(each) not in held
        }
        if not new:
            return []
        if added := [name for name, each in new.items() if id(each) not in self._known]:
            raise UserCodeError(
                f"{_list(added)} of the model was added after its optimizer was "
                f"built, so that no step trains {_pronoun(added)}, and a resumed run would lack it",
                hint=(
                    "build every layer in model(); a layer that is trained later can "
                    "be frozen there, and unfrozen in the loop"
                ),
            )
        if why := _reason_against(assembly):
            raise UserCodeError(
                f"{_list(list(new))} is unfrozen now, but the run cannot train "
                f"{_pronoun(list(new))}: {why}",
                hint=FROM_START,
            )
        _extend(assembly, {id(each) for each in new.values()})
        self.unfrozen.append(list(new))
        return list(new)

    def state(self, assembly: Assembly) -> dict[str, Any]:
        """Return the names of the parameters that were unfrozen or frozen since the start.

        The result is part of a checkpoint; it is empty if there are none.
        """
        names = {id(each): name for name, each in self._built.items()}
        held = [leaf_of(each) for update in assembly.updates for each in update.guarded.parameters]
        frozen = sorted(
            {names[id(each)] for each in held if not each.requires_grad and id(each) in names}
        )
        return (
            {"unfrozen": self.unfrozen} | ({"frozen": frozen} if frozen else {})
            if self.unfrozen or frozen
            else {}
        )

    def restore(self, assembly: Assembly, tree: Mapping[str, Any]) -> None:
        """Set `requires_grad` as in the checkpoint `tree`, before the optimizer state is loaded."""
        self._take_again(assembly, tree.get("unfrozen", ()))
        for name in tree.get("frozen", ()):
            if name in self._built:
                self._built[name].requires_grad_(False)

    def _take_again(self, assembly: Assembly, saved: Iterable[Sequence[str]]) -> None:
        """Unfreeze the parameters that a checkpoint names, in its order.

        Raises UserCodeError as `take_new` does, and for a name that the model does not have.
        """
        for names in list(saved)[len(self.unfrozen) :]:
            if lost := [name for name in names if name not in self._built]:
                raise UserCodeError(
                    f"the checkpoint trains {_list(lost)}, which the model does not have",
                    hint="build the model that was saved",
                )
            for name in names:
                self._built[name].requires_grad_(True)
            self.take_new(assembly)


def _list(names: Sequence[str]) -> str:
    return name_some(names, MAX_NAMED)


def _pronoun(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _reason_against(assembly: Assembly) -> str:
    """Return why a run cannot train additional parameters; "" if it can."""
    spec, task, ranks = assembly.spec, assembly.task, assembly.engine.steps.collectives.ranks
    reasons = {
        "the task defines updates": task.updates is not None,
        "the task defines parameter_groups": task.parameter_groups is not None,
        "memory.update_in_backward is on": spec.memory.update_in_backward,
        'compile.what is "step"': assembly.engine.steps.whole is not None,
        "layout.shard splits only the parameters that were trained at the start": ranks is not None
        and ranks.sharded is not None,
        "precision.weights makes master weights only at the start": spec.precision.weights
        != "fp32",
        'memory.offload is "optimizer"': spec.memory.offload == "optimizer",
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _extend(assembly: Assembly, new: set[int]) -> None:
    """Add optimizers for the new parameters, with the same rules and separate moments."""
    trained = [each for each in find_trained(assembly.model) if id(leaf_of(each.parameter)) in new]
    (update,) = assembly.updates
    update.guarded.extend(_build(assembly, trained))
    average = assembly.engine.average
    ranks = assembly.engine.steps.collectives.ranks
    table = assembly.spec.layout
    if average is not None:
        average.add([each.parameter for each in trained])
    if ranks is not None:
        ranks.use_buckets(parse_bytes(table.bucket_size), parse_bytes(table.first_bucket_size))


def _build(
    assembly: Assembly, trained: Sequence[GroupedParameter]
) -> Sequence[torch.optim.Optimizer]:
    table, own = table_of(assembly.spec.optim, trained), assembly.task.optimizer
    if own is None or ("name" in table.model_fields_set and table.name != "task"):
        return build_optimizer(table, trained).optimizers
    groups = build_groups(
        trained,
        weight_decay=table.weight_decay,
        no_decay=table.no_decay,
        lr_multipliers=table.lr_multipliers,
    )
    made = own(
        [{**group, "lr": table.lr} for group in groups]
        if "lr" in table.model_fields_set
        else groups
    )
    moved: list[Tensor] = [each for group in made.param_groups for each in group["params"]]
    if {id(each) for each in moved} != {id(each.parameter) for each in trained}:
        raise UserCodeError(
            f"optimizer(groups) of the task, called for {_list([each.name for each in trained])}, "
            "which is unfrozen now, returned an optimizer of other parameters",
            hint=FROM_START,
        )
    return (made,)


# steps after which all modules are checked: some layers are created in the first forward pass
NUM_LOOKED_AT = 2


@final
class Unfreezing:
    """Step function that starts to train parameters that the user's loop has unfrozen.

    Frozen parameters are checked before each step. All modules are checked in the first steps and
    after each log interval.
    """

    def __init__(
        self, step: Callable[[int], StepReport], assembly: Assembly, telling: Telling
    ) -> None:
        self._step, self._assembly, self._telling = step, assembly, telling
        self._frozen = assembly.trained.frozen()
        self._ends_window = assembly.course.rhythm(assembly.spec.observe.every)
        self._num_left, self._num_told = NUM_LOOKED_AT, len(assembly.trained.unfrozen)

    def __call__(self, number: int) -> StepReport:
        trained = self._assembly.trained
        is_look = self._num_left or self._ends_window(number - 1)
        if (is_look and trained.has_changed()) or (
            self._frozen and any(each.requires_grad for each in self._frozen)
        ):
            trained.take_new(self._assembly)
            self._frozen = trained.frozen()
        self._num_left = max(0, self._num_left - 1)
        if len(trained.unfrozen) > self._num_told:  # a save may have added them
            for names in trained.unfrozen[self._num_told :]:
                self._telling.say(
                    f"step {number}: {len(names)} parameters that were frozen are "
                    f"trained from this step on, the first is {names[0]}"
                )
            self._num_told = len(trained.unfrozen)
        return self._step(number)
