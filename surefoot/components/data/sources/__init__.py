"""Sources: samples by number, from arrays, token streams, files, torch datasets and iterables."""

from surefoot.components.data.sources.arrays import ArrayLike, Arrays
from surefoot.components.data.sources.images import ImageFolder
from surefoot.components.data.sources.iterated import BatchRead, Iterated
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
from surefoot.components.data.sources.watched import OF_LOADER, ObservedLoader, as_ids, name_states
from surefoot.components.data.sources.wrapped import TorchDataset, as_source

__all__ = [
    "OF_LOADER",
    "ArrayLike",
    "Arrays",
    "BatchRead",
    "ImageFolder",
    "Iterated",
    "Packed",
    "Safetensors",
    "Synthetic",
    "Table",
    "Texts",
    "TokenFile",
    "Tokens",
    "TorchDataset",
    "ObservedLoader",
    "as_ids",
    "as_source",
    "block_diagonal",
    "find_documents",
    "join_texts",
    "name_states",
]
