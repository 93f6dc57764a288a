"""What a loop gives to `attach` and to `step_done`, of a different kind than it must be.

It is refused with what was given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.core.errors import SurefootError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": {}}, "model is a dict"),
        (
            {"state": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 1)},
            "state is a StepLR",
        ),
        ({"data": 3}, "data must be iterable; got a int"),
        ({"optimizer": "sgd"}, "which has no param_groups"),
    ],
)
def test_what_attach_cannot_use_is_refused_with_what_was_given(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 1)
    whole = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "data": [1],
        "folder": tmp_path / "a",
        **given,
    }
    with pytest.raises(SurefootError, match=words) as caught:
        surefoot.attach(**whole)
    assert caught.value.hint


@pytest.mark.parametrize("loss", [{"a": 1.0}, None, "0.5 of it", [1.0]])
def test_a_loss_that_is_no_number_is_refused(loss: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with (
        surefoot.attach(
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            data=[1],
            folder=tmp_path / "a",
        ) as run,
        pytest.raises(SurefootError, match="step_done was given"),
    ):
        for _ in run.batches():
            run.step_done(loss)
