"""A model in torch's own wrappers for several devices is refused before the first step.

Wherever in the model the wrapper stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from surefoot.contract.spec import RunSpec
from surefoot.core.errors import TaskError
from surefoot.tasks.digits import Digits
from surefoot.train.assemble.model import check_unwrapped
from surefoot.train.run import Run


@pytest.fixture
def alone() -> Iterator[None]:
    """torch's process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def _split(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)  # type: ignore[return-value]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (nn.DataParallel, "DataParallel, which drives all devices from one interpreter"),
        (
            nn.parallel.DistributedDataParallel,
            "DistributedDataParallel, which sums gradients in each backward pass",
        ),
        (_split, "FSDPModule, which splits weights"),
    ],
)
def test_each_wrapper_is_named_with_its_place_and_what_to_do(
    wrap: Callable[[nn.Module], nn.Module], says: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), wrap(nn.Linear(2, 2)))
    with pytest.raises(TaskError, match=f"^1 of the model is wrapped in torch's {says}") as caught:
        check_unwrapped(model)
    assert "--ranks N" in (caught.value.hint or "")
    check_unwrapped(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Conv1d(1, 1, 1)])))


class Wrapped(Digits):
    def model(self) -> nn.Module:
        return nn.DataParallel(super().model())


def test_a_run_refuses_it_before_it_makes_a_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with (
        pytest.raises(TaskError, match=r"^the model is wrapped in torch's DataParallel"),
        Run(RunSpec(), Wrapped(), folder=tmp_path / "run"),
    ):
        pass
    assert not (tmp_path / "run").exists()
