"""Tests of windows of torch.profiler.

What a trace shows equals what torch says, adds up, and harms nobody who opens it.
"""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from surefoot.components.profiler.counts import Counter
from surefoot.components.profiler.tracing import (
    Profiler,
    Window,
    analyse,
    draw,
    flame,
    fold,
    memory,
    trace,
    window,
)
from surefoot.components.profiler.tracing.operators import (
    OperatorStats,
    count_flops,
    find_operators,
)
from surefoot.core.errors import InputError

WIDTH, BATCH = 64, 32


def small() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 10))
    return model, torch.optim.AdamW(model.parameters())


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(
        model(torch.randn(BATCH, WIDTH)), torch.randint(10, (BATCH,))
    )
    loss.backward()
    optimizer.step()


def record(
    folder: Path, levels: tuple[str, ...] = ("shapes", "stacks", "memory"), active: int = 3
) -> Path:
    model, optimizer = small()
    with Profiler(
        model,
        folder,
        window=Window(wait=1, warmup=1, active=active),
        levels=levels,
        optimizers=[optimizer],
    ) as profiler:
        for _ in range(2 + active):
            take_step(model, optimizer)
            profiler.step_done(epoch=0)
    return folder / "trace.json.gz"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("profile"))


def test_a_window_that_the_memory_cannot_hold_ends_early_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter(range(0, 10 << 20, 1 << 20))  # a MiB more at each look
    resident = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(taken)))
    monkeypatch.setattr(window.psutil, "Process", lambda: resident)
    monkeypatch.setattr(
        window.psutil,
        "virtual_memory",
        lambda: SimpleNamespace(available=2 * window.CLOSING * 2.5 * (1 << 20)),
    )
    path = record(tmp_path, levels=(), active=90)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["num_steps"], facts["short_of_memory"]) == (
        60,
        True,
    )  # three looks: 3 MiB are more than the 2.5 that may be
    assert len(trace.read(path).steps) == 60


# ---- flame graphs


def test_the_widths_of_every_flame_graph_add_up_to_the_window(recorded: Path) -> None:
    found = trace.read(recorded)
    first_ns, last_ns = found.window
    for root in (fold.by_stack(found), fold.by_module(found)):
        waiting = [root]
        while waiting:
            frame = waiting.pop()
            assert frame.self_ns >= 0
            waiting.extend(frame.children.values())
        assert root.total_ns == last_ns - first_ns
        drawn = list(flame.boxes(root))
        assert drawn[0].total_ns == last_ns - first_ns
        for box in drawn:
            inside = [
                each
                for each in drawn
                if each.row == box.row + 1
                and box.left_ns <= each.left_ns < box.left_ns + box.total_ns
            ]
            assert sum(each.total_ns for each in inside) <= box.total_ns


def names(root: fold.StackFrame) -> set[tuple[str, ...]]:
    found, waiting = set(), [(root, (root.name,))]
    while waiting:
        frame, path = waiting.pop()
        found.add(path)
        waiting += [(child, (*path, child.name)) for child in frame.children.values()]
    return found


def test_the_backward_pass_of_an_operator_stands_under_the_module_that_called_it(
    recorded: Path,
) -> None:
    paths = names(fold.by_module(trace.read(recorded)))
    node = "autograd::engine::evaluate_function: "
    assert ("the window", "module Sequential", "module 0", "aten::linear") in paths
    assert (
        "the window",
        "backward",
        "module Sequential",
        "module 0",
        f"{node}AddmmBackward0",
    ) in paths
    assert (
        "the window",
        "backward",
        "module Sequential",
        "module 1",
        f"{node}ReluBackward0",
    ) in paths
    assert (
        "the window",
        "backward",
        "module Sequential",
        "module 2",
        f"{node}ReluBackward0",
    ) not in paths


def test_python_stacks_lead_to_the_operator(recorded: Path) -> None:
    paths = names(fold.by_stack(trace.read(recorded)))
    assert any("take_step" in " ".join(path) and path[-1] == "aten::addmm" for path in paths)


HOSTILE = '</title><script>alert(1)</script><g onclick="x" a=\'&\x00\ud800\x1b]'


def test_a_hostile_name_is_shown_as_text(tmp_path: Path) -> None:
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#1",
            "pid": 1,
            "tid": 1,
            "ts": 0,
            "dur": 10,
        },
        {"ph": "X", "cat": "cpu_op", "name": HOSTILE, "pid": 1, "tid": 1, "ts": 1, "dur": 8},
    ]
    found = analyse(write(tmp_path / "trace.json", {"traceEvents": events}))
    for path in draw(found, tmp_path / "out"):
        if path.suffix == ".svg":
            root = ET.fromstring(path.read_text())
            scripts = [each for each in root.iter() if each.tag.endswith("script")]
            assert len(scripts) == 1
            assert "alert" not in (scripts[0].text or "")
            assert not [
                each
                for each in root.iter()
                for key in each.attrib
                if key.startswith("on") or "href" in key
            ]
            assert any(
                "alert(1)" in (each.text or "")
                for each in root.iter()
                if each.tag.endswith("title")
            )


