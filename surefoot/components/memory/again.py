"""Computing a block again as it was computed: with the buffers of then, and without the products that were kept.

The seams are `torch.utils._python_dispatch.TorchDispatchMode`, which sees each operator below autograd, and
`torch._C._SetExcludeDispatchKeyGuard`, without which a change in place would not be seen there.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Slot = tuple[nn.Module, str]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
# where the time of a forward pass goes: products of matrices, convolutions, fused attention; by their names in torch.ops.aten
PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip


class Buffers:
    """The buffers that a block changes in its forward pass (the statistics of BatchNorm): computing it again sees them as they were
    then, and leaves them as they are now.

    Which ones they are is seen at the first pass in each mode of the block's modules; only they are copied from then on.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        self._slots = [(module, name) for module in self._modules for name, _ in module.named_buffers(recurse=False)]
        self._moving: dict[tuple[bool, ...], list[Slot]] = {}

    def tensors(self) -> list[Tensor]:
        """What stands in their places now."""
        return [getattr(*slot) for slot in self._slots]

    def lent(self) -> AbstractContextManager[Any]:
        """Copies of all buffers stand in their places inside."""
        return _AsBefore(self._slots, self.tensors())

    def contexts(self) -> Contexts | None:
        """For the forward pass and for computing it again; None where no buffer moves."""
        modes = tuple(module.training for module in self._modules)
        slots = self._moving.get(modes, self._slots)
        if not slots:
            return None
        before = [getattr(*slot).detach().clone() for slot in slots]
        return _Watched(self, modes, slots, before), _AsBefore(slots, before)

    def saw(self, modes: tuple[bool, ...], moving: list[Slot]) -> None:
        self._moving.setdefault(modes, moving)


class _Watched(AbstractContextManager[None]):
    def __init__(self, buffers: Buffers, modes: tuple[bool, ...], slots: list[Slot], before: list[Tensor]) -> None:
        self._buffers, self._modes, self._slots, self._before = buffers, modes, slots, before

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            moving = [slot for slot, copy in zip(self._slots, self._before, strict=True) if _moved(copy, getattr(*slot))]
            self._buffers.saw(self._modes, moving)


class _AsBefore(AbstractContextManager[None]):
    def __init__(self, slots: list[Slot], before: list[Tensor]) -> None:
        self._slots, self._before = slots, before
        self._now: list[Tensor] = []

    def __enter__(self) -> None:
        self._now = [getattr(*slot) for slot in self._slots]
        for slot, copy in zip(self._slots, self._before, strict=True):
            setattr(*slot, copy.clone())  # another backward pass over the same graph starts from them too

    def __exit__(self, *error: object) -> None:
        for slot, tensor in zip(self._slots, self._now, strict=True):
            setattr(*slot, tensor)


class Both(AbstractContextManager[None]):
    """Several contexts as one, which may be entered again."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:  # type: ignore[override]
        for context in self._contexts:
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _moved(before: Tensor, now: Tensor) -> bool:
    try:
        return before.shape != now.shape or not torch.equal(before, now)
    except RuntimeError:  # a tensor without numbers, in a trace of sizes alone
        return True


class Products:
    """The products of a block, kept for computing it again up to the last one that this came to: where a block ends in a product,
    nobody asks for its output. Until that is known the last one is left out, so that no step holds more than the others.
    """

    def __init__(self) -> None:
        self.num_needed: int | None = None

    def contexts(self) -> Contexts:
        """For the forward pass and for computing it again."""
        kept: dict[int, _Kept] = {}
        return _Keeping(self, kept), _Reusing(self, kept)


class _Kept:
    """What a product gave; it is gone when something has changed it in place."""

    def __init__(self, output: Any) -> None:
        self._is_one = isinstance(output, Tensor)
        parts = (output,) if self._is_one else output
        # without this guard they had versions of their own
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._parts = [each.detach() if isinstance(each, Tensor) else each for each in parts]
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [each._version for each in self._parts if isinstance(each, Tensor)]

    def take(self) -> Any:
        if self._now() != self._versions:
            return None
        return self._parts[0] if self._is_one else tuple(self._parts)


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, products: Products, kept: dict[int, _Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._kept, self._count = products, kept, 0

    def __exit__(self, *error: object) -> None:
        if self._products.num_needed is None:
            self._kept.pop(self._count - 1, None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            needed = self._products.num_needed
            if needed is None or self._count < needed:
                self._kept[self._count] = _Kept(output)
            self._count += 1
        return output


class _Reusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, products: Products, kept: dict[int, _Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._kept, self._count = products, kept, 0

    def __enter__(self) -> Self:
        self._count = 0  # another backward pass over the same graph has nothing left, and computes all of it
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._products.num_needed = max(self._products.num_needed or 0, self._count)
        self._kept.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = None
        if _is_kept(func, args, kwargs or {}):
            kept = self._kept.pop(self._count, None)
            output = None if kept is None else kept.take()
            self._count += 1
        return func(*args, **(kwargs or {})) if output is None else output


def keep_products() -> Contexts:
    """The same for a compiler, which takes nothing but torch's own contexts and sees by itself what is needed."""
    contexts: Contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(context: Any, operator: Any, *args: Any, **named: Tensor | Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator, args, named) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return getattr(operator, "overloadpacket", None) in _PACKETS and not _draws(operator, args, named)


def _draws(operator: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether it draws numbers: kept, it would leave the stream of those behind it elsewhere than it was."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    place = next((place for place, each in enumerate(operator._schema.arguments) if each.name == "dropout_p"), None)
    if place is None:
        return True
    return bool(named.get("dropout_p", args[place] if place < len(args) else 0.0))


# compilers keep what they made in a cache by this name of the choice
setattr(keep_products, "cache_hash", f"surefoot keeps {PRODUCTS}")  # noqa: B010 - a function has no such attribute for mypy
_PACKETS = {getattr(torch.ops.aten, name) for name in PRODUCTS if hasattr(torch.ops.aten, name)}
