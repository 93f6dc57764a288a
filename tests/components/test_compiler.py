"""Compiled regions give what they gave before; what cannot be compiled falls back or stops.

Each compilation is told with its reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.compiler.regions import compile_regions
from surefoot.components.compiler.steward import Steward
from surefoot.components.precision.keep import keep_in_fp32
from surefoot.core.errors import InputError, TaskError


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.linear(rows)), 0.5)


class Broken(Block):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.linear(rows)
        print(end="")
        if rows.sum() > 1e9:
            rows = rows + 1
        return torch.tanh(rows)


class Mended(Block):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.linear(rows)
        return torch.tanh(torch.where(rows.sum() > 1e9, rows + 1, rows))


def make(kind: type[nn.Module] = Block, number: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(number)))


def outcome(model: nn.Module, rows: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    output = model(torch.linspace(-1, 1, rows * 8).view(rows, 8))
    output.sum().backward()
    return [output.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def regions(model: nn.Sequential) -> dict[str, nn.Module]:
    return dict(model.named_children())


def test_blocks_that_are_kept_in_fp32_are_compiled_too() -> None:
    plain, model = make(), make()
    for each in (plain, model):
        keep_in_fp32(each, ["1"])
    expected = outcome(plain)
    done = compile_regions(regions(model), backend="aot_eager")
    for one, other in zip(outcome(model), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert done.failed == {}


def refuse(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("planted")


def test_blocks_give_the_numbers_of_eager_mode_dropout_included_and_share_what_was_compiled() -> (
    None
):
    model = make(number=6)
    before, names = outcome(model), list(model.state_dict())
    steward = Steward()
    compiled = compile_regions(regions(model), backend="aot_eager")
    after = outcome(model)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert list(model.state_dict()) == names
    forward = [each for each in steward.take() if not each.is_backward]
    assert 1 <= len(forward) <= 2  # the first block's input needs no gradient
    compiled.undo()
    assert all(torch.equal(one, other) for one, other in zip(before, outcome(model), strict=True))
    assert steward.take() == []


def test_what_cannot_be_compiled_runs_as_it_was_or_stops() -> None:
    model = make()
    before = outcome(model)
    compiled = compile_regions(regions(model), backend=refuse)
    assert all(torch.equal(one, other) for one, other in zip(before, outcome(model), strict=True))
    assert list(compiled.failed) == ["0", "1", "2"]
    assert "planted" in compiled.failed["0"]
    compile_regions(other := make(), backend=refuse, on_failure="stop")
    with pytest.raises(TaskError, match=r"model cannot be compiled: .*planted"):
        outcome(other)


def test_an_error_of_the_users_own_code_is_theirs() -> None:
    model = make()
    compile_regions(model, backend="eager")
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(4, 7))


def test_two_planted_graph_breaks_are_named_by_reason_file_and_line_and_can_be_mended() -> None:
    source, first = inspect.getsourcelines(Broken.forward)
    lines = {
        word: first + next(n for n, line in enumerate(source) if word in line)
        for word in ("print(", "if rows")
    }
    steward, model = Steward(), make(Broken, 1)
    compile_regions(regions(model), backend="eager")
    outcome(model)
    told = list(
        dict.fromkeys(each.ended_early for each in steward.take() if each.ended_early is not None)
    )
    printed, jumped = told
    assert printed.endswith(f'; at test_compiler.py:{lines["print("]}: print(end="")')
    assert "builtin" in printed
    assert jumped.endswith(f"; at test_compiler.py:{lines['if rows']}: if rows.sum() > 1e9:")
    assert jumped.startswith("Data-dependent branching")
    mended = make(Mended, 1)
    compile_regions(regions(mended), backend="eager")
    assert all(
        torch.equal(one, other)
        for one, other in zip(outcome(mended), outcome(make(Broken, 1)), strict=True)
    )
    (one,) = (each for each in steward.take() if not each.is_backward)
    assert one.ended_early is None


def test_a_break_belongs_to_the_function_that_ends_there_and_is_told_once() -> None:
    """Three functions of one name; and what torch forgot is met anew."""
    steward, model = Steward(), nn.Sequential(Block(), Broken(), Mended())
    compile_regions(regions(model), backend="eager")
    for _ in range(2):
        outcome(model)
        ended = [(each.line, each.ended_early is not None) for each in steward.take()]
        begun = {kind: inspect.getsourcelines(kind.forward)[1] for kind in (Block, Broken, Mended)}
        assert {line for line, is_so in ended if is_so} == {begun[Broken], begun[Broken] + 2}
        assert {line for line, is_so in ended if not is_so} == {
            begun[Block],
            begun[Broken] + 3,
            begun[Mended],
        }
        assert [each for each in Steward().take() if each.ended_early] == []
        torch._dynamo.reset()


def test_a_loop_that_breaks_is_said_to_have_nothing_compiled() -> None:
    class Loop(Block):
        def forward(self, rows: Tensor) -> Tensor:
            for _ in range(2):
                rows = self.linear(rows)
                print(end="")
            return rows

    steward, model = Steward(), make(Loop, 1)
    compile_regions(regions(model), backend="eager")
    outcome(model)
    (told,) = {each.ended_early for each in steward.take() if each.ended_early is not None}
    assert told.startswith("no part of it is compiled: ")
    assert told.endswith(': print(end="")')


def test_a_recompilation_says_which_guard_failed() -> None:
    steward, model = Steward(), make(number=1)
    compile_regions(model, backend="eager", dynamic=False)
    outcome(model, rows=4)
    assert [each.why_again for each in steward.take()] == [None]
    outcome(model, rows=6)
    (again,) = steward.take()
    assert "expected 4, actual 6" in str(again.why_again)
    assert "again" in again.words


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match=r"compile\.mode is 'fast'"):
        compile_regions(make(), mode="fast")  # type: ignore[arg-type]
    compile_regions(model := make(), backend="eager")
    with pytest.raises(InputError, match="compiled already"):
        compile_regions(model, backend="eager")
