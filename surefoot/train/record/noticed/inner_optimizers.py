"""Optimizers in attributes of other optimizers, as in SAM, whose state_dict omits their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from torch.optim import Optimizer

from surefoot.train.record.noticed.attribute_notes import optimizers_in


@final
class InnerOptimizers:
    """Optimizers in attributes of those in `objects`; checkpoints hold both.

    If the class of the outer optimizer defines a `state_dict` method, this method saves the inner
    one.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        known = {id(each) for each in objects.values()}
        self._found = {
            name: (outer, inner, inner.param_groups is outer.param_groups)
            for path, outer in objects.items()
            if isinstance(outer, Optimizer) and type(outer).state_dict is Optimizer.state_dict
            for name, inner in _name_inner(path, outer)
            if id(inner) not in known
            and inner.state is not outer.state
            and type(inner).load_state_dict is Optimizer.load_state_dict
        }

    def all(self) -> list[Optimizer]:
        """Return the inner optimizers."""
        return [inner for _, inner, _ in self._found.values()]

    def state(self) -> dict[str, Any]:
        """Return the state of each inner optimizer, by name."""
        return {name: inner.state_dict() for name, (_, inner, _) in self._found.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the inner optimizers from `state()`, after the outer optimizers are restored.

        Parameter groups that both optimizers shared are shared again, so that a scheduler of the
        outer optimizer still sets the learning rate of the inner one.
        """
        for name, (outer, inner, is_shared) in self._found.items():
            if name in saved:
                inner.load_state_dict(saved[name])
                if is_shared:
                    inner.param_groups = outer.param_groups


def _name_inner(name: str, outer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    for key, value in vars(outer).items():
        for number, inner in enumerate(optimizers_in(value)):
            yield f"{name}.{key}.{number}", inner
