"""Check for models in a torch wrapper for several devices, which surefoot rejects.

Both the wrapper and surefoot would sum the gradients.
"""

from __future__ import annotations

from torch import nn

from surefoot.core.errors import TaskError

# by name: importing all of them takes half as long as torch
WRAPPERS = {
    "DataParallel": "drives all devices from one interpreter "
    "and copies the model to them in every forward pass",
    "DistributedDataParallel": "sums gradients in each backward pass, as surefoot does once a step",
    "FullyShardedDataParallel": "splits weights where surefoot cannot see them",
    "FSDPModule": "splits weights where surefoot cannot see them",
}


def check_unwrapped(model: nn.Module) -> None:
    """Raise TaskError for a model that is, or contains, a torch wrapper for several devices.

    DistributedDataParallel is such a wrapper.
    """
    for place, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                where = f"{place} of the model" if place else "the model"
                raise TaskError(
                    f"{where} is wrapped in torch's {kind.__name__}, "
                    f"which {WRAPPERS[kind.__name__]}",
                    hint=(
                        "give the model itself: surefoot train SPEC --ranks N copies it to "
                        "N ranks, layout.shard splits it"
                    ),
                )
