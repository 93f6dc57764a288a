"""Sources: samples by number, out of arrays, token streams, files, torch datasets and iterables."""

from surefoot.components.data.sources.arrays import ArrayLike, Arrays
from surefoot.components.data.sources.packed import Packed, TokenFile, block_diagonal, find_documents
from surefoot.components.data.sources.synthetic import Synthetic
from surefoot.components.data.sources.tokens import Tokens
from surefoot.components.data.sources.wrapped import Iterated, TorchDataset, as_source

__all__ = [
    "ArrayLike", "Arrays", "Iterated", "Packed", "Synthetic", "TokenFile", "Tokens", "TorchDataset", "as_source", "block_diagonal",
    "find_documents",
]  # fmt: skip
