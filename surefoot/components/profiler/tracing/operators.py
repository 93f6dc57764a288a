"""Statistics of the operators in a trace, such as self time and memory, as rows of a table."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.components.profiler.tracing.trace import (
    DEVICE_WORK,
    OPERATOR,
    MemoryChange,
    Slice,
    Trace,
    is_shape,
)
from surefoot.core.cost import shape

ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short int": 2,
    "short": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "c10::complex<c10::Half>": 4,
    "short unsigned int": 2,
    "unsigned int": 4,
    "long unsigned int": 8,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
    "c10::Float8_e8m0fnu": 1,
}
NO_TENSORS = ("", "Scalar", "ScalarList")  # torch's types for None, a scalar, a list of scalars
INDEXED = {  # operators with a list of optional tensors, which torch records as None
    "aten::index",
    "aten::_unsafe_index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index_put",
}
CONVOLUTIONS = {  # indices of stride and padding in the arguments
    "aten::conv1d": (3, 4),
    "aten::conv2d": (3, 4),
    "aten::conv3d": (3, 4),
    "aten::mkldnn_convolution": (4, 3),
    "aten::cudnn_convolution": (3, 2),
}
# argument 6 says whether it is transposed
EITHER_WAY = {"aten::convolution": (3, 4), "aten::_convolution": (3, 4)}
_WHOLE = re.compile(r"-?[0-9]{1,18}")
TRANSPOSED = {
    "aten::conv_transpose1d",
    "aten::conv_transpose2d",
    "aten::conv_transpose3d",
    "aten::slow_conv_transpose2d",
    "aten::slow_conv_transpose3d",
    "aten::cudnn_convolution_transpose",
}


@dataclass(frozen=True, kw_only=True)
class OperatorStats:
    """Sums over all calls of one operator in the recorded steps; an unknown value is None.

    The fields `self_...` do not include the operators that the operator called. `self_bytes` is the
    memory that it allocated minus the memory that it freed. `flops` counts multiplications and
    additions; only matmuls and convolutions have a formula. `bytes` is the size of the input
    tensors. `flops` and `bytes` are None if they are unknown for one of the calls.
    """

    name: str
    calls: int
    self_s: float
    total_s: float
    self_device_s: float | None = None
    self_bytes: int | None = None
    flops: int | None = None
    bytes: int | None = None

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


class _OperatorSum:
    def __init__(self) -> None:
        self.calls = self.self_ns = self.total_ns = self.self_bytes = self.device_ns = 0
        self.flops: int | None = 0
        self.bytes: int | None = 0


def find_operators(trace: Trace) -> list[OperatorStats]:
    """Return the operators that started in the window of a trace, on all threads.

    They are sorted by self time on the device, then by self time on the host, the longest first.
    """
    sums: defaultdict[str, _OperatorSum] = defaultdict(_OperatorSum)
    first_ns, last_ns = trace.window
    by_thread: defaultdict[Any, list[Slice]] = defaultdict(list)
    for each in trace.slices:
        if each.category == OPERATOR and first_ns <= each.start_ns < last_ns:
            by_thread[each.thread].append(each)
    changes: defaultdict[Any, list[MemoryChange]] = defaultdict(list)
    for change in trace.changes:
        changes[change.thread].append(change)
    for thread, slices in by_thread.items():
        _add_thread(sums, slices, changes[thread])
    has_device = _add_device(sums, trace)
    made = [
        _as_operator(name, found, bool(trace.changes), has_device) for name, found in sums.items()
    ]
    return sorted(made, key=lambda each: (-(each.self_device_s or 0.0), -each.self_s, each.name))


def _add_thread(
    sums: Mapping[str, _OperatorSum], slices: Sequence[Slice], changes: Iterable[MemoryChange]
) -> None:
    """Add the operators of one thread to `sums`.

    `slices` and `changes` must be sorted by time. Each memory change is attributed to the innermost
    operator that is running at the time.
    """
    stack: list[Slice] = []
    waiting = iter(changes)
    change = next(waiting, None)

    def give(until_ns: float) -> None:
        nonlocal change
        while change is not None and change.time_ns < until_ns:
            while stack and change.time_ns >= stack[-1].end_ns:
                stack.pop()
            if stack:
                sums[stack[-1].name].self_bytes += change.num_bytes
            change = next(waiting, None)

    for each in slices:
        give(each.start_ns)
        while stack and each.start_ns >= stack[-1].end_ns:
            stack.pop()
        length_ns = each.end_ns - each.start_ns
        if stack:
            sums[stack[-1].name].self_ns -= length_ns
        found = sums[each.name]
        # an operator that calls itself directly counts as one call, as in torch
        found.calls += not stack or stack[-1].name != each.name
        found.self_ns += length_ns
        # of recursive calls only the outermost counts
        if all(one.name != each.name for one in stack):
            found.total_ns += length_ns
        _add_shapes(found, each)
        stack.append(each)
    give(math.inf)


def _add_shapes(found: _OperatorSum, each: Slice) -> None:
    """Add the bytes and FLOPs of one call to `found`.

    A sum becomes None if its value is unknown for one call.
    """
    shapes, types, values = (
        each.details.get(key) for key in ("Input Dims", "Input type", "Concrete Inputs")
    )
    if not isinstance(shapes, list) or not isinstance(types, list):
        found.bytes = found.flops = None
        return
    found.bytes = _add_or_none(
        found.bytes, None if each.name in INDEXED else _input_bytes(shapes, types)
    )
    # complex arithmetic has no agreed count of FLOPs
    is_complex = any(isinstance(kind, str) and "complex" in kind for kind in types)
    values = values if isinstance(values, list) else []
    found.flops = _add_or_none(
        found.flops, None if is_complex else count_flops(each.name, shapes, values)
    )


def _add_or_none(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


def _input_bytes(shapes: Sequence[Any], types: Sequence[Any]) -> int | None:
    """Return the bytes of the input tensors of a call, or None if they are unknown.

    They are unknown for a list of tensors, whose types torch does not record, and for invalid
    entries.
    """
    if len(shapes) != len(types):
        return None
    given = [
        (sizes, kind) for sizes, kind in zip(shapes, types, strict=True) if kind not in NO_TENSORS
    ]
    if not all(
        isinstance(kind, str) and kind in ITEM_BYTES and is_shape(sizes) for sizes, kind in given
    ):
        return None
    found: int = sum(ITEM_BYTES[kind] * math.prod(sizes) for sizes, kind in given)
    return found


def count_flops(name: str, shapes: Sequence[Any], values: Sequence[Any]) -> int | None:
    """Return the FLOPs of one operator call, or None if the operator has no formula.

    `shapes` and `values` are "Input Dims" and "Concrete Inputs" of the trace. A multiplication and
    an addition are 2 FLOPs.

    >>> count_flops("aten::mm", [[32, 64], [64, 10]], [])
    40960
    """
    places = {
        "aten::mm": (0, 1),
        "aten::addmm": (1, 2),
        "aten::bmm": (0, 1),
        "aten::baddbmm": (1, 2),
    }
    if name in places:
        factors = [
            shapes[place]
            for place in places[name]
            if place < len(shapes) and is_shape(shapes[place])
        ]
        if len(factors) < 2 or min(map(len, factors)) < 2:
            return None
        first, second = factors
        return shape.product_flops(math.prod(first[:-1]) * second[-1], second[-2])
    if len(shapes) < 2 or not (is_shape(shapes[0]) and is_shape(shapes[1])):
        return None
    transposed = str(values[6]) if name in EITHER_WAY and len(values) > 6 else ""
    if name in TRANSPOSED or transposed == "True":
        return shape.convolution_flops(shapes[1], math.prod(shapes[0]))
    if name in CONVOLUTIONS or transposed == "False":
        return _count_convolution(shapes, values, {**CONVOLUTIONS, **EITHER_WAY}[name])
    return _count_backward(shapes, values) if name == "aten::convolution_backward" else None


def _count_convolution(
    shapes: Sequence[Any], values: Sequence[Any], places: tuple[int, int]
) -> int | None:
    """Return the FLOPs of a convolution: 2 x outputs x (input channels of a group x kernel).

    `places` are the indices of stride and padding in `values`; the dilation follows after both.
    Return None if the values are invalid.
    """
    sizes, weight = shapes[0][2:], shapes[1]
    if not sizes or len(shapes[0]) != len(weight):
        return None
    stride, padding, dilation = (
        _numbers(values, place, len(sizes)) for place in (*places, max(places) + 1)
    )
    if stride is None or padding is None or dilation is None or min(stride) < 1:
        return None
    outputs = [
        (size + 2 * pad - dilate * (kernel - 1) - 1) // step + 1
        for size, pad, dilate, kernel, step in zip(
            sizes, padding, dilation, weight[2:], stride, strict=True
        )
    ]
    return (
        shape.convolution_flops(weight, shapes[0][0] * weight[0] * math.prod(outputs))
        if is_shape(outputs)
        else None
    )


def _count_backward(shapes: Sequence[Any], values: Sequence[Any]) -> int | None:
    """Return the FLOPs of the backward pass of a convolution, or None if they are unknown.

    Each requested gradient of the input and of the weight costs as much as the forward pass.
    """
    if (
        len(shapes) < 3
        or not is_shape(shapes[2])
        or len(values) < 11
        or str(values[7]) not in ("True", "False")
    ):
        return None
    num_wanted = sum("True" in each for each in str(values[10]).strip("[]").split(",")[:2])
    return num_wanted * shape.convolution_flops(
        shapes[2], math.prod(shapes[1 if str(values[7]) == "True" else 0])
    )


def _numbers(values: Sequence[Any], place: int, count: int) -> list[int] | None:
    """Return the `count` integers that `values[place]` contains as text, such as "[1, 1]".

    A single integer is repeated `count` times. Return None if the text is not a list of integers,
    or has a different length.
    """
    text = str(values[place]) if place < len(values) else ""
    parts = [part.strip() for part in text.strip("[]").split(",")]
    if not all(_WHOLE.fullmatch(part) for part in parts):
        return None
    found = [int(part) for part in parts]
    found = found * count if len(found) == 1 else found
    return found if len(found) == count else None


def _add_device(sums: Mapping[str, _OperatorSum], trace: Trace) -> bool:
    """Add the time of all device work to the operators that launched it.

    Return whether the trace has any device work.
    """
    names = {
        each.mark("External id"): each.name for each in trace.slices if each.category == OPERATOR
    }
    has_any = False
    for each in trace.slices:
        if each.category in DEVICE_WORK:
            has_any = True
            name = names.get(each.mark("External id"), "")
            if name in sums:
                sums[name].device_ns += each.end_ns - each.start_ns
    return has_any


def _as_operator(
    name: str, found: _OperatorSum, has_memory: bool, has_device: bool
) -> OperatorStats:
    return OperatorStats(
        name=name,
        calls=found.calls,
        self_s=found.self_ns / 1e9,
        total_s=found.total_ns / 1e9,
        self_device_s=found.device_ns / 1e9 if has_device else None,
        self_bytes=found.self_bytes if has_memory else None,
        flops=found.flops,
        bytes=found.bytes,
    )
