"""Data: sources of samples, their order, and the keys of augmentation."""

from surefoot.components.data.feed import Feed, Window, size_of, to_device
from surefoot.components.data.order import Keys, Order, Permutation
from surefoot.components.data.sources import Arrays, Iterated, Synthetic, Tokens, TorchDataset, as_source
from surefoot.components.data.sources.packed import Packed, TokenFile, block_diagonal, find_documents
from surefoot.components.data.tars import Tars

__all__ = [
    "Arrays", "Feed", "Iterated", "Keys", "Order", "Packed", "Permutation", "Synthetic", "Tars", "TokenFile", "Tokens", "TorchDataset",
    "Window", "as_source", "block_diagonal", "find_documents", "size_of", "to_device",
]  # fmt: skip
