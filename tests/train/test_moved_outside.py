"""What an optimizer trains is what checkpoints hold and what is evaluated, wherever it is kept.

What is found nowhere is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot
from surefoot.components import checkpoint
from surefoot.core.errors import TaskError
from surefoot.train.run import Run
from tests.train.small import Small, spec
from tests.train.test_resume import Left, train

DATA = list(
    zip(
        torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).split(8),
        torch.arange(64).split(8),
        strict=True,
    )
)


class ArcFace:
    """A loss that is no module and has a weight."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.randn(3, 8))

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight)


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 8), {"a": nn.Linear(8, 3), "b": [nn.Linear(8, 8)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["a"](self.heads["b"][0](self.body(x)))  # type: ignore[index,operator]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def cast_all(module: nn.Module, state: Any, prefix: str, meta: Any) -> None:
    for name in list(state):
        state[name] = state[name].bfloat16()


def leave_out(module: nn.Module, state: Any, prefix: str, meta: Any) -> None:
    del state["2.weight"]


Made = tuple[nn.Module, list[Tensor], Callable[[Tensor], Tensor], Any]


def loss_with_weight() -> Made:
    model, loss = nn.Linear(4, 8), ArcFace()
    return model, [loss.weight], lambda x: loss(model(x)), loss


def lone_parameter() -> Made:
    model, temperature = net(), nn.Parameter(torch.zeros(()))
    return model, [temperature], lambda x: model(x) * temperature.exp(), temperature


def wrapper_that_shares() -> Made:
    model, head = nn.Linear(4, 8), nn.Linear(8, 3)
    whole = nn.ModuleList([model, nn.ModuleDict({"head": head})])
    return model, list(head.parameters()), lambda x: head(model(x)), whole


def dict_in_the_model() -> Made:
    model = InDict()
    heads: Any = model.heads
    return model, [*heads["a"].parameters(), *heads["b"][0].parameters()], model, None


def tensors_in_the_model() -> Made:
    model = net()
    model.scales = [torch.ones(3, requires_grad=True)]  # type: ignore[assignment]
    return model, list(model.scales), lambda x: model(x) * model.scales[0], None  # type: ignore[arg-type,operator,index]


def hook_that_casts() -> Made:
    model = net()
    model.register_state_dict_post_hook(cast_all)
    return model, [], model, None


def hook_that_leaves_out() -> Made:
    model = net()
    model.register_state_dict_post_hook(leave_out)
    return model, [], model, None


def list_of_objects() -> Made:
    model, losses = nn.Linear(4, 8), [ArcFace(), ArcFace()]
    return (
        model,
        [each.weight for each in losses],
        lambda x: losses[0](model(x)) + losses[1](model(x)),
        losses,
    )


LOOPS = {
    make.__name__: make
    for make in (
        loss_with_weight,
        lone_parameter,
        wrapper_that_shares,
        dict_in_the_model,
        tensors_in_the_model,
        hook_that_casts,
        hook_that_leaves_out,
        list_of_objects,
    )
}


def loop(make: Callable[[], Made], folder: Path, *, leave_at: int | None = None) -> float:
    """A loop that keeps `beside` in a variable, left as by a kill, or whole.

    Gives its last loss.
    """
    torch.manual_seed(1)
    model, more, forward, beside = make()
    optimizer = torch.optim.AdamW([*model.parameters(), *more], lr=0.05)
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=DATA, folder=folder, save="3 steps"
    )
    assert beside is None or beside is not None
    for _ in range(run.first_pass, 3):
        for x, y in run.batches():
            loss = F.cross_entropy(forward(x), y % 3)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            run.step_done(loss)
            if run.step == leave_at:
                run._left.detach()
                run.session.lock.release()
                return 0.0
    run.close()
    return loss.item()


@pytest.mark.quick("loss_with_weight")
@pytest.mark.parametrize("make", LOOPS)
def test_a_loop_that_was_left_resumes_all_that_its_optimizer_trains(
    make: str, tmp_path: Path
) -> None:
    whole = loop(LOOPS[make], tmp_path / "whole")
    loop(LOOPS[make], tmp_path / "left", leave_at=13)
    assert loop(LOOPS[make], tmp_path / "left") == whole


def test_a_parameter_that_no_variable_leads_to_is_refused_with_its_shape(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any]:
        hidden, model = nn.Linear(8, 5), net()
        return model, torch.optim.SGD([*model.parameters(), *hidden.parameters()], lr=0.1)

    model, optimizer = build()
    with pytest.raises(
        TaskError, match=r"2 parameters that no checkpoint would hold, of shape \[5, 8\], \[5\]"
    ) as refused:
        surefoot.attach(model=model, optimizer=optimizer, data=DATA, folder=tmp_path / "a")
    assert "nn.ModuleList" in str(refused.value.hint)
    assert "in attach: state={'head': head}" in str(refused.value.hint)
    assert not (tmp_path / "a").exists()


def test_an_optimizer_that_saves_its_own_masters_is_taken(tmp_path: Path) -> None:
    class WithMasters(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {**super().state_dict(), "masters": self.param_groups[0]["params"]}

        def load_state_dict(self, state: Any) -> None:
            with torch.no_grad():
                for own, saved in zip(
                    self.param_groups[0]["params"], state.pop("masters"), strict=True
                ):
                    own.copy_(saved)
            super().load_state_dict(state)

    def build() -> tuple[nn.Module, Any]:
        model = net().bfloat16()
        return model, WithMasters(
            [each.detach().float().requires_grad_() for each in model.parameters()], lr=0.1
        )

    model, optimizer = build()
    surefoot.attach(model=model, optimizer=optimizer, data=DATA, folder=tmp_path / "a").close()
    assert (tmp_path / "a" / "events.jsonl").is_file()


# ---- runs


class Outside(Small):
    """Trains more than its model, kept as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        torch.manual_seed(3)
        if how == "lists":
            self.heads = [[nn.Linear(3, 3)], {"scale": nn.Parameter(torch.ones(3))}]
        elif how == "object":
            self.loss_function = ArcFace()
            self.loss_function.weight = nn.Parameter(torch.randn(3, 3))
        elif how == "named":
            self.head = nn.Linear(3, 3)
            self.state = lambda: {"head": self.head}
        elif how == "global":
            globals()["HEAD"] = nn.Linear(3, 3)

    def model(self) -> nn.Module:
        made = super().model()
        if self.how == "model":
            made.heads = (nn.Linear(3, 3),)  # type: ignore[assignment]
        elif self.how == "left out":
            made.register_state_dict_post_hook(
                lambda module, state, prefix, meta: state.__delitem__("4.weight")
            )
        elif self.how == "cast":
            made.register_state_dict_post_hook(cast_all)
        return made

    def more(self, model: Any) -> Iterator[Any]:
        """What is trained beside the model, each as a function."""
        if self.how == "lists":
            yield self.heads[0][0]  # type: ignore[index]
            yield lambda x: x * self.heads[1]["scale"]  # type: ignore[call-overload]
        elif self.how == "object":
            yield self.loss_function
        elif self.how == "named":
            yield self.head
        elif self.how == "global":
            yield globals()["HEAD"]
        elif self.how == "model":
            yield model.heads[0]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.net, output = model, super().forward(model, batch)
        for each in self.more(model):
            output = each(output)
        return output

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        beside: list[Tensor] = []
        if self.how == "lists":
            beside = [*self.heads[0][0].parameters(), self.heads[1]["scale"]]  # type: ignore[index,call-overload]
        elif self.how == "object":
            beside = [self.loss_function.weight]
        elif self.how == "named":
            beside = list(self.head.parameters())
        elif self.how == "global":
            beside = list(globals()["HEAD"].parameters())
        elif self.how == "model":
            beside = list(self.net.heads[0].parameters())  # type: ignore[union-attr,operator,index]
        return torch.optim.AdamW([*groups, {"params": beside}] if beside else groups, lr=0.05)


HOW = spec(14, checkpoint={"every": "5 steps", "background": False})
KINDS = ("lists", "object", "named", "global", "model", "left out", "cast")


def ended(folder: Path, task: Outside) -> tuple[float, dict[str, str]]:
    with Run(HOW, task, folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
        return float(run.evaluate().loss), run.state_digests()


@pytest.mark.quick("lists", "left out")
@pytest.mark.parametrize("how", KINDS)
def test_a_run_resumes_and_evaluates_all_that_its_optimizer_trains(
    how: str, tmp_path: Path
) -> None:
    loss, state = ended(tmp_path / "whole", Outside(how))
    train(tmp_path / "left", HOW, Outside(how), leave_at=8)
    assert ended(tmp_path / "left", Outside(how)) == (loss, state)
    task = Outside(how)
    model = surefoot.load(tmp_path / "whole", "last", task=task)
    batch = task.data("test").read(torch.arange(24).numpy())
    with torch.no_grad():
        assert float(F.cross_entropy(task.forward(model, batch), batch[1])) == pytest.approx(
            loss, abs=1e-6
        )


class Hidden(Small):
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*groups, {"params": list(nn.Linear(7, 2).parameters())}], lr=0.05)


def test_a_run_is_refused_before_its_first_step_where_nothing_holds_what_it_trains(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(TaskError, match=r"no checkpoint would hold, of shape \[2, 7\]"),
        Run(HOW, Hidden(), folder=tmp_path / "a"),
    ):
        raise Left
    assert not (tmp_path / "a").exists()


def test_what_a_state_dict_leaves_out_on_purpose_and_nothing_trains_is_not_saved(
    tmp_path: Path,
) -> None:
    model = net()
    model[2].requires_grad_(False)
    model.register_state_dict_post_hook(leave_out)
    checkpoint.save(tmp_path, 1, {"model": model})
    assert "2.weight" not in checkpoint.Commit(tmp_path, 1).pieces(checkpoint.MODEL)
    other = net()  # trained wholly, as after optim.freeze was left out
    other.register_state_dict_post_hook(leave_out)
    assert checkpoint.load(tmp_path, {"model": other}) is not None
    assert torch.equal(other[0].weight, model[0].weight)


class Listed(nn.Module):
    """Layers held in `how`, of which a plain list or dict registers none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, layers = (
            nn.Linear(4, 4),
            nn.Linear(4, 3),
            [nn.Linear(4, 4), nn.Linear(4, 4)],
        )
        if how == "frozen":
            for each in layers:
                each.requires_grad_(False)
        held: dict[str, Any] = {
            "list": layers,
            "frozen": layers,
            "dict": {"a": layers[0], "b": layers[1:]},
            "tuple": (nn.Sequential(*layers),),
            "registered": nn.ModuleList(layers),
            "beside": [self.body],
        }
        self.kept = held[how]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class WithListed(Small):
    how = "list"

    def model(self) -> nn.Module:
        return Listed(self.how)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("list", "model.kept[0], model.kept[1]"),
        ("dict", "model.kept['a'], model.kept['b'][0]"),
        ("tuple", "model.kept[0]"),
        ("frozen", ""),
        ("registered", ""),
        ("beside", ""),
    ],
)
def test_layers_that_the_model_does_not_register_are_named_at_the_start(
    how: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = WithListed()
    task.how = how
    with Run(spec(1), task, folder=tmp_path / "run", quiet=True) as run:
        assert sum(1 for _ in run.steps()) == 1
    printed = capsys.readouterr().err
    assert (f"4 parameters in {named} are not registered in the model" in printed) is bool(named)
    assert ("not registered" in printed) is bool(named)
