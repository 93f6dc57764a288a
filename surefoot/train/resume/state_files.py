"""Names of the files of a checkpoint that hold the state, and files for other libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from surefoot.components import checkpoint

TREE, CLOCK = "state.json", "clock.json"
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


def read_task_state(
    run: Path, step: int, is_wanted: Callable[[dict[str, Any]], bool] = bool
) -> dict[str, Any]:
    """Return the entries of the task's `state()` that the checkpoint of a step holds.

    The result is empty for a checkpoint that holds only weights, and if `is_wanted` is false for
    the content of its `state.json`. Raises RunFolderError for a damaged checkpoint.
    """
    one = checkpoint.Commit(run, step)
    if not one.manifest.is_whole_state:
        return {}
    with checkpoint.as_run_folder_errors(one.folder):
        tree = one.json(TREE)
        if not is_wanted(tree):
            return {}
        tensors = one.read(STATE) if one.names(STATE) else {}
        saved: dict[str, Any] = checkpoint.join(tree.get("task", {}), tensors, one.folder)
        return saved
