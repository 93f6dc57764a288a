"""The kinds of training of examples/kinds as plain PyTorch loops.

Torch's optimizers, clipping and means, and no step of surefoot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from surefoot.components.data.order import Keys

Trained = tuple[list[float], dict[str, Tensor]]  # the loss of each step, and what was trained
Mean = Callable[[ModuleType, nn.Module, Any], Tensor]  # the loss of a batch, as the field writes it


def batches(task: Any, size: int, steps: int) -> Iterator[Any]:
    """The first batches of the first epoch, not shuffled, with the draws of each sample."""
    source = task.data("train")
    assert steps * size <= len(source)
    for step in range(steps):
        ids = np.arange(step * size, (step + 1) * size)
        batch = source.read(ids)
        yield task.augment(batch, Keys(0, 0, ids)) if hasattr(task, "augment") else batch


def loop(kind: ModuleType, task: Any, steps: int, mean: Mean) -> Trained:
    """Forward, backward, clip, Adam."""
    torch.manual_seed(0)
    model, table = task.model(), kind.SPEC.optim
    optimizer = torch.optim.Adam(model.parameters(), lr=table.lr, betas=table.betas)
    losses = []
    for batch in batches(task, kind.SPEC.train.batch, steps):
        loss = mean(kind, model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), table.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def diffusion(kind: ModuleType, model: nn.Module, batch: Any) -> Tensor:
    kept = kind.KEPT[batch["time"]][:, None]
    noisy = kept**0.5 * batch["points"] + (1 - kept) ** 0.5 * batch["noise"]
    return F.mse_loss(
        model(torch.cat([noisy, batch["time"][:, None] / kind.STEPS], 1)), batch["noise"]
    )


def graphs(kind: ModuleType, model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(
        model(batch["edges"], batch["graph"], len(batch["labels"])), batch["labels"]
    )


def reinforcement(kind: ModuleType, model: Any, batch: Any) -> Tensor:
    """One episode after another."""
    total, count = torch.zeros(()), 0
    for start, draws in zip(batch["start"], batch["draws"], strict=True):
        state, states, actions = start[None], [], []
        for draw in draws:
            if states and not (state[0, 0].abs() < 2.4 and state[0, 2].abs() < 0.2):
                break
            states.append(state)
            actions.append(float(draw < model["actor"](state).sigmoid()))
            state = kind.move(state, torch.tensor(actions[-1:]))
        come = [0.0]
        for _ in states:
            come.append(1 + kind.GAMMA * come[-1])
        returns, visited = torch.tensor(come[:0:-1]), torch.cat(states)
        better = returns - model["critic"](visited)[:, 0]
        chance = model["actor"](visited)[:, 0].sigmoid()
        surprise = -torch.where(torch.tensor(actions) > 0, chance, 1 - chance).log()
        total = total + (surprise * better.detach()).sum() + 0.5 * (better / 10).square().sum()
        count += len(states)
    return total / count


def contrastive(kind: ModuleType, model: nn.Module, batch: Any) -> Tensor:
    one, other = (F.normalize(model(batch[name]), dim=1) for name in ("first", "second"))
    rows = []
    for mine, theirs in ((one, other), (other, one)):
        same = mine @ mine.T / 0.2
        negatives = same.masked_select(~torch.eye(len(mine), dtype=torch.bool)).view(len(mine), -1)
        rows.append(
            F.cross_entropy(
                torch.cat([mine @ theirs.T / 0.2, negatives], 1), torch.arange(len(mine))
            )
        )
    return sum(rows) / 2  # type: ignore[return-value]


def ctc(kind: ModuleType, model: nn.Module, batch: Any) -> Tensor:
    criterion = nn.CTCLoss(reduction="none")
    output = model(batch["signal"]).log_softmax(2).transpose(0, 1)
    return (
        criterion(output, batch["letters"], batch["times"], batch["num_letters"]).sum()
        / batch["num_letters"].sum()
    )


def detection(kind: ModuleType, model: nn.Module, batch: Any) -> Tensor:
    task = kind.Boxes()
    output = task.forward(model, batch)
    pairs, mine, real = task.match(output, batch)
    there = torch.zeros_like(output["logits"])
    there[pairs] = 1.0
    off = F.l1_loss(mine, real, reduction="none").sum(1) + 1 - kind.overlap(mine, real)
    return F.binary_cross_entropy_with_logits(output["logits"], there) + off.mean()


def physics(kind: ModuleType, model: nn.Module, batch: Any) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    first = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    ends = model(torch.tensor([[0.0], [torch.pi]]))
    return F.mse_loss(second, -x.detach().sin()) + 10.0 * F.mse_loss(ends, torch.zeros(2, 1))


def truncated(kind: ModuleType, model: Any, batch: Any) -> Tensor:
    """All rows at once, with the state that the step before has left."""
    begins = bool(batch["begins"].any())
    out, state = model.cell(F.one_hot(batch["bits"], 2).float(), None if begins else model.kept)
    model.kept = state.detach()
    return F.cross_entropy(model.head(out).flatten(0, 1), batch["asked"].flatten())


def complex_weights(kind: ModuleType, model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def wgan(kind: ModuleType, task: Any, steps: int) -> Trained:
    torch.manual_seed(0)
    model, table, losses = task.model(), kind.SPEC.optim, []
    critic, generator = model["critic"], model["generator"]
    of_critic, of_generator = (
        torch.optim.Adam(net.parameters(), lr=table.lr, betas=table.betas)
        for net in (critic, generator)
    )
    for number, batch in enumerate(batches(task, kind.SPEC.train.batch, steps), 1):
        drawn = generator(batch["noise"]).detach()
        mixed = ((1 - batch["between"]) * batch["real"] + batch["between"] * drawn).requires_grad_()
        slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
        loss = (
            critic(drawn).mean()
            - critic(batch["real"]).mean()
            + kind.PENALTY * ((slope.norm(dim=1) - 1) ** 2).mean()
        )
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        losses.append(loss.item())
        if number % 5 == 0:
            loss = -critic(generator(batch["noise"])).mean()
            of_generator.zero_grad()
            loss.backward()
            of_generator.step()
            losses[-1] += loss.item()
    return losses, dict(model.named_parameters())


def swa(kind: ModuleType, task: Any, steps: int) -> Trained:
    torch.manual_seed(0)
    model, losses = task.model(), []
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (images, labels) in enumerate(batches(task, kind.SPEC.train.batch, steps), 1):
        optimizer.param_groups[0]["lr"] = 0.1 * (
            1 - 0.5 * min(1.0, (number - 1) / (kind.FROM * steps))
        )
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number > kind.FROM * steps:
            average.update_parameters(model)
    return losses, dict(model.named_parameters()) | {
        f"average.{name}": each for name, each in average.named_parameters()
    }


def sparse_embeddings(kind: ModuleType, task: Any, steps: int) -> Trained:
    torch.manual_seed(0)
    model, losses = task.model(), []
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=2e-2)
    for batch in batches(task, kind.SPEC.train.batch, steps):
        words = model["words"](batch["word"])
        near, others = (
            words[:, None] * model["contexts"](asked)
            for asked in (batch["near"][:, None], batch["others"])
        )
        loss = -(F.logsigmoid(near.sum(2)).sum(1) + F.logsigmoid(-others.sum(2)).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


MEANS: dict[str, Mean] = {
    "diffusion": diffusion,
    "graphs": graphs,
    "reinforcement": reinforcement,
    "contrastive": contrastive,
    "ctc": ctc,
    "detection": detection,
    "physics": physics,
    "truncated": truncated,
    "complex_weights": complex_weights,
}
LOOPS = {"wgan": wgan, "swa": swa, "sparse_embeddings": sparse_embeddings}


def train(name: str, kind: ModuleType, task: Any, steps: int) -> Trained:
    """The losses and what was trained after `steps` steps of the kind `name`."""
    if name in LOOPS:
        return LOOPS[name](kind, task, steps)
    return loop(kind, task, steps, MEANS[name])
