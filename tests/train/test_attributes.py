"""State that a model keeps in plain attributes of its modules is kept like a buffer.

Saved, resumed, and put back after an evaluation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import surefoot
from surefoot.components.memory.recompute import recompute
from surefoot.components.optim.buffers import LiveBuffers
from surefoot.contract import manifest
from surefoot.contract.events import Fault
from surefoot.runtime.attributes.values import attributes_of
from surefoot.train.resume.start import Start
from surefoot.train.run import Run
from tests.train.hidden_state import KINDS, Cell, NoneAtFirst, Recurrent
from tests.train.small import Small, records, spec
from tests.train.test_resume import EVERY, STEPS, STOP, bits, losses, train

HOW = {"checkpoint": {"every": f"{EVERY} steps"}, "observe": {"every": "1 step"}}


def held(folder: Path, step: int = STEPS) -> dict[str, Any]:
    """The attributes that a checkpoint holds, by name."""
    tree = json.loads((manifest.step_folder(folder, step) / "state.json").read_text())
    return dict(tree.get("attributes", {}).get("values", {}))


@pytest.mark.quick("OfALstm", "Flagged")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(
    kind: str, tmp_path: Path
) -> None:
    how = spec(STEPS, **HOW, evaluate={"every": "4 steps"})
    train(tmp_path / "whole", how, Recurrent(KINDS[kind]))
    train(tmp_path / "left", how, Recurrent(KINDS[kind]), leave_at=STOP)
    train(tmp_path / "left", how, Recurrent(KINDS[kind]), leave_at=STOP + 5)
    train(tmp_path / "left", how, Recurrent(KINDS[kind]))
    assert losses(tmp_path / "left") == losses(tmp_path / "whole")
    assert bits(tmp_path / "left") == bits(tmp_path / "whole")


@pytest.mark.quick("Queue")
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_changes_nothing_of_what_is_trained_afterwards(
    kind: str, tmp_path: Path
) -> None:
    train(
        tmp_path / "plain",
        spec(STEPS, **HOW, evaluate={"every": "1000 steps"}),
        Recurrent(KINDS[kind]),
    )
    train(
        tmp_path / "seen", spec(STEPS, **HOW, evaluate={"every": "3 steps"}), Recurrent(KINDS[kind])
    )
    assert losses(tmp_path / "seen") == losses(tmp_path / "plain")


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_moves_no_attribute(kind: str, tmp_path: Path) -> None:
    with Run(
        spec(12, **HOW, evaluate={"every": "1000 steps"}),
        Recurrent(KINDS[kind], poison=(3,)),
        folder=tmp_path / "run",
        quiet=True,
    ) as run:
        for _ in run.steps():
            pass
        assert run.num_skipped == 2
        kept = [each for each in vars(run.model[1]).values() if isinstance(each, Tensor)]  # type: ignore[index]
        assert all(bool(each.isfinite().all()) for each in kept)
        assert all(
            report is not None and report == report
            for report in list(losses(tmp_path / "run").values())[-1:]
        )


class Cached(Cell):
    """A table that is built once, and one that the first batch of each length builds.

    The latter has a number that says for which length.
    """

    def start(self) -> None:
        self.table = torch.arange(8.0)
        self.built_for: int | None = None
        self.sines: Tensor | None = None

    def carry(self, hidden: Tensor) -> Tensor:
        if self.built_for != len(hidden):
            self.built_for, self.sines = (
                len(hidden),
                torch.arange(8.0 * len(hidden)).sin().reshape(-1, 8),
            )
        assert self.sines is not None
        return self.sines + self.table


def test_a_table_that_never_changes_is_in_no_checkpoint_and_one_that_is_built_late_stays_right(
    tmp_path: Path,
) -> None:
    task = Recurrent(Cached)
    train(
        tmp_path / "run",
        spec(STEPS, **HOW, evaluate={"every": "4 steps", "batch": 7}),
        task,
        leave_at=STOP,
    )
    train(tmp_path / "run", spec(STEPS, **HOW, evaluate={"every": "4 steps", "batch": 7}), task)
    train(tmp_path / "plain", spec(STEPS, **HOW, evaluate={"every": "1000 steps"}), task)
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert set(held(tmp_path / "run")) == {"1.built_for", "1.sines"}


class Derived(nn.Module):
    """Weights computed anew in each pass, and attributes that are parameters, or views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.pruned = prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5)
        self.rnn = nn.GRU(8, 8)
        self.weights = list(self.normed.parameters())
        self.first = self.normed.bias[:2]

    def forward(self, hidden: Tensor) -> Tensor:
        self.first = self.normed.bias[:2]
        return self.pruned(self.spectral(self.normed(hidden))) + self.rnn(hidden[None])[0][0]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "task",
    [Small(), Small(0.2, norm=True), Recurrent(Derived)],
    ids=["plain", "BatchNorm", "derived"],
)
def test_a_checkpoint_of_a_model_without_such_state_has_no_part_for_it(
    task: Small, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", spec(STEPS, **HOW), task)
    assert run is not None
    assert run.assembly.engine.steps.buffers._attribute_slots == []
    tree = json.loads((manifest.step_folder(tmp_path / "run", STEPS) / "state.json").read_text())
    assert "attributes" not in tree


class Boxed(Cell):
    """No checkpoint can hold these: an object, a sparse tensor, a parameter's view, a generator."""

    class Box:
        def __init__(self) -> None:
            self.h = torch.zeros(8)

    def start(self) -> None:
        self.box, self.generator = self.Box(), torch.Generator().manual_seed(1)
        self.few = torch.zeros(8).to_sparse()

    def carry(self, hidden: Tensor) -> Tensor:
        self.box.h = hidden.mean(0).detach()
        self.few = hidden.mean(0).detach().to_sparse()
        return self.box.h + torch.randn(8, generator=self.generator)


def test_state_that_no_checkpoint_can_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", spec(STEPS, **HOW), Recurrent(Boxed))
    found = [
        event
        for event in records(tmp_path / "run")
        if isinstance(event, Fault) and event.fault == "attributes"
    ]
    assert len(found) == 1
    printed = " ".join(capsys.readouterr().err.split())
    for name in ("1.box (Box)", "1.generator (Generator)", "1.few (Tensor)"):
        assert name in found[0].detail
        assert name in printed


class Held(Cell):
    """A parameter in a plain list, which its module does not know; and one that is deleted."""

    def start(self) -> None:
        self.hidden = [nn.Parameter(torch.zeros(8))]
        self.before: Tensor | None = torch.ones(8)

    def carry(self, hidden: Tensor) -> Tensor:
        if hasattr(self, "before"):
            del self.before
        return self.hidden[0]


def test_a_parameter_in_a_list_keeps_its_object_and_what_was_deleted_stays_so(
    tmp_path: Path,
) -> None:
    made: list[Held] = []

    def cell() -> Held:
        made.append(Held())
        return made[-1]

    how = spec(STEPS, **HOW)
    try:
        with Run(how, Recurrent(cell), folder=tmp_path / "run", quiet=True) as run:
            for report in run.steps():
                with torch.no_grad():
                    made[-1].hidden[0] += 1
                if report.step == STOP:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    with Run(how, Recurrent(cell), folder=tmp_path / "run", quiet=True) as run:
        seen = made[-1].hidden[0]
        assert isinstance(seen, nn.Parameter)
        assert seen.tolist() == [float(run.step)] * 8
        assert run.step
        assert not hasattr(made[-1], "before")


def test_a_fork_begins_with_the_attributes_and_saves_them(tmp_path: Path) -> None:
    how = spec(STEPS, **HOW)
    train(tmp_path / "whole", how, Recurrent(NoneAtFirst))
    with Run(
        how,
        Recurrent(NoneAtFirst),
        folder=tmp_path / "fork",
        start=Start(tmp_path / "whole", 15),
        quiet=True,
    ) as run:
        assert run.step == 15
        for _ in run.steps():
            pass
    assert losses(tmp_path / "fork") == {
        step: loss for step, loss in losses(tmp_path / "whole").items() if step > 15
    }


def attached(folder: Path, kind: str, *, leave_at: int | None = None) -> list[Any]:
    """A loop with attach, left at a step as by a kill, or whole.

    Its losses, and what is in the end.
    """
    torch.manual_seed(3)
    model = Recurrent(KINDS[kind]).model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = list(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)).split(4))
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=rows, folder=folder, every=1, save="4 steps"
    )
    found: list[Any] = []
    for _ in range(run.first_pass, 4):
        for batch in run.batches():
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step_done(loss)
            found.append((run.step, float(loss.detach())))
            if run.step == leave_at:
                run.session.telling.close()
                return found
    run.close()
    return [*found, *(each.tolist() for each in model.state_dict().values())]


