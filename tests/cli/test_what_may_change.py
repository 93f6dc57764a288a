"""The table of what may change between a run and its continuation holds for every key of a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from surefoot.contract import manifest
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError
from surefoot.train.resume import changes
from tests.cli.conftest import Command
from tests.cli.reference import ROOT, sections
from tests.cli.resumed_runs import SPEC, STEPS, STOP, snapshot, train
from tests.train.small import write_task

EDITS = {
    "observe.every": ("5 steps", "in place"),
    "observe.tensorboard": (True, "in place"),
    "observe.noise": (True, "in place"),
    "checkpoint.every": ("7 steps", "in place"),
    "checkpoint.keep": (5, "in place"),
    "checkpoint.keep_every": ("10 steps", "in place"),
    "checkpoint.keep_best": (2, "in place"),
    "checkpoint.max_unsaved": ("never", "in place"),
    "checkpoint.background": (False, "in place"),
    "data.folder": ("elsewhere", "in place"),
    "train.device": ("cpu", "in place"),
    "layout.replicate": (2, "in place"),
    "layout.shard": (2, "in place"),
    "layout.zero_stage": (1, "in place"),
    "layout.sync_buffers": (False, "in place"),
    "layout.timeout": (9.0, "in place"),
    "layout.check_every": ("5 steps", "in place"),
    "layout.hang_timeout": (9.0, "in place"),
    "layout.transport": ("gloo", "in place"),
    "layout.bucket_size": ("5 MiB", "in place"),
    "layout.first_bucket_size": ("5 MiB", "in place"),
    "layout.virtual_ranks": (4, "fork"),
    "layout.compress": ("bf16", "fork"),
    "layout.compress_rank": (2, "fork"),
    "nccl.debug": ("info", "in place"),
    "nccl.interface": ("eth0", "in place"),
    "nccl.infiniband": (False, "in place"),
    "nccl.adapter": ("mlx5_0", "in place"),
    "nccl.infiniband_timeout": (22, "in place"),
    "nccl.infiniband_retries": (7, "in place"),
    "nccl.algorithm": (("ring",), "in place"),
    "nccl.protocol": (("simple",), "in place"),
    "nccl.peer_access": (False, "in place"),
    "loader.workers": (2, "in place"),
    "loader.kind": ("process", "in place"),
    "loader.prefetch": (3, "in place"),
    "loader.start": ("spawn", "in place"),
    "loader.timeout": (9.0, "in place"),
    "loader.memory": ("1 GiB", "in place"),
    "train.cudnn_benchmark": (True, "in place"),
    "train.attention": ("math", "in place"),
    "train.memory_format": ("channels_last", "refused"),
    "train.threads": (2, "in place"),
    "task.use": ("cifar10", "refused"),
    "task.width": (9, "fork"),
    "data.shuffle": (False, "fork"),
    "data.last_batch": ("drop", "fork"),
    "data.draws": ("sample", "fork"),
    "data.shards": (4, "refused"),
    "data.on_bad": ("skip", "fork"),
    "data.window": (2, "fork"),
    "data.max_bad": (0.5, "fork"),
    "optim.name": ("sgd", "refused"),
    "optim.lr": (0.5, "fork"),
    "optim.weight_decay": (0.5, "fork"),
    "optim.betas": ((0.5, 0.5), "fork"),
    "optim.eps": (1e-3, "fork"),
    "optim.momentum": (0.5, "fork"),
    "optim.nesterov": (True, "fork"),
    "optim.trust_coefficient": (0.5, "fork"),
    "optim.reference_batch": (64, "fork"),
    "optim.scaling": ("sqrt", "fork"),
    "optim.clip": (0.0, "fork"),
    "optim.clip_value": (0.5, "fork"),
    "optim.no_decay": (("a*",), "fork"),
    "optim.lr_multipliers": ({"a*": 0.5}, "fork"),
    "optim.freeze": (("a*",), "refused"),
    "optim.ema": (0.5, "refused"),
    "optim.ema_ramp": (False, "fork"),
    "optim.ema_buffers": (True, "refused"),
    "schedule.name": ("constant", "fork"),
    "schedule.warmup": ("3 steps", "fork"),
    "train.length": ("99 steps", "fork"),
    "train.ramp": (((0, 64), (999, 128)), "fork"),
    "train.batchnorm": ("group", "refused"),
    "train.batch": (256, "fork"),
    "train.accumulate": (2, "fork"),
    "train.microbatch": (2, "fork"),
    "train.seed": (7, "fork"),
    "train.deterministic": (False, "fork"),
    "evaluate.split": ("other", "fork"),
    "evaluate.every": ("3 steps", "fork"),
    "evaluate.batch": (7, "fork"),
    "evaluate.batches": (2, "fork"),
    "evaluate.score": ("loss", "fork"),
    "evaluate.patience": (3, "fork"),
    "precision.compute": ("bf16", "fork"),
    "stability.nonfinite": ("stop", "fork"),
    "stability.max_skips": (9, "fork"),
    "stability.diverged": (99.0, "fork"),
    "memory.activation_checkpointing": ("full", "in place"),
    "memory.blocks": (("a*",), "in place"),
    "memory.on_oom": ("halve", "in place"),
    "memory.predict": (True, "in place"),
    "memory.offload": ("optimizer", "in place"),
    "compile.what": ("model", "in place"),
    "compile.blocks": (("a*",), "in place"),
    "compile.mode": ("max-autotune", "in place"),
    "compile.dynamic": (True, "in place"),
    "compile.on_failure": ("stop", "in place"),
    "compile.budget": (9, "in place"),
    "compile.over_budget": ("stop", "in place"),
    "optim.fused": (False, "fork"),
    "optim.state": ("8bit", "refused"),
    "fault.forget": (("optimizer",), "fork"),
    "precision.init_scale": (2.0, "fork"),
    "precision.growth_interval": (9, "fork"),
    "precision.min_scale": (0.5, "fork"),
    "precision.keep": (("0*",), "fork"),
    "precision.weights": ("bf16", "refused"),
    "precision.master": ("none", "refused"),
    "precision.emulate": (True, "fork"),
    "precision.contract": ({"state": "fp32"}, "fork"),
}


# as their neighbours
UNTRIED = {
    "checkpoint.store",
    "checkpoint.budget",
    "train.keep_freed_memory",
    "memory.update_in_backward",
}


NEEDS: dict[str, dict[str, Any]] = {  # what a value goes together with
    **{
        f"loader.{key}": {"workers": 2}
        for key in ("kind", "prefetch", "start", "timeout", "memory")
    },
    **{
        f"compile.{key}": {"what": "model"}
        for key in ("mode", "dynamic", "on_failure", "budget", "over_budget")
    },
    "data.max_bad": {"on_bad": "skip"},
    "layout.zero_stage": {"shard": 2},
    "precision.keep": {"compute": "bf16"},
    "optim.momentum": {"name": "sgd"},
    "optim.nesterov": {"name": "sgd"},
    "optim.trust_coefficient": {"name": "lars"},
    "optim.ema_ramp": {"ema": 0.9},
    "optim.ema_buffers": {"ema": 0.9},
    "optim.clip_value": {"clip": 0.0},
    "memory.blocks": {"activation_checkpointing": "full"},
    "compile.blocks": {"what": "blocks"},
    "layout.compress_rank": {"compress": "powersgd"},
    "precision.init_scale": {"compute": "fp16"},
    "precision.emulate": {"compute": "float8"},
    "precision.growth_interval": {"compute": "fp16"},
    "precision.min_scale": {"compute": "fp16"},
    "optim.scaling": {"reference_batch": 64},
    "precision.weights": {"compute": "bf16"},
    "precision.master": {"compute": "bf16", "weights": "bf16"},
}


def edited(key: str, value: Any) -> RunSpec:
    table, name = key.split(".")
    return plain(key).replace(**{table: {name: value}})


def plain(key: str) -> RunSpec:
    """A spec beside which the key has an effect."""
    return RunSpec(
        **{"task": {"use": "digits"}, **({key.split(".")[0]: NEEDS[key]} if key in NEEDS else {})}
    )


@pytest.mark.parametrize("key", EDITS)
def test_every_edit_is_allowed_needs_a_fork_or_is_refused_and_counts_in_the_id_alike(
    key: str,
) -> None:
    value, verdict = EDITS[key]
    before, after = plain(key), edited(key, value)
    found = changes.find(before, after)
    assert key in {change.key for change in found}
    try:
        changes.check_fork(found)
        changes.check_in_place(found, "how")
    except SpecError as error:
        assert verdict == ("refused" if "--weights-only" in str(error.hint) else "fork")  # noqa: PT017
    else:
        assert verdict == "in place"
    assert (before.id == after.id) == (verdict == "in place")


def test_every_key_of_a_spec_has_an_edit_here() -> None:
    before = changes._values(RunSpec(task={"use": "digits"}))
    assert {key for key in before if not key.startswith("schedule.")} - {*EDITS, *UNTRIED} == set()


def test_a_stated_default_may_overrule_a_part_of_the_task_and_counts_as_a_change() -> None:
    before = RunSpec(task={"use": "digits"})
    (change,) = changes.find(before, before.replace(optim={"name": "adamw"}))
    assert str(change) == "optim.name is 'adamw', was 'not stated'"
    assert change.rule.verdict == "refused"
    assert changes.find(before, RunSpec(**before.as_tables())) == []
    (back,) = changes.find(before.replace(optim={"name": "adamw"}), before)
    assert str(back) == "optim.name is 'not stated', was 'adamw'"


def test_the_table_of_what_may_change_is_the_one_that_is_applied() -> None:
    text = sections(ROOT / "docs" / "reference" / "run-folder.md")["Changes on resume"]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert rows == [[f"`{rule.pattern}`", rule.verdict, rule.why] for rule in changes.RULES]


OWN = """    def optimizer(self, groups):
        return torch.optim.SGD(groups, lr=0.05)

    def schedule(self, step, total_steps):
        return 1.0

    def data(self, split):"""


@pytest.mark.quick("False-schedule.name=cosine", "True-optim.lr=0.001")
@pytest.mark.parametrize("stated", ["optim.lr=0.001", "optim.name=adamw", "schedule.name=cosine"])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_default_that_overrules_the_tasks_own_by_being_stated_is_no_change_in_silence(
    stated: str, is_dropped: bool, tmp_path: Path, surefoot: Command
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        SPEC.format(use=write_task(tmp_path, change=("    def data(self, split):", OWN)))
    )
    key, value = stated.split("=")
    table, name = key.split(".")
    more: dict[str, Any] = {table: {name: float(value) if name == "lr" else value}}
    train("left", path, leave_at=STOP, **(more if is_dropped else {}))
    before = snapshot("left")
    words = () if is_dropped else ("--set", stated)
    answer = surefoot("train", str(path), "--run", "left", "--quiet", *words)
    assert answer.code == 2
    assert "unlike when left was started, and" in answer.err
    assert snapshot("left") == before
    assert (
        surefoot(
            "train",
            str(path),
            "--run",
            "left",
            "--quiet",
            *(("--set", stated) if is_dropped else ()),
        ).code
        == 0
    )


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({"name": "sgd", "momentum": 0.0}, "optim.momentum=0.9"),
        ({"name": "sgd", "momentum": 0.9}, "optim.momentum=0"),
        ({"name": "adamw"}, "optim.weight_decay=0"),
        ({"name": "adamw"}, "optim.lr_multipliers={'0.*'=0.5}"),
    ],
)
def test_a_fork_takes_settings_that_need_other_state_or_other_groups(
    was: dict[str, Any], now: str, tmp_path: Path, surefoot: Command
) -> None:
    spec = tmp_path / "mine.toml"
    spec.write_text(SPEC.format(use=write_task(tmp_path)))
    train("begun", spec, leave_at=STOP, optim=was)
    answer = surefoot("resume", "begun", "--fork", "new", "--set", now, "--quiet", "--json")
    assert (answer.code, answer.row["step"]) == (0, STEPS)
    files = [
        manifest.step_folder(Path(run), 6) / "optimizer.safetensors" for run in ("begun", "new")
    ]
    assert [file.is_file() for file in files] == [
        was.get("momentum") != 0.0,
        now != "optim.momentum=0",
    ]
    if all(file.is_file() for file in files):
        moments = [load_file(file) for file in files]
        assert moments[0].keys() == moments[1].keys()
        assert all(torch.equal(tensor, moments[1][name]) for name, tensor in moments[0].items())
