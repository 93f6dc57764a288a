"""Selective activation checkpointing: the outputs of expensive operators are saved.

These are matmuls, convolutions and attention; all other operators of a block are recomputed. Saving
all of these outputs frees at most 40 % of the memory that recomputing a whole transformer block
frees. If a quarter of their FLOPs, a twelfth of a step, is recomputed too, this becomes 60 %. The
output of attention is always saved, because a fused attention kernel needs more time for its FLOPs
than a matmul. Two private names of torch are used:
`torch.utils._python_dispatch.TorchDispatchMode`, which sees each operator below autograd, and
`torch._C._SetExcludeDispatchKeyGuard`, without which an in-place change of a saved output would not
be detected.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from surefoot.components.memory.again import Contexts
from surefoot.core.cost import shape
from surefoot.runtime.attributes.rewritten import OperatorMode

# the expensive operators of a forward pass, by their names in torch.ops.aten
PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "mkldnn_rnn_layer",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
# index of the argument whose last dimension is the inner size
SUMMED = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
SHARE = 0.26  # share of FLOPs that may be recomputed: Q, K and V have a quarter of a GPT block's


@dataclass(frozen=True)
class ProductWork:
    """Cost of one matmul, convolution or attention: its FLOPs, and the bytes of its output.

    `flops` is infinite if it is not known.
    """

    flops: float
    num_bytes: int

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key, by which operators with few FLOPs per output byte come first.

        Of operators with equal FLOPs per byte, the one with the largest output comes first.
        """
        return self.flops / max(self.num_bytes, 1), -self.num_bytes


class FlopsAllowance:
    """Number of FLOPs of matmuls and convolutions that the blocks of a model may recompute.

    It is 26 % of the FLOPs of these operators. A block may also use what earlier blocks have left.

    >>> FlopsAllowance().choose([ProductWork(12, 12), ProductWork(4, 4), ProductWork(32, 16)])
    frozenset({0})
    """

    def __init__(self) -> None:
        self._left = 0.0

    def choose(self, work: Sequence[ProductWork]) -> frozenset[int]:
        """Return the indices of the operators in `work` that a block recomputes.

        Operators with the fewest FLOPs per output byte are chosen first; of equal ones, that with
        the largest output. The last operator is never chosen. Its output is saved only if a
        recomputation has needed it.
        """
        self._left += SHARE * sum(each.flops for each in work if math.isfinite(each.flops))
        found = set()
        for place in sorted(range(len(work) - 1), key=lambda place: work[place].rank):
            if work[place].flops <= self._left:
                self._left -= work[place].flops
                found.add(place)
        return frozenset(found)


class Products:
    """Choice of the operators in one block whose outputs are saved for the recomputation.

    Only the outputs of matmuls, convolutions and attention are saved, and only up to the last one
    that a recomputation has needed. If a block ends in a matmul, for example, the backward pass
    does not need its output. Until this is known, the last output is not saved, so that no step
    needs more memory than the others.
    """

    def __init__(self, allowance: FlopsAllowance) -> None:
        self.num_needed: int | None = None
        self.again: frozenset[int] | None = None  # chosen at the end of the first pass
        self._allowance = allowance

    def choose(self, work: Sequence[ProductWork]) -> None:
        self.again = self._allowance.choose(work)

    def contexts(self) -> Contexts:
        """Return a context for the forward pass of the block, and one for its recomputation.

        The first saves outputs, and the second uses them instead of running the operators again.
        """
        kept: dict[int, _SavedOutput] = {}
        return _SaveOutputs(self, kept), _ReuseOutputs(self, kept)


class _SavedOutput:
    """Saved output of one operator.

    `take` returns it, or None if it has been changed in place since it was saved.
    """

    def __init__(self, output: Any) -> None:
        self._is_one = isinstance(output, Tensor)
        parts = (output,) if self._is_one else output
        # without this guard the detached tensors would have separate version counters
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._parts = [each.detach() if isinstance(each, Tensor) else each for each in parts]
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [each._version for each in self._parts if isinstance(each, Tensor)]

    def take(self) -> Any:
        if self._now() != self._versions:
            return None
        return self._parts[0] if self._is_one else tuple(self._parts)


