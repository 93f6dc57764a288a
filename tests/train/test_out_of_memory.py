"""A step that runs out of memory, for real.

In a process whose address space may grow by little more once the run has begun.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.contract import ledger
from surefoot.contract.events import Committed, Started
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.errors import OutOfMemory, SpecError, TaskError
from surefoot.core.ranks.layout import Layout
from surefoot.train.assemble import assemble
from surefoot.train.failure import account
from surefoot.train.preflight.predicted import Prediction
from surefoot.train.resume.start import Start
from surefoot.train.run import Run, drive
from tests.train.short import Greedy, train_short
from tests.train.small import Small, end_of, faults_of, records, spec
from tests.train.test_resume import bits, train
from tests.world.launched import forked

# a process that was forked from one with much memory may give back some hundred MiB in between
HEADROOM_MIB = 1400


def tables(memory: dict[str, Any] | None = None, **task: Any) -> dict[str, Any]:
    return {
        "task": {"use": "tests.train.short:Greedy", **task},
        "memory": memory or {},
        "train": {"batch": 16, "length": "3 steps", "threads": 1, "device": "cpu"},
        "observe": {"tensorboard": False},
        "evaluate": {"every": "100 epochs"},
        "optim": {"lr": 0.1, "ema": 0.9},
    }


def run_short(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a spec with little memory.

    Gives what its error says, or the digests of its state at the end.
    """
    importlib.import_module("torch._dynamo")  # seconds, which every process would need anew
    answer = folder.with_suffix(".json")

    def job() -> int:
        answer.write_text(json.dumps(train_short(given, folder, HEADROOM_MIB)))
        return 0

    _, status = os.waitpid(forked(job), 0)
    assert status == 0, f"the process with little memory ended with status {status}"
    told: dict[str, Any] = json.loads(answer.read_text())
    return told


@pytest.mark.parametrize(
    "greedy", [pytest.param("forward_mib", marks=pytest.mark.faults), "backward_mib"]
)
def test_a_step_done_again_in_halves_is_that_of_a_run_that_began_with_them(
    greedy: str, tmp_path: Path
) -> None:
    task = {greedy: 128}  # a batch of 16 takes 2 GiB
    told = run_short(tables({"on_oom": "halve"}, **task), tmp_path / "short")
    assert told["exit_code"] == 0, told
    faults = faults_of(tmp_path / "short")
    assert [(fault.step, fault.fault) for fault in faults] == [(1, "memory")]
    where = greedy.removesuffix("_mib")
    assert (
        f"step 1: out of memory in the {where} pass with microbatch 16: "
        "the allocation asked for 2 GiB" in faults[0].detail
    )
    assert re.search(
        rf"the peak was [^;]+; at .*short\.py:\d+, in {where}: torch\.empty\(", faults[0].detail
    )
    assert faults[0].action == "this step is repeated with microbatch 8, and later steps keep it"
    began = tables(**task)
    began["train"]["microbatch"] = 8
    with Run(RunSpec(**began), folder=tmp_path / "began", quiet=True) as run:
        drive(run)
        assert told["digests"] == run.state_digests()
    checksums = [
        [(row.step, row.checksum) for row in ledger.read(tmp_path / name)]
        for name in ("short", "began")
    ]
    assert checksums[0] == checksums[1]
    assert [step for step, _ in checksums[0]] == [1, 2, 3]


def test_what_has_no_half_left_ends_with_an_account_of_the_memory(tmp_path: Path) -> None:
    given = tables({"on_oom": "halve"}, backward_mib=4096)
    given["train"] |= {"batch": 4, "length": "2 steps"}
    told = run_short(given, tmp_path / "run")
    assert told["exit_code"] == 7
    assert (
        "step 1: out of memory in the backward pass with microbatch 1: "
        "the allocation asked for 4 GiB" in told["message"]
    )
    assert "'halve', but the microbatch is one sample already" in told["message"]
    actions = [event.action for event in faults_of(tmp_path / "run")]
    assert [action.partition(",")[0].split()[-1] for action in actions] == ["2", "1"]
    assert not any(isinstance(event, Committed) for event in records(tmp_path / "run"))
    assert (end_of(tmp_path / "run").outcome, end_of(tmp_path / "run").exit_code) == ("failed", 7)


@pytest.mark.parametrize(
    ("largest", "remedy"),
    [
        ("activations", "use a smaller model, or smaller samples"),
        ("parameters", "use a smaller model"),
        ("optimizer", "use an optimizer with less state, or a smaller model"),
    ],
)
def test_without_a_change_that_helps_the_hint_follows_from_the_largest_part(
    largest: str, remedy: str
) -> None:
    terms = {"activations": 1, "parameters": 1, "optimizer": 1, largest: 8 << 40}
    found = Prediction("id", 8 << 40, terms, 1, {}, Layout())
    assert account._hint(found, [], None, False) == (
        f"the predicted peak memory of a step is 8 TiB, mostly {largest}: {remedy}"
    )


@pytest.mark.slow
def test_the_error_names_the_blocks_and_what_would_bring_how_much(tmp_path: Path) -> None:
    told = run_short(tables(backward_mib=128), tmp_path / "run")
    assert told["exit_code"] == 7
    largest = "blocks.0 6 MiB, blocks.2 6 MiB, blocks.1 4 MiB, blocks.3 4 MiB, norm 2 MiB"
    assert f"the blocks with the largest activations: {largest}" in told["message"]
    assert re.search(
        r"step is 2\.0\d GiB; changes with their predicted peak, the cheapest first: "
        r"train.microbatch = 8 \(1\.0\d GiB\)",
        told["hint"],
    )
    assert 'memory.on_oom = "halve"' in told["hint"]
    row = json.loads((tmp_path / "run" / account.FILE).read_text())
    assert (row["step"], row["phase"], row["asked_bytes"], row["microbatch"]) == (
        1,
        "backward",
        2 << 30,
        16,
    )
    assert [change["change"] for change in row["changes"]] == ["train.microbatch = 8"]
    assert row["changes"][0]["predicted_bytes"] < 0.6 * row["predicted"]["peak_bytes"]
    assert row["peak_bytes"] > 64 << 20


