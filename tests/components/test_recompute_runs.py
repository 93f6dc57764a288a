"""Recomputation as a line of a spec: a run trains to the same bits, or is refused in words."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot import Run, RunSpec, recompute
from surefoot.core.errors import SpecError
from tests.components.test_recompute import assert_same_bits
from tests.train import small

# ---- in a run


class Repeats(small.Small):
    """The small task with blocks that repeat, BatchNorm and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 8),
            *(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(3)),
            nn.Linear(8, 3),
        )


@pytest.mark.quick("None-full", "2-operators", "2-6 KiB")
@pytest.mark.parametrize("how", ["full", "operators", "6 KiB"])
@pytest.mark.parametrize("microbatch", [None, 2])
def test_a_run_recomputes_with_a_line_of_the_spec_and_trains_to_the_same_bits(
    how: str, microbatch: int | None, tmp_path: Path
) -> None:
    found = []
    for way in ("none", how):
        spec = small.spec(
            8, train={"microbatch": microbatch}, memory={"activation_checkpointing": way}
        )
        with Run(spec, Repeats(), folder=tmp_path / way, quiet=True) as run:
            losses = [torch.tensor(report.loss) for report in islice(run.steps(), 8)]
            found.append(
                [
                    *losses,
                    *(
                        each.detach().clone()
                        for each in [*run.model.parameters(), *run.model.buffers()]
                    ),
                ]
            )
            recomputed = run.assembly.engine.recomputed
    assert_same_bits(*found)
    assert recomputed is not None
    assert "of 3 blocks are computed again" in recomputed.words


def test_a_run_with_a_budget_that_cannot_be_met_is_refused_before_it_begins(tmp_path: Path) -> None:
    with (
        pytest.raises(SpecError, match="even when each is computed again"),
        Run(
            small.spec(memory={"activation_checkpointing": "16 B"}),
            Repeats(),
            folder=tmp_path / "run",
            quiet=True,
        ),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_budget_is_chosen_by_what_training_keeps_and_by_the_largest_batch(tmp_path: Path) -> None:
    """A trial in evaluation mode keeps no mask of a dropout.

    Of a batch that grows the first is the smallest.
    """

    def cost(name: str, **train: Any) -> int:
        how = small.spec(4, train=train, memory={"activation_checkpointing": "64 KiB"})
        with Run(how, Repeats(), folder=tmp_path / name, quiet=True) as run:
            recomputed = run.assembly.engine.recomputed
            assert recomputed is not None
            assert recomputed.budget is not None
            return sum(each.whole_bytes for each in recomputed.budget.costs)

    four, eight = cost("four", batch=4), cost("eight", batch=8)
    model = Repeats().model().train()
    asked = recompute(model, "64 KiB")
    model(torch.randn(4, 4)).sum().backward()
    assert asked.budget is not None
    assert four == sum(each.whole_bytes for each in asked.budget.costs)
    assert cost("ramp", batch=8, ramp=[[0, 4], [16, 8]]) == eight > four


def test_a_task_names_its_blocks_and_the_spec_overrules_it(tmp_path: Path) -> None:
    class Names(Repeats):
        def blocks(self, model: nn.Module) -> list[nn.Module]:
            return [model[1]]

    for blocks, expected in (((), ("1",)), (("2", "3"), ("2", "3"))):
        spec = small.spec(memory={"activation_checkpointing": "full", "blocks": blocks})
        with Run(spec, Names(), folder=tmp_path / str(len(blocks)), quiet=True) as run:
            recomputed = run.assembly.engine.recomputed
            assert recomputed is not None
            assert recomputed.names == expected


def test_blocks_without_recomputation_say_nothing_and_are_refused() -> None:
    with pytest.raises(
        SpecError,
        match=(
            r'memory\.blocks = \["a"\] has no effect with '
            r'memory\.activation_checkpointing = "none"'
        ),
    ):
        RunSpec(memory={"blocks": ("a",)})
