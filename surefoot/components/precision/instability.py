"""Detection of overflow and underflow in low precision, in one forward and backward pass.

with Watch(model, scale=65536.0) as watch:
    (loss(model(batch)) * 65536.0).backward()
watch.overflow      # the first module with a non-finite output though its inputs were finite
watch.flushed()     # by module: the share of gradient values that underflow to zero in fp16
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from surefoot.components.precision.record import NAMES, OverflowRecord
from surefoot.runtime.nested_tensors import find_tensors

VANISHES_UP_TO = 2.0**-25  # half the smallest fp16 number; ties round to zero
HEADROOM = 2.0**14  # limit of scaled gradients: below fp16's 65,504, as later batches may be larger
MAX_SCALE = 2.0**24
LOSS = "the loss"


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """Module in which values first became non-finite, although its inputs were finite.

    `dtype` is the dtype of its first 16-bit output or input, or of its output if none has 16 bits.
    In the backward pass, it is the dtype of the gradient. `operator` is the operator that
    overflowed, and `largest` is the largest magnitude among the inputs of that operator or of the
    module. Both are None if they are not known.
    """

    module: str
    direction: Literal["forward", "backward"]
    dtype: str
    largest: float | None
    operator: str | None = None

    @property
    def words(self) -> str:
        way = "of its output" if self.direction == "forward" else "of the gradient of its input"
        given = "" if self.largest is None else f"; its largest input is {self.largest:.3g}"
        if self.operator is not None:
            return f"{self.operator} in {self.module} overflows in {self.dtype}{given}"
        return (
            f"{self.module} is the first module with non-finite values {way}, "
            f"in {self.dtype}{given}"
        )

    @property
    def remedy(self) -> str | None:
        """Spec setting that avoids the overflow; None if the dtype is not the cause."""
        if self.dtype not in ("fp16", "bf16"):
            return None
        return (
            'precision.compute = "bf16"'
            if self.module == LOSS
            else f'precision.keep = ["{self.module}"]'
        )


@dataclass(frozen=True, kw_only=True)
class UnderflowShare:
    """Share of gradient values that underflow to zero in fp16, for one module or parameter.

    `num_values` is the number of nonzero gradient values. `shares` maps each loss scale to the
    share of them that underflows. `largest` is their largest magnitude, without a loss scale.
    """

    module: str
    num_values: int
    shares: Mapping[float, float]
    largest: float


class Watch:
    """Context that checks the inputs, outputs and gradients of every module without children.

    Args:
        model: The model.
        scale: Loss scale with which the code in the context multiplies its loss.
        scales: Loss scales for which `flushed` computes the share of gradient values that
            underflow.
    """

    def __init__(
        self, model: nn.Module, *, scale: float = 1.0, scales: Iterable[float] = (1.0,)
    ) -> None:
        self._model, self._scale, self._scales = model, scale, tuple(scales)
        self._handles: list[RemovableHandle] = []
        self._last = LOSS  # the last module with a finite gradient
        self._running: list[str] = []
        self._operators = OverflowRecord(lambda: self._running[-1] if self._running else LOSS)
        self._counts: dict[str, list[float]] = {}
        self.overflow: Overflow | None = None

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._handles.append(
                module.register_forward_pre_hook(self._before(name or "the model"))
            )
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
            if not any(True for _ in module.children()):
                self._handles.append(
                    module.register_forward_hook(self._after(name or "the model"), with_kwargs=True)
                )
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                register: Any = parameter.register_hook
                self._handles.append(register(self._counting(name)))
        self._operators.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._operators.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._operators.found is not None:
            operator, module, made, given = self._operators.found
            way: Literal["forward", "backward"] = "backward" if module == LOSS else "forward"
            known = self.overflow
            if known is None or (
                way == "forward" and (known.direction == "backward" or known.module == module)
            ):
                self.overflow = Overflow(
                    module=module,
                    direction=way,
                    dtype=_name(made),
                    largest=_max_finite(given),
                    operator=operator,
                )

    def _before(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, given: Any) -> None:
            self._running.append(name)

        return enter

    def _leave(self, module: nn.Module, given: Any, made: Any) -> None:
        self._running.pop()

    def _after(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, given: Any, named: Any, made: Any) -> None:
            inputs, outputs = list(_floats((given, named))), list(_floats(made))
            if (
                self.overflow is None
                and not all(map(_is_finite, outputs))
                and all(map(_is_finite, inputs))
            ):
                narrow = next(
                    (each for each in (*outputs, *inputs) if each.element_size() < 4), outputs[0]
                )
                self.overflow = Overflow(
                    module=name,
                    direction="forward",
                    dtype=_name(narrow),
                    largest=_max_finite(inputs),
                )
            for each in outputs:
                if each.requires_grad:
                    each.register_hook(self._behind(name))  # type: ignore[no-untyped-call]

        return look

    def _behind(self, name: str) -> Callable[[Tensor], None]:
        count = self._counting(name)

        def look(gradient: Tensor) -> None:
            if not _is_finite(gradient):
                if self.overflow is None:
                    self.overflow = Overflow(
                        module=self._last, direction="backward", dtype=_name(gradient), largest=None
                    )
                return
            self._last = name
            count(gradient)

        return look

    def _counting(self, name: str) -> Callable[[Tensor], None]:
        def count(gradient: Tensor) -> None:
            sizes = gradient.detach().float().abs() / self._scale
            row = self._counts.setdefault(name, [0.0] * (2 + len(self._scales)))
            row[0] += int((sizes > 0).sum())
            row[1] = max(row[1], float(sizes.max())) if sizes.numel() else row[1]
            for number, scale in enumerate(self._scales, start=2):
                row[number] += int(((sizes > 0) & (sizes * scale <= VANISHES_UP_TO)).sum())

        return count

    def flushed(self) -> tuple[UnderflowShare, ...]:
        """Return the share of gradient values that underflow, for each module and parameter.

        The rows are sorted by the share at the first of the `scales`, the largest first.
        """
        rows = [
            UnderflowShare(
                module=name,
                num_values=int(row[0]),
                largest=row[1],
                shares={
                    scale: row[number] / row[0] if row[0] else 0.0
                    for number, scale in enumerate(self._scales, start=2)
                },
            )
            for name, row in self._counts.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.shares[self._scales[0]]))


def total(rows: Iterable[UnderflowShare], scale: float) -> float:
    """Return the share of all gradient values that underflow to zero in fp16 at a loss scale.

    The loss scale `scale` must be one of those for which the rows have shares.
    """
    rows = list(rows)
    values = sum(row.num_values for row in rows)
    return sum(row.shares[scale] * row.num_values for row in rows) / values if values else 0.0


def advise_scale(rows: Iterable[UnderflowShare]) -> float:
    """Return a loss scale: the largest power of two with all scaled gradients at 2^14 or below.

    The result is at most 2^24.
    """
    largest = max((row.largest for row in rows if math.isfinite(row.largest)), default=0.0)
    return (
        MAX_SCALE
        if largest == 0.0
        else min(MAX_SCALE, 2.0 ** math.floor(math.log2(HEADROOM / largest)))
    )


def count_lost(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return for each parameter the share of its values that an update did not change.

    Values count only if their update is not 0. Such an update is lost if it is too small for the
    dtype of the parameter.

    Args:
        before: Parameters before the update, by name.
        after: Parameters after the update, by name.
        moved: Updates, by parameter name.
    """
    found = {}
    for name, old in before.items():
        meant = moved[name] != 0
        if bool(meant.any()):
            found[name] = float(((after[name] == old) & meant).sum() / meant.sum())
    return found


def was_clipped_first(norm: float, *, scale: float, clip: float) -> bool:
    """Return whether gradients were clipped before they were divided by the loss scale.

    If so, their norm is `clip / scale`.

    Args:
        norm: Norm of the gradients after clipping and division.
        scale: The loss scale.
        clip: The limit of the norm.

    >>> was_clipped_first(1.0 / 65536, scale=65536.0, clip=1.0)
    True
    >>> was_clipped_first(0.7, scale=65536.0, clip=1.0)
    False
    """
    return scale > 1 and math.isclose(norm, clip / scale, rel_tol=1e-3)


def _floats(tree: Any) -> Iterator[Tensor]:
    return (each for each in find_tensors(tree) if each.is_floating_point())


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _max_finite(tensors: Iterable[Tensor]) -> float | None:
    return max((float(each.detach().abs().max()) for each in tensors if each.numel()), default=None)


def _name(tensor: Tensor) -> str:
    return NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
