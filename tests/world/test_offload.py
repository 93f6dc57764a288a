"""What ranks that hold rows keep on the host: the same bits, commits that go on without it.

Here the host is the device too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.contract.state import master_of
from surefoot.core.errors import SpecError
from surefoot.train import preflight
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_run import Sentences, spec
from tests.world.test_shard import Stacked

pytestmark = pytest.mark.usefixtures("loaded_for_shards")


def train(folder: Path, offload: str, stage: int, length: int) -> Any:
    """The weights of all rows after so many steps, and whether the optimizer moves copies."""
    if offload != "none":  # a run on a CPU is refused, since nothing is gained
        preflight.check = lambda assembly, is_again: []
    stated = spec(
        train={"length": "6 steps"},
        layout={"shard": 2, "zero_stage": stage},
        memory={"offload": offload},
        evaluate={"every": "100 steps"},
    )
    with Run(stated, Stacked(), folder=folder, quiet=True) as run:
        for report in run.steps():
            if report.step == length:
                break
        model = run.assembly.model
        rows = [
            each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()
        ]
        masters = [master_of(each) for each in model.parameters()]
        own = {each.untyped_storage().data_ptr() for each in rows}
        apart = not any(
            each.untyped_storage().data_ptr() in own
            for each in masters
            if each.requires_grad and each.numel()
        )
        moved = {
            id(tensor) for update in run.assembly.updates for tensor, _ in update.guarded.states()
        }
        return [
            [each.detach().double().flatten().tolist() for each in masters],
            apart,
            moved <= set(map(id, masters)),
        ]


@pytest.mark.quick("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rows_on_the_host_move_to_the_same_bits_and_their_commits_go_on_without_it(
    stage: int, tmp_path: Path
) -> None:
    def job(rank: int, offload: str, name: str, length: int) -> Any:
        return train(tmp_path / name, offload, stage, length)

    plain = run_ranks(2, lambda rank: job(rank, "none", "plain", 6), tmp_path / "a")
    offloaded = run_ranks(2, lambda rank: job(rank, "optimizer", "offloaded", 3), tmp_path / "b")
    assert [each[1:] for each in offloaded if isinstance(each, list)] == [[True, True]] * 2, (
        offloaded
    )
    again = run_ranks(2, lambda rank: job(rank, "none", "offloaded", 6), tmp_path / "c")
    for mine, theirs in zip(plain, again, strict=True):
        assert mine[0] == theirs[0]
    assert plain[0][1] is False


def test_copies_of_a_whole_model_do_not_go_to_the_host(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        with pytest.raises(
            SpecError, match=r"with layout\.shard a rank keeps its rows on the host"
        ):
            Run(
                spec(memory={"offload": "optimizer"}),
                Sentences(),
                folder=tmp_path / "run",
                quiet=True,
            ).__enter__()
        return True

    assert run_ranks(2, job, tmp_path / "ranks") == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks take a GPU each")
def test_a_gpu_holds_fewer_bytes_by_what_its_optimizer_has_of_the_rows(tmp_path: Path) -> None:
    def job(rank: int, offload: str) -> Any:
        stated = spec(
            layout={"shard": 2, "zero_stage": 3},
            memory={"offload": offload},
            train={"length": "3 steps", "device": "cuda"},
        )
        with Run(stated, Stacked(), folder=tmp_path / offload, quiet=True) as run:
            list(run.steps())
            held = sum(master_of(each).numel() for each in run.assembly.model.parameters())
            return [torch.cuda.memory_allocated(), held]

    plain = run_ranks(2, lambda rank: job(rank, "none"), tmp_path / "a")
    offloaded = run_ranks(2, lambda rank: job(rank, "optimizer"), tmp_path / "b")
    for (with_state, held), (without, _) in zip(plain, offloaded, strict=True):
        assert with_state - without >= 0.9 * 2 * 4 * held  # two moments in fp32
