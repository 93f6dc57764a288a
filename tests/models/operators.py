"""torchvision's compiled operators, declared where its wheel was built for another torch.

So it and what needs it can be imported.

The wheel of the package index is built for CUDA, and its operators do not load beside a CPU build
of torch. No model here calls them.
"""

from __future__ import annotations

import importlib.util

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []


def declare() -> None:
    """Let torchvision be imported, if it is installed."""
    if _declared or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for schema in SCHEMAS:
            _declared[0].define(schema)
