"""FLOPs and bytes of what runs, against counts by hand in the stated convention.

Where torch's own counter has them, against that too.
"""

# B batch, T tokens, D model, N heads, H per head, I in, O out

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from surefoot.components.profiler import formulas
from surefoot.components.profiler.counts import Counter
from surefoot.core.cost import shape
from surefoot.core.cost.roofline import OperatorWork

FLOAT = 4  # bytes


def counted(
    model: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor] = lambda out: out.sum()
) -> Counter:
    """Run a forward and a backward pass under the counter.

    The loss, its gradient and the sums of gradients are part of it.
    """
    with Counter(model) as counter:
        loss(model(*inputs)).backward()
    return counter


def one(counter: Counter, operator: str, module: str = "") -> OperatorWork:
    (found,) = [row for row in counter.of(module) if row.operator == operator]
    return found


def flops(counter: Counter, module: str, *groups: str) -> float:
    return sum(row.flops for row in counter.of(module) if not groups or row.group in groups)


B, INS, OUTS = 8, 12, 20


def test_a_linear_layer_has_two_flops_a_multiply_add_and_twice_that_backward() -> None:
    counter = counted(nn.Linear(INS, OUTS), torch.randn(B, INS, requires_grad=True))
    forward = one(counter, "addmm", ".")
    assert forward.flops == 2 * B * INS * OUTS
    assert forward.num_bytes == FLOAT * (B * INS + INS * OUTS + OUTS + B * OUTS)
    backward = one(counter, "mm", ".")
    assert (backward.calls, backward.flops) == (2, 2 * 2 * B * INS * OUTS)
    # the gradient is that of a sum: one number, broadcast, is read for each of the two products
    assert backward.num_bytes == FLOAT * (1 + INS * OUTS + B * INS + 1 + B * INS + INS * OUTS)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_each_result_with_its_window_padding_included(groups: int) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=groups)
    counter = counted(layer, torch.randn(B, 4, 9, 9, requires_grad=True))
    results, window = B * 6 * 5 * 5, 4 // groups * 9
    forward, backward = one(counter, "convolution"), one(counter, "convolution_backward")
    assert forward.flops == forward.model_flops == 2 * results * window
    assert forward.num_bytes == FLOAT * (B * 4 * 81 + 6 * window + 6 + results)
    assert backward.model_flops == 2 * 2 * results * window
    assert backward.flops == 2 * 2 * results * window + results  # and the sum of the bias


def test_a_convolution_of_data_needs_no_gradient_for_them() -> None:
    counter = counted(nn.Conv2d(4, 6, 3, bias=False), torch.randn(B, 4, 9, 9))
    assert one(counter, "convolution_backward").flops == 2 * B * 6 * 49 * 4 * 9


def test_a_transposed_convolution_counts_each_input_with_its_window() -> None:
    counter = counted(nn.ConvTranspose2d(4, 6, 3, bias=False), torch.randn(B, 4, 9, 9))
    assert one(counter, "convolution").flops == 2 * B * 4 * 81 * 6 * 9


HEADS, T, S, H = 3, 64, 64, 16


class Attention(nn.Module):
    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, is_causal=self.causal)


