"""`surefoot verify --layouts`.

The same batches on one process and on several ranks, and a task that is another one on a rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.forked_commands import run_forked
from tests.prove.forked import programs_are_forked
from tests.world.test_launch import environment

__all__ = ["programs_are_forked"]

OTHER = """
import os
from surefoot.tasks.digits import Digits

class Other(Digits):
    def loss(self, output, batch):
        return super().loss(output * (1.0 + 1e-6 * int(os.environ.get("RANK", "0"))), batch)
"""


TASKS = """
import torch
import torch.nn.functional as F
from torch import nn
from surefoot import Loss
from surefoot.data import Arrays

class Base:
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    def data(self, split):
        g = torch.Generator().manual_seed(1)
        return Arrays(x=torch.randn(64, 8, generator=g), y=torch.randint(0, 4, (64,), generator=g))
    def forward(self, model, batch):
        return model(batch["x"])
    def loss(self, output, batch):
        return Loss.sum(F.cross_entropy(output, batch["y"], reduction="sum"), count=len(output))

class Norm(nn.Module):
    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

class Logits(Base):
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), Norm(), nn.Linear(16, 4))
    def loss(self, output, batch):
        return super().loss(output.float(), batch)

class Halves(Base):
    def loss(self, output, batch):
        each = F.cross_entropy(output, batch["y"], reduction="none")
        return Loss.sum(each.bfloat16().sum(), count=len(each))

class Bytes(Base):
    def data(self, split):
        g = torch.Generator().manual_seed(1)
        x = torch.randint(0, 255, (64, 8), generator=g, dtype=torch.uint8)
        return Arrays(x=x, y=torch.randint(0, 4, (64,), generator=g))
    def forward(self, model, batch):
        return model(batch["x"].float() / 255)

class Contrastive(Base):
    def loss(self, output, batch):
        unit = F.normalize(output, dim=-1)
        loss = F.cross_entropy(unit @ unit.T / 0.1, torch.arange(len(unit)), reduction="sum")
        return Loss.sum(loss, count=len(unit))

class Hardest(Base):  # the worst three of whatever batch there is
    def loss(self, output, batch):
        each = F.cross_entropy(output, batch["y"], reduction="none")
        return Loss.sum(each.sum() + each.topk(3).values.sum(), count=len(each))

class Whitened(Base):
    def loss(self, output, batch):
        return super().loss(output / (output.std(0, keepdim=True) + 1e-3), batch)

class Penalty(Base):
    def forward(self, model, batch):
        return model(batch["x"]), model[0].weight.square().sum()
    def loss(self, output, batch):
        loss = F.cross_entropy(output[0], batch["y"], reduction="sum")
        return Loss.sum(loss + output[1], count=len(output[0]))

class Norms(Base):
    def model(self):
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)
        return nn.Sequential(*layers)

class Noisy(Base):
    def forward(self, model, batch):
        return model(batch["x"] + 0.1 * torch.randn_like(batch["x"]))