def test_a_drawing_names_nothing_outside_itself(recorded: Path, tmp_path: Path) -> None:
    for path in draw(analyse(recorded), tmp_path):
        text = path.read_text()
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "url(" not in text
        assert "@import" not in text


def test_device_work_stands_under_the_operator_that_launched_it(tmp_path: Path) -> None:
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#1",
            "pid": 1,
            "tid": 1,
            "ts": 0,
            "dur": 10,
        },
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "module a",
            "pid": 1,
            "tid": 1,
            "ts": 1,
            "dur": 4,
        },
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "pid": 1,
            "tid": 1,
            "ts": 2,
            "dur": 2,
            "args": {"External id": 7},
        },
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 0,
            "tid": 7,
            "ts": 5,
            "dur": 90,
            "args": {"External id": 7},
        },
    ]
    found = analyse(write(tmp_path / "trace.json", {"traceEvents": events}))
    assert found.by_device is not None
    assert ("device time", "module a", "aten::mm", "gemm") in names(found.by_device)
    assert found.by_device.total_ns == 90_000
    assert [(each.name, each.self_device_s) for each in found.operators] == [("aten::mm", 90e-6)]


# ---- operators


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
    assert (
        count_flops("aten::convolution_backward", shapes, values[:7]) is None
    )  # nobody knows whether it is transposed


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
    found = analyse(record(tmp_path, levels=()))
    assert found.by_stack is None
    assert found.memory is None
    assert {(each.self_bytes, each.flops, each.bytes) for each in found.operators} == {
        (None, None, None)
    }


# ---- memory


def test_the_memory_of_a_step_is_told_apart_by_category(recorded: Path) -> None:
    model, _ = small()
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    found = analyse(recorded).memory
    assert found is not None
    assert set(found.categories["parameters"]) == {weights}
    counters = 4 * len(list(model.parameters()))
    assert set(found.categories["optimiser"]) == {2 * weights + counters}
    assert max(found.categories["gradients"]) == weights
    assert min(found.categories["gradients"]) == 0
    # at least the batch, what the first layer, relu and the second layer gave, and its logarithm
    assert max(found.categories["activations"]) >= 4 * BATCH * (WIDTH + 2 * WIDTH + 10)
    assert min(min(values) for values in found.categories.values()) == 0


def test_blocks_are_told_apart_by_hand() -> None:
    def change(time_ns: int, address: int, num_bytes: int) -> trace.MemoryChange:
        return trace.MemoryChange(time_ns, address, num_bytes, -1, ("1", "1"))

    def work(start_ns: int, end_ns: int, name: str, category: str = trace.OPERATOR) -> trace.Slice:
        return trace.Slice(start_ns, end_ns, name, category, ("1", "1"), {})

    node = "autograd::engine::evaluate_function: X"
    found = trace.Trace(
        [
            work(0, 1000, "ProfilerStep#1", trace.RANGE),
            work(10, 90, "aten::mm"),
            work(500, 600, node),
            work(600, 700, node),
        ],
        [
            change(20, 1, 100),
            change(30, 2, 10),
            change(40, 2, -10),  # an activation, a temporary
            change(510, 3, 7),
            change(520, 4, 50),
            change(550, 3, -7),
            change(650, 1, -100),  # a temporary, a gradient
            change(800, 9, -1000),  # from before, of unknown use
        ],
        epoch_ns=10_000,
    )
    known = memory.Known(
        before={"parameters": {5: 40}}, after={"parameters": {5: 40}}, gradients=[(10_560, 4)]
    )
    line = memory.find_timeline(found, known)

    def at(time_ns: int) -> dict[str, int]:
        place = max(i for i, time_s in enumerate(line.times_s) if time_s <= time_ns / 1e9)
        return {name: values[place] for name, values in line.categories.items()}

    assert at(0) == {
        "parameters": 40,
        "optimiser": 0,
        "gradients": 0,
        "activations": 0,
        "temporaries": 1000,
    }
    assert at(35) == {
        "parameters": 40,
        "optimiser": 0,
        "gradients": 0,
        "activations": 100,
        "temporaries": 1010,
    }
    assert at(530) == {
        "parameters": 40,
        "optimiser": 0,
        "gradients": 50,
        "activations": 100,
        "temporaries": 1007,
    }
    assert at(900) == {
        "parameters": 40,
        "optimiser": 0,
        "gradients": 50,
        "activations": 0,
        "temporaries": 0,
    }
    assert line.num_unknown == 1


