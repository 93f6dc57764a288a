"""Models with their own `train()` and `eval()`, compared with a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot import Loss, Run
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.train.quiet import preserve_state
from surefoot.train.run import drive

STEPS, SIZE, LR = 6, 4, 0.1


class Merging(nn.Linear):
    """A layer that adds the product of two small matrices to its weight for evaluation."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.weight.requires_grad_(False)
        self.down, self.up = (
            nn.Parameter(torch.randn(2, num_in) * 0.3),
            nn.Parameter(torch.randn(num_out, 2) * 0.3),
        )
        self.merged = False

    def add(self, sign: float) -> None:
        self.weight.data += sign * (self.up @ self.down)

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged is mode:
            self.add(-1.0 if mode else 1.0)
        self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        output = F.linear(x, self.weight, self.bias)
        return output if self.merged else output + x @ self.down.T @ self.up.T


class MergingInPlace(Merging):
    def add(self, sign: float) -> None:
        with torch.no_grad():
            self.weight.add_(self.up @ self.down, alpha=sign)


class MergingIntoNewMemory(Merging):
    def add(self, sign: float) -> None:
        self.weight.data = self.weight.data + sign * (self.up @ self.down).detach()


class MergingIntoNewParameter(Merging):
    def add(self, sign: float) -> None:
        made = self.weight.detach() + sign * (self.up @ self.down).detach()
        self.weight = nn.Parameter(made, requires_grad=False)


class MergingByNumPy(Merging):
    def add(self, sign: float) -> None:
        values = self.weight.data.numpy()
        values += sign * (self.up @ self.down).detach().numpy()


class MergingIntoOldMemory(Merging):
    """A layer that merges into new memory, and then overwrites the old one as a cache."""

    def add(self, sign: float) -> None:
        old = self.weight.data
        self.weight.data = old + sign * (self.up @ self.down).detach()
        old.zero_()


class MergingAll(Merging):
    def add(self, sign: float) -> None:
        product = (self.up @ self.down).detach()
        torch._foreach_add_([self.weight.data, self.bias.data], [sign * product, product[:, 0]])


class NarrowInEvaluation(nn.Linear):
    def train(self, mode: bool = True) -> NarrowInEvaluation:
        super().train(mode)
        self.to(torch.float32 if mode else torch.bfloat16)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).float()


class TransposedInEvaluation(nn.Linear):
    """A layer that stores its weight transposed for evaluation, in the same memory."""

    def train(self, mode: bool = True) -> TransposedInEvaluation:
        if mode is not self.training:
            self.weight.data.copy_(self.weight.data.T.clone())
            self.weight.data = self.weight.data.T
        super().train(mode)
        return self


