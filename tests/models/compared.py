"""One model of somebody else's, trained by a plain PyTorch loop and by a run.

Whole, in microbatches, on two ranks, killed and resumed.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # once, before ranks are forked
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import default_collate

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.wrapped import TorchDataset
from surefoot.core.errors import SurefootError
from surefoot.runtime.nested_tensors import map_tensors
from tests.world.ranks import run_ranks

STEPS, BATCH, MICROBATCH, KILLED_AFTER = 4, 8, 4, 3
# a file system without a disk: 20 commits a case are not what is tried here
MEMORY = Path("/dev/shm")
BOUND, WIDE = 1e-6, 1e-3  # of how far the weights have moved: in float64, and in float32
State = dict[str, Tensor]


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)


def sgd(groups: Any) -> torch.optim.Optimizer:
    """For models that compute in float32 at some place.

    Adam makes a large step of a gradient that is nothing but rounding.
    """
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model as its user builds and trains it.

    `model(drops)` builds it, with its dropout or without any; `mean(output, batch)` is the loss of
    a plain loop, a mean over `count(batch)` items. `loss` is what the task returns where that is
    not the mean times its count. `source` overrules a dataset of `samples`, joined by `collate`.
    `joins_samples` says that a pass over a part of a batch gives its samples other losses, as with
    BatchNorm. `refused` names the comparisons that are refused before step 1, with words of the
    message.
    """

    model: Callable[[bool], nn.Module]
    samples: Callable[[], Sequence[Any]]
    count: Callable[[Any], int]
    collate: Callable[[list[Any]], Any] = default_collate
    forward: Callable[[Any, Any], Any] = lambda model, batch: model(**batch)
    mean: Callable[[Any, Any], Tensor] = lambda output, batch: output.loss
    loss: Callable[[Any, Any], Loss] | None = None
    counts: Callable[[Any], Any] | None = None
    source: Callable[[Case], Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    dtype: torch.dtype = torch.float64
    stage: int = 3
    blocks: Callable[[Any], Sequence[nn.Module]] | None = None
    joins_samples: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        return BOUND if self.dtype is torch.float64 else WIDE

    def join(self, samples: list[Any]) -> Any:
        """A batch, its numbers in the `dtype` of the model."""
        batch = self.collate(samples)
        return map_tensors(
            batch, lambda each: each.to(self.dtype) if each.is_floating_point() else each
        )


class Trained:
    """The task of a case, computed in its `dtype`."""

    def __init__(self, case: Case, drops: bool) -> None:
        self.case, self.drops = case, drops
        if case.blocks is not None:
            self.blocks = case.blocks
        if case.counts is not None:
            self.counts = case.counts

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return self.case.model(self.drops).to(self.case.dtype)

    def data(self, split: str) -> Any:
        if self.case.source is not None:
            return self.case.source(self.case)
        return TorchDataset(self.case.samples(), self.case.join)

    def forward(self, model: Any, batch: Any) -> Any:
        return self.case.forward(model, batch)

    def loss(self, output: Any, batch: Any) -> Loss:
        if self.case.loss is not None:
            return self.case.loss(output, batch)
        count = self.case.count(batch)
        return Loss.sum(self.case.mean(output, batch) * count, count)

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return self.case.optimizer(groups)


@dataclass(frozen=True)
class Result:
    """A training's losses, weights and buffers.

    The loss of each step, the weights and buffers at the end, the loss of an evaluation.
    """

    losses: list[float]
    state: State
    evaluated: float | None = None

    def is_same(self, other: Result) -> bool:
        """Whether losses and state are the same bits."""
        return self.losses == other.losses and all(
            torch.equal(each, other.state[name]) for name, each in self.state.items()
        )


def spec_of(case: Case, tables: dict[str, Any]) -> RunSpec:
    whole_batches = {} if case.source is not None else {"batch": BATCH}
    train = {"length": f"{STEPS} steps", "threads": 1, **whole_batches, **tables.pop("train", {})}
    return RunSpec(
        train=train,
        optim={"name": "task", "weight_decay": 0.0, "clip": 0.0},
        schedule={"name": "constant"},
        data={"shuffle": False},
        evaluate={"split": "train", "every": "1000 steps"},
        checkpoint={"every": "2 steps", "background": False},
        observe={"tensorboard": False},
        **tables,
    )


def run(
    case: Case, folder: Path, *, drops: bool = False, killed: bool = False, **tables: Any
) -> Result:
    """A run of the case; with `killed` the process ends itself after a step."""
    losses = []
    with Run(spec_of(case, tables), Trained(case, drops), folder=folder, quiet=True) as run:
        for report in run.steps():
            losses.append(float(report.loss or 0.0))
            if killed and report.step == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
        state = {
            name: _whole(each)
            for name, each in run.model.state_dict().items()
            if isinstance(each, Tensor)
        }
        evaluated = run.evaluate().loss
    return Result(losses, state, evaluated)


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone().contiguous()


def run_on_ranks(case: Case, folder: Path, layout: dict[str, Any], **tables: Any) -> list[Result]:
    """What each of two ranks made of it. Raises SurefootError where the run was refused."""

    def job(rank: int) -> Any:
        made = run(case, folder / "run", layout=layout, **tables)
        save_file(made.state, folder / f"{rank}.safetensors")
        return [made.losses, made.evaluated]

    found = run_ranks(2, job, folder / "ranks", within_s=120.0)
    for each in found:
        if isinstance(each, dict):
            if each["code"] != 2:
                raise AssertionError(f"{each['error']}\n{each['trace']}")
            raise SurefootError(each["error"])
    return [
        Result(losses, load_file(folder / f"{rank}.safetensors"), loss)
        for rank, (losses, loss) in enumerate(found)
    ]


def plain(case: Case, microbatch: int | None = None) -> Result:
    """The loop that a user would write; gradients are accumulated where microbatches are given."""
    model = Trained(case, drops=False).model()
    model.train()
    optimizer = case.optimizer(model.parameters())
    source = Trained(case, drops=False).data("train")
    losses = []
    for step in range(STEPS):
        parts = _parts(case, source, step, microbatch)
        total = sum(case.count(part) for part in parts)
        optimizer.zero_grad()
        loss = 0.0
        for part in parts:
            share = case.mean(case.forward(model, part), part) * (case.count(part) / total)
            share.backward()  # type: ignore[no-untyped-call]
            loss += float(share.detach())
        optimizer.step()
        losses.append(loss)
    state = {
        name: _whole(each) for name, each in model.state_dict().items() if isinstance(each, Tensor)
    }
    return Result(losses, state, _evaluate(case, model, source))


def _parts(case: Case, source: Any, step: int, microbatch: int | None) -> list[Any]:
    if case.source is not None:
        batches = list(source)
        return [batches[step % len(batches)]]
    samples = case.samples()
    first = step * BATCH % len(samples)
    size = microbatch or BATCH
    return [
        case.join([samples[n] for n in range(at, at + size)])
        for at in range(first, first + BATCH, size)
    ]


@torch.no_grad()
def _evaluate(case: Case, model: nn.Module, source: Any) -> float:
    """The loss over all samples, each term over its own count."""
    model.eval()
    task = Trained(case, drops=False)
    samples = () if case.source is not None else case.samples()
    cut = [case.join(list(samples[at : at + BATCH])) for at in range(0, len(samples), BATCH)]
    terms: dict[str, list[float]] = {}
    for batch in cut or source:
        for term in task.loss(task.forward(model, batch), batch).terms:
            held = terms.setdefault(term.name, [term.weight, 0.0, 0.0])
            held[1] += float(term.total)
            held[2] += float(term.count)
    return sum(weight * total / count for weight, total, count in terms.values())


class Comparison:
    """The trainings of one case, each made once, and how far they are apart."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder

    def _start(self, drops: bool) -> State:
        return {
            name: each
            for name, each in Trained(self.case, drops).model().state_dict().items()
            if isinstance(each, Tensor)
        }

    @cached_property
    def plain(self) -> Result:
        return plain(self.case)

    @cached_property
    def alone(self) -> Result:
        """One rank, in microbatches, with dropout."""
        return run(self.case, self.folder / "alone", drops=True, **self._cut())

    def _cut(self) -> dict[str, Any]:
        return {} if "microbatches" in self.case.refused else {"train": {"microbatch": MICROBATCH}}

    def compare(self, what: str) -> float:
        """How far apart `what` compares, as a share of how far the weights have moved.

        0.0 is the same bits.
        """
        return float(getattr(self, f"_{what.replace(' ', '_')}")())

    def _plain_loop(self) -> float:
        return self.apart(run(self.case, self.folder / "whole"), self.plain)

    def _microbatches(self) -> float:
        """Against the whole batch; where samples are joined, against a loop that accumulates."""
        expected = plain(self.case, MICROBATCH) if self.case.joins_samples else self.plain
        return self.apart(
            run(self.case, self.folder / "cut", train={"microbatch": MICROBATCH}), expected
        )

    def _two_ranks(self) -> float:
        return self._on_ranks({})

    def _two_ranks_sharded(self) -> float:
        return self._on_ranks({"shard": 2, "zero_stage": self.case.stage})

    def _on_ranks(self, layout: dict[str, Any]) -> float:
        found = run_on_ranks(
            self.case,
            self.folder / f"ranks-{layout.get('zero_stage', 0)}",
            layout,
            drops=True,
            **self._cut(),
        )
        assert found[0].is_same(found[1]), "the ranks differ"
        return self.apart(found[0], self.alone, drops=True)

    def _resumed(self) -> float:
        folder = self.folder / "killed"
        pid = os.fork()
        if not pid:
            try:
                run(self.case, folder, drops=True, killed=True, **self._cut())
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        found = run(self.case, folder, drops=True, **self._cut())
        assert len(found.losses) == STEPS - 2, "resumed from the commit of step 2"
        unbroken = Result(self.alone.losses[2:], self.alone.state, self.alone.evaluated)
        if found.is_same(unbroken) and found.evaluated == unbroken.evaluated:
            return 0.0
        return max(self.apart(found, unbroken, drops=True), torch.finfo(torch.float64).tiny)

    def apart(self, one: Result, other: Result, *, drops: bool = False) -> float:
        """Largest difference of losses, relative, and of weights, by how far that tensor moved."""
        assert one.state.keys() == other.state.keys(), one.state.keys() ^ other.state.keys()
        assert len(one.losses) == len(other.losses)
        losses = [(*one.losses, one.evaluated), (*other.losses, other.evaluated)]
        found = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(*losses, strict=True)]
        start = self._start(drops)
        moved = {name: _distance(each, start[name]) for name, each in other.state.items()}
        assert max(moved.values()) > 0.0, "nothing was trained"
        least = 1e-3 * max(moved.values())
        found += [
            _distance(each, other.state[name]) / max(moved[name], least)
            for name, each in one.state.items()
        ]
        return max(found)


def _distance(one: Tensor, other: Tensor) -> float:
    if one.numel() == 0 or torch.equal(one, other):
        return 0.0
    return float((one.double() - other.double()).abs().max())


COMPARISONS = ("plain loop", "microbatches", "two ranks", "two ranks sharded", "resumed")


def check(case: Case) -> dict[str, str]:
    """Make every comparison of a case; gives what came of each in words.

    AssertionError where one does not hold.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        return _check(case, Path(folder))


def _check(case: Case, folder: Path) -> dict[str, str]:
    held, found = Comparison(case, folder), dict[str, str]()
    for what in COMPARISONS:
        try:
            distance = held.compare(what)
        except SurefootError as error:
            if what not in case.refused or case.refused[what] not in error.message:
                raise
            found[what] = "refused"
            continue
        assert what not in case.refused, f"{what} was not refused"
        assert distance <= (0.0 if what == "resumed" else case.bound), (
            f"{what}: {distance:.3g} apart"
        )
        found[what] = "same bits" if distance == 0.0 else f"{distance:.0e}"
    return found
