"""Activation checkpointing for any model, without changes to its code.

Blocks of the model drop their activations, and recompute them in the backward pass (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", 2016). The blocks run in torch.utils.checkpoint
with use_reentrant=False. In the recomputation, random states and buffers are as they were in the
forward pass, so that only memory and time change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surefoot.components.memory.again import Buffers, CombinedContext, Contexts
from surefoot.components.memory.blocks import find_blocks
from surefoot.components.memory.budget import Budget, RecomputeDecision
from surefoot.components.memory.caches import CachesOff
from surefoot.components.memory.products import FlopsAllowance, Products, keep_products
from surefoot.core.errors import InputError
from surefoot.core.recompute import RecomputeChoice
from surefoot.runtime.nested_tensors import find_tensors

_SEAT = "_surefoot_seat"  # the attribute of a block that holds its _BlockSettings


class RecomputeHandle:
    """Result of `recompute`, which can switch activation checkpointing off again (`undo`).

    `blocks` are the names of the blocks that can be recomputed, and `names` those of the blocks
    that are recomputed. `skipped` gives the reason for each block that cannot be recomputed.
    """

    def __init__(
        self,
        how: RecomputeChoice,
        blocks: Mapping[str, nn.Module],
        skipped: Mapping[str, str],
        budget: Budget | None,
        caches: CachesOff,
    ) -> None:
        self.how, self.blocks, self.skipped, self.budget, self._caches = (
            how,
            tuple(blocks),
            dict(skipped),
            budget,
            caches,
        )
        self.allowance = FlopsAllowance()
        self._modules = dict(blocks)
        step = how.number if how.kind == "every" else 1
        self.fates = (
            budget.fates
            if budget is not None
            else [RecomputeDecision(number % step == 0) for number in range(len(blocks))]
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks that are recomputed; all of them until a memory budget has chosen."""
        return tuple(name for name, fate in zip(self.blocks, self.fates, strict=True) if fate.again)

    @property
    def words(self) -> str:
        """Line for the log that says which blocks are recomputed."""
        if self.budget is not None and self.budget.chosen is None:
            return self.budget.words
        what = "the cheap operators of " if self.how.kind == "operators" else ""
        said = (
            f"{what}{len(self.names)} of {len(self.blocks)} blocks are computed again in the "
            "backward pass"
        )
        return said if self.budget is None else f"{said}: {self.budget.words}"

    @property
    def notes(self) -> list[str]:
        """Lines for the log that are known before the first batch.

        The choice of a memory budget is not among them, because it is made later.
        """
        if not self.blocks:
            return []
        chosen = [self.words] if self.budget is None else []
        return (
            chosen
            + self._caches.notes
            + [f"{name} is not computed again: {reason}" for name, reason in self.skipped.items()]
        )

    def undo(self) -> None:
        """Turn off activation checkpointing for all blocks, and remove the hooks."""
        self._caches.remove()
        for block in self._modules.values():
            if hasattr(block, _SEAT):  # false if undo() was called already
                block.__class__ = type(block).__mro__[1]
                delattr(block, _SEAT)


def recompute(
    model: nn.Module, how: str = "full", *, blocks: Sequence[str | nn.Module] = ()
) -> RecomputeHandle:
    """Turn on activation checkpointing for the blocks of a model.

    The activations of these blocks are recomputed in the backward pass. Gradients stay bitwise
    identical, and the model keeps the names of its parameters and its hooks. During a forward pass
    with gradients, `config.use_cache` is False in the modules that contain the blocks.

    Args:
        model: The model, changed in place.
        how: "full" recomputes every block, and "every 2" every second block. "operators" recomputes
            the cheap operators of every block, and saves the outputs of expensive matmuls. A size
            such as "12 MiB" limits the memory that the blocks may hold: the blocks are measured
            with the first batch, and the set of blocks that takes the least extra time is
            recomputed.
        blocks: The blocks, as name patterns or modules; by default, the modules that repeat.

    Raises:
        SpecError: For any other `how`. A memory limit that cannot be met raises it with the first
            batch.
        InputError: If there are no blocks, or none that can be recomputed.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    >>> recompute(model, "every 2").names
    ('0', '2')
    """
    parsed = RecomputeChoice.parse(how)
    found = {} if parsed.kind == "none" else find_blocks(model, blocks)
    skipped = {
        name: reason
        for name, block in found.items()
        if (reason := _reason_against(block)) is not None
    }
    taken = {name: block for name, block in found.items() if name not in skipped}
    if found and not taken:
        raise InputError(
            f"no block can be computed again: {next(iter(skipped.values()))}",
            hint="name others with memory.blocks",
        )
    budget = (
        Budget(list(taken), parsed.number, [*model.parameters(), *model.buffers()])
        if parsed.kind == "budget"
        else None
    )
    made = RecomputeHandle(parsed, taken, skipped, budget, CachesOff(model, taken))
    for number, block in enumerate(taken.values()):
        setattr(block, _SEAT, _BlockSettings(number, made, Buffers(block)))
        kind: Any = type(block)  # mypy takes a module for not hashable
        block.__class__ = _make_recomputing_subclass(kind)
    return made


def _reason_against(block: nn.Module) -> str | None:
    if hasattr(block, _SEAT):
        return "it is computed again already"
    if "forward" in vars(block):
        return "something has replaced its forward"
    if isinstance(block, torch.jit.ScriptModule):
        return "it is a script of torch.jit"
    return None


class _BlockSettings:
    """Settings of one block, stored as an attribute of the block.

    They are its index, the decision whether it is recomputed, and its buffers. A compiled block
    does not read its index, so that equal blocks share their compiled code.
    """

    def __init__(self, number: int, plan: RecomputeHandle, buffers: Buffers) -> None:
        self._number, self._plan, self._buffers, self._products = (
            number,
            plan,
            buffers,
            Products(plan.allowance),
        )
        self._fate = plan.fates[number]

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        # positional, so that torch detects in-place changes of them
        given = (*args, *named.values())
        run = functools.partial(_call, forward, len(args), tuple(named))
        budget, selects = self._plan.budget, self._plan.how.kind == "operators"
        inputs = [] if budget is None else list(find_tensors(given))
        # a compiled graph changes buffers once, and supports only torch's contexts
        if torch.compiler.is_compiling():
            if not self._fate.again and self._fate.covers(inputs):
                return forward(*args, **named)
            if selects:
                return checkpoint(run, *given, use_reentrant=False, context_fn=keep_products)
            return checkpoint(run, *given, use_reentrant=False)
        if budget is not None and budget.needs_measurement(self._number, inputs):
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
        return (
            kept
            if guard is None
            else (CombinedContext(guard[0], kept[0]), CombinedContext(guard[1], kept[1]))
        )


def _call(forward: Callable[..., Any], num_args: int, names: tuple[str, ...], *given: Any) -> Any:
    return forward(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))


@functools.cache
def _make_recomputing_subclass(kind: Any) -> type[nn.Module]:
    """Return a subclass of the module class `kind` whose `forward` can be recomputed.

    Its `forward` calls the `run` of the block's `_BlockSettings`. The subclass has the same name,
    and parameter names, hooks and copies of a module are unaffected.
    """

    def forward(self: nn.Module, *args: Any, **named: Tensor | Any) -> Any:
        seat: _BlockSettings = getattr(self, _SEAT)
        return seat.run(functools.partial(kind.forward, self), args, named)

    own = {
        "forward": forward,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    made: type[nn.Module] = type(kind)(kind.__name__, (kind,), own)
    return made