@pytest.mark.slow
def test_the_changes_are_told_by_what_they_cost(tmp_path: Path) -> None:
    spec = RunSpec(
        task={"use": "pycorpus", "layers": 4, "width": 32, "heads": 2, "length": 64},
        train={"batch": 32, "device": "cpu"},
        evaluate={"split": "heldout"},
    )
    assembly = assemble(spec, better="lower")
    shortage = account.describe_shortage(
        MemoryError("Unable to allocate 2.50 GiB for an array"), assembly, 3
    )
    assert shortage.asked_bytes == 5 << 29
    hint = account.report_shortage(shortage, assembly, tmp_path, "").hint
    order = (
        r"first: task.chunked_loss = true \(.*\), train.microbatch = 16 \(.*\), "
        r"memory.activation_checkpointing = \"operators\" \("
    )
    assert re.search(order, str(hint)), hint


def test_an_update_that_broke_off_is_not_gone_on_from(tmp_path: Path) -> None:
    given = {**tables({"on_oom": "halve"}), "optim": {"name": "task"}}
    given["train"] |= {"batch": 4}
    with (
        pytest.raises(
            OutOfMemory, match="weights may be partly updated, and the step cannot be repeated"
        ) as raised,
        Run(RunSpec(**given), Greedy(moves=True), folder=tmp_path / "run", quiet=True) as run,
    ):
        drive(run)
    assert raised.value.message.startswith("step 1: out of memory in the update")
    assert [event.kind for event in records(tmp_path / "run")] == ["started", "ended"]


def test_an_evaluation_that_runs_out_of_memory_says_so(tmp_path: Path) -> None:
    given = {**tables(), "train": {"batch": 4, "length": "1 step"}, "evaluate": {"batch": 32}}
    with (
        pytest.raises(OutOfMemory, match="evaluation after step 1: ") as raised,
        Run(RunSpec(**given), Greedy(evaluates=True), folder=tmp_path / "run", quiet=True) as run,
    ):
        drive(run)
    assert "evaluate.batch" in str(raised.value.hint)


def test_what_cannot_be_done_in_halves_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    class Whole(Greedy):
        def loss(self, output: Tensor, batch: Any) -> Loss:
            return Loss(*super().loss(output, batch).terms, additive=False)

    with (
        pytest.raises(TaskError, match="not additive"),
        Run(RunSpec(memory={"on_oom": "halve"}), Whole(), folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert not (tmp_path / "run").exists()
    with pytest.raises(SpecError, match="half a batch would be one of several microbatches"):
        RunSpec(
            memory={"on_oom": "halve", "update_in_backward": True},
            optim={"clip": 0.0},
            stability={"nonfinite": "stop"},
        )


@pytest.mark.gpu
def test_a_gpu_that_is_full_is_told_with_what_its_allocator_holds(tmp_path: Path) -> None:
    given = tables({"on_oom": "halve"}, backward_mib=200)
    given["train"]["device"] = "cuda"
    torch.cuda.set_per_process_memory_fraction((2 << 30) / torch.cuda.mem_get_info()[1])
    try:
        with Run(RunSpec(**given), folder=tmp_path / "run", quiet=True) as run:
            drive(run)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [event.fault for event in faults_of(tmp_path / "run")] == ["memory"]
    assert json.loads((tmp_path / "run" / account.SEGMENTS_FILE).read_text())


class Once(Small):
    """Runs out of memory at one step, and never again: another process needed it."""

    def __init__(self, step: int | None) -> None:
        super().__init__(dropout=0.3, norm=True)
        self.left = -1 if step is None else step

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.left -= model.training
        if self.left == 0 and model.training:
            raise MemoryError("Unable to allocate 2.00 GiB for an array")
        return super().forward(model, batch)


def test_a_run_that_goes_on_keeps_the_half_that_memory_left_it(tmp_path: Path) -> None:
    how = spec(12, memory={"on_oom": "halve"}, checkpoint={"every": "3 steps"})
    train(tmp_path / "whole", how, Once(4))
    train(tmp_path / "left", how, Once(4), leave_at=8)
    train(tmp_path / "left", how, Once(None))
    assert bits(tmp_path / "left", 12) == bits(tmp_path / "whole", 12)
    began = [event for event in records(tmp_path / "left") if isinstance(event, Started)]
    assert "microbatch 2, not 4: a step ran out of memory with the larger one" in began[-1].notes
    stated = spec(14, memory={"on_oom": "halve"}, train={"microbatch": 4})
    with Run(
        stated,
        Once(None),
        folder=tmp_path / "fork",
        quiet=True,
        start=Start(tmp_path / "whole", 12),
    ) as run:
        assert run.assembly.feed.microbatch == 4


@pytest.mark.quick("process")
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_what_was_read_ahead_of_a_step_that_is_done_again_is_cut_anew(
    kind: str, tmp_path: Path
) -> None:
    for name, loader in (("alone", {}), ("ahead", {"workers": 2, "kind": kind})):
        train(
            tmp_path / name,
            spec(12, memory={"on_oom": "halve"}, checkpoint={"every": "3 steps"}, loader=loader),
            Once(4),
        )
    assert bits(tmp_path / "ahead", 12) == bits(tmp_path / "alone", 12)
    assert [event.step for event in faults_of(tmp_path / "ahead")] == [4]
