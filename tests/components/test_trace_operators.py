"""Tests of the operators of a trace: calls, times, memory and FLOPs are torch's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from surefoot.components.profiler.counts import Counter
from surefoot.components.profiler.tracing import trace
from surefoot.components.profiler.tracing.analysis import analyze
from surefoot.components.profiler.tracing.operators import (
    OperatorStats,
    count_flops,
    find_operators,
)
from tests.components.recorded import record


def test_operators_have_torch_s_own_calls_times_memory_and_flops(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )
    options: dict[str, Any] = {"record_shapes": True, "profile_memory": True, "with_flops": True}
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, **options) as torchs:
        for _ in range(3):
            model(torch.randn(2, 3, 8, 8)).sum().backward()
    torchs.export_chrome_trace(str(tmp_path / "trace.json"))
    ours = {each.name: each for each in find_operators(trace.read(tmp_path / "trace.json"))}
    theirs = {each.key: each for each in torchs.key_averages() if not each.key.startswith("[")}
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert each.calls == theirs[name].count
        assert each.self_s == pytest.approx(
            theirs[name].self_cpu_time_total / 1e6, abs=1e-6 * each.calls
        ), name
        assert each.total_s == pytest.approx(
            theirs[name].cpu_time_total / 1e6, abs=1e-6 * each.calls
        ), name
        assert each.self_bytes == theirs[name].self_cpu_memory_usage, name
    for name in ("aten::conv2d", "aten::mm", "aten::addmm"):
        assert ours[name].flops == theirs[name].flops > 0


def recorded_operators(folder: Path, run: Callable[[], Any]) -> dict[str, OperatorStats]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as torchs:
        run()
    torchs.export_chrome_trace(str(folder / "trace.json"))
    return {each.name: each for each in find_operators(trace.read(folder / "trace.json"))}


def test_the_backward_pass_of_a_transposed_convolution_counts_each_input_with_its_window() -> None:
    shapes: list[Any] = [[1, 8, 9, 9], [1, 4, 4, 4], [4, 8, 3, 3], *([[]] * 8)]
    values = [
        "",
        "",
        "",
        "[0]",
        "[2, 2]",
        "[0, 0]",
        "[1, 1]",
        "True",
        "[0, 0]",
        "1",
        "[True, True, False]",
    ]
    assert (
        count_flops("aten::convolution_backward", shapes, values)
        == 2 * (2 * 4 * 16 * 8 * 9)
        == 18_432
    )
    # nobody knows whether it is transposed
    assert count_flops("aten::convolution_backward", shapes, values[:7]) is None


LAYERS = {  # with results or inputs, and the multiply-adds of each
    "transposed": (nn.ConvTranspose2d(4, 8, 3, stride=2, bias=False), 4 * 5 * 5, 8 * 9),
    "transposed, in groups": (
        nn.ConvTranspose2d(4, 8, 3, stride=2, groups=2, dilation=2, bias=False),
        4 * 5 * 5,
        4 * 9,
    ),
    "in groups": (nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), 8 * 5 * 5, 2 * 9),
}


@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_count_as_by_hand_as_the_roofline_and_as_torch_does(
    name: str, tmp_path: Path
) -> None:
    layer, elements, each = LAYERS[name]

    def run() -> None:
        layer(torch.randn(3, 4, 5, 5, requires_grad=True)).sum().backward()

    ours, by_hand = recorded_operators(tmp_path, run), 2 * 3 * elements * each
    assert (ours["aten::convolution"].flops, ours["aten::convolution_backward"].flops) == (
        by_hand,
        2 * by_hand,
    )
    top = "aten::conv_transpose2d" if "transposed" in name else "aten::conv2d"
    assert ours[top].flops == by_hand
    with Counter(layer) as counter, FlopCounterMode(display=False) as theirs:
        run()
    assert sum(work.flops for work in counter.of() if work.group == "product") == 3 * by_hand
    if "groups" not in name:  # torch's own counter leaves groups out of the gradient of the weights
        assert theirs.get_total_flops() == 3 * by_hand


def test_what_was_given_is_unknown_where_the_trace_does_not_tell_the_tensors_of_a_list(
    tmp_path: Path,
) -> None:
    weight = nn.Parameter(torch.randn(6, 7))
    weight.grad = torch.randn(6, 7)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def run() -> None:
        optimizer.step()
        torch._foreach_norm([weight, weight])
        for parts in ([torch.ones(3, 4), torch.ones(5, 4)], [torch.ones(1)] * 40):
            torch.stack(parts[:1])
            torch.cat(parts)
        torch.ones(9)[torch.tensor([0, 1])].to(torch.float8_e5m2).clone()
        torch.ones(3, 5) @ torch.ones(5, 2)

    ours = recorded_operators(tmp_path, run)
    for name in ("_fused_adamw_", "_foreach_norm", "cat", "stack", "index"):
        assert ours[f"aten::{name}"].bytes is None, name
    assert ours["aten::mm"].bytes == 4 * (3 * 5 + 5 * 2)
    assert ours["aten::clone"].bytes == 2  # of one byte each


def test_products_of_complex_numbers_count_nothing_that_nobody_knows(tmp_path: Path) -> None:
    numbers = torch.ones(3, 3, dtype=torch.complex64)
    product = recorded_operators(tmp_path, lambda: numbers @ numbers)["aten::mm"]
    assert (product.flops, product.bytes) == (None, 2 * 9 * 8)


def test_without_shapes_and_memory_they_are_unknown_and_not_0(tmp_path: Path) -> None:
    found = analyze(record(tmp_path, levels=()))
    assert found.by_stack is None
    assert found.memory is None
    assert {(each.self_bytes, each.flops, each.bytes) for each in found.operators} == {
        (None, None, None)
    }


def test_arguments_that_no_convolution_has_leave_its_flops_unknown() -> None:
    shapes: list[Any] = [[1, 4, 9, 9], [8, 4, 3, 3]]
    far = ["", "", "", "[1, 1]", f"[{10**17}, {10**17}]", "[1, 1]", "1"]
    for values in (
        far,
        [*far[:4], f"[{10**400}, 1]", *far[5:]],
        [*far[:4], "[\u00b2, 1]", *far[5:]],
        [],
    ):
        assert count_flops("aten::conv2d", shapes, values) is None
    # the kernel is larger
    assert (
        count_flops("aten::conv2d", [[1, 4, 1, 1], [8, 4, 3, 3]], [*far[:4], "[0, 0]", *far[5:]])
        is None
    )
    assert (
        count_flops("aten::conv1d", [[1, 4], [8, 4]], ["", "", "", "[1]", "[0]", "[1]", "1"])
        is None
    )