# ---- the window


def test_a_window_is_shortened_to_the_steps_that_there_are() -> None:
    window = Window(wait=10, warmup=10, active=20)
    assert window.fitted(None) == window.fitted(40) == window
    assert window.fitted(30) == Window(wait=7, warmup=8, active=15)
    assert window.fitted(2) == Window(wait=0, warmup=1, active=1)
    assert window.fitted(1) == Window(wait=0, warmup=0, active=1)


def test_a_window_of_no_step_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="a window of 0 steps"):
        Window(active=0)
    with pytest.raises(InputError, match="no step to record"):
        Window().fitted(0)
    with pytest.raises(InputError, match="'stack' cannot be recorded"):
        Profiler(nn.Linear(1, 1), "profile", levels=["stack"])


def test_a_loop_that_ends_before_its_window_is_told_so_and_one_inside_it_keeps_what_there_is(
    tmp_path: Path,
) -> None:
    model, optimizer = small()
    with (
        pytest.raises(InputError, match="ended after 2 steps"),
        Profiler(model, tmp_path, window=Window(wait=1)) as profiler,
    ):
        for _ in range(2):
            take_step(model, optimizer)
            profiler.step_done()
    assert not list(tmp_path.iterdir())
    with Profiler(
        model, tmp_path, window=Window(wait=0, warmup=0, active=9), levels=()
    ) as profiler:
        for _ in range(2):
            take_step(model, optimizer)
            profiler.step_done()
    assert json.loads((tmp_path / "facts.json").read_text())["num_steps"] == 2


def hooks_left(model: nn.Module) -> int:
    held = sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())  # type: ignore[attr-defined]
    return (
        held + len(torch_hooks._global_forward_hooks) + len(torch_hooks._global_forward_pre_hooks)
    )


