"""Operators of a trace by their own time and memory: rows that a table shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.components.profiler.tracing.trace import DEVICE_WORK, OPERATOR, Change, Slice, Trace
from surefoot.core import shape

ITEM_BYTES = {
    "double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "short int": 2, "short": 2,
    "bool": 1, "unsigned char": 1, "signed char": 1, "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
CONVOLUTIONS = {  # where stride and padding stand among the arguments
    "aten::conv1d": (3, 4), "aten::conv2d": (3, 4), "aten::conv3d": (3, 4), "aten::mkldnn_convolution": (4, 3),
    "aten::cudnn_convolution": (3, 2),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All calls of an operator in the window. `self_` is without the operators that it called; unknown is None.

    `self_bytes` is what it allocated less what it freed itself; `flops` counts products and sums of the operators whose shapes tell
    (matrix products and convolutions), `bytes` the tensors that it was given.
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


class _Sum:
    def __init__(self) -> None:
        self.calls = self.self_ns = self.total_ns = self.self_bytes = self.flops = self.bytes = self.device_ns = 0
        self.has_flops = self.has_bytes = False


def find_operators(trace: Trace) -> list[Operator]:
    """The operators that began in the window, on every thread, the costliest by its own time first: on the device where there is one."""
    sums: defaultdict[str, _Sum] = defaultdict(_Sum)
    first_ns, last_ns = trace.window
    by_thread: defaultdict[Any, list[Slice]] = defaultdict(list)
    for each in trace.slices:
        if each.category == OPERATOR and first_ns <= each.start_ns < last_ns:
            by_thread[each.thread].append(each)
    changes: defaultdict[Any, list[Change]] = defaultdict(list)
    for change in trace.changes:
        changes[change.thread].append(change)
    for thread, slices in by_thread.items():
        _add_thread(sums, slices, changes[thread])
    has_device = _add_device(sums, trace)
    made = [_as_operator(name, found, bool(trace.changes), has_device) for name, found in sums.items()]
    return sorted(made, key=lambda each: (-(each.self_device_s or 0.0), -each.self_s, each.name))


def _add_thread(sums: Mapping[str, _Sum], slices: Sequence[Slice], changes: Iterable[Change]) -> None:
    """Add the operators of a thread, in order, and give each change of memory to the innermost operator that went on."""
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
        found.calls += (
            not stack or stack[-1].name != each.name
        )  # an operator that hands on to itself is called once, as torch counts
        found.self_ns += length_ns
        if all(one.name != each.name for one in stack):  # of calls within themselves only the outer one counts
            found.total_ns += length_ns
        _add_shapes(found, each)
        stack.append(each)
    give(math.inf)


def _add_shapes(found: _Sum, each: Slice) -> None:
    shapes, types = each.details.get("Input Dims"), each.details.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return
    given = sum(
        ITEM_BYTES[kind] * math.prod(sizes)
        for sizes, kind in zip(shapes, types, strict=False)
        if isinstance(kind, str) and kind in ITEM_BYTES and _is_shape(sizes)
    )
    found.bytes, found.has_bytes = found.bytes + given, True
    flops = count_flops(each.name, shapes, each.details.get("Concrete Inputs") or [])
    if flops is not None:
        found.flops, found.has_flops = found.flops + flops, True


def _is_shape(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)


def count_flops(name: str, shapes: Sequence[Any], values: Sequence[Any]) -> int | None:
    """Operations of one call by its shapes, a multiplication and an addition as two; None where this table does not know.

    >>> count_flops("aten::mm", [[32, 64], [64, 10]], [])
    40960
    """
    places = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
    if name in places:
        factors = [shapes[place] for place in places[name] if place < len(shapes) and _is_shape(shapes[place])]
        if len(factors) < 2 or min(map(len, factors)) < 2:
            return None
        first, second = factors
        return shape.product_flops(math.prod(first[:-1]) * second[-1], second[-2])
    if name in CONVOLUTIONS and len(shapes) > 1:
        return _count_convolution(shapes, values, CONVOLUTIONS[name])
    if name == "aten::convolution_backward" and len(shapes) > 2 and _is_shape(shapes[0]) and _is_shape(shapes[2]):
        num_wanted = str(values[10]).strip("[]").split(",")[:2] if len(values) > 10 else []  # of the input, of the weights
        return sum("True" in each for each in num_wanted) * shape.convolution_flops(shapes[2], math.prod(shapes[0]))
    return None


def _count_convolution(shapes: Sequence[Any], values: Sequence[Any], places: tuple[int, int]) -> int | None:
    """2 x outputs x (input channels of a group x kernel); `places` are those of stride and padding in `values`, dilation follows them."""
    if not (_is_shape(shapes[0]) and _is_shape(shapes[1]) and len(shapes[0]) == len(shapes[1])):
        return None
    sizes, weight = shapes[0][2:], shapes[1]
    stride, padding, dilation = (_numbers(values, place, len(sizes)) for place in (*places, max(places) + 1))
    if stride is None or padding is None or dilation is None or min(stride) < 1:
        return None
    outputs = [
        (size + 2 * pad - dilate * (kernel - 1) - 1) // step + 1
        for size, pad, dilate, kernel, step in zip(sizes, padding, dilation, weight[2:], stride, strict=True)
    ]
    return shape.convolution_flops(weight, shapes[0][0] * weight[0] * math.prod(outputs))


def _numbers(values: Sequence[Any], place: int, count: int) -> list[int] | None:
    """A list of whole numbers as the trace writes it: "[1, 1]"."""
    text = str(values[place]) if place < len(values) else ""
    parts = [part.strip() for part in text.strip("[]").split(",")]
    if not all(part.lstrip("-").isdigit() for part in parts):
        return None
    found = [int(part) for part in parts]
    found = found * count if len(found) == 1 else found
    return found if len(found) == count else None


def _add_device(sums: Mapping[str, _Sum], trace: Trace) -> bool:
    """Give what a device did to the operator that launched it; gives whether there was any."""
    names = {each.mark("External id"): each.name for each in trace.slices if each.category == OPERATOR}
    has_any = False
    for each in trace.slices:
        if each.category in DEVICE_WORK:
            has_any = True
            name = names.get(each.mark("External id"), "")
            if name in sums:
                sums[name].device_ns += each.end_ns - each.start_ns
    return has_any


def _as_operator(name: str, found: _Sum, has_memory: bool, has_device: bool) -> Operator:
    return Operator(
        name=name, calls=found.calls, self_s=found.self_ns / 1e9, total_s=found.total_ns / 1e9,
        self_device_s=found.device_ns / 1e9 if has_device else None, self_bytes=found.self_bytes if has_memory else None,
        flops=found.flops if found.has_flops else None, bytes=found.bytes if found.has_bytes else None,
    )  # fmt: skip
