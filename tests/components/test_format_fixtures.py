"""A commit that an earlier surefoot wrote loads for ever.

Model, optimizer and state come back as they were.
`python -m tests.components.test_format_fixtures FOLDER` writes one like it;
what is in tests/fixtures/format_1 is never written again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit, Content
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract import commits, manifest
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.errors import RunFolderError
from surefoot.train.assemble import Assembly, assemble
from surefoot.train.resume.start import Start
from surefoot.train.resume.state import LiveState
from surefoot.train.run import Run, drive

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "format_1"
STEP = 6
MANIFEST_SHA256 = "1fa7c84fa12503e4dc69f8715b5299ffb5d73d356a6536507cb3a136c101e533"


class Kept:
    """Frozen and trained weights, BatchNorm, dropout, own state in a tensor, array and object."""

    def __init__(self) -> None:
        self.seen, self.table, self.noise = torch.zeros(2), np.zeros(3), Counter()

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2).to(torch.float32)
        )

    def data(self, split: str) -> Arrays:
        return Arrays(torch.linspace(-1, 1, 16).reshape(8, 2), torch.arange(8) % 2)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.seen += torch.bincount(batch[1], minlength=2)
            self.table[1] += 0.5
            self.noise.count += 1
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    def state(self) -> Mapping[str, Any]:
        return {"seen": self.seen, "table": self.table, "noise": self.noise}


class Counter:
    """Something with a state_dict that JSON alone cannot hold."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "pair": (self.count, float("inf")),
            3: b"bytes",
            "dtype": torch.bfloat16,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        assert saved["pair"] == (saved["count"], float("inf"))
        assert saved[3] == b"bytes"  # type: ignore[index]
        assert saved["dtype"] is torch.bfloat16
        self.count = saved["count"]


SPEC = RunSpec(
    train={"length": f"{STEP} steps", "batch": 4},
    optim={"ema": 0.9, "freeze": ["0.weight"], "lr": 0.05},
    schedule={"name": "plateau", "patience": 1},
    evaluate={"every": "3 steps"},
    observe={"tensorboard": False},
    checkpoint={"every": "3 steps"},
)


def restored() -> tuple[Assembly, LiveState, Kept, dict[str, Any]]:
    task = Kept()
    assembly = assemble(SPEC, task)
    state = LiveState(assembly)
    return assembly, state, task, state.restore(Commit(FIXTURE, STEP))


def test_the_fixture_is_the_one_that_was_written() -> None:
    text = (manifest.step_folder(FIXTURE, STEP) / manifest.FILE).read_bytes()
    assert hashlib.sha256(text).hexdigest() == MANIFEST_SHA256
    made = commits.check(manifest.step_folder(FIXTURE, STEP))
    assert (made.format, made.step, made.is_whole_state) == (1, STEP, True)
    assert sorted(entry.name for entry in made.files) == [
        "clock.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer.safetensors",
        "state.json",
        "state.safetensors",
        "weights.safetensors",
    ]


def test_model_optimizer_and_state_of_format_1_come_back_bit_for_bit() -> None:
    assembly, state, task, saved = restored()
    one = Commit(FIXTURE, STEP)
    stored = one.read("")
    average = assembly.engine.average
    assert average is not None
    served = dict(zip(map(id, average.parameters), average.averages, strict=True))
    for name, tensor in assembly.model.state_dict(keep_vars=True).items():
        assert torch.equal(served.get(id(tensor), tensor), one.read(checkpoint.MODEL)[name]), name
    assert average.num_updates == STEP
    assert (task.seen.tolist(), task.table.tolist(), task.noise.count) == (
        [12.0, 12.0],
        [0.0, 3.0, 0.0],
        6,
    )
    assert (saved["num_samples"], saved["scores"]["last_step"]) == (24, STEP)
    assert torch.equal(torch.get_rng_state(), stored["state/random/torch"])
    content, moving = state.take(
        STEP, {key: saved[key] for key in ("num_samples", "scores", "guard")}, {}
    )
    again = {
        name: tensor
        for held in (*content.tensors.values(), *moving.values())
        for name, tensor in held.items()
    }
    for name, tensor in stored.items():
        if name in one.pieces("weights") or not name.startswith("state/"):
            continue  # live weights and averages have the same names
        assert torch.equal(again[name].cpu(), tensor), name
    assert set(leaves(one.json("state.json"))) <= set(
        leaves(json.loads(content.texts["state.json"]))
    )


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in leaves(part, f"{path}/{key}")]
    if isinstance(value, list):
        return [
            leaf for number, part in enumerate(value) for leaf in leaves(part, f"{path}/{number}")
        ]
    return [(path, value)]


def test_a_run_begins_with_the_weights_of_format_1(tmp_path: Path) -> None:
    with Run(
        SPEC,
        Kept(),
        folder=tmp_path / "run",
        quiet=True,
        start=Start(FIXTURE, STEP, weights_only=True),
    ) as run:
        drive(run)
    assert run.outcome == "finished"
    frozen = [
        Commit(folder, step).read("model-00002-of-00002.safetensors")["0.weight"]
        for folder, step in ((FIXTURE, STEP), (tmp_path / "run", STEP))
    ]
    assert torch.equal(*frozen)


def test_a_format_of_the_future_is_told_and_not_guessed(tmp_path: Path) -> None:
    made = checkpoint.commit(
        tmp_path, Content(step=1, tensors={}, texts={"a.json": b"{}"}), checkpoint.Stamp()
    )
    row = json.loads(made.as_text())
    row.pop("sha256")
    row["format"] = 2
    text = json.dumps(
        {**row, "sha256": hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()}
    )
    (manifest.step_folder(tmp_path, 1) / manifest.FILE).write_text(text)
    with pytest.raises(RunFolderError, match="has format 2, newer than 1") as caught:
        commits.check(manifest.step_folder(tmp_path, 1))
    assert caught.value.hint == "use a newer surefoot"


if __name__ == "__main__":
    with Run(SPEC, Kept(), folder=sys.argv[1], quiet=True) as written:
        drive(written)
