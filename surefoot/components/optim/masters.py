"""Weights stored in bf16 with an fp32 master each: the model computes with the one, the optimiser moves the other.

bf16 keeps 8 bits, so 1.0 + 0.0001 is 1.0 again and small updates are lost; the master adds them up until they show. Gradients of all
microbatches are summed up in the master's `.grad`, in fp32, and the model's own are let go as soon as they are there.

    store_narrow(model)
    optimizer = torch.optim.AdamW([master_of(parameter) for parameter in model.parameters()])
    loss.backward(); optimizer.step(); publish(model.parameters())
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from surefoot.components.optim.fused import copy_tensors
from surefoot.contract.state import leaf_of, master_of, part_of

NARROW = torch.bfloat16


def store_narrow(model: nn.Module, *, wide: Collection[nn.Module] = (), with_masters: bool = True) -> list[str]:
    """Store the fp32 parameters of `model` in bf16, those of norms and of the modules `wide` left out; gives their names.

    Those that are trained get a master, unless their updates are to be lost.
    """
    left = {
        id(parameter)
        for module in {*find_norms(model), *wide}
        for parameter in module.parameters(recurse=module in wide)
    }  # fmt: skip
    narrowed = []
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or id(parameter) in left:
            continue
        master = nn.Parameter(parameter.detach().clone())
        parameter.data = parameter.data.to(NARROW)
        if parameter.requires_grad and with_masters:
            _serve(parameter, master)
        narrowed.append(name)
    return narrowed


def keep_on_host(model: nn.Module) -> None:
    """Let the masters of all trained parameters stand in host memory, and with them the optimiser's state: it updates there.

    A gradient goes there as soon as it is there, and is let go.
    """
    for parameter in model.parameters():
        master = master_of(parameter)
        if not parameter.requires_grad:
            continue
        if master is parameter:
            _serve(parameter, nn.Parameter(parameter.detach().to("cpu", copy=True)))
        else:
            master.data = master.data.cpu()


def _serve(parameter: Tensor, master: Tensor) -> None:
    master.served, parameter.master = parameter, master  # type: ignore[attr-defined]
    parameter.register_post_accumulate_grad_hook(_hand_over)  # type: ignore[no-untyped-call]


def find_norms(model: nn.Module) -> list[nn.Module]:
    """The norms of a model, by the names of their classes: what they scale by is not narrowed."""
    return [module for module in model.modules() if "norm" in type(module).__name__.lower()]


def _hand_over(parameter: Tensor) -> None:
    master, gradient = master_of(parameter), parameter.grad
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master)
    else:
        master.grad.add_(gradient.to(master.device))
    parameter.grad = None


@torch.no_grad()
def publish(parameters: Iterable[Tensor]) -> None:
    """Round every master into its parameter, and let a part's parameter know that it moved; those that have none stay."""
    pairs = [(leaf, master) for leaf in map(leaf_of, parameters) if (master := master_of(leaf)) is not leaf]
    parts = [part for _, master in pairs if (part := part_of(master)) is not None]
    for owner in {id(part.owner): part.owner for part in parts}.values():
        owner.publish()
    pairs = [(leaf, master) for leaf, master in pairs if part_of(master) is None]
    if pairs:
        copy_tensors([leaf.detach() for leaf, _ in pairs], [master for _, master in pairs])
