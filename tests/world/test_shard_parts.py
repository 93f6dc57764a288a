"""State and weights that are split in a loop of one's own.

Losses with weights, what stays whole, gradients at their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once, before ranks are forked
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from surefoot.components.optim.update import GuardedUpdate
from surefoot.components.parallel.shard.fully import FullySharded
from surefoot.components.parallel.shard.parts import gather_rows, serve_part
from surefoot.components.parallel.shard.state import ShardedState
from surefoot.contract.state import master_of, part_of
from surefoot.core.errors import SpecError, TaskError
from surefoot.core.ranks.layout import Layout
from surefoot.runtime.comm.group import Group
from surefoot.runtime.comm.mesh import SOLO, Mesh, lay_out
from tests.world.ranks import together

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

STEPS, NORM = 3, 0.5


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What torch loads with the first optimizer is loaded here, once, and not by each rank."""
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])


class Scaled(nn.Module):
    """Two layers, and a number that multiplies what comes out, as CLIP's `logit_scale` does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.shift = nn.Parameter(torch.full((3,), 0.2, dtype=torch.float64))
        self.first.shift = self.last.shift = self.shift  # in two units

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.first(inputs))) * self.scale + self.shift
        return made


class Centers(nn.Module):
    """A loss with weights of its own: the squared distance to the center of a sample's class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.centers = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, made: Tensor, labels: Tensor) -> Tensor:
        return (made - self.centers[labels]).square().sum() + F.cross_entropy(
            made, labels, reduction="sum"
        )


