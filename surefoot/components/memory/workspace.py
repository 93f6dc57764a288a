"""Memory that CPU kernels save or allocate internally, which fake tensors do not show.

The formulas describe the allocations of torch 2.13 with oneDNN 3.x on x86, as measured with torch's
profiler (benchmarks/memory_prediction). A convolution changes the layout of its inputs and outputs,
arithmetic between dtypes copies the narrower tensor, and an LSTM saves a workspace for its backward
pass. The workspace of an LSTM grows linearly with the sequence length, so it is measured on two
short sequences and extrapolated. The memory of matmuls and convolutions in 16 bits follows no
simple rule, so it is measured for calls up to a certain size.
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
from surefoot.runtime.nested_tensors import find_tensors

BLOCK = 16  # channels in one block of oneDNN's layout
SHORT, LONG = 2, 34  # sequence lengths for the measurement of an LSTM's workspace
MAX_MEASURED_BYTES = 1 << 25  # of inputs and outputs; measuring more takes seconds
aten = torch.ops.aten


def measure_workspace(func: Any, args: tuple[Any, ...], out: Any) -> tuple[Any, int]:
    """Return the output of an operator, and the bytes that its kernel allocates while it runs.

    In the output of an LSTM, the workspace is replaced by one with the size that the kernel really
    saves.
    """
    operator = func.overloadpacket
    if operator is aten.mkldnn_rnn_layer:
        kept, inside, _ = _lstm(args)
        return (*out[:3], out[3].new_empty([kept], dtype=torch.uint8)), inside
    if operator is aten.mkldnn_rnn_layer_backward:
        inside = _lstm((*args[:7], args[13], args[20], *args[14:18], args[19], args[21], True))[2]
        absent = sum(
            _bytes(args[place])
            for place, grad in zip(range(7, 10), args[10:13], strict=True)
            if grad is None
        )
        return out, inside + absent + _copies(*(grad for grad in args[10:13] if grad is not None))
    if operator in _ASKED and _is_measured(operator, args, out):
        return out, _workspace_bytes(operator, args)
    formula = _FORMULAS.get(operator)
    return out, 0 if formula is None else max(0, formula(args, out))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _channel_blocked_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor (N, C, ...) after C is rounded up to a multiple of BLOCK."""
    channels = tensor.shape[1]
    return _bytes(tensor) // channels * math.ceil(channels / BLOCK) * BLOCK if channels else 0


def _is_last(tensor: Tensor) -> bool:
    """Return whether a tensor is in channels-last format, which oneDNN uses without reordering."""
    return (
        tensor.ndim == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    given, weight = args[0], args[1]
    if _is_last(given):
        return _bytes(weight)
    if out.element_size() < 4:
        return max(_bytes(given) + _bytes(out) + _bytes(weight), 3 * _bytes(out)) - _bytes(out)
    source = _channel_blocked_bytes(given) + _bytes(weight) if given.shape[1] >= BLOCK else 0
    return max(
        source + _channel_blocked_bytes(out), _channel_blocked_bytes(out) + _bytes(out)
    ) - _bytes(out)


def _convolution_backward(args: tuple[Any, ...], out: Any) -> int:
    grad, given, weight, stride = args[0], args[1], args[2], args[4]
    made = sum(_bytes(each) for each in out if isinstance(each, Tensor))
    copied = 0 if grad.is_contiguous() else _bytes(grad)
    if _is_last(given):
        return (0 if _is_last(grad) else _bytes(grad)) + 2 * _bytes(weight)
    narrow = given.element_size() < 4
    source = (
        (_bytes(given) if narrow else _channel_blocked_bytes(given))
        if given.shape[1] >= BLOCK
        else 0
    )
    target = _bytes(grad) if narrow else _channel_blocked_bytes(grad)
    weights = source + target + made
    if out[0] is None:
        return copied + weights - made
    times = 3 if narrow or max(stride) > 1 else 2
    return copied + max(times * _bytes(given), weights) - made


def _batch_norm_backward(args: tuple[Any, ...], out: Any) -> int:
    return _bytes(args[1])


def _copies(*tensors: Tensor) -> int:
    """Return the bytes of the tensors that are not contiguous, which kernels copy."""
    return sum(_bytes(each) for each in tensors if not each.is_contiguous())


def _arithmetic(args: tuple[Any, ...], out: Tensor) -> int:
    """Return the bytes that an arithmetic operator between tensors of different dtypes copies.

    An operand is copied if its dtype is not the common dtype. A result in a narrower dtype is
    computed in a temporary copy.
    """
    common = functools.reduce(
        torch.promote_types,
        (each.dtype for each in args[:2] if isinstance(each, Tensor) and each.ndim),
        out.dtype,
    )
    copies = sum(
        each.numel()
        for each in args[:2]
        if isinstance(each, Tensor) and each.ndim and each.dtype != common
    )
    return (copies + (out.numel() if out.dtype != common else 0)) * common.itemsize


def _reduction(args: tuple[Any, ...], out: Tensor) -> int:
    """Return the bytes of the fp32 copies in the mean of a 16-bit tensor; 0 for other dtypes."""
    return (
        (args[0].numel() + out.numel()) * 4
        if args[0].element_size() < 4 and args[0].is_floating_point()
        else 0
    )


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
    **dict.fromkeys(
        (aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_),
        _arithmetic,
    ),
}
_ASKED = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution_backward)