class Raises(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        raise ArithmeticError


def test_ranges_are_balanced_when_a_step_raises_and_nothing_stays_behind(tmp_path: Path) -> None:
    model, _ = small()
    model.append(Raises())
    with (
        pytest.raises(ArithmeticError),
        Profiler(
            model, tmp_path, window=Window(wait=0, warmup=0, active=3), levels=("memory",)
        ) as profiler,
    ):
        model[:3](torch.ones(1, WIDTH))
        profiler.step_done(epoch=0)
        assert hooks_left(model) > 0
        model(torch.ones(1, WIDTH))
    assert hooks_left(model) == 0
    ranges = [
        each
        for each in trace.read(tmp_path / "trace.json.gz").slices
        if each.category == trace.RANGE
    ]
    broken = next(each for each in ranges if each.name == "module 3")
    around = [
        each.name
        for each in ranges
        if each.start_ns <= broken.start_ns and broken.end_ns <= each.end_ns
    ]
    assert [name for name in around if not name.startswith(trace.STEP_PREFIX)] == [
        "epoch 0",
        "step 2",
        "module Sequential",
        "module 3",
    ]
    profile_again = record(tmp_path / "again", levels=())
    assert trace.read(profile_again).steps


def test_a_part_that_raises_ends_its_range_at_once(tmp_path: Path) -> None:
    model, _ = small()
    broken = Raises()
    model.append(broken)
    with Profiler(
        model, tmp_path, window=Window(wait=0, warmup=0, active=2), levels=()
    ) as profiler:
        with pytest.raises(ArithmeticError):
            model(torch.ones(1, WIDTH))
        profiler.step_done()
        model[:3](torch.ones(1, WIDTH))
        profiler.step_done()
    ranges = [
        each
        for each in trace.read(tmp_path / "trace.json.gz").slices
        if each.category == trace.RANGE
    ]
    second = next(each for each in ranges if each.name == "step 2")
    assert not [
        each for each in ranges if each.name == "module 3" and each.end_ns > second.start_ns
    ]


def test_nothing_is_hooked_outside_of_the_window(tmp_path: Path) -> None:
    model, optimizer = small()
    with Profiler(
        model, tmp_path, window=Window(wait=2, warmup=1, active=1), levels=()
    ) as profiler:
        seen = []
        for _ in range(6):
            take_step(model, optimizer)
            profiler.step_done()
            seen.append((hooks_left(model) > 0, torch.autograd.profiler._is_profiler_enabled))
    assert seen == [
        (False, False),
        (False, True),
        (True, True),
        (False, False),
        (False, False),
        (False, False),
    ]


# ---- traces of others


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")
    return path


def test_a_trace_that_is_none_is_refused_in_words(tmp_path: Path, recorded: Path) -> None:
    whole = recorded.read_bytes()
    text = gzip.decompress(whole)
    for name, data, words in (
        ("cut.json.gz", whole[: len(whole) // 2], "truncated or damaged"),
        (
            "flipped.json.gz",
            whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:],
            "truncated or damaged|no trace|no JSON",
        ),
        ("cut.json", text[: len(text) // 2], "is truncated"),
        ("empty.json", b"", "is no JSON"),
        ("picture.json", b"\x89PNG\r\n\x1a\n", "is no JSON"),
        ("deep.json", b"[" * 100_000, "truncated|no JSON"),
        ("other.json", b'{"version": 1}', "no list of traceEvents"),
        ("number.json", b"7", "no list of traceEvents"),
        (
            "chrome.json",
            b'{"traceEvents": [{"ph": "X", "name": "v8", "cat": "v8", "ts": 1, "dur": 2}]}',
            "holds no operator",
        ),
        (
            "odd.json",
            b'[7, null, {"ph": "X", "cat": "cpu_op", "ts": "1", "dur": NaN}]',
            "holds no operator",
        ),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=words):
            trace.read(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        trace.read(tmp_path / "nowhere.json")


ODD = ([], {}, [[1]], "x", None, True, -1, 10**400, 1e308, float("nan"))


def product_of(*shapes: Any, **details: Any) -> dict[str, Any]:
    args = {"Input Dims": shapes, "Input type": ["float"] * len(shapes), **details}
    row = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    return {"traceEvents": [row | {"args": args}]}


@pytest.mark.parametrize(
    "shapes",
    [
        ([10**300, 10**300], [10**300, 4]),
        ([2, -3], [3, 4]),
        ([2**63], [1]),
        ([2**40, 2**40], [2**40, 4]),
        ([0] + [2**62] * 40, [1]),
        ([[2, 3], [10**300]], [3, 4]),
    ],
)
def test_a_trace_with_sizes_that_no_tensor_has_is_refused_in_words(
    shapes: tuple[Any, ...], tmp_path: Path
) -> None:
    with pytest.raises(
        InputError,
        match=r"is damaged: 'aten::mm' was given a tensor of a negative size or of 2\^63 elements",
    ) as told:
        analyse(write(tmp_path / "trace.json", product_of(*shapes)))
    assert told.value.hint


@pytest.mark.parametrize("num_bytes", [10**400, -(10**400), 2**63])
def test_a_trace_with_memory_that_no_machine_has_is_refused_in_words(
    num_bytes: int, tmp_path: Path
) -> None:
    document = product_of([2, 3], [3, 4])
    change = {
        "ph": "i",
        "name": "[memory]",
        "ts": 2,
        "args": {"Addr": 1, "Bytes": num_bytes, "Device Id": -1},
    }
    document["traceEvents"].append(change)
    with pytest.raises(InputError, match=r"is damaged: 2\^63 bytes or more were allocated at once"):
        analyse(write(tmp_path / "trace.json", document))


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
    assert (
        count_flops("aten::conv2d", [[1, 4, 1, 1], [8, 4, 3, 3]], [*far[:4], "[0, 0]", *far[5:]])
        is None
    )  # the kernel is larger
    assert (
        count_flops("aten::conv1d", [[1, 4], [8, 4]], ["", "", "", "[1]", "[0]", "[1]", "1"])
        is None
    )


def test_details_of_other_types_are_left_aside_and_odd_facts_are_damage(
    tmp_path: Path, recorded: Path
) -> None:
    document = json.loads(gzip.decompress(recorded.read_bytes()))
    rows = [each for each in document["traceEvents"] if each.get("cat") == "cpu_op"]
    for row, odd in zip(rows, ODD * 6, strict=False):
        row["args"] = dict.fromkeys(
            ("External id", "Sequence number", "Fwd thread id", "Concrete Inputs"), odd
        )
        row["args"] |= {"Input Dims": [[2, 3], odd, [3, 4]], "Input type": [odd, "float", "float"]}
    document["traceEvents"] += [
        {"ph": "X", "cat": "cpu_op", "name": "odd", "ts": odd, "dur": 1} for odd in ODD
    ]
    draw(analyse(write(tmp_path / "trace.json.gz", document)), tmp_path / "drawn")
    for name in ("num_steps", "step_s", "memory", "first_step"):
        (tmp_path / "facts.json").write_text(
            json.dumps({name: {"before": "x"} if name == "step_s" else "x"})
        )
        with pytest.raises(InputError, match=r"facts\.json is damaged"):
            analyse(tmp_path / "trace.json.gz")


def test_a_trace_that_is_too_long_keeps_its_first_steps(tmp_path: Path) -> None:
    path = record(tmp_path, active=6)
    limit = path.stat().st_size // 2
    assert trace.shrink(path, 10**9) is None
    num_kept = trace.shrink(path, limit)
    assert path.stat().st_size <= limit
    assert num_kept is not None
    assert 1 <= num_kept < 6
    assert len(trace.read(path).steps) == num_kept
