"""FLOPs of matmuls, convolutions, attention, recurrent layers and norms, from their sizes.

All counts follow docs/concepts/roofline.md. A multiplication and its addition are two FLOPs. A bias
that is added in the same call is not counted. Padding is counted like data. For causal attention
only the unmasked pairs are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# per element: maximum, difference, exponential, sum, quotient; two products, a sum, a difference
SOFTMAX, SOFTMAX_BACKWARD = 5, 4
# per element: mean, difference, square, sum, scale; square, sum, scale
NORM_FORWARD = {"layer": 5, "rms": 3}
NORM_BACKWARD = {"layer": 9, "rms": 5}
# per hidden unit of a cell with 4 gates (LSTM), 3 (GRU) or 1 (plain): sums, activations, the new
# state
GATE_WORK = {4: 13, 3: 11, 1: 2}


def product_flops(out_elements: int, inner: int) -> int:
    """Return the FLOPs of a matmul with `out_elements` results, each a sum over `inner` terms.

    >>> product_flops(out_elements=32 * 10, inner=64)
    40960
    """
    return 2 * out_elements * inner


def convolution_flops(weight: Sequence[int], out_elements: int) -> int:
    """Return the FLOPs of a convolution with a weight of shape `weight`.

    The shape is (out channels, in channels / groups, *kernel size). `out_elements` is the number of
    output elements, or, for a transposed convolution, of input elements.

    >>> convolution_flops((8, 3, 5, 5), out_elements=2 * 8 * 28 * 28)
    1881600
    """
    return product_flops(out_elements, math.prod(weight[1:]))


def attention_pairs(queries: int, keys: int, *, causal: bool) -> int:
    """Return the number of (query, key) pairs in one attention head, without masked pairs.

    In causal attention the i-th query uses the first i keys.

    >>> attention_pairs(4, 4, causal=False)
    16
    >>> attention_pairs(4, 4, causal=True), attention_pairs(4, 2, causal=True)
    (10, 7)
    """
    if not causal:
        return queries * keys
    seen = min(queries, keys)
    return seen * (seen + 1) // 2 + (queries - seen) * keys


def attention_flops(pairs: int, key_size: int, value_size: int) -> tuple[int, int]:
    """Return the FLOPs of the forward pass of fused attention: (total, matmuls only).

    `pairs` is the number of (query, key) pairs in all heads. The total includes the softmax; there
    are two matmuls.
    """
    products = 2 * pairs * (key_size + value_size)
    return products + SOFTMAX * pairs, products


def attention_backward_flops(pairs: int, key_size: int, value_size: int) -> tuple[int, int]:
    """Return the FLOPs of the backward pass of fused attention: (total, matmuls only).

    `pairs` is the number of (query, key) pairs in all heads. The second number has the four matmuls
    of the gradients. The total also includes the softmax and the recomputation of the scores.
    """
    asked = 4 * pairs * (key_size + value_size)
    again = 2 * pairs * key_size + 2 * pairs
    return asked + again + SOFTMAX_BACKWARD * pairs, asked


def recurrent_flops(rows: int, inputs: int, hidden: int, gates: int) -> tuple[int, int]:
    """Return the FLOPs of a recurrent layer's forward pass in one direction: (total, matmuls only).

    `rows` is sequence length * batch size. `gates` is 4 for an LSTM, 3 for a GRU and 1 for a plain
    RNN.

    >>> recurrent_flops(rows=1, inputs=3, hidden=2, gates=4)
    (106, 80)
    """
    products = product_flops(rows * gates * hidden, inputs + hidden)
    return products + GATE_WORK[gates] * rows * hidden, products


def norm_flops(elements: int, kind: str, *, weight: bool, bias: bool) -> int:
    """Return the FLOPs of the forward pass of a normalization layer, "layer" or "rms".

    Work that is done once per row (the root, the division by the count) is not counted.
    """
    return elements * (NORM_FORWARD[kind] + weight + bias)


def norm_backward_flops(elements: int, kind: str, *, weight: bool, bias: bool) -> int:
    """Return the FLOPs of the backward pass of a normalization layer, "layer" or "rms".

    For each element a weight adds three FLOPs: one for its product with the gradient, and two for
    its own gradient. A bias adds one.
    """
    return elements * (NORM_BACKWARD[kind] + 3 * weight + bias)


def training_bytes(parameters: int, *, number_bytes: int = 4, states: int = 2) -> dict[str, int]:
    """Return the bytes that training needs for any batch: weights, gradients and optimizer state.

    `number_bytes` is the size of a number, 4 for fp32. `states` is the number of optimizer state
    elements per parameter, 2 for Adam and AdamW. In fp32 with Adam the sum is 16 bytes per
    parameter. For example, 70 B parameters have 280 GB of weights, which fill 3.5 devices of 80 GB;
    175 B parameters have 700 GB.

    >>> training_bytes(70 * 10**9)
    {'parameters': 280000000000, 'gradients': 280000000000, 'optimizer': 560000000000}
    >>> training_bytes(175 * 10**9)["parameters"], sum(training_bytes(1).values())
    (700000000000, 16)
    """
    weights = parameters * number_bytes
    return {"parameters": weights, "gradients": weights, "optimizer": states * weights}


def transformer_flops(
    parameters: int, *, tokens: int, layers: int, width: int, length: int, causal: bool = True
) -> int:
    """Return the FLOPs of a transformer's training step: 6 * parameters * tokens, and attention.

    Kaplan et al. 2020; Chowdhery et al. 2022 (PaLM), appendix B. For each token, a parameter costs
    one multiplication and addition in the forward pass, and two in the backward pass. Attention has
    two matmuls over the (query, key) pairs in the forward pass, and four in the backward pass.
    Masked pairs are not counted, although PaLM counts them.

    >>> transformer_flops(1000, tokens=8, layers=1, width=4, length=4)
    48960
    """
    pairs = tokens // length * attention_pairs(length, length, causal=causal)
    return 6 * parameters * tokens + 12 * layers * width * pairs