def _is_measured(operator: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Return whether the memory of an operator call is measured by running the call.

    This is the case for small calls in 16 bits. The backward pass of a convolution is measured only
    in bf16, because fp16 takes seconds on a CPU without fp16 units.
    """
    tensors = [*find_tensors(args), *find_tensors(out)]
    dtypes = (
        (torch.bfloat16,)
        if operator is aten.convolution_backward
        else (torch.bfloat16, torch.float16)
    )
    return tensors[0].dtype in dtypes and sum(map(_bytes, tensors)) <= MAX_MEASURED_BYTES


def _workspace_bytes(operator: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator allocates besides its output, measured with zeros."""
    return _measure_workspace(
        operator, tuple(_signature(each) for each in args), torch.get_num_threads()
    )


def _signature(given: Any) -> Any:
    if isinstance(given, Tensor):
        return _TensorSpec(tuple(given.shape), given.stride(), given.dtype)
    return tuple(given) if isinstance(given, list) else given


class _TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=1024)
def _measure_workspace(operator: Any, given: tuple[Any, ...], num_threads: int) -> int:
    def ask() -> int:
        torch.set_num_threads(num_threads)  # each thread has a separate setting
        args = [
            torch.empty_strided(each.shape, each.stride, dtype=each.dtype).zero_()
            if isinstance(each, _TensorSpec)
            else each
            for each in given
        ]
        rise = Rise()
        rise.start()
        made = operator(*args)
        return rise.stop() - sum(map(_bytes, find_tensors(made)))

    return max(0, _call_with_real_tensors(ask) or 0)


def _call_with_real_tensors(ask: Callable[[], Any]) -> Any:
    """Call `ask` in a separate thread, where tensors have data, and return its result.

    Returns None if `ask` raises RuntimeError.
    """
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            found.append(ask())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


def _lstm(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Return the bytes of an LSTM layer's workspace, and those that its kernels allocate.

    The three results are the workspace, the forward kernel and the backward kernel.
    """
    given = args[0]
    if given.dtype not in (torch.float32, torch.bfloat16):
        return 0, 0, 0  # in a different dtype, oneDNN may abort the process
    shapes = tuple(tuple(each.shape) for each in args[:7])
    at = functools.partial(
        _ask_once,
        shapes,
        given.dtype,
        tuple(tuple(x) if isinstance(x, list) else x for x in args[7:]),
    )
    steps = given.shape[0]
    if steps <= LONG:
        return at(steps)
    low, high = at(SHORT), at(LONG)
    kept, forward, backward = (
        b + (b - a) * (steps - LONG) // (LONG - SHORT) for a, b in zip(low, high, strict=True)
    )
    return kept, forward, backward


@functools.lru_cache(maxsize=256)
def _ask_once(
    shapes: tuple[Any, ...], dtype: torch.dtype, rest: tuple[Any, ...], steps: int
) -> tuple[int, int, int]:
    found: tuple[int, int, int] | None = _call_with_real_tensors(
        functools.partial(_ask, shapes, dtype, rest, steps)
    )
    return found or (0, 0, 0)


def _ask(
    shapes: tuple[Any, ...], dtype: torch.dtype, rest: tuple[Any, ...], steps: int
) -> tuple[int, int, int]:
    tensors = [
        torch.zeros((steps, *shape[1:]) if not number else shape, dtype=dtype)
        for number, shape in enumerate(shapes)
    ]
    reverse, sizes, mode, hidden, layers, biases, both, first, _ = rest
    rise = Rise()
    rise.start()
    made = aten.mkldnn_rnn_layer(
        *tensors, reverse, list(sizes), mode, hidden, layers, biases, both, first, True
    )
    forward = rise.stop() - sum(map(_bytes, made))
    output, hy, cy, kept = made
    grads = [torch.zeros_like(each) for each in (output, hy, cy)]
    rise = Rise()
    rise.start()
    back = aten.mkldnn_rnn_layer_backward(
        *tensors[:5],
        tensors[5],
        tensors[6],
        output,
        hy,
        cy,
        *grads,
        reverse,
        mode,
        hidden,
        layers,
        biases,
        True,
        both,
        list(sizes),
        first,
        kept,
    )
    backward = rise.stop() - sum(_bytes(each) for each in back if isinstance(each, Tensor))
    return _bytes(kept), forward, backward