@pytest.mark.quick("InAGraph", "AbsentAtFirst", "Turns")
@pytest.mark.parametrize("kind", KINDS)
def test_an_attached_loop_resumes_with_the_bits_of_one_that_was_never_stopped(
    kind: str, tmp_path: Path
) -> None:
    whole = attached(tmp_path / "whole", kind)
    attached(tmp_path / "left", kind, leave_at=11)
    again = attached(tmp_path / "left", kind)
    assert again == whole[8:]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Turns"])
@pytest.mark.parametrize("how", ["full", "operators"])
def test_recomputation_sees_the_attributes_that_the_forward_pass_saw(kind: str, how: str) -> None:
    def trained(way: str) -> list[Any]:
        torch.manual_seed(3)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), KINDS[kind](), nn.Tanh()) for _ in range(2))
        )
        recompute(model, way)
        found = []
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.randn(4, 8)).square().sum()
            loss.backward()
            found += [
                float(loss.detach()),
                *(each.grad.tolist() for each in model.parameters() if each.grad is not None),
            ]
        return found

    assert trained(how) == trained("none")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_applied", [0, 2])
def test_a_step_that_the_device_skips_moves_no_attribute(kind: str, num_applied: int) -> None:
    torch.manual_seed(3)
    model = KINDS[kind]()
    live = LiveBuffers(model)

    yes, no, rows = torch.tensor(True), torch.tensor(False), torch.randn(3, 4, 8)
    for number in range(num_applied):
        live.keep()
        model(rows[number])
        live.restore_unless(yes)
    live.keep()

    def state() -> str:
        return repr({**attributes_of(model), **dict(model.named_buffers())})

    before = state()
    model(rows[2] * torch.nan)
    live.restore_unless(no)
    assert state() == before


class Decayed(nn.Module):
    """A factor in a number of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = np.float32(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.factor = np.float32(self.factor * np.float32(0.9))
        return x * float(self.factor)


class OfNumpy(Small):
    def __init__(self) -> None:
        super().__init__()
        # keys that cannot be compared
        self.by_weight = {torch.zeros(2): 1.0, torch.ones(2): 2.0}

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), Decayed())


def test_a_number_of_numpy_is_kept_too(tmp_path: Path) -> None:
    how = spec(STEPS, **HOW)
    train(tmp_path / "whole", how, OfNumpy())
    train(tmp_path / "left", how, OfNumpy(), leave_at=STOP)
    train(tmp_path / "left", how, OfNumpy())
    assert losses(tmp_path / "left") == losses(tmp_path / "whole")
    assert bits(tmp_path / "left") == bits(tmp_path / "whole")
