"""Data sources, sample order, augmentation, and batches on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.components.data.blocks import BlockShuffle, Order, measure_mixing
from surefoot.components.data.feed import Feed, StreamShard, to_device
from surefoot.components.data.mixture import Concat, Mixture
from surefoot.components.data.order import Keys
from surefoot.components.data.remote.fetch import RetryPolicy
from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.data.sources.images import ImageFolder
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.data.sources.packed import (
    Packed,
    TokenFile,
    block_diagonal,
    find_documents,
)
from surefoot.components.data.sources.synthetic import Synthetic
from surefoot.components.data.sources.tables import Table
from surefoot.components.data.sources.tensors import Safetensors
from surefoot.components.data.sources.texts import Texts, join_texts
from surefoot.components.data.sources.tokens import Tokens
from surefoot.components.data.sources.wrapped import TorchDataset, as_source
from surefoot.components.data.tars.source import Tars
from surefoot.components.data.tars.stream import TarStream
from surefoot.components.data.transforms.colors import Jitter, Normalize
from surefoot.components.data.transforms.erasing import Cutout, Erase
from surefoot.components.data.transforms.mixing import cutmix, mixup, soft_targets
from surefoot.components.data.transforms.moving import Mirror, Translate
from surefoot.components.data.transforms.pipeline import Pipeline
from surefoot.components.data.transforms.resizing import CenterCrop, Crop, Resize
from surefoot.core.old_homes import renamed_in

if not TYPE_CHECKING:
    __getattr__ = renamed_in(__name__)

__all__ = [
    "Arrays",
    "BlockShuffle",
    "CenterCrop",
    "Concat",
    "Crop",
    "Cutout",
    "Erase",
    "Feed",
    "ImageFolder",
    "Iterated",
    "Jitter",
    "Keys",
    "Mirror",
    "Mixture",
    "Normalize",
    "Order",
    "Packed",
    "Pipeline",
    "Remote",
    "Resize",
    "RetryPolicy",
    "Safetensors",
    "StreamShard",
    "Synthetic",
    "Table",
    "TarStream",
    "Tars",
    "Texts",
    "TokenFile",
    "Tokens",
    "TorchDataset",
    "Translate",
    "as_source",
    "block_diagonal",
    "cutmix",
    "find_documents",
    "join_texts",
    "measure_mixing",
    "mixup",
    "soft_targets",
    "to_device",
]
