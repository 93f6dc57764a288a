"""Weights stored in bf16, each with an fp32 copy (master) that the optimizer updates.

The model computes with the bf16 weight. bf16 has 8 significant bits, so that 1.0 + 0.0001 is 1.0,
and small updates would be lost; the master accumulates them. The gradients of all microbatches are
summed in the `.grad` of the master, in fp32. The gradients of the model are freed as soon as they
have been added.

    store_narrow(model)
    optimizer = torch.optim.AdamW([master_of(parameter) for parameter in model.parameters()])
    loss.backward(); optimizer.step(); publish(model.parameters())
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

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
        with_masters: Add an fp32 master to each trained parameter; without one, small updates are
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


def narrow_spectral_vectors(model: nn.Module, *, wide: Collection[nn.Module] = ()) -> None:
    """Store the singular vectors of spectral norms in bf16, the dtype of the weights.

    torch multiplies the weight by them, which needs one dtype. Those in `wide` stay in fp32.
    """
    left = {id(buffer) for module in wide for buffer in module.buffers()}
    for module in model.modules():
        hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook) is SpectralNorm]
        names = [f"{hook.name}_" for hook in hooks]
        if type(module).__name__ == "_SpectralNorm":  # the parametrization
            names.append("_")
        for name in names:
            for vector in (getattr(module, f"{name}{end}", None) for end in "uv"):
                if isinstance(vector, Tensor) and id(vector) not in left:
                    vector.data = vector.data.to(NARROW)


def keep_on_host(model: nn.Module) -> None:
    """Move the tensors that the optimizer updates (masters) to host memory.

    A trained parameter without a master gets one. The optimizer's state is then in host memory too,
    and the update runs on the CPU. A gradient is copied to the host as soon as it exists, and freed
    on the device.
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
    hook = parameter.register_post_accumulate_grad_hook(_hand_over)  # type: ignore[no-untyped-call]
    parameter.hand_over = hook.id  # type: ignore[attr-defined]


def find_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules with "norm" in their class names, whose weights stay in fp32."""
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
    """Copy every fp32 master into its parameter, rounded to the dtype of the parameter.

    Parameters without a master are unchanged. If a master is only a shard of its parameter, the
    owner of the sharded parameter copies it.
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
