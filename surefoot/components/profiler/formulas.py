"""FLOPs and bytes of one call of a torch operator, from the shapes of its inputs and outputs.

FLOPs follow the conventions in core/cost/shape. A pointwise operator counts one FLOP for each
floating-point element of its result, whatever the function is.

For bytes, each input tensor is read once and each output is written once, as with a perfect cache.
A broadcast tensor counts the bytes that it occupies in memory. A lookup counts only the rows that
it selects. A view counts 0 bytes.

Operators on complex numbers have no formula for FLOPs: a product takes four times the
multiplications of a real product, a sum takes twice the additions, and there is no agreed count for
other functions.
"""

# the indices below follow the arguments of each operator's schema

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.core.cost import shape

aten: Any = torch.ops.aten
Args = Sequence[Any]
Flops = int | tuple[int, int]  # all FLOPs; where they differ, also the model FLOPs (matmuls)
Formula = Callable[[Args, Mapping[str, Any], Any], Flops]

NO_FLOAT = "none"  # the dtype of an operator on integers, which has no FLOPs
DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
COMPLEX = {
    torch.complex32: "complex32",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


def _packets(names: str) -> set[Any]:
    """Return the torch operators with the given names, which are separated by spaces."""
    return {getattr(aten, name) for name in names.split()}


FIRST_FACTOR = {
    aten.mm: 0,
    aten.bmm: 0,
    aten.mv: 0,
    aten.dot: 0,
    aten._scaled_mm: 0,
    aten.addmm: 1,
    aten.baddbmm: 1,
    aten.addmv: 1,
    aten._addmm_activation: 1,
}
# index of `is_causal`; query, key and value come first, in backward after the gradient
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 4,
    aten._scaled_dot_product_flash_attention: 4,
    aten._scaled_dot_product_efficient_attention: 6,
    aten._scaled_dot_product_cudnn_attention: 6,
}
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    aten._scaled_dot_product_flash_attention_backward: 11,
    aten._scaled_dot_product_efficient_attention_backward: 11,
    aten._scaled_dot_product_cudnn_attention_backward: 14,
}
NORMS = {
    aten.native_layer_norm: "layer",
    aten.native_group_norm: "layer",
    aten._fused_rms_norm: "rms",
}
NORM_WEIGHTS = {
    aten.native_layer_norm: (2, 3),
    aten.native_group_norm: (1, 2),
    aten._fused_rms_norm: (2, None),
}
BATCH_NORMS = {
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten.cudnn_batch_norm,
    aten._batch_norm_with_update,
}
NORMS_BACKWARD = {
    aten.native_layer_norm_backward: ("layer", 5, 6),
    aten.native_group_norm_backward: ("layer", 4, None),
    aten._fused_rms_norm_backward: ("rms", 4, None),
    aten.native_batch_norm_backward: ("layer", 2, None),
    aten.cudnn_batch_norm_backward: ("layer", 2, None),
    aten.batch_norm_backward: ("layer", 2, None),
}
# per element: the first moment 3, the second 4, the divisor 3, the update 3; the update 2
ADAM, SGD = (13, 2)
# FLOPs per element of the first result
SOFTMAXES = {
    aten._softmax: shape.SOFTMAX,
    aten._log_softmax: shape.SOFTMAX,
    aten._safe_softmax: shape.SOFTMAX,
    aten._softmax_backward_data: shape.SOFTMAX_BACKWARD,
    aten._log_softmax_backward_data: shape.SOFTMAX_BACKWARD,
}
DROPOUTS = {aten.native_dropout: 2, aten.native_dropout_backward: 2}
# FLOPs per element of the first argument
PER_INPUT = dict.fromkeys(
    _packets(
        """
        sum mean amax amin max min argmax argmin prod cumsum embedding_dense_backward
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward max_pool2d_with_indices_backward
        avg_pool2d_backward
        """
    ),
    1,
) | {
    aten.linalg_vector_norm: 2,
    aten.norm: 2,
    aten.mse_loss_backward: 2,
    aten.mse_loss: 3,
    aten.var: 4,
    aten.var_mean: 4,
    aten.std: 4,
    aten.logsumexp: 4,
}
LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
# index of the added argument
ADDED_AT = {aten.scatter_add: 3, aten.scatter_add_: 3, aten.index_add: 3, aten.index_add_: 3}
# the first argument is not read
OVERWRITTEN = {aten.copy_, aten.fill_, aten.zero_, aten.zeros_like, aten.ones_like, aten.full_like}
ALLOCATED = _packets(
    """
    empty empty_like empty_strided new_empty new_empty_strided _unsafe_view _reshape_alias
    lift_fresh is_same_size detach_ _local_scalar_dense unsafe_split unsafe_chunk
    """
)
MOVES = _packets(
    """
    copy_ _to_copy clone cat stack fill_ zero_ zeros ones full arange zeros_like ones_like
    full_like new_zeros new_ones new_full constant_pad_nd slice_backward select_backward
    nll_loss_backward scatter scatter_ flip roll repeat masked_fill masked_fill_ bernoulli_
    uniform_ normal_ random_ index_put index_put_ _index_put_impl_ tril triu scalar_tensor
    eye
    """
)
MUTATED = {
    aten._fused_adamw_: (0, 2, 3, 5),
    aten._fused_adam_: (0, 2, 3, 5),
    aten._fused_sgd_: (0, 2),
}