"""


def words_of(spec: str, *layouts: str, folder: Path | None = None) -> list[str]:
    if folder is not None:
        (folder / "tasks.py").write_text(TASKS)
        (folder / "spec.toml").write_text(
            f'[task]\nuse = "{folder}/tasks.py:{spec}"\n[train]\nlength = "4 steps"\nbatch = 16\n'
        )
        spec = str(folder / "spec.toml")
    tried = (word for each in layouts for word in ("--layouts", each))
    return ["verify", spec, *tried, "--steps", "1", "--json"]


def verify(
    spec: str, *layouts: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "surefoot", *words_of(spec, *layouts, folder=folder)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_ranks_compute_what_one_process_does_and_a_layout_that_is_named_twice_is_tried_once() -> (
    None
):
    done = verify("digits", "1; replicate=2; replicate=2,shard=1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["layout"], row["precision"], row["holds"]) for row in found["rows"]] == [
        (f"1,microbatch={found['microbatch']}", "float64", True),
        ("replicate=2", "float64", True),
        ("replicate=2", "fp32", True),
    ]
    assert all(row["count"] > 10 and row["off"] <= row["allowed"] for row in found["rows"])


@pytest.mark.slow  # five processes that import torch
def test_a_rank_that_computes_a_millionth_more_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OTHER)
    done = verify(f"{tmp_path / 'other.py'}:Other", "replicate=2")
    assert done.returncode == 1, done.stderr
    _, wide, narrow = json.loads(done.stdout)["rows"]
    assert not wide["holds"]
    assert wide["off"] > 1e-8
    # AdamW divides a gradient by its own size: where its terms cancel, a weight moves by much more
    # than a millionth of a step
    assert wide["worst"].startswith("weight/1/")
    # of the same step, which is what is compared in fp32; which of the two is further off, rounding
    # decides, and so the processor
    assert narrow["worst"].split("/")[:2] in (["gradient", "1"], ["norm", "1"])
    assert narrow["off"] < 1e-5


@pytest.mark.slow
def test_a_model_that_computes_in_fp32_is_held_to_the_bound_of_fp32_and_its_line_is_named(
    tmp_path: Path,
) -> None:
    done = verify("Logits", "1", "replicate=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wide = next(
        row
        for row in found["rows"]
        if (row["layout"], row["precision"]) == ("replicate=2", "float64")
    )
    assert wide["allowed"] == 16 * 2.0**-24
    assert [(each["operator"], each["dtype"], each["module"]) for each in found["narrow"]] == [
        ("_to_copy", "float32", "1"),
        ("_to_copy", "float32", ""),
    ]
    assert f"{tmp_path}/tasks.py:" in found["notes"][0]


@pytest.mark.usefixtures("programs_are_forked")
@pytest.mark.parametrize(
    "task",
    [
        "Contrastive",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("Hardest", "Penalty")),
    ],
)
def test_a_loss_that_depends_on_how_its_batch_is_cut_is_refused_before_a_layout_is_tried(
    task: str, tmp_path: Path
) -> None:
    done = run_forked(*words_of(task, "replicate=2", folder=tmp_path), folder=tmp_path)
    assert done.returncode == 2, done.stderr + done.stdout
    assert "is not a sum over samples" in done.stderr
    assert "additive=False" in done.stderr


@pytest.mark.slow
def test_a_loss_that_cannot_be_told_from_a_sum_before_does_not_compute_the_same(
    tmp_path: Path,
) -> None:
    done = verify("Whitened", "replicate=2", folder=tmp_path)
    assert done.returncode == 1, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert [row["layout"] for row in found["rows"] if not row["holds"]] == ["1,microbatch=8"]
    assert "additive=False" in found["notes"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "note", "precisions"),
    [
        ("Bytes", "not compared in float64, since the task keeps numbers in fewer bits", {"fp32"}),
        ("Halves", "to bfloat16", {"float64", "fp32"}),
        ("Norms", "compared with BatchNorm and dropout as in evaluation", {"float64", "fp32"}),
        (
            "Noisy",
            "not compared with the whole batch, since the task draws numbers: randn_like",
            {"float64", "fp32"},
        ),
    ],
)
def test_what_a_task_does_on_purpose_is_told_and_blamed_on_no_layout(
    task: str, note: str, precisions: set[str], tmp_path: Path
) -> None:
    done = verify(task, "replicate=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert note in "; ".join(found["notes"])
    assert {row["precision"] for row in found["rows"]} == precisions


LOADED = """
import torch
from torch.utils.data import DataLoader, Dataset
from tasks import Base, Contrastive

class Drawn(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(64, 8, generator=g), torch.randint(0, 4, (64,), generator=g)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return {"x": self.x[index] + 0.1 * torch.randn(8), "y": self.y[index]}

class Loaded:
    def data(self, split):
        return DataLoader(Drawn(), batch_size=16, shuffle=True, num_workers=1)

class Right(Loaded, Base):
    pass

class Wrong(Loaded, Contrastive):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Right", "Wrong"])
def test_layouts_divide_the_batches_of_a_loader(task: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "loaded.py").write_text(LOADED)
    (tmp_path / "spec.toml").write_text(f'[task]\nuse = "{tmp_path}/loaded.py:{task}"\n')
    done = verify(str(tmp_path / "spec.toml"), "replicate=2", "shard=2,stage=2")
    if task == "Wrong":
        assert done.returncode == 2, done.stderr + done.stdout
        assert "is not a sum over samples" in done.stderr
        return
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert (found["batch"], found["microbatch"]) == (16, 8)
    assert len(found["rows"]) == 5
    assert all(row["off"] <= row["allowed"] for row in found["rows"])
