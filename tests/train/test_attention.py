"""train.attention: fused kernels off, on as torch chooses, or asked for.

What is asked for is held against what step 1 called.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError
from surefoot.train.run import Run
from tests.train.small import Small, spec

SWITCHES: Any = torch.backends.cuda


class Attends(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.into, self.out = nn.Linear(1, 24), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x.unsqueeze(-1)).unsqueeze(1).chunk(3, -1)
        return self.out(
            F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0
            ).flatten(1)
        )


class Attention(Small):
    def model(self) -> nn.Module:
        return Attends(self.dropout)


def train(folder: Path, which: str, task: Small) -> tuple[dict[str, str], list[Tensor]]:
    """The operators of step 1 and the weights after two."""
    # Adam would make a step of the rounding in a gradient that is 0, as that of a key's bias
    optim = {"name": "sgd", "lr": 0.1}
    with Run(
        spec(2, train={"attention": which}, optim=optim), task, folder=folder, quiet=True
    ) as run:
        for _ in islice(run.steps(), 2):
            pass
        weights = [each.detach().clone() for each in run.model.parameters()]
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return next(row["operators"] for row in rows if row["kind"] == "dtypes"), weights


def is_fused(operators: dict[str, str]) -> bool:
    return any("_scaled_dot_product" in name for name in operators)


def test_math_calls_no_fused_kernel_fused_calls_one_and_the_numbers_are_the_same(
    tmp_path: Path,
) -> None:
    found = {
        which: train(tmp_path / which, which, Attention()) for which in ("auto", "fused", "math")
    }
    assert {which: is_fused(operators) for which, (operators, _) in found.items()} == {
        "auto": True,
        "fused": True,
        "math": False,
    }
    assert SWITCHES.flash_sdp_enabled()
    assert SWITCHES.mem_efficient_sdp_enabled()
    for mine, theirs in zip(found["math"][1], found["fused"][1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "task",
    [Small(), Attention(dropout=0.5)],
    ids=["no attention", "a dropout that no kernel here has"],
)
def test_asked_for_and_not_called_in_step_1_ends_the_run_there(task: Small, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r'train\.attention is "fused", and step 1 called no fused kernel'
    ):
        train(tmp_path, "fused", task)


def test_a_run_with_fused_attention_goes_on(tmp_path: Path) -> None:
    how = spec(
        4,
        train={"attention": "fused"},
        optim={"name": "sgd", "lr": 0.1},
        checkpoint={"every": "1 step"},
    )
    with (
        pytest.raises(KeyboardInterrupt),
        Run(how, Attention(), folder=tmp_path / "run", quiet=True) as run,
    ):
        for report in run.steps():
            if report.step == 3:
                raise KeyboardInterrupt
    with Run(how, Attention(), folder=tmp_path / "run", quiet=True) as run:
        assert [report.step for report in run.steps()] == [3, 4]


def test_which_kernel_attends_does_not_change_what_a_run_is() -> None:
    assert (
        RunSpec(train={"attention": "math"}).id
        == RunSpec().id
        != RunSpec(train={"memory_format": "channels_last"}).id
    )