@dataclass(frozen=True)
class OperatorCall:
    """Cost of one call of an operator.

    `group` is the type of the operator, for example "product" or "pointwise". `model_flops` are the
    FLOPs of matmuls, convolutions and attention. `is_known` is false if the operator has no formula
    for its FLOPs.
    """

    group: str
    dtype: str
    flops: int
    model_flops: int
    num_bytes: int
    is_known: bool = True


def count(func: Any, args: Args, kwargs: Mapping[str, Any], out: Any) -> OperatorCall:
    """Return the cost of one call of the operator overload `func`, whose result is `out`."""
    packet = func.overloadpacket
    read, written = list(_tensors((args, kwargs))), list(_tensors(out))
    dtype = _complex_dtype((*written, *read)) or _dtype(written) or _dtype(read) or NO_FLOAT
    if func.is_view or packet in ALLOCATED or not (read or written):
        return OperatorCall("view", dtype, 0, 0, 0)
    flops, group = _flops(func, packet, args, kwargs, out, read, written)
    if dtype in COMPLEX.values() and not _is_free(group, written):
        flops = None
    every, asked = flops if isinstance(flops, tuple) else (flops or 0, 0)
    if dtype == NO_FLOAT:
        every = asked = 0
    return OperatorCall(
        group, dtype, every, asked, _bytes(packet, args, kwargs, read, written), flops is not None
    )


def _is_free(group: str, written: Sequence[Tensor]) -> bool:
    """Return whether an operator, such as a copy or a comparison, has 0 FLOPs for any dtype."""
    return group in ("move", "look-up") or (
        bool(written) and all(each.dtype == torch.bool for each in written)
    )


def _flops(
    func: Any,
    packet: Any,
    args: Args,
    kwargs: Mapping[str, Any],
    out: Any,
    read: list[Tensor],
    written: list[Tensor],
) -> tuple[Flops | None, str]:
    """Return the FLOPs of a call, and the type of the operator, for example "pointwise".

    The FLOPs are None if the operator has no formula.
    """
    if packet in FORMULAS:
        group, formula = FORMULAS[packet]
        return formula(args, kwargs, out), group
    name = packet.__name__
    if packet in MOVES or packet in LOOK_UPS:
        return (_size(args[1]) if packet is aten.nll_loss_forward else 0), (
            "move" if packet in MOVES else "look-up"
        )
    if name.startswith("_foreach_"):
        results = written or list(_tensors(args[0]))
        many = _tensors(args[0]) if name == "_foreach_norm" else results
        return (1 + (name == "_foreach_norm")) * sum(map(Tensor.numel, many)), "pointwise"
    if torch.Tag.pointwise in func.tags:
        return sum(each.numel() for each in written[:1] if each.is_floating_point()), "pointwise"
    return None, "other"