def samples(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.randint(
        0, 3, (8,), generator=generator
    )


def passes(
    model: nn.Module, loss: nn.Module, step: int, rank: int, size: int
) -> list[Callable[[], None]]:
    """The two microbatches of a rank in a step, each to be passed through."""
    inputs, labels = samples(step)
    most = 8 // size // 2
    rows = [
        slice(first, first + most) for first in range(rank * 2 * most, (rank + 1) * 2 * most, most)
    ]

    def one(each: slice) -> None:
        loss(model(inputs[each]), labels[each]).backward()

    return [partial(one, each) for each in rows]


def sum_passes(synced: Any, each_pass: list[Callable[[], None]]) -> None:
    """All passes of a step, the last of which sums the gradients over ranks."""
    *before, last = each_pass
    for each in before:
        each()
    synced.arm()
    last()
    synced.finish()


def alone(
    params: Any, model: nn.Module, loss: nn.Module, *, clips: bool = False
) -> tuple[list[Tensor], list[Any], list[float]]:
    """Weights after the steps of one process, the last one's gradients and the norm of each."""
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer, norms = torch.optim.AdamW(params, lr=0.05), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in passes(model, loss, step, 0, 1):
            each()
        norms.append(float(clip_grad_norm_(parameters, NORM if clips else torch.inf)))
        optimizer.step()
    return [each.detach() for each in parameters], [each.grad for each in parameters], norms


def apart(one: list[Any], other: list[Any]) -> float:
    """The largest difference."""
    return max(
        float((first.detach() - second).abs().max())
        for first, second in zip(one, other, strict=True)
    )


def in_halves(group: Group) -> Mesh:
    return lay_out(group, Layout(shard=2, stage=3, replicate=group.size // 2), timeout_s=20.0)


FORMS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "module": lambda model, loss: nn.ModuleList([model, loss]),
    "parameters": lambda model, loss: (
        each for part in (model, loss) for each in part.parameters()
    ),
    "names": lambda model, loss: [*model.named_parameters(), *loss.named_parameters()],
    "groups": lambda model, loss: [
        {"params": model.named_parameters(), "lr": 0.01},
        {"params": [*loss.named_parameters()], "weight_decay": 0.0},
    ],
}


@pytest.mark.quick("module", "groups")
@pytest.mark.parametrize("form", FORMS)
def test_state_is_split_of_whatever_an_optimizer_of_torch_takes(form: str, tmp_path: Path) -> None:
    """A loss with weights beside the model; each rank keeps moments of its rows alone."""

    def make() -> tuple[nn.Module, nn.Module]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        with torch.no_grad():
            for number, each in enumerate(model.parameters()):
                each.copy_(torch.linspace(-0.5, 0.6 + number, each.numel()).reshape(each.shape))
        return model, Centers()

    def job(group: Group) -> Any:
        model, loss = make()
        sharded = ShardedState(FORMS[form](model, loss), in_halves(group))
        parameters = [*model.parameters(), *loss.parameters()]
        optimizer, replicas = torch.optim.AdamW(sharded.groups, lr=0.05), sharded.synced(parameters)
        for step in range(STEPS):
            optimizer.zero_grad()
            sum_passes(replicas, passes(model, loss, step, group.rank, group.size))
            optimizer.step()
            sharded.publish()
        other = make()
        params = FORMS[form](*other)
        weights, gradients, _ = alone(params.parameters() if form == "module" else params, *other)
        masters = [master_of(each) for each in parameters]
        whole = [
            gather_rows(sharded.group, each.grad, part)
            for each in masters
            if (part := part_of(each)) and each.grad is not None
        ]
        kept = sum(each["exp_avg"].numel() for each in optimizer.state.values())
        names = [name for each in optimizer.param_groups for name in each.get("param_names", [])]
        return [
            apart(parameters, weights),
            apart(whole, gradients),
            kept,
            sum(each.numel() for each in parameters),
            names,
        ]

    found = together(2, job, tmp_path)
    assert max(max(each[:2]) for each in found) < 1e-12
    assert found[0][2] + found[1][2] == found[0][3]
    assert max(each[2] for each in found) < 0.7 * found[0][3]
    assert found[0][4] == (
        ["0.weight", "0.bias", "2.weight", "2.bias", "centers"]
        if form in ("names", "groups")
        else []
    )


WEIGHT = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (WEIGHT, r"a tensor of shape \[2, 2\] was given"),
        (3, "int 3 was given"),
        ([], "none were given"),
        ([WEIGHT, {"params": [WEIGHT]}], "groups and parameters side by side"),
        ([{"lr": 0.1}], r"a group with the entries \['lr'\] are NoneType"),
        ([{"params": {WEIGHT}}], "are a set, which each rank may read in a different order"),
        (
            [("weight", WEIGHT), nn.Parameter(torch.ones(2))],
            "some parameters of a group have a name",
        ),
        ([{"params": [WEIGHT]}, {"params": WEIGHT}], "parameter 1.0 is in group 0, too"),
        ([WEIGHT, "weight"], "str 'weight' is among them"),
        ([("doubled", WEIGHT * 2)], "doubled is not a leaf"),
        ([nn.Parameter(torch.ones(()))], "parameter 0 has no dimension"),
    ],
)
def test_what_no_optimizer_takes_is_not_split(given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        ShardedState(given, SOLO)


def test_a_parameter_whose_state_is_not_split_is_not_summed() -> None:
    model, loss = nn.Linear(2, 2), nn.Linear(2, 3)
    sharded = ShardedState(model.parameters(), SOLO)
    with pytest.raises(
        TaskError, match=r"shape \[3, 2\] is to be trained, and ShardedState was not given it"
    ):
        sharded.synced([*model.parameters(), *loss.parameters()])


@pytest.mark.parametrize(
    ("stage", "num_ranks"), [(2, 2), (3, 2), pytest.param(3, 4, marks=pytest.mark.slow)]
)
def test_a_parameter_that_stays_whole_trains_to_the_numbers_of_one_process(
    stage: int, num_ranks: int, tmp_path: Path
) -> None:
    """A scalar, which cannot be split, what two units hold, and all of a unit.

    Each rank has all of them, with the same bits.
    """

    def job(group: Group) -> Any:
        model, loss, calls = Scaled(), nn.CrossEntropyLoss(reduction="sum"), list[int]()
        model.shift.register_hook(lambda gradient: calls.append(1))  # type: ignore[no-untyped-call]
        replicated = {model.scale, model.shift, *model.last.parameters()}
        units = {"first": model.first, "last": model.last}
        sharded = FullySharded(model, in_halves(group), units, stage=stage, replicated=replicated)
        parameters = [*model.parameters()]
        optimizer = torch.optim.AdamW([master_of(each) for each in parameters], lr=0.05)
        synced = sharded.synced(parameters)
        for step in range(STEPS):
            optimizer.zero_grad()
            sharded.begin()
            sum_passes(synced, passes(model, loss, step, group.rank, group.size))
            optimizer.step()
            sharded.publish()
            sharded.end()
        weights, gradients, _ = alone((other := Scaled()).parameters(), other, loss)
        whole = [
            each.full_tensor() if hasattr(each, "full_tensor") else each for each in parameters
        ]
        found = [
            each.grad.full_tensor() if hasattr(each, "full_tensor") else each.grad
            for each in parameters
        ]  # type: ignore[union-attr]
        split = [name for name, each in model.named_parameters() if hasattr(each, "full_tensor")]
        bits = [each.tolist() for each in (model.scale, model.shift, model.last.weight)]
        synced.close()
        return [apart(whole, weights), apart(found, gradients), split, len(calls), bits]

    found = together(num_ranks, job, tmp_path)
    assert max(max(each[:2]) for each in found) < 1e-12
    assert [each[2:4] for each in found] == [
        [["first.weight", "first.bias"], 2 * STEPS]
    ] * num_ranks
    assert all(each[4] == found[0][4] for each in found)


def test_a_parameter_that_is_not_the_model_s_cannot_stay_whole() -> None:
    with pytest.raises(
        SpecError, match=r"replicated has a parameter that Linear does not have: of shape \[2, 2\]"
    ):
        FullySharded(nn.Linear(2, 2), SOLO, {}, stage=2, replicated=[WEIGHT])


@pytest.mark.quick("2-True", "3-False")
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_torch_clips_the_gradients_that_stand_at_the_parameters(
    stage: int, begins: bool, tmp_path: Path
) -> None:
    """After `finish()`, each once, though the optimizer clears those of the rows alone."""

    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def job(group: Group) -> Any:
        model, loss = make(), nn.CrossEntropyLoss(reduction="sum")
        sharded = FullySharded(
            model, in_halves(group), {"0": model.get_submodule("0")}, stage=stage
        )
        parameters, norms = [*model.parameters()], list[float]()
        optimizer = torch.optim.AdamW([master_of(each) for each in parameters], lr=0.05)
        synced = sharded.synced(parameters)
        for step in range(STEPS):
            optimizer.zero_grad()
            if begins:
                sharded.begin()
            sum_passes(synced, passes(model, loss, step, group.rank, group.size))
            with torch.no_grad():
                model(samples(step)[0])  # an evaluation leaves them
            total: Any = clip_grad_norm_(parameters, NORM)
            norms.append(float(total.full_tensor()))
            optimizer.step()
            sharded.publish()
            sharded.end()
        weights, gradients, expected = alone(
            (other := make()).parameters(), other, loss, clips=True
        )
        return [
            apart([each.full_tensor() for each in parameters], weights),  # type: ignore[attr-defined]
            apart([each.grad.full_tensor() for each in parameters], gradients),  # type: ignore[union-attr]
            max(abs(one - two) for one, two in zip(norms, expected, strict=True)),
            all(
                each.grad.to_local().data_ptr() == master_of(each).grad.data_ptr()
                for each in parameters
            ),  # type: ignore[union-attr]
        ]

    found = together(2, job, tmp_path)
    assert max(max(each[:3]) for each in found) < 1e-12
    assert all(each[3] for each in found)  # they take no memory of their own


def test_a_step_that_begins_lets_the_gradients_at_the_parameters_go_with_those_of_the_rows() -> (
    None
):
    """They share memory: as long as one is held, the forward pass has none of it."""
    parameter = nn.Parameter(torch.ones(4, 2))
    master = serve_part(parameter, parameter[:2], 0, ShardedState([WEIGHT], SOLO))
    update = GuardedUpdate([torch.optim.SGD([master], lr=0.1)])
    parameter.grad, master.grad = torch.ones(4, 2), torch.ones(2, 2)
    update.clear_gradients()
    assert parameter.grad is None
    assert master.grad is None
