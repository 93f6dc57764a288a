"""Every key of a spec is used, refused, or named as left out, by every command with a spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.cli import left_out
from surefoot.cli.left_out import GROUPS, LEFT_OUT, find_left_out
from surefoot.cli.main import build_verbs
from surefoot.contract import spec_file
from surefoot.contract.spec.run_spec import key_names
from surefoot.core.errors import SpecError
from surefoot.prove.memory import predict
from tests.cli.conftest import Command

SMALL = """
import torch
from torch import nn
from surefoot import Loss
from surefoot.data import Arrays

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Small:
    def model(self):
        blocks = nn.Sequential(*(Block() for _ in range(4)))
        return nn.Sequential(nn.Linear(64, 64), blocks, nn.Linear(64, 8))
    def data(self, split):
        return Arrays(torch.ones(64, 64), torch.zeros(64))
    def forward(self, model, batch):
        return model(batch[0])
    def loss(self, output, batch):
        return Loss.sum(output.square().sum(), len(output))
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(SMALL)
    path = tmp_path / "small.toml"
    path.write_text('[task]\nuse = "small.py:Small"\n[train]\nlength = "4 steps"\nbatch = 32\n')
    return path


def find_commands() -> set[str]:
    """The commands that take `--set`, by their words."""
    found = set()
    groups = [("", build_verbs())]
    while groups:
        words, group = groups.pop()
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                groups.append((f"{words}{name} ", command))
            elif any("--set" in each.opts for each in command.params):
                found.add(f"{words}{name}")
    return found


def test_every_key_of_a_spec_stands_in_one_group_and_every_command_has_an_entry() -> None:
    grouped = [key for keys in GROUPS.values() for key in keys]
    keys = [f"{table}.{key}" for table in key_names(None) for key in key_names(table)]
    assert sorted(grouped) == sorted(keys)
    assert len(grouped) == len(set(grouped))
    ways = {
        "verify": ("--layouts", "--precision", "--compile"),
    }
    expected = {f"{name} {way}" for name, flags in ways.items() for way in flags} | find_commands()
    assert set(LEFT_OUT) == expected
    named = {name for names, _ in LEFT_OUT.values() for name in names}
    assert named <= {*GROUPS, *keys}
    assert all(bool(names) == bool(why) for names, why in LEFT_OUT.values())


@pytest.mark.parametrize("command", sorted(name for name, (keys, _) in LEFT_OUT.items() if keys))
def test_a_key_of_the_command_line_that_a_command_does_not_use_is_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = spec_file.read(
        "digits",
        [
            ("checkpoint.store", "memory://x", "--set checkpoint.store"),
            ("data.folder", "here", "--data"),
        ],
    )
    assert left_out.name_left_out(command, origin) == ["checkpoint.store"]
    assert (
        capsys.readouterr().err
        == f"note: {command} does not use checkpoint.store: {LEFT_OUT[command][1]}\n"
    )


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("memory", []),
        ("roofline", ["layout.shard"]),
        ("train", []),
        ("bench step", ["layout.shard"]),
        ("bench comm", []),
        ("verify --layouts", ["layout.shard"]),
        ("whatif noise", ["layout.shard"]),
    ],
)
def test_of_a_file_the_keys_of_several_ranks_are_named(
    command: str, keys: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "digits"\n[layout]\nshard = 2\n[checkpoint]\nkeep = 4\n')
    assert find_left_out(command, spec_file.read(str(path))) == keys


def test_a_command_names_what_it_does_not_use_even_when_quiet(
    surefoot: Command, small: Path
) -> None:
    words = (
        "--set",
        "layout.shard=2",
        "--set",
        "layout.zero_stage=1",
        "--set",
        "layout.bucket_size=1MiB",
        "--set",
        "train.device=cuda",
        "--quiet",
        "--json",
    )
    answer = surefoot("memory", small, *words)
    assert answer.code == 0, answer.err
    assert answer.row["left_out"] == ["train.device", "layout.bucket_size"]
    assert answer.err == (
        "note: memory does not use train.device, layout.bucket_size: "
        "it predicts one training step on a CPU, in eager mode\n"
    )
    answer = surefoot("explain", small, "--set", "layout.shard=2")
    assert (answer.code, answer.err) == (
        0,
        "note: explain does not use layout.shard: it runs the first step in one process\n",
    )


STATES = ("parameters", "gradients", "optimizer")


@pytest.mark.quick("layout0-divided0-4", "layout2-divided2-4", "layout4-divided4-4")
@pytest.mark.parametrize(
    ("layout", "divided", "num_microbatches"),
    [
        ({"replicate": 4}, (), 4),
        ({"shard": 4, "zero_stage": 1}, ("optimizer",), 4),
        ({"shard": 4, "zero_stage": 2}, STATES, 4),
        ({"shard": 4, "zero_stage": 3}, STATES, 4),
        ({"shard": 2, "replicate": 2, "zero_stage": 3}, STATES, 4),
    ],
)
def test_memory_predicts_what_a_rank_of_the_layout_holds(
    layout: dict[str, int], divided: tuple[str, ...], num_microbatches: int, small: Path
) -> None:
    spec = spec_file.read(str(small)).spec
    found = predict(spec.replace(layout=layout))
    count, whole = found.num_parameters, predict(spec)
    for kind, size in zip(STATES, (4, 4, 8), strict=True):
        ranks = layout.get("shard", 1) if kind in divided else 1
        if kind != "gradients":  # whose peak may lie inside of a backward pass
            assert found.terms[kind] == pytest.approx(size * count / ranks, rel=0.01)
        else:
            assert found.terms[kind] >= 0.99 * size * count / ranks
    assert whole.terms["batches"] == num_microbatches * found.terms["batches"]
    assert ("gathered weights" in found.terms) == (layout.get("zero_stage", 1) > 1)
    if layout.get("zero_stage") == 3:
        assert found.terms["gathered weights"] < 0.6 * 4 * count
        assert found.peak_bytes < whole.peak_bytes


@pytest.mark.parametrize(
    ("table", "smaller"),
    [
        ({"precision": {"compute": "bf16"}}, "activations"),
        ({"memory": {"activation_checkpointing": "full"}}, "activations"),
        ({"train": {"microbatch": 4}}, "activations"),
        ({"optim": {"name": "sgd", "momentum": 0.0}}, "optimizer"),
    ],
)
def test_memory_uses_what_else_changes_a_step(
    table: dict[str, dict[str, object]], smaller: str, small: Path
) -> None:
    spec = spec_file.read(str(small)).spec
    found = [predict(each) for each in (spec, spec.replace(**table))]
    before, after = (
        sum(each.blocks.values()) if smaller == "activations" else each.terms.get(smaller, 0)
        for each in found
    )
    # the casts of weights are kept, too
    assert after < before or ("precision" in table and after != before)


def test_memory_refuses_a_layout_that_train_refuses(small: Path) -> None:
    spec = spec_file.read(str(small)).spec
    for tables in (
        {"layout": {"shard": 64}},
        {"layout": {"shard": 2}, "optim": {"name": "muon"}},
        {"layout": {"shard": 2}, "observe": {"noise": True}, "train": {"microbatch": 4}},
    ):
        with pytest.raises(SpecError):
            predict(spec.replace(**tables))