def _bytes(
    packet: Any, args: Args, kwargs: Mapping[str, Any], read: list[Tensor], written: list[Tensor]
) -> int:
    unread: list[Tensor] = list(_tensors(kwargs.get("out")))
    if packet in OVERWRITTEN:
        unread += _tensors(args[0])
    if packet in LOOK_UPS:  # the selected rows, not the table
        unread += _tensors(args[0])
        taken = (
            _size(args[1]) * args[0].element_size()
            if packet is aten.nll_loss_forward
            else sum(map(_stored_bytes, written))
        )
    else:
        taken = 0
    if not written:
        written = list(
            _tensors(
                [
                    args[index]
                    for index in MUTATED.get(packet, (0,) if packet.__name__.endswith("_") else ())
                ]
            )
        )
    skipped = {id(each) for each in unread}
    inputs = {id(each): each for each in read if id(each) not in skipped}
    return (
        taken
        + sum(map(_stored_bytes, inputs.values()))
        + sum(map(_stored_bytes, {id(each): each for each in written}.values()))
    )


def _product(args: Args, kwargs: Mapping[str, Any], out: Tensor, first: int) -> Flops:
    flops = shape.product_flops(out.numel(), args[first].shape[-1])
    return flops, flops


def _convolution(args: Args, kwargs: Mapping[str, Any], out: Tensor) -> Flops:
    inputs, weight, transposed = args[0], args[1], args[6]
    flops = shape.convolution_flops(weight.shape, inputs.numel() if transposed else out.numel())
    return flops, flops


def _convolution_backward(args: Args, kwargs: Mapping[str, Any], out: Any) -> Flops:
    """Return the FLOPs of the backward pass of a convolution.

    Each requested gradient of the input and of the weight costs as much as the forward pass. The
    gradient of the bias is a sum, with one FLOP for each element of the output gradient.
    """
    gradient, inputs, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    once = shape.convolution_flops(weight.shape, inputs.numel() if transposed else gradient.numel())
    products = once * (wanted[0] + wanted[1])
    return products + wanted[2] * gradient.numel(), products


def _attention(args: Args, kwargs: Mapping[str, Any], out: Any, causal_at: int) -> Flops:
    return shape.attention_flops(*_attention_sizes(args[:3], args[causal_at:]))


def _attention_backward(args: Args, kwargs: Mapping[str, Any], out: Any, causal_at: int) -> Flops:
    return shape.attention_backward_flops(*_attention_sizes(args[1:4], args[causal_at:]))


def _attention_sizes(inputs: Sequence[Tensor], causal: Args) -> tuple[int, int, int]:
    """Return the number of query-key pairs, the size of a key, and the size of a value.

    The pairs are summed over batch and heads. `causal` starts with the value of `is_causal`; if it
    is empty, the attention is not causal.
    """
    query, key, value = inputs
    heads = math.prod(query.shape[:-2])
    is_causal = len(causal) > 0 and bool(causal[0])
    pairs = heads * shape.attention_pairs(query.shape[-2], key.shape[-2], causal=is_causal)
    return pairs, key.shape[-1], value.shape[-1]


def _norm(args: Args, kwargs: Mapping[str, Any], out: Any, packet: Any) -> Flops:
    weight, bias = (index is not None and args[index] is not None for index in NORM_WEIGHTS[packet])
    return shape.norm_flops(args[0].numel(), NORMS[packet], weight=weight, bias=bias)


def _batch_norm(args: Args, kwargs: Mapping[str, Any], out: Any) -> Flops:
    """Return the FLOPs of a BatchNorm.

    In evaluation mode, which uses running statistics, only a subtraction, a multiplication and the
    affine parameters count.
    """
    inputs, weight, bias = args[:3]
    is_training = next((each for each in args[3:] if isinstance(each, bool)), True)
    affine = (weight is not None) + (bias is not None)
    whole = shape.norm_flops(
        inputs.numel(), "layer", weight=weight is not None, bias=bias is not None
    )
    return whole if is_training else inputs.numel() * (2 + affine)


def _norm_backward(args: Args, kwargs: Mapping[str, Any], out: Any, packet: Any) -> Flops:
    kind, weight_at, bias_at = NORMS_BACKWARD[packet]
    weight = args[weight_at] is not None
    bias = weight and kind == "layer" if bias_at is None else args[bias_at] is not None
    return shape.norm_backward_flops(args[0].numel(), kind, weight=weight, bias=bias)


