"""`surefoot evaluate` and `predict` use the task state of the checkpoint, as the run did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from surefoot.contract import events
from surefoot.train.look_back import evaluate_run, predict_run
from surefoot.train.run import Run
from tests.train.small import spec

TASK = """
import torch
import torch.nn.functional as F
from torch import nn

from surefoot import Loss
from surefoot.data import Arrays


class Normalized:
    '''Inputs are shifted by a mean that training moves: a tensor of `state()`.'''

    def __init__(self, holds: str = "tensor"):
        self.holds, self.tensor = holds, torch.zeros(())
        self.array = self.tensor.numpy()

    def model(self):
        return nn.Linear(4, 3)

    def data(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        return Arrays(3 + torch.randn(24, 4, generator=generator), torch.arange(24) % 3)

    def state(self):
        return {"mean": self.tensor if self.holds == "tensor" else self.array}

    def forward(self, model, batch):
        if model.training:
            self.tensor.mul_(0.9).add_(0.1 * batch[0].mean())
        return model(batch[0] - self.tensor)

    def loss(self, output, batch):
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))
"""


@pytest.mark.parametrize("holds", ["tensor", "array"])
def test_the_score_of_a_checkpoint_is_that_of_the_run(holds: str, tmp_path: Path) -> None:
    file = tmp_path / "normalized.py"
    file.write_text(TASK)
    how = spec(
        10,
        task={"use": f"{file}:Normalized", "holds": holds},
        evaluate={"every": "10 steps"},
    )
    with Run(how, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
        with torch.no_grad():
            task = run.assembly.task.task
            batch = task.data("test").read(np.arange(24))
            expected = task.forward(run.model.eval(), batch)
    (scored,) = [
        each for each in events.read(tmp_path / "run") if isinstance(each, events.Evaluated)
    ]
    (found,), _ = evaluate_run(tmp_path / "run", "last", None, None)
    assert found.loss == pytest.approx(scored.loss, rel=1e-6)
    path, _, _ = predict_run(tmp_path / "run", "last", None, None, tmp_path / "out.safetensors")
    assert torch.allclose(load_file(path)["output"], expected)


def test_a_state_that_cannot_be_restored_is_named_and_the_rest_is_evaluated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "normalized.py"
    file.write_text(TASK)
    how = spec(4, task={"use": f"{file}:Normalized"})
    with Run(how, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
    other = tmp_path / "other.py"
    entry = "torch.nn.Linear(2, 2)"  # whose state is another than that of a tensor
    other.write_text(TASK.replace("self.tensor if self", f"{entry} if self"))
    evaluate_run(tmp_path / "run", "last", None, None, quiet=False, use=f"{other}:Normalized")
    said = capfd.readouterr()
    assert "state() of the task is not restored" in said.err + said.out