def attended(*, causal: bool, backend: SDPBackend) -> Counter:
    parts = [torch.randn(B, HEADS, length, H, requires_grad=True) for length in (T, S, S)]
    with sdpa_kernel(backend):
        return counted(Attention(causal=causal), *parts)


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_is_counted_by_the_pairs_that_it_may_see(causal: bool) -> None:
    counter = attended(causal=causal, backend=SDPBackend.FLASH_ATTENTION)
    pairs = B * HEADS * (T * (T + 1) // 2 if causal else T * S)
    forward = one(counter, "_scaled_dot_product_flash_attention_for_cpu")
    backward = one(counter, "_scaled_dot_product_flash_attention_for_cpu_backward")
    assert forward.model_flops == 2 * 2 * pairs * H
    assert forward.flops == 2 * 2 * pairs * H + 5 * pairs  # and the softmax
    # out, and the log of the sums
    assert forward.num_bytes == FLOAT * B * HEADS * (T * H + 2 * S * H + T * H + T)
    assert backward.model_flops == 2 * forward.model_flops
    # the scores and their exponentials again
    assert backward.flops == 5 * 2 * pairs * H + 2 * pairs + 4 * pairs


def test_attention_that_is_not_fused_counts_its_products_and_its_softmax_alike() -> None:
    counter = attended(causal=False, backend=SDPBackend.MATH)
    pairs = B * HEADS * T * S
    assert flops(counter, "", "product") == 3 * 2 * 2 * pairs * H
    (softmax,) = [row for row in counter.of() if row.operator in ("_softmax", "_safe_softmax")]
    assert softmax.flops == 5 * pairs
    assert one(counter, "_softmax_backward_data").flops == 4 * pairs


def test_an_embedding_looks_up_and_its_gradient_adds() -> None:
    ids = torch.randint(50, (B, 7))
    counter = counted(nn.Embedding(50, 16), ids)
    rows = B * 7 * 16
    look_up, added = one(counter, "embedding"), one(counter, "embedding_dense_backward")
    assert (look_up.flops, added.flops) == (0, rows)
    # the rows that are taken, not the table
    assert look_up.num_bytes == FLOAT * rows + 8 * B * 7 + FLOAT * rows
    # of a sum: its gradient is one number
    assert added.num_bytes == FLOAT * 1 + 8 * B * 7 + FLOAT * 50 * 16


NORMS = {
    "layer": (nn.LayerNorm(16), "native_layer_norm", 5 + 2, 9 + 3 + 1),
    "layer, plain": (nn.LayerNorm(16, elementwise_affine=False), "native_layer_norm", 5, 9),
    "group": (nn.GroupNorm(4, 16), "native_group_norm", 5 + 2, 9 + 3 + 1),
    "batch": (nn.BatchNorm1d(16), "native_batch_norm", 5 + 2, 9 + 3 + 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_normalization_has_its_flops_an_element(name: str) -> None:
    layer, operator, forward, backward = NORMS[name]
    counter = counted(
        layer, torch.randn(B, 16, requires_grad=True), loss=lambda out: (out * out).sum()
    )
    assert one(counter, operator).flops == forward * B * 16
    assert one(counter, f"{operator}_backward").flops == backward * B * 16


def test_a_normalization_in_evaluation_has_its_statistics_given() -> None:
    layer = nn.BatchNorm1d(16).eval()
    with Counter(layer) as counter:
        layer(torch.randn(B, 16))
    assert one(counter, "native_batch_norm").flops == 4 * B * 16


def test_a_layer_norm_reads_and_writes_each_tensor_once() -> None:
    counter = counted(nn.LayerNorm(16), torch.randn(B, 16, requires_grad=True))
    assert one(counter, "native_layer_norm").num_bytes == FLOAT * (
        B * 16 + 16 + 16 + B * 16 + B + B
    )


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_has_four_gates_over_input_and_state_at_each_time(bidirectional: bool) -> None:
    ins, hidden, layers, length = 10, 6, 2, 5
    model = nn.LSTM(ins, hidden, num_layers=layers, bidirectional=bidirectional)
    counter = counted(model, torch.randn(length, B, ins), loss=lambda out: out[0].sum())
    ways = 1 + bidirectional
    products = sum(
        ways * 2 * length * B * 4 * hidden * (each + hidden) for each in (ins, ways * hidden)
    )
    forward, backward = one(counter, "mkldnn_rnn_layer"), one(counter, "mkldnn_rnn_layer_backward")
    assert forward.calls == layers * ways
    assert forward.model_flops == products
    assert forward.flops == products + 13 * layers * ways * length * B * hidden
    assert (backward.model_flops, backward.flops) == (2 * products, 2 * forward.flops)


def test_an_lstm_that_is_not_fused_counts_the_same() -> None:
    ins, hidden, length = 10, 6, 5
    model, inputs = nn.LSTM(ins, hidden), torch.randn(length, B, ins)
    with torch.backends.mkldnn.flags(enabled=False), Counter(model) as counter:
        model(inputs)
    fused = shape.recurrent_flops(length * B, ins, hidden, 4)
    assert (flops(counter, "."), flops(counter, ".", "product")) == fused


def test_a_fused_update_reads_and_writes_parameters_and_moments_and_reads_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(100))
    parameter.grad = torch.ones(100)
    optimizer = torch.optim.AdamW([parameter], weight_decay=0.1, fused=True)
    optimizer.step()
    with Counter(nn.Identity()) as counter:
        optimizer.step()
    update = one(counter, "_fused_adamw_")
    assert update.flops == 14 * 100
    assert update.num_bytes == FLOAT * (4 * 100 + 1 + 3 * 100 + 1)  # and the count of its steps


def test_a_pointwise_operator_counts_its_results_and_a_broadcast_tensor_has_the_bytes_it_has() -> (
    None
):
    with Counter(nn.Identity()) as counter:
        made = torch.randn(B, 16) + torch.randn(16).expand(B, 16)
        _ = (made > 0).sum()
        made.mul_(2.0)
        made.zero_()
        made.view(-1)
    assert (one(counter, "add").flops, one(counter, "add").num_bytes) == (
        B * 16,
        FLOAT * (B * 16 + 16 + B * 16),
    )
    assert one(counter, "gt").flops == 0  # its results are no numbers
    assert one(counter, "sum").flops == 0  # and neither is counting them
    assert one(counter, "mul_").num_bytes == FLOAT * 2 * B * 16
    assert one(counter, "zero_").num_bytes == FLOAT * B * 16  # nothing is read
    assert (one(counter, "view").flops, one(counter, "view").num_bytes) == (0, 0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INS, OUTS)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(OUTS, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rest(self.first(x))
        return out


def test_a_module_has_its_forward_and_backward_pass_and_all_that_is_inside() -> None:
    counter = counted(Two(), torch.randn(B, INS, requires_grad=True))
    first, last = 2 * B * INS * OUTS, 2 * B * OUTS * 2
    assert {name: flops(counter, name, "product") for name in counter.modules()} == {
        ".": 3 * (first + last),
        "first": 3 * first,
        "rest": 3 * last,
        "rest.0": 0,
        "rest.1": 3 * last,
    }
    assert flops(counter, "", "product") == 3 * (first + last)


class Shared(nn.Module):
    """Three layers over one input, and one that hands it on unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: nn.Linear(INS, size) for name, size in (("a", 3), ("b", 5), ("c", 7))}
        )
        self.idle = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(self.idle(x)) for layer in self.layers.values()], dim=1)


def test_layers_that_share_an_input_are_told_apart_in_the_backward_pass_too() -> None:
    model = nn.Sequential(nn.Linear(INS, INS), Shared(), nn.Linear(15, 2))
    counter = counted(model, torch.randn(B, INS))
    found = {name: flops(counter, name, "product") for name in counter.modules()}
    shared = {
        f"1.layers.{name}": 3 * 2 * B * INS * size for name, size in (("a", 3), ("b", 5), ("c", 7))
    }
    assert {name: found[name] for name in shared} == shared
    assert found["1"] == found["1.layers"] == sum(shared.values())
    # the data need no gradient
    assert (found["0"], found["2"]) == (2 * 2 * B * INS * INS, 3 * 2 * B * 15 * 2)
    assert found.get("1.idle", 0) == 0


class Before(nn.Module):
    """A product of its own, and then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(INS, OUTS)), nn.Linear(OUTS, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x @ self.weight)
        return out


def test_a_layer_has_no_part_of_what_came_before_it() -> None:
    counter = counted(Before(), torch.randn(B, INS, requires_grad=True))
    assert flops(counter, "layer", "product") == 3 * 2 * B * OUTS * 2
    assert flops(counter, ".", "product") == 3 * 2 * B * OUTS * (2 + INS)


def test_an_optimizers_products_are_no_part_of_the_models_own() -> None:
    model, inputs = Two(), torch.randn(B, INS, requires_grad=True)
    with Counter(model) as counter:
        model(inputs).sum().backward()
        with torch.no_grad():
            _ = model.first.weight @ model.first.weight.T
            model(inputs)  # one that is asked for without a gradient, as of a teacher, is
    own = 2 * B * (INS * OUTS + OUTS * 2)
    assert sum(work.model_flops for work in counter.of()) == 4 * own
    assert flops(counter, "", "product") == 4 * own + 2 * OUTS * OUTS * INS


class Recomputed(Two):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def test_what_is_recomputed_is_no_part_of_the_models_own() -> None:
    inputs = torch.randn(B, INS, requires_grad=True)
    plain, again = counted(Two(), inputs), counted(Recomputed(), inputs)
    own = [sum(row.model_flops for row in each.of()) for each in (plain, again)]
    assert own[0] == own[1]
    # the last product is not needed again
    assert (plain.again_flops, again.again_flops) == (0, 2 * B * INS * OUTS)
    assert flops(again, "", "product") == own[1] + again.again_flops


def test_torchs_own_counter_says_the_same_where_it_has_a_formula() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10), nn.LayerNorm(10)
    )
    inputs = torch.randn(B, 3, 8, 8)
    with FlopCounterMode(display=False) as theirs:
        model(inputs).sum().backward()
    # and the sum of the bias
    assert flops(counted(model, inputs), "", "product") == theirs.get_total_flops() + B * 8 * 36
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), FlopCounterMode(display=False) as none:
        F.scaled_dot_product_attention(*(torch.randn(1, 2, 8, 16) for _ in range(3)))
    assert none.get_total_flops() == 0  # why fused attention on a CPU has a formula of ours


