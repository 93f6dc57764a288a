"""What CPU kernels keep or allocate inside themselves, which torch's fake tensors do not know.

From what torch 2.13 with oneDNN 3.x allocates on x86, seen with its profiler (benchmarks/memory_prediction): a convolution changes the
layout of what it is given and gives, arithmetic between dtypes copies the narrower one, an LSTM keeps a workspace for its backward pass.
The LSTM's is asked of the library itself, with two short sequences: it grows by as much with each step; and so is what products and
convolutions in 16 bits need, up to a size, since that follows no simple rule.
"""

# N batch, C channels, T steps

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.components.memory.measure import Rise
from surefoot.components.memory.tensors import find_tensors

BLOCK = 16  # channels that stand side by side in oneDNN's own layout
SHORT, LONG = 2, 34  # steps of the sequences that an LSTM's workspace is asked with
MOST_ASKED_BYTES = (
    1 << 25
)  # of what an operator is given and gives: more would take seconds, and the rest is a small share by then
aten = torch.ops.aten


def of(func: Any, args: tuple[Any, ...], out: Any) -> tuple[Any, int]:
    """What an operator gives, with the workspace that its kernel really keeps, and the bytes that it needs for itself meanwhile."""
    operator = func.overloadpacket
    if operator is aten.mkldnn_rnn_layer:
        kept, inside, _ = _lstm(args)
        return (*out[:3], out[3].new_empty([kept], dtype=torch.uint8)), inside
    if operator is aten.mkldnn_rnn_layer_backward:
        inside = _lstm((*args[:7], args[13], args[20], *args[14:18], args[19], args[21], True))[2]
        absent = sum(_bytes(args[place]) for place, grad in zip(range(7, 10), args[10:13], strict=True) if grad is None)
        return out, inside + absent + _copies(*(grad for grad in args[10:13] if grad is not None))
    if operator in _ASKED and _is_asked(operator, args, out):
        return out, _inside(operator, args)
    formula = _FORMULAS.get(operator)
    return out, 0 if formula is None else max(0, formula(args, out))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _blocked(tensor: Tensor) -> int:
    """Bytes of (N, C, ...) with its channels rounded up to whole blocks."""
    channels = tensor.shape[1]
    return _bytes(tensor) // channels * math.ceil(channels / BLOCK) * BLOCK if channels else 0


def _is_last(tensor: Tensor) -> bool:
    """Whether the channels stand last in memory, which oneDNN takes as it is."""
    return tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    given, weight = args[0], args[1]
    if _is_last(given):
        return _bytes(weight)
    if out.element_size() < 4:
        return max(_bytes(given) + _bytes(out) + _bytes(weight), 3 * _bytes(out)) - _bytes(out)
    source = _blocked(given) + _bytes(weight) if given.shape[1] >= BLOCK else 0
    return max(source + _blocked(out), _blocked(out) + _bytes(out)) - _bytes(out)


def _convolution_backward(args: tuple[Any, ...], out: Any) -> int:
    grad, given, weight, stride = args[0], args[1], args[2], args[4]
    made = sum(_bytes(each) for each in out if isinstance(each, Tensor))
    copied = 0 if grad.is_contiguous() else _bytes(grad)
    if _is_last(given):
        return (0 if _is_last(grad) else _bytes(grad)) + 2 * _bytes(weight)
    narrow = given.element_size() < 4
    source = (_bytes(given) if narrow else _blocked(given)) if given.shape[1] >= BLOCK else 0
    target = _bytes(grad) if narrow else _blocked(grad)
    weights = source + target + made
    if out[0] is None:
        return copied + weights - made
    times = 3 if narrow or max(stride) > 1 else 2
    return copied + max(times * _bytes(given), weights) - made


def _batch_norm_backward(args: tuple[Any, ...], out: Any) -> int:
    return _bytes(args[1])


def _copies(*tensors: Tensor) -> int:
    """Kernels that want their tensors in one piece copy those that are not."""
    return sum(_bytes(each) for each in tensors if not each.is_contiguous())


def _arithmetic(args: tuple[Any, ...], out: Tensor) -> int:
    """What is not of the common dtype is copied into it; into a narrower tensor the result goes by another copy."""
    common = functools.reduce(
        torch.promote_types, (each.dtype for each in args[:2] if isinstance(each, Tensor) and each.ndim), out.dtype
    )
    copies = sum(each.numel() for each in args[:2] if isinstance(each, Tensor) and each.ndim and each.dtype != common)
    return (copies + (out.numel() if out.dtype != common else 0)) * common.itemsize


def _reduction(args: tuple[Any, ...], out: Tensor) -> int:
    """A mean of 16 bits is one of a copy in fp32."""
    return (args[0].numel() + out.numel()) * 4 if args[0].element_size() < 4 and args[0].is_floating_point() else 0


