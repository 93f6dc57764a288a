"""Weights stored in bf16, with an fp32 master each: the model computes with the bf16 weight, the
optimizer updates the master.

bf16 has 8 significant bits, so 1.0 + 0.0001 is 1.0 and small updates are lost; the master
accumulates them. Gradients of all microbatches are summed in the master's `.grad`, in fp32, and the
model's gradients are freed as soon as they were added.

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


def store_narrow(
    model: nn.Module, *, wide: Collection[nn.Module] = (), with_masters: bool = True
) -> list[str]:
    """Store the fp32 parameters of a model in bf16, except those of norms.

    Args:
        model: The model, changed in place.
        wide: Modules whose parameters stay in fp32.
        with_masters: Give each trained parameter an fp32 master; without one, small updates are
            lost.

    Returns:
        The names of the parameters that were stored in bf16.
    """
    left = {
        id(parameter)
        for module in {*find_norms(model), *wide}
        for parameter in module.parameters(recurse=module in wide)
    }
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
    """Move the masters of all trained parameters to host memory; the optimizer's state is then
    there too, and the update runs on the CPU.

    A gradient is copied to the host as soon as it exists, and freed on the device.
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
    """Return the norm modules of a model, found by their class names; their scales stay in fp32."""
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
    """Round every master into its parameter; parameters without a master are unchanged.

    For masters that are rows of a sharded parameter, call the `publish` of their owner.
    """
    pairs = [
        (leaf, master)
        for leaf in map(leaf_of, parameters)
        if (master := master_of(leaf)) is not leaf
    ]
    parts = [part for _, master in pairs if (part := part_of(master)) is not None]
    for owner in {id(part.owner): part.owner for part in parts}.values():
        owner.publish()
    pairs = [(leaf, master) for leaf, master in pairs if part_of(master) is None]
    if pairs:
        copy_tensors([leaf.detach() for leaf, _ in pairs], [master for _, master in pairs])
