"""Sources of a conversion: encoded samples, and an identity by which a source is recognized."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from surefoot.components.data.disk.encode import (
    KINDS,
    LARGEST_CLASS,
    NAME,
    encode,
    extensions_of,
    frame,
    framed_bytes,
    kind_of,
)
from surefoot.components.data.sources.arrays import Arrays, open_npy
from surefoot.components.data.sources.images import ImageFolder
from surefoot.contract.task import Source
from surefoot.core.errors import DataError

CLASSES, FILES = "classes.json", "files.txt"


class Given(Protocol):
    """Samples by number, each as encoded parts.

    `identity` changes with the contents. `num_bytes` is the size of all samples in tars, or None if
    it is unknown. `beside` are small files that belong to the samples, and `parts` maps the name of
    each part to its extension. A source that is not `seekable` is read sequentially.
    """

    identity: str
    num_bytes: int | None
    beside: Mapping[str, bytes]
    parts: Mapping[str, str]
    seekable: bool

    def __len__(self) -> int: ...

    def sample(self, number: int) -> dict[str, bytes]:
        """Return the parts of a sample by extension."""
        ...


class Folder:
    """Images of a folder with one subfolder per class: file contents, and the class index `cls`.

    The file `classes.json` maps class indices to names, and `files.txt` lists the file of each
    sample. Raises what `ImageFolder` raises.
    """

    seekable = True

    def __init__(self, folder: str | Path, *, follow_links: bool = False) -> None:
        self.images = ImageFolder(folder, follow_links=follow_links)
        names = self.images.names
        try:
            changed = [(self.images.folder / name).stat().st_mtime_ns for name in names]
        except OSError as error:
            raise DataError(
                f"{error.filename} cannot be read: {error.strerror}",
                hint="check that the file still exists",
            ) from None
        told = f"{self.images.digest} {changed}"
        self.identity = hashlib.sha256(told.encode()).hexdigest()
        label_bytes = len(str(len(self.images.classes)))
        self.num_bytes: int | None = sum(
            framed_bytes([size, label_bytes]) for size in self.images.sizes
        )
        classes = {str(number): name for number, name in enumerate(self.images.classes)}
        listing = "".join(
            f"{json.dumps(name) if not name.isprintable() else name}\n" for name in names
        )
        self.beside: Mapping[str, bytes] = {
            CLASSES: (json.dumps(classes, indent=1) + "\n").encode(),
            FILES: listing.encode("utf-8", "surrogateescape"),
        }
        kinds = sorted({name.rpartition(".")[2].lower() for name in names})
        images = {"image": kinds[0]} if len(kinds) == 1 else {kind: kind for kind in kinds}
        self.parts: Mapping[str, str] = images | {"label": "cls"}

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, number: int) -> dict[str, bytes]:
        return {**self.images.content(number).parts, "cls": str(self.images.label(number)).encode()}


class Samples:
    """Samples of a source, read one at a time; `kinds` maps part names to formats.

    By default the format of a part is the one that suits the first sample. The identity is computed
    from the digest of the source and its first sample; with a seekable source also from the samples
    in the middle and at the end. With `uniform` all samples take the same number of bytes. Raises
    DataError for samples that differ when they are read again, for a batch that does not consist of
    rows, and for names that a tar cannot hold.
    """

    def __init__(
        self,
        source: Source,
        *,
        kinds: Mapping[str, str] | None = None,
        uniform: bool = False,
        known: str = "",
    ) -> None:
        self.source, self.seekable = source, source.guarantee == "proven"
        first = self._rows(0)
        self.kinds = {name: kind_of(value) for name, value in first.items()} | _checked(
            kinds or {}, first
        )
        self.parts: Mapping[str, str] = extensions_of(self.kinds)
        self.beside: Mapping[str, bytes] = {}
        looked = sorted({0, len(source) // 2, len(source) - 1}) if self.seekable else [0]
        digest = hashlib.sha256(f"{source.digest} {len(source)} {known}".encode())
        begin = [frame(str(number), self.sample(number)) for number in looked]
        for number, framed in zip(looked, begin, strict=True):
            if self.seekable and frame(str(number), self.sample(number)) != framed:
                raise DataError(
                    f"sample {number:,} has different values each time it is read",
                    hint="give a source without random numbers: no augmentation",
                )
            digest.update(framed)
        self.identity = digest.hexdigest()
        self.num_bytes: int | None = max(map(len, begin)) * len(source) if uniform else None

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, number: int) -> dict[str, bytes]:
        rows = self._rows(number)
        if rows.keys() != self.kinds.keys():
            raise DataError(
                (
                    f"sample {number:,} has the parts {', '.join(rows)}, and the first sample "
                    f"has {', '.join(self.kinds)}"
                ),
                hint="give samples of the same parts",
            )
        return {
            self.parts[name]: encode(value, self.kinds[name], f"{name} of sample {number:,}")
            for name, value in rows.items()
        }

    def _rows(self, number: int) -> dict[str, Any]:
        batch = self.source.read(np.array([number], dtype=np.int64))
        if isinstance(batch, Mapping):
            fields = dict(batch)
        elif isinstance(batch, tuple | list):
            fields = {str(place): value for place, value in enumerate(batch)}
        else:
            fields = {"data": batch}
        for name in fields:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise DataError(
                    f"a part has the name {name!r}",
                    hint=(
                        "a name has at most 40 letters, digits, _ and -, since it becomes "
                        "a file extension"
                    ),
                )
        return {name: _row(value, f"{name} of sample {number:,}") for name, value in fields.items()}


def of_arrays(named: Mapping[str, str | Path], kinds: Mapping[str, str] | None = None) -> Samples:
    """Return the rows of .npy files as samples.

    Integers that are not class indices, negative or of more than 9 digits, are written as npy.
    Raises DataError for files that `open_npy` refuses, and for arrays of different lengths.
    """
    arrays = {name: open_npy(path) for name, path in named.items()}
    chosen = {
        name: "npy"
        for name, array in arrays.items()
        if array.ndim == 1
        and array.dtype.kind in "iu"
        and len(array)
        and (array.min() < 0 or array.max() > LARGEST_CLASS)
    }
    changed = [Path(path).expanduser().stat().st_mtime_ns for path in named.values()]
    return Samples(
        Arrays(**arrays), kinds={**chosen, **(kinds or {})}, uniform=True, known=str(changed)
    )


def _row(value: Any, what: str) -> Any:
    """Return the only row of a batch of one sample. Raises DataError for any other batch."""
    if isinstance(value, Mapping):
        return {name: _row(each, f"{what}, its {name}") for name, each in value.items()}
    is_array = isinstance(value, Tensor | np.ndarray)
    if (is_array and value.ndim and len(value) == 1) or (
        isinstance(value, list | tuple) and len(value) == 1
    ):
        return value[0]
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(each, Tensor) and each.shape[:1] == (1,) for each in value)
    ):
        return [each[0] for each in value]  # each sample has a list, and torch collates it so
    shown = f"{tuple(value.shape)}" if is_array else f"a {type(value).__name__}"
    raise DataError(
        f"{what} is {shown}, and one row was requested",
        hint=(
            "give a source that is indexed by sample number: tensors, or a dataset with a length"
        ),
    )


def _checked(kinds: Mapping[str, str], first: Mapping[str, Any]) -> dict[str, str]:
    for name, kind in kinds.items():
        if name not in first or kind not in KINDS:
            raise DataError(
                f"{name} as {kind} is not possible",
                hint=f"the parts are {', '.join(first)}, the forms {', '.join(KINDS)}",
            )
    return dict(kinds)