class Frozen(nn.Sequential):
    """A model that freezes all parameters for evaluation, and rounds the trained ones."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        if not mode:
            for parameter in self.parameters():
                parameter.data = parameter.data.bfloat16().float()
                parameter.requires_grad_(False)
        return self


def only_low_rank() -> nn.Module:
    model = nn.Sequential(Merging(4, 8), nn.Tanh(), Merging(8, 3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("down", "up")))
    return model


MERGING: dict[str, Callable[[], nn.Module]] = {
    "data": lambda: nn.Sequential(Merging(4, 8), nn.Tanh(), Merging(8, 3)),
    "in place": lambda: nn.Sequential(MergingInPlace(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "new memory": lambda: nn.Sequential(MergingIntoNewMemory(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "new parameter": lambda: nn.Sequential(
        MergingIntoNewParameter(4, 8), nn.Tanh(), nn.Linear(8, 3)
    ),
    "by NumPy": lambda: nn.Sequential(MergingByNumPy(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "overwriting old memory": lambda: nn.Sequential(
        MergingIntoOldMemory(4, 8), nn.Tanh(), nn.Linear(8, 3)
    ),
    "two at once": lambda: nn.Sequential(MergingAll(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "narrow": lambda: nn.Sequential(NarrowInEvaluation(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "transposed": lambda: nn.Sequential(TransposedInEvaluation(4, 4), nn.Tanh(), nn.Linear(4, 3)),
    "all but the low rank frozen": only_low_rank,
    "the whole model": lambda: Frozen(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
}


ROUNDED = {"the whole model": 1e-2, "narrow": 1e-2}  # tolerances of losses in bf16


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return output


class FrozenNorm(WithNorm):
    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        self.drop.eval()
        return self


class FrozenStage(WithNorm):
    """A model that freezes its first layers as soon as it is trained."""

    def train(self, mode: bool = True) -> FrozenStage:
        super().train(mode)
        self.drop.p = 0.0
        for module in (self.first, self.norm):
            module.eval()
            for parameter in module.parameters():
                parameter.requires_grad_(False)
        return self


class AlwaysEvaluating(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> AlwaysEvaluating:
        super().train(False)
        return self


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


def with_own_method() -> nn.Module:
    model = WithNorm()

    def train(module: WithNorm, mode: bool = True) -> WithNorm:
        nn.Module.train(module, mode)
        module.norm.eval()
        module.drop.eval()
        return module

    model.train = MethodType(train, model)  # type: ignore[method-assign]
    return model


FROZEN: dict[str, Callable[[], nn.Module]] = {
    "the model": FrozenNorm,
    "an inner module": lambda: Around(Around(FrozenNorm())),
    "a layer": lambda: nn.Sequential(nn.Linear(4, 8), AlwaysEvaluating(8), nn.Linear(8, 3)),
    "parameters too": FrozenStage,
    "a method of the object": with_own_method,
    "built in evaluation mode": lambda: FrozenNorm().eval(),
}


class Classify:
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build

    def model(self) -> nn.Module:
        return self.build()

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randn(24, 4, generator=draw) + 2.0, torch.randint(0, 3, (24,), generator=draw)
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), count=len(output))


def plain_loop(build: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], float]:
    """Return the state dict after training without evaluations, and the loss of an evaluation."""
    torch.manual_seed(0)
    model = build()
    model.train()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], LR)
    x, y = Classify(build).data("train").read(torch.arange(24).numpy())
    for step in range(STEPS):
        rows = slice(step * SIZE, (step + 1) * SIZE)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        return state, float(F.cross_entropy(model(x), y))


def settings(steps: int = STEPS, **tables: Any) -> RunSpec:
    return RunSpec(
        optim={"name": "sgd", "lr": LR, "momentum": 0.0, "weight_decay": 0.0, "clip": 0},
        schedule={"name": "constant"},
        train={"length": f"{steps} steps", "batch": SIZE},
        data={"shuffle": False},
        **{"evaluate": {"every": "1 step", "split": "train"}, **tables},
    )


def held_in(model: Any) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def check_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, each in state.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", MERGING)
def test_weights_that_eval_changes_come_back_bitwise(kind: str, tmp_path: Path) -> None:
    expected, loss = plain_loop(MERGING[kind])
    with Run(settings(), Classify(MERGING[kind]), folder=tmp_path, quiet=True) as run:
        built = dict(run.model.named_parameters())
        for _ in run.steps():
            before = held_in(run.model)
            found = run.evaluate()
            after = held_in(run.model)
            assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(each is built[name] for name, each in run.model.named_parameters())
        assert found.loss == pytest.approx(loss, rel=ROUNDED.get(kind, 1e-5))
        check_same(held_in(run.model), expected)


@pytest.mark.parametrize("kind", MERGING)
def test_the_checks_before_step_1_leave_merged_weights_bitwise_unchanged(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    built = held_in(MERGING[kind]())
    with Run(settings(), Classify(MERGING[kind]), folder=tmp_path, quiet=True) as run:
        run.evaluate()
        assert all(torch.equal(each, built[name]) for name, each in held_in(run.model).items())
        drive(run)


class CopyCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Number of elements that are cloned inside the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("build", "copied"),
    [
        (lambda: Around(FrozenNorm()), 17),  # the buffers of the norm
        (lambda: nn.Sequential(AlwaysEvaluating(8), nn.Linear(8, 64)), 17),
        (lambda: nn.Sequential(MergingInPlace(4, 8), nn.Linear(8, 64)), 32),
        (lambda: nn.Sequential(MergingIntoNewMemory(4, 8), nn.Linear(8, 64)), 0),
        (lambda: Frozen(nn.Linear(4, 8)), 0),
    ],
)
def test_an_evaluation_copies_only_the_weights_that_eval_writes(
    build: Callable[[], nn.Module], copied: int
) -> None:
    model = build()
    with CopyCount() as count, preserve_state(model):
        pass
    assert count.elements == copied


@pytest.mark.parametrize("kind", FROZEN)
def test_an_own_train_method_is_called_as_in_a_plain_loop(kind: str, tmp_path: Path) -> None:
    expected, loss = plain_loop(FROZEN[kind])
    with Run(settings(), Classify(FROZEN[kind]), folder=tmp_path, quiet=True) as run:
        drive(run)
        check_same(held_in(run.model), expected)
        assert run.evaluate().loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["the model", "an inner module", "parameters too"])
def test_an_own_train_method_is_called_after_a_resume(kind: str, tmp_path: Path) -> None:
    expected, _ = plain_loop(FROZEN[kind])
    with Run(settings(), Classify(FROZEN[kind]), folder=tmp_path, quiet=True) as run:
        for report in run.steps():
            if report.step == STEPS // 2:
                run.save()
                break
    with Run(settings(), Classify(FROZEN[kind]), folder=tmp_path, quiet=True) as run:
        drive(run)
        check_same(held_in(run.model), expected)


def test_the_modules_that_train_keeps_in_evaluation_mode_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(settings(), Classify(FrozenNorm), folder=tmp_path) as run:
        modes = {name: module.training for name, module in run.model.named_children()}
        drive(run)
    assert modes == {"first": True, "norm": False, "drop": False, "last": True}
    words = "norm (BatchNorm1d), drop (Dropout) stay in evaluation mode, as set by train()"
    assert words in capsys.readouterr().err


def test_model_and_train_may_each_set_evaluation_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(
            nn.Linear(4, 8), AlwaysEvaluating(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        model[2].eval()
        return model

    with Run(settings(), Classify(build), folder=tmp_path) as run:
        for _ in run.steps():
            run.evaluate()
            assert [each.training for each in run.model.children()] == [True, False, False, True]
    told = capsys.readouterr().err
    assert "2 (Dropout) stay in evaluation mode, as set by model()" in told
