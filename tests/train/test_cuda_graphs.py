"""compile.mode = "reduce-overhead": what a replay overwrites is refused in words.

And what a CPU has no use for is said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from surefoot.core.errors import UserCodeError
from surefoot.train.run import Run
from tests.train.small import Small, spec

GRAPHS = {"what": "model", "mode": "reduce-overhead"}


class Keeps(Small):
    """Adds what the model gave a step before; `copied` keeps a copy of it."""

    def __init__(self, *, copied: bool) -> None:
        super().__init__()
        self.copied = copied
        self.kept: Tensor | None = None

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output = super().forward(model, batch)
        before, self.kept = self.kept, output.detach().clone() if self.copied else output.detach()
        return output if before is None or not model.training else output + 0.1 * before.mean()


class Overwritten(Small):
    """Planted: torch's words for a read of overwritten output, in the last of eight steps."""

    now = 0

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += model.training
        if self.now < 8:
            return super().forward(model, batch)
        raise RuntimeError(
            "Error: accessing tensor output of CUDAGraphs that has been overwritten by a "
            "subsequent run. Stack trace: none. To prevent ..."
        )


def train(task: Any, folder: Path, **tables: Any) -> list[float]:
    with Run(
        spec(8, observe={"every": "1 step"}, **tables), task, folder=folder, quiet=True
    ) as run:
        return [float(report.loss or 0.0) for report in run.steps()]


def test_an_output_that_was_overwritten_is_told_with_what_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="of CUDAGraphs that has been overwritten") as raised:
        train(Overwritten(), tmp_path / "run")
    assert (
        raised.value.hint
        == 'keep a copy of the output of the model: output.clone(); or set compile.mode = "default"'
    )


def test_a_cpu_has_no_cuda_graphs_and_the_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"what": "model", "mode": "reduce-overhead", "on_failure": "eager"}
    with Run(spec(1, compile=table, train={"device": "cpu"}), Small(), folder=tmp_path) as run:
        assert len(list(run.steps())) == 1
    said = capsys.readouterr()
    assert (
        'compile.mode = "reduce-overhead" runs as "default", since CUDA graphs need a GPU'
        in said.out + said.err
    )


@pytest.mark.gpu
def test_an_output_kept_over_a_step_is_refused_and_a_copy_of_it_has_the_numbers_of_eager_mode(
    tmp_path: Path,
) -> None:
    eager = train(Keeps(copied=True), tmp_path / "eager")
    assert train(Keeps(copied=True), tmp_path / "copied", compile=GRAPHS) == pytest.approx(
        eager, rel=1e-4
    )
    try:
        kept = train(Keeps(copied=False), tmp_path / "kept", compile=GRAPHS)
    except UserCodeError as error:
        assert "output.clone()" in str(error.hint)  # noqa: PT017 - either is right, a wrong number is not
    else:
        assert kept == pytest.approx(eager, rel=1e-4)
