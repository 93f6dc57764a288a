"""Names, sizes and digests of what a checkpoint stores, and files for other libraries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.components import checkpoint

CLOCK = "clock.json"
OPTIMIZER, STATE, LIVE = "optimizer.safetensors", "state.safetensors", "weights.safetensors"
Files = dict[str, dict[str, Tensor]]


def name_weight_files(model: nn.Module) -> tuple[str, str]:
    """Return the file names of trained and frozen weights, in Hugging Face's scheme.

    The second name is "" if no weight is frozen.
    """
    if all(parameter.requires_grad for parameter in model.parameters()):
        return "model.safetensors", ""
    return "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def index_weights(weights: Files, moving: Files) -> dict[str, bytes]:
    """Return the index file of a model whose weights are in several files; empty for one file.

    `weights` and `moving` are the tensors of the checkpoint by file name.
    """
    parts = {
        file: {**weights.get(file, {}), **moving.get(file, {})}
        for file in {*weights, *moving}
        if file.startswith("model-")
    }
    if not parts:
        return {}
    tensors = [tensor for held in parts.values() for tensor in held.values()]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    where = {name: file for file, held in sorted(parts.items()) for name in held}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    return {"model.safetensors.index.json": json.dumps(index).encode()}


def write_config(model: nn.Module) -> dict[str, bytes]:
    """Return the config file of a Hugging Face model; empty for other models."""
    config = getattr(model, "config", None)
    if callable(getattr(config, "to_json_string", None)) and callable(
        getattr(model, "save_pretrained", None)
    ):
        return {"config.json": str(config.to_json_string()).encode()}  # type: ignore[union-attr]
    return {}


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the size of an optimizer's state, estimated for parameters that have none yet.

    SGD has one value per weight with momentum and none without; two are assumed for the others.
    """
    total = 0
    for group in optimizer.param_groups:
        is_sgd = "momentum" in group and isinstance(optimizer, torch.optim.SGD)
        values = int(bool(group["momentum"])) if is_sgd else 2
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {}).values()
            held = [each for each in state if isinstance(each, Tensor)]
            own = parameter.numel() * parameter.element_size() * values * parameter.requires_grad
            total += sum(each.numel() * each.element_size() for each in held) if held else own
    return total


def digest_of(tensors: Mapping[str, Tensor], words: Any) -> str:
    """Return a digest of tensors by name, and of values that JSON can hold."""
    taken = hashlib.sha256(json.dumps(words, sort_keys=True).encode())
    for name in sorted(tensors):
        taken.update(name.encode())
        taken.update(checkpoint.as_buffer(tensors[name].detach().cpu().contiguous()))
    return taken.hexdigest()
