"""Data: sources of samples, the sample order, and the keys of augmentation."""

from surefoot.components.data.blocks import BlockShuffle, Order
from surefoot.components.data.feed import (
    WHOLE,
    Feed,
    SampleWindow,
    Share,
    count_numbers,
    size_of,
    to_device,
)
from surefoot.components.data.order import Keys, Permutation
from surefoot.components.data.sources import (
    Arrays,
    Iterated,
    Synthetic,
    Tokens,
    TorchDataset,
    as_source,
)
from surefoot.components.data.sources.images import ImageFolder
from surefoot.components.data.sources.packed import (
    Packed,
    TokenFile,
    block_diagonal,
    find_documents,
)
from surefoot.components.data.sources.tables import Table
from surefoot.components.data.sources.tensors import Safetensors
from surefoot.components.data.sources.texts import Texts, join_texts
from surefoot.components.data.tars import Tars, TarStream

__all__ = [
    "WHOLE",
    "Arrays",
    "BlockShuffle",
    "Feed",
    "ImageFolder",
    "Iterated",
    "Keys",
    "Order",
    "Packed",
    "Permutation",
    "Safetensors",
    "Share",
    "Synthetic",
    "Table",
    "TarStream",
    "Tars",
    "Texts",
    "TokenFile",
    "Tokens",
    "TorchDataset",
    "SampleWindow",
    "as_source",
    "block_diagonal",
    "count_numbers",
    "find_documents",
    "join_texts",
    "size_of",
    "to_device",
]
