"""Tests of windows of torch.profiler.

What a trace shows equals what torch says, adds up, and harms nobody who opens it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from surefoot.components.profiler.tracing import memory, trace, window
from surefoot.components.profiler.tracing.analysis import analyze
from surefoot.components.profiler.tracing.window import Profiler, Window
from surefoot.core.errors import InputError
from tests.components.recorded import BATCH, WIDTH, record, recorded, small, take_step

__all__ = ["recorded"]  # a fixture


def test_a_window_that_the_memory_cannot_hold_ends_early_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter(range(0, 10 << 20, 1 << 20))  # a MiB more at each look
    resident = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(taken)))
    monkeypatch.setattr(window.psutil, "Process", lambda: resident)
    monkeypatch.setattr(
        window.psutil,
        "virtual_memory",
        lambda: SimpleNamespace(available=2 * window.CLOSING_FACTOR * 2.5 * (1 << 20)),
    )
    path = record(tmp_path, levels=(), active=90)
    facts = json.loads((tmp_path / "facts.json").read_text())
    # three looks: 3 MiB are more than the 2.5 that may be
    assert (facts["num_steps"], facts["short_of_memory"]) == (60, True)
    assert len(trace.read(path).steps) == 60


# ---- memory


def test_the_memory_of_a_step_is_told_apart_by_category(recorded: Path) -> None:
    model, _ = small()
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    found = analyze(recorded).memory
    assert found is not None
    assert set(found.categories["parameters"]) == {weights}
    counters = 4 * len(list(model.parameters()))
    assert set(found.categories["optimizer"]) == {2 * weights + counters}
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
    known = memory.KnownBlocks(
        before={"parameters": {5: 40}}, after={"parameters": {5: 40}}, gradients=[(10_560, 4)]
    )
    line = memory.find_timeline(found, known)

    def at(time_ns: int) -> dict[str, int]:
        place = max(i for i, time_s in enumerate(line.times_s) if time_s <= time_ns / 1e9)
        return {name: values[place] for name, values in line.categories.items()}

    assert at(0) == {
        "parameters": 40,
        "optimizer": 0,
        "gradients": 0,
        "activations": 0,
        "temporaries": 1000,
    }
    assert at(35) == {
        "parameters": 40,
        "optimizer": 0,
        "gradients": 0,
        "activations": 100,
        "temporaries": 1010,
    }
    assert at(530) == {
        "parameters": 40,
        "optimizer": 0,
        "gradients": 50,
        "activations": 100,
        "temporaries": 1007,
    }
    assert at(900) == {
        "parameters": 40,
        "optimizer": 0,
        "gradients": 50,
        "activations": 0,
        "temporaries": 0,
    }


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


def test_a_trace_that_is_too_long_keeps_its_first_steps(tmp_path: Path) -> None:
    path = record(tmp_path, active=6)
    limit = path.stat().st_size // 2
    assert trace.shrink(path, 10**9) is None
    num_kept = trace.shrink(path, limit)
    assert path.stat().st_size <= limit
    assert num_kept is not None
    assert 1 <= num_kept < 6
    assert len(trace.read(path).steps) == num_kept
