"""Recomputation (activation checkpointing) on any model as it is: blocks forget what their backward pass needs, and compute it again.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. torch.utils.checkpoint without re-entering autograd does the work;
random streams and buffers are as they were in the forward pass, so that nothing but memory and time changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surefoot.components.memory.again import Both, Buffers, Contexts
from surefoot.components.memory.blocks import find_blocks
from surefoot.components.memory.budget import Budget, Fate
from surefoot.components.memory.caches import CachesOff
from surefoot.components.memory.products import Allowance, Products, keep_products
from surefoot.components.memory.tensors import find_tensors
from surefoot.core.errors import InputError
from surefoot.core.recompute import How

_SEAT = "_surefoot_seat"  # the attribute of a block that holds its seat


class Recomputed:
    """What `recompute` did: the `blocks` it found, those that it `skipped` with the reason, and the `names` of those computed again."""

    def __init__(
        self, how: How, blocks: Mapping[str, nn.Module], skipped: Mapping[str, str], budget: Budget | None, caches: CachesOff
    ) -> None:  # fmt: skip
        self.how, self.blocks, self.skipped, self.budget, self._caches = how, tuple(blocks), dict(skipped), budget, caches
        self.allowance = Allowance()
        self._modules = dict(blocks)
        step = how.number if how.kind == "every" else 1
        self.fates = budget.fates if budget is not None else [Fate(number % step == 0) for number in range(len(blocks))]

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks that are computed again: all of them while a budget measures."""
        return tuple(name for name, fate in zip(self.blocks, self.fates, strict=True) if fate.again)

    @property
    def words(self) -> str:
        """What is done, in a line."""
        if self.budget is not None and self.budget.chosen is None:
            return self.budget.words
        what = "the cheap operators of " if self.how.kind == "operators" else ""
        said = f"{what}{len(self.names)} of {len(self.blocks)} blocks are computed again in the backward pass"
        return said if self.budget is None else f"{said}: {self.budget.words}"

    @property
    def notes(self) -> list[str]:
        """What a log says of it before the first batch; with a budget nothing is chosen by then."""
        if not self.blocks:
            return []
        chosen = [self.words] if self.budget is None else []
        return chosen + self._caches.notes + [f"{name} is not computed again: {reason}" for name, reason in self.skipped.items()]

    def undo(self) -> None:
        """Make the blocks what they were."""
        self._caches.remove()
        for block in self._modules.values():
            if hasattr(block, _SEAT):  # and not undone already
                block.__class__ = type(block).__mro__[1]
                delattr(block, _SEAT)


def recompute(model: nn.Module, how: str = "full", *, blocks: Sequence[str | nn.Module] = ()) -> Recomputed:
    """Let the blocks of `model` compute again, in the backward pass, what it needs of their forward pass, instead of keeping it.

    `how`: "full" for every block, "every 2" for every second, "operators" to keep the costly products and compute the cheap operators
    again, or the bytes that the blocks may hold, as "12 MiB": then they are measured while the first batch goes through, and the set
    that costs the least time is chosen. `blocks` names them, by patterns or themselves; without it they are what repeats. Gradients
    keep their bits. The model keeps its names and its hooks. While a pass takes gradients, `config.use_cache` is off in the modules around
    the blocks. Raises SpecError for another `how`, and, in the first batch, for a budget that cannot be met; InputError where there are
    no blocks.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    >>> recompute(model, "every 2").names
    ('0', '2')
    """
    parsed = How.parse(how)
    found = {} if parsed.kind == "none" else find_blocks(model, blocks)
    skipped = {name: reason for name, block in found.items() if (reason := _reason_against(block)) is not None}
    taken = {name: block for name, block in found.items() if name not in skipped}
    if found and not taken:
        raise InputError(f"no block can be computed again: {next(iter(skipped.values()))}", hint="name others with memory.blocks")
    budget = Budget(list(taken), parsed.number, [*model.parameters(), *model.buffers()]) if parsed.kind == "budget" else None
    made = Recomputed(parsed, taken, skipped, budget, CachesOff(model, taken))
    for number, block in enumerate(taken.values()):
        setattr(block, _SEAT, _Seat(number, made, Buffers(block)))
        kind: Any = type(block)  # for mypy a module is not hashable
        block.__class__ = _kind_that_forgets(kind)
    return made


def _reason_against(block: nn.Module) -> str | None:
    if hasattr(block, _SEAT):
        return "it is computed again already"
    if "forward" in vars(block):
        return "something has replaced its forward"
    if isinstance(block, torch.jit.ScriptModule):
        return "it is a script of torch.jit"
    return None


class _Seat:
    """One block's place in the plan. A compiled block reads no number of its own here, so that equal ones share their code."""

    def __init__(self, number: int, plan: Recomputed, buffers: Buffers) -> None:
        self._number, self._plan, self._buffers, self._products = number, plan, buffers, Products(plan.allowance)
        self._fate = plan.fates[number]

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        given = (*args, *named.values())  # as positions, so that torch sees where one of them is changed in place
        run = functools.partial(_call, forward, len(args), tuple(named))
        budget, selects = self._plan.budget, self._plan.how.kind == "operators"
        inputs = [] if budget is None else list(find_tensors(given))
        if torch.compiler.is_compiling():  # a compiled graph changes buffers once, and torch takes only its own contexts into it
            if not self._fate.again and self._fate.covers(inputs):
                return forward(*args, **named)
            if selects:
                return checkpoint(run, *given, use_reentrant=False, context_fn=keep_products)
            return checkpoint(run, *given, use_reentrant=False)
        if budget is not None and budget.wants(self._number, inputs):
            budget.measure(self._number, inputs, functools.partial(run, *given), self._buffers)
        if not self._fate.again:
            return forward(*args, **named)
        contexts = self._contexts()
        if contexts is None:
            return checkpoint(run, *given, use_reentrant=False)
        return checkpoint(run, *given, use_reentrant=False, context_fn=lambda: contexts)

    def _contexts(self) -> Contexts | None:
        guard = self._buffers.contexts()
        if self._plan.how.kind != "operators":
            return guard
        kept = self._products.contexts()
        return kept if guard is None else (Both(guard[0], kept[0]), Both(guard[1], kept[1]))


def _call(forward: Callable[..., Any], num_args: int, names: tuple[str, ...], *given: Any) -> Any:
    return forward(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))


@functools.cache
def _kind_that_forgets(kind: Any) -> type[nn.Module]:
    """A class like `kind`, and of its name, whose forward goes through its seat: names, hooks and copies of a module stay what they are."""

    def forward(self: nn.Module, *args: Any, **named: Tensor | Any) -> Any:
        seat: _Seat = getattr(self, _SEAT)
        return seat.run(functools.partial(kind.forward, self), args, named)

    own = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made: type[nn.Module] = type(kind)(kind.__name__, (kind,), own)
    return made