_FORMULAS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten.native_layer_norm: lambda args, out: _copies(args[0]),
    aten.native_layer_norm_backward: lambda args, out: _copies(args[0], args[1]),
    aten.upsample_nearest2d: lambda args, out: _bytes(args[0]) + _bytes(out),
    aten.upsample_nearest2d_backward: lambda args, out: _copies(args[0]),
    aten._safe_softmax: lambda args, out: out.numel(),
    aten.mean: _reduction,
    **dict.fromkeys((aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_), _arithmetic),
}
_ASKED = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution_backward)


def _is_asked(operator: Any, args: tuple[Any, ...], out: Any) -> bool:
    """A small one in 16 bits; convolutions in bf16 alone, since fp16 takes seconds where a CPU has no units for it."""
    tensors = [*find_tensors(args), *find_tensors(out)]
    dtypes = (torch.bfloat16,) if operator is aten.convolution_backward else (torch.bfloat16, torch.float16)
    return tensors[0].dtype in dtypes and sum(map(_bytes, tensors)) <= MOST_ASKED_BYTES


def _inside(operator: Any, args: tuple[Any, ...]) -> int:
    """What it allocates beside what it gives, seen while it runs on zeros."""
    return _inside_once(operator, tuple(_signature(each) for each in args), torch.get_num_threads())


def _signature(given: Any) -> Any:
    if isinstance(given, Tensor):
        return _Sized(tuple(given.shape), given.stride(), given.dtype)
    return tuple(given) if isinstance(given, list) else given


class _Sized(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=1024)
def _inside_once(operator: Any, given: tuple[Any, ...], num_threads: int) -> int:
    def ask() -> int:
        torch.set_num_threads(num_threads)  # a thread has its own
        args = [
            torch.empty_strided(each.shape, each.stride, dtype=each.dtype).zero_() if isinstance(each, _Sized) else each
            for each in given
        ]
        rise = Rise()
        rise.start()
        made = operator(*args)
        return rise.stop() - sum(map(_bytes, find_tensors(made)))

    return max(0, _where_there_are_numbers(ask) or 0)


def _where_there_are_numbers(ask: Callable[[], Any]) -> Any:
    """What `ask` gives in a thread of its own, where tensors have numbers; None for what the library does not take here."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            found.append(ask())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


def _lstm(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Bytes of an LSTM layer's workspace, and those inside its forward and its backward pass."""
    given = args[0]
    if given.dtype not in (torch.float32, torch.bfloat16):
        return 0, 0, 0  # asked in another format, the library may end the process
    shapes = tuple(tuple(each.shape) for each in args[:7])
    at = functools.partial(_ask_once, shapes, given.dtype, tuple(tuple(x) if isinstance(x, list) else x for x in args[7:]))
    steps = given.shape[0]
    if steps <= LONG:
        return at(steps)
    low, high = at(SHORT), at(LONG)
    kept, forward, backward = (b + (b - a) * (steps - LONG) // (LONG - SHORT) for a, b in zip(low, high, strict=True))
    return kept, forward, backward


@functools.lru_cache(maxsize=256)
def _ask_once(shapes: tuple[Any, ...], dtype: torch.dtype, rest: tuple[Any, ...], steps: int) -> tuple[int, int, int]:
    found: tuple[int, int, int] | None = _where_there_are_numbers(functools.partial(_ask, shapes, dtype, rest, steps))
    return found or (0, 0, 0)


def _ask(shapes: tuple[Any, ...], dtype: torch.dtype, rest: tuple[Any, ...], steps: int) -> tuple[int, int, int]:
    tensors = [torch.zeros((steps, *shape[1:]) if not number else shape, dtype=dtype) for number, shape in enumerate(shapes)]
    reverse, sizes, mode, hidden, layers, biases, both, first, _ = rest
    rise = Rise()
    rise.start()
    made = aten.mkldnn_rnn_layer(*tensors, reverse, list(sizes), mode, hidden, layers, biases, both, first, True)
    forward = rise.stop() - sum(map(_bytes, made))
    output, hy, cy, kept = made
    grads = [torch.zeros_like(each) for each in (output, hy, cy)]
    rise = Rise()
    rise.start()
    back = aten.mkldnn_rnn_layer_backward(
        *tensors[:5], tensors[5], tensors[6], output, hy, cy, *grads, reverse, mode, hidden, layers, biases, True, both,
        list(sizes), first, kept,
    )  # fmt: skip
    backward = rise.stop() - sum(_bytes(each) for each in back if isinstance(each, Tensor))
    return _bytes(kept), forward, backward