def test_an_operator_without_a_formula_is_named_and_not_guessed() -> None:
    numbers = torch.randn(9)
    with Counter(nn.Identity()) as counter:
        numbers.sort()
    assert counter.unknown == {"sort"}
    assert one(counter, "sort").flops == 0


def test_complex_arithmetic_is_named_and_not_counted_and_what_counts_nothing_is_not() -> None:
    numbers, reals = torch.randn(B, B, dtype=torch.complex64), torch.randn(B, B)
    with Counter(nn.Identity()) as counter:
        _ = (numbers @ numbers + reals) * 2
        _ = numbers.abs().max()
        _ = numbers.clone() == numbers
        _ = torch.view_as_real(numbers).view(-1)
        _ = reals @ reals
    assert counter.unknown == {
        "mm (complex64)",
        "add (complex64)",
        "mul (complex64)",
        "abs (complex64)",
    }
    found = {(row.operator, row.dtype): row for row in counter.of()}
    assert found["mm", "complex64"].flops == found["mm", "complex64"].model_flops == 0
    assert found["mm", "complex64"].num_bytes == 8 * 2 * B * B  # the two factors are one tensor
    assert found["mm", "fp32"].flops == 2 * B**3


@pytest.mark.parametrize("groups", [1, 2])
def test_the_gradients_of_a_transposed_convolution_count_each_input_with_its_window(
    groups: int,
) -> None:
    counter = counted(
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=groups),
        torch.randn(B, 4, 9, 9, requires_grad=True),
    )
    products = 2 * 2 * B * 4 * 81 * 6 // groups * 9
    assert one(counter, "convolution_backward").model_flops == products
    # and the sum of the bias
    assert one(counter, "convolution_backward").flops == products + B * 6 * 19 * 19


POSITIONS = {
    **{
        each: ("is_causal", at)
        for table in (formulas.ATTENTION, formulas.ATTENTION_BACKWARD)
        for each, at in table.items()
    }
}


@pytest.mark.parametrize("packet", POSITIONS, ids=str)
def test_arguments_stand_where_the_schema_of_torch_has_them(packet: Any) -> None:
    name, at = POSITIONS[packet]
    assert packet.default._schema.arguments[at].name == name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_time_on_a_gpu_is_that_of_the_kernel() -> None:
    model = nn.Linear(4096, 4096, device="cuda")
    inputs = torch.randn(8192, 4096, device="cuda")
    for _ in range(3):
        counter = counted(model, inputs)
    assert one(counter, "addmm").elapsed_s > 2 * 8192 * 4096**2 / 1e15
