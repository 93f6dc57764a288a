"""Conversion of a model's weights to the channels-last memory format.

Most convolution kernels work with channels last, and reorder tensors in any other format in every
step. The output of a convolution has the format of its weights, so only weights and buffers are
converted; batches need no conversion. See "Channels Last Memory Format in PyTorch",
https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from surefoot.core.errors import SpecError

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions
NUM_NAMED = 4


def lay_channels_last(model: nn.Module) -> list[str]:
    """Convert every parameter and buffer of four or five dimensions to channels last, in place.

    Returns lines for the log: the number of converted tensors, and the names of 1-D convolutions,
    for which channels last does not exist. Raises SpecError if the model has no tensor of four or
    five dimensions.
    """
    count = 0
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.ndim in FORMATS:
            tensor.data = tensor.data.contiguous(memory_format=FORMATS[tensor.ndim])
            count += 1
    if not count:
        raise SpecError(
            'train.memory_format is "channels_last", but the model has no tensor of four or five '
            "dimensions",
            hint="leave it out",
        )
    left = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
    ]
    notes = [f"channels last (train.memory_format): {count} of the model's tensors"]
    if left:
        listed = ", ".join(
            left if len(left) <= NUM_NAMED else (*left[:NUM_NAMED], f"{len(left) - NUM_NAMED} more")
        )
        notes.append(
            f"unchanged, since channels last does not exist for 1-D convolutions: {listed}"
        )
    return notes