class _SaveOutputs(OperatorMode):
    def __init__(self, products: Products, kept: dict[int, _SavedOutput]) -> None:
        super().__init__()
        self._products, self._kept, self._count = products, kept, 0
        self._work: list[ProductWork] = []

    def __exit__(self, kind: object = None, *error: object) -> None:
        if self._products.again is None and kind is None:
            self._products.choose(self._work)
        if self._products.num_needed is None:
            self._kept.pop(self._count - 1, None)
        for place in self._products.again or ():
            self._kept.pop(place, None)
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            if self._products.again is None:
                self._work.append(_work_of(func.overloadpacket.__name__, args, output))
            if self._is_wanted():
                self._kept[self._count] = _SavedOutput(output)
            self._count += 1
        return output

    def _is_wanted(self) -> bool:
        needed, again = self._products.num_needed, self._products.again or ()
        return (needed is None or self._count < needed) and self._count not in again


class _ReuseOutputs(OperatorMode):
    def __init__(self, products: Products, kept: dict[int, _SavedOutput]) -> None:
        super().__init__()
        self._products, self._kept, self._count = products, kept, 0

    def __enter__(self) -> Self:
        # a second backward pass over the same graph finds nothing saved, and recomputes all
        self._count = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._products.num_needed = max(self._products.num_needed or 0, self._count)
        self._kept.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = None
        if _is_kept(func, args, kwargs or {}):
            kept = self._kept.pop(self._count, None)
            output = None if kept is None else kept.take()
            self._count += 1
        return func(*args, **(kwargs or {})) if output is None else output


def _work_of(name: str, args: tuple[Any, ...], output: Any) -> ProductWork:
    parts = [
        each
        for each in ((output,) if isinstance(output, Tensor) else output)
        if isinstance(each, Tensor)
    ]
    num_bytes, flops = sum(each.nbytes for each in parts), math.inf
    if name in SUMMED:
        flops = shape.product_flops(parts[0].numel(), args[SUMMED[name]].shape[-1])
    elif name == "convolution":
        inputs, weight, transposed = args[0], args[1], args[6]
        flops = shape.convolution_flops(
            weight.shape, inputs.numel() if transposed else parts[0].numel()
        )
    return ProductWork(flops, num_bytes)


def keep_products() -> Contexts:
    """Return contexts of selective checkpointing for torch.compile that save expensive outputs.

    These are the outputs of matmuls, convolutions and attention. torch.compile accepts only the
    contexts of torch's own selective checkpointing. It determines itself which outputs the backward
    pass needs.
    """
    create: Any = create_selective_checkpoint_contexts
    contexts: Contexts = create(_policy)
    return contexts


def _policy(context: Any, operator: Any, *args: Any, **named: Tensor | Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if _is_kept(operator, args, named)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _is_kept(operator: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    draws = _find_randomness(operator)
    if draws is None or isinstance(draws, bool):
        return draws is False
    return not named.get("dropout_p", args[draws] if draws < len(args) else 0.0)


@functools.cache
def _find_randomness(operator: Any) -> bool | int | None:
    """Return whether a matmul, convolution or attention draws random numbers.

    If this depends on its argument `dropout_p`, the index of that argument is returned. For other
    operators, the result is None. The output of an operator that draws random numbers is not saved:
    a recomputation without this operator would leave the random state different for later
    operators.
    """
    if getattr(operator, "overloadpacket", None) not in _PACKETS:
        return None
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    return next(
        (
            place
            for place, each in enumerate(operator._schema.arguments)
            if each.name == "dropout_p"
        ),
        True,
    )


# torch.compile identifies the policy by this text in its cache
# for mypy, a function has no such attribute
setattr(keep_products, "cache_hash", f"surefoot keeps {PRODUCTS}")  # noqa: B010
_PACKETS = {getattr(torch.ops.aten, name) for name in PRODUCTS if hasattr(torch.ops.aten, name)}