def _recurrent(
    args: Args, kwargs: Mapping[str, Any], out: Any, first: int = 0, times: int = 1
) -> Flops:
    """Return the FLOPs of one oneDNN recurrent layer in one direction.

    `first` is the index of the input in `args`. `times` is 2 for a backward pass, which has two
    matmuls for each matmul of the forward pass.
    """
    inputs, weight, hidden = args[first], args[first + 1], args[first + 2].shape[-1]
    rows, gates = inputs.numel() // weight.shape[-1], weight.shape[0] // hidden
    every, products = shape.recurrent_flops(rows, weight.shape[-1], hidden, gates)
    return times * every, times * products


def _update(args: Args, kwargs: Mapping[str, Any], out: Any, per_element: int) -> Flops:
    decay, momentum = bool(kwargs.get("weight_decay")), bool(kwargs.get("momentum"))
    more = 2 * decay + 2 * momentum + 2 * bool(kwargs.get("nesterov"))
    return sum(map(Tensor.numel, args[0])) * (per_element + more)


def _decoupled(args: Args, kwargs: Mapping[str, Any], out: Any) -> Flops:
    return sum(map(Tensor.numel, args[0])) * (ADAM + bool(kwargs.get("weight_decay")))


def _per_result(args: Args, kwargs: Mapping[str, Any], out: Any, flops: int) -> Flops:
    return flops * next(_tensors(out)).numel()


def _per_argument(
    args: Args, kwargs: Mapping[str, Any], out: Any, at: int, flops: int = 1
) -> Flops:
    return flops * _size(args[at])


def _pool(args: Args, kwargs: Mapping[str, Any], out: Any) -> Flops:
    kernel = args[1]
    window = math.prod(kernel) if len(kernel) > 1 else kernel[0] ** 2
    results: Tensor = next(_tensors(out))
    return results.numel() * window


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor in `tree`, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from _tensors(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)


def _dtype(tensors: Iterable[Tensor]) -> str | None:
    return next(
        (
            DTYPES.get(each.dtype, str(each.dtype).removeprefix("torch."))
            for each in tensors
            if each.is_floating_point()
        ),
        None,
    )


def _complex_dtype(tensors: Iterable[Tensor]) -> str | None:
    """Return the name of the first complex dtype among the tensors, or None if there is none.

    A single complex tensor makes the arithmetic of an operator complex.
    """
    return next((COMPLEX[each.dtype] for each in tensors if each.is_complex()), None)


def _size(tensor: Tensor) -> int:
    return tensor.numel()


def _stored_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies in memory.

    A broadcast dimension, whose stride is 0, does not add to them.
    """
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


# the kind of each operator, and the formula of its FLOPs
FORMULAS: dict[Any, tuple[str, Formula]] = {
    **{each: ("product", partial(_product, first=at)) for each, at in FIRST_FACTOR.items()},
    aten.convolution: ("product", _convolution),
    aten.convolution_backward: ("product", _convolution_backward),
    aten.mkldnn_rnn_layer: ("recurrent", _recurrent),
    aten.mkldnn_rnn_layer_backward: ("recurrent", partial(_recurrent, times=2)),
    **{each: ("attention", partial(_attention, causal_at=at)) for each, at in ATTENTION.items()},
    **{
        each: ("attention", partial(_attention_backward, causal_at=at))
        for each, at in ATTENTION_BACKWARD.items()
    },
    **{each: ("normalization", partial(_norm, packet=each)) for each in NORMS},
    **dict.fromkeys(BATCH_NORMS, ("normalization", _batch_norm)),
    **{each: ("normalization", partial(_norm_backward, packet=each)) for each in NORMS_BACKWARD},
    **{
        each: ("normalization", partial(_per_result, flops=flops))
        for each, flops in SOFTMAXES.items()
    },
    **{each: ("pointwise", partial(_per_result, flops=flops)) for each, flops in DROPOUTS.items()},
    **{
        each: ("reduction", partial(_per_argument, at=0, flops=flops))
        for each, flops in PER_INPUT.items()
    },
    **{each: ("reduction", partial(_per_argument, at=at)) for each, at in ADDED_AT.items()},
    aten.max_pool2d_with_indices: ("reduction", _pool),
    aten.avg_pool2d: ("reduction", _pool),
    aten._fused_adamw_: ("optimizer", _decoupled),
    aten._fused_adam_: ("optimizer", partial(_update, per_element=ADAM)),
    aten._fused_sgd_: ("optimizer", partial(_update, per_element=SGD)),
}
