"""Python's standard library as bytes, and a small decoder-only transformer that predicts them."""

# B batch, T bytes, V 256 values

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from surefoot.components.data.sources.packed import Packed
from surefoot.components.data.sources.tokens import Tokens
from surefoot.components.metrics import Mean, bits_per_byte
from surefoot.contract.task import Guarantee, Loss
from surefoot.core.errors import DataError
from surefoot.core.place import whole_path
from surefoot.tasks.transformer import HiddenAndHead, Transformer, nats

__all__ = ["PyCorpus"]

# pydoc_data is 0.7 MB of the manual, not source
NOT_SOURCE = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "pydoc_data",
}
BUILD_RECORD = "_sysconfigdata"  # names of paths of the machine that built this Python
HELD_OUT_SHARE = 0.1  # of the files, by a hash of their name


class PyCorpus:
    """Next-byte prediction on windows of `length` bytes of Python source.

    Batches are dict(inputs (B, T), targets (B, T)) of byte values; target -100 is ignored.

    Args:
        folder: Folder with .py files at any depth; None for the standard library of this Python.
        layers: Number of blocks.
        width: Size of the hidden state.
        heads: Number of attention heads.
        length: Bytes of a window (T).
        dropout: Dropout probability.
        chunked_loss: Compute the output layer and the loss for a few bytes at a time, so that the
            logits of a whole batch never exist.
        packed: Rows contain whole files, or pieces of `length` bytes of longer files, and no byte
            attends to a byte of a different file.

    Raises:
        DataError: If `folder` contains no .py files.
    """

    unit = "bytes"

    def __init__(
        self,
        folder: str | None = None,
        *,
        layers: int = 4,
        width: int = 192,
        heads: int = 6,
        length: int = 256,
        dropout: float = 0.0,
        chunked_loss: bool = False,
        packed: bool = False,
    ) -> None:
        self.folder = whole_path(folder or sysconfig.get_paths()["stdlib"])
        self.layers, self.width, self.heads, self.length, self.dropout = (
            layers,
            width,
            heads,
            length,
            dropout,
        )
        self.chunked_loss, self.packed = chunked_loss, packed
        self._sources: dict[str, Files] = {}

    def model(self) -> nn.Module:
        return Transformer(
            256,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            length=self.length,
            dropout=self.dropout,
            chunked_loss=self.chunked_loss,
        )

    def data(self, split: str) -> Files:
        """Return the files of the split "train" or "heldout".

        About every tenth file is in "heldout", selected by a hash of its name.
        """
        if split not in ("train", "heldout"):
            raise DataError(f"pycorpus has no split {split!r}", hint='use "train" or "heldout"')
        if split not in self._sources:
            names = [
                name
                for name in find_files(self.folder)
                if is_held_out(name) == (split == "heldout")
            ]
            self._sources[split] = Files(self.folder, names, self.length, packed=self.packed)
        return self._sources[split]

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor | HiddenAndHead:
        output: Tensor | HiddenAndHead = model(
            *(batch[name] for name in ("inputs", "positions", "documents") if name in batch)
        )
        return output

    def loss(self, output: Tensor | HiddenAndHead, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(*nats(output, batch["targets"]))

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
        return {"bits_per_byte": bits_per_byte(*nats(output, batch["targets"]))}


class Files:
    """Data source with the bytes of the files `names` in `folder`.

    A sample is a window of `length` bytes; with `packed`, it is a row of whole files. The digest
    covers the names and bytes of the files, and the Python version.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(
        self, folder: Path, names: list[str], length: int, *, packed: bool = False
    ) -> None:
        contents = [_read(folder / name) for name in names]
        if sum(map(len, contents)) < 2:
            raise DataError(
                f"{folder} holds no Python source for this split",
                hint="name a folder of .py files with --data DIR, or leave --data out",
            )
        stream = np.frombuffer(bytearray(b"".join(contents)), dtype=np.uint8)
        sizes = np.array([len(content) for content in contents if content])
        self._tokens = (
            Packed(stream, np.append(0, np.cumsum(sizes)), length)
            if packed
            else Tokens(stream, length)
        )
        self.names, self.tokens_per_sample = names, self._tokens.tokens_per_sample
        self.listing = hashlib.sha256("\n".join(names).encode()).hexdigest()
        self.digest = hashlib.sha256(
            f"{platform.python_version()} {self.listing} {self._tokens.digest}".encode()
        ).hexdigest()

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        return self._tokens.read(ids)

    def describe(self) -> str:
        what = (
            f"{len(self.names)} files of Python {platform.python_version()}, "
            f"list {self.listing[:12]}"
        )
        return f"{what}: {self._tokens.describe().replace('tokens', 'bytes')}"


def find_files(folder: Path) -> list[str]:
    """Return the names of the Python source files in `folder` and its subfolders, sorted.

    The names are POSIX paths relative to `folder`. Tests, installed packages, and the file that
    records how Python was built are left out.
    """
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}",
            hint="name a folder of .py files with --data DIR, or leave --data out for Python's own",
        )
    found = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return sorted(
        path.as_posix()
        for path in found
        if not NOT_SOURCE.intersection(path.parts) and not path.name.startswith(BUILD_RECORD)
    )


def is_held_out(name: str) -> bool:
    """Return whether a file is used for evaluation only.

    This depends on the name of the file alone, so that it is the same in any Python version.
    """
    return hashlib.sha256(name.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            hint="make it readable, or name another folder",
        ) from None
