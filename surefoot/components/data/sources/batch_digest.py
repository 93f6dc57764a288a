"""Digests of batches and data, which detect changed data and are fast enough for every batch."""

from __future__ import annotations

import enum
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from surefoot.core.errors import OtherDataError

SAMPLED_BYTES = 4096  # of one batch, over all of its tensors
DIGEST_BYTES = 16
MAX_DEPTH = 8  # nesting of containers
MAX_PARTS = 256  # maximum items hashed of one container
ARRAYS = (Tensor, np.ndarray)
DIGESTS = ("first", "first_values", "digest", "spot")
SEED_HINT = "random data need a seed: call torch.manual_seed(0) before the data are created"
VALUES_HINT = (
    f"{SEED_HINT}; augmentation with the global random generators of torch, NumPy or "
    "Python is repeated exactly"
)
SPOT_EVERY = 8  # batches
AGAIN = "that are read again to resume"
AGAIN_HINT = (
    "give an iterable that returns the same batches in each iteration, or one with "
    "state_dict and load_state_dict"
)
OTHER_HINT = f"{SEED_HINT}; otherwise {AGAIN_HINT}"
VALUE_BYTES = 8  # bytes that a single value counts as
MIN_PARTS = 64  # minimum items hashed of a container of containers
TEXT_CHARACTERS = 64  # characters hashed of a text in the data
CONTAINERS = (dict, list, tuple, deque)
SINGLE = (bool, int, float, complex, str, bytes, PurePath, type(None))
MAX_SETTINGS = 1000  # entries of a dict of settings; a larger one is content
CONTENT = (
    "the content of the data differs from that of the previous attempt (4 KiB at even "
    "strides are compared)"
)
CONTENT_HINT = f"{SEED_HINT}; otherwise give the data of the previous attempt"
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(batch: Any) -> bytes:
    """Return a digest (BLAKE2b, 16 bytes) of structure, shapes, dtypes and values of a batch.

    About 4 KiB of the values, at even strides, are hashed. Of a tensor that is not on the CPU, only
    shape and dtype are hashed, because reading its values would wait for the device.
    """
    taken = hashlib.blake2b(digest_size=DIGEST_BYTES)
    parts: list[Any] = []
    _find_parts(batch, parts, 0)
    arrays = sum(isinstance(part, ARRAYS) for part in parts)
    share = max(8, SAMPLED_BYTES // max(1, arrays))
    for part in parts:
        if isinstance(part, ARRAYS):
            try:
                _add_elements(taken, part, share)
            except Exception:  # noqa: BLE001 - a tensor without readable elements, as torch.masked
                taken.update(type(part).__name__.encode())
        else:
            taken.update(part.encode(errors="replace") + b"\0")
    return taken.digest()


class ReadingDifference(NamedTuple):
    """Difference between two readings of the same batches, and a hint what to do.

    If `same_samples` is True, both readings have the same samples, but with different values.
    """

    what: str
    hint: str
    same_samples: bool = False


def chain(before: bytes, item: bytes) -> bytes:
    """Return the digest of a sequence that is extended by `item`.

    `before` is the digest of the sequence without it.
    """
    return hashlib.blake2b(before + item, digest_size=DIGEST_BYTES).digest()


def digest_of_ids(ids: Iterable[Any]) -> bytes:
    """Return a digest of the sample indices of a batch, in their order."""
    return hashlib.blake2b(repr(tuple(ids)).encode(), digest_size=DIGEST_BYTES).digest()


@dataclass(eq=False)
class PassDigest:
    """Digests of the first `count` batches of an epoch, for comparison with a second reading.

    `digest` covers all of these batches: their sample indices if these are known, otherwise their
    contents. If the indices are known, `spot` is in addition a digest of the contents of batch
    `spot_number`. It is updated for each of the first 8 batches, and then for every eighth batch.
    """

    count: int = 0
    first: bytes = b""
    first_values: bytes = b""
    digest: bytes = b""
    spot_number: int = -1
    spot: bytes = b""

    def add(self, batch: Any, samples: Iterable[Any] | None, *, spots: bool = True) -> bytes:
        """Add the next batch, and return its digest.

        `samples` are its sample indices, or None if they are unknown. If `spots` is False, the
        contents of batches with known indices are not hashed.
        """
        digest = digest_of(batch) if samples is None else digest_of_ids(samples)
        if self.count == 0:
            self.first = digest
        self.digest = chain(self.digest, digest)
        if (
            samples is not None
            and spots
            and (self.count < SPOT_EVERY or self.count % SPOT_EVERY == 0)
        ):
            self.spot_number, self.spot = self.count, digest_of(batch)
            self.first_values = self.first_values if self.count else self.spot
        self.count += 1
        return digest

    def compare(
        self, before: PassDigest, *, knows_samples: bool, values: bool = True
    ) -> ReadingDifference | None:
        """Compare this second reading of an epoch with the first; return the difference, or None.

        Both readings must cover the same number of batches. If `knows_samples` is True, the sample
        indices of all batches are compared, and the contents of one of them. Otherwise, the
        contents of all batches are compared. `values` is False if the random states of the batches
        are unknown. Then contents are not compared, except those of the first batch if the indices
        are unknown.
        """
        if not values and not knows_samples:
            what = (
                "the first batch of the epoch, read again to resume, is not the batch "
                "that was trained on"
            )
            return None if self.first == before.first else ReadingDifference(what, OTHER_HINT)
        if self.digest != before.digest:
            if knows_samples:
                return ReadingDifference(
                    (
                        f"the {self.count:,} batches {AGAIN} contain different samples than those "
                        "that the run was trained on"
                    ),
                    (
                        "give the sampler a generator, or seed it by the epoch, so that "
                        "the order is the same again"
                    ),
                )
            return ReadingDifference(
                f"the {self.count:,} batches {AGAIN} are not those trained on", OTHER_HINT
            )
        if values and self.spot_number == before.spot_number >= 0 and self.spot != before.spot:
            return ReadingDifference(
                (
                    f"batch {self.spot_number + 1:,}, read again to resume, has the same "
                    "samples whose values have changed"
                ),
                VALUES_HINT,
                same_samples=True,
            )
        return None

    def compare_first(self, before: PassDigest) -> ReadingDifference | None:
        """Compare the first batch of a finished epoch with that of `before`, the first reading.

        Returns the difference, or None if there is none.
        """
        if self.first != before.first:
            return ReadingDifference(
                (
                    "the first batch of the previous epoch, read again, is not the batch "
                    "that was trained on"
                ),
                OTHER_HINT,
            )
        if self.first_values and before.first_values and self.first_values != before.first_values:
            return ReadingDifference(
                (
                    "the first batch of the previous epoch, read again, has the same samples "
                    "with other values"
                ),
                VALUES_HINT,
                True,
            )
        return None

    def as_state(self) -> dict[str, Any]:
        """Return the digests as a dict that can be stored as JSON."""
        texts = {name: getattr(self, name).hex() for name in DIGESTS}
        return {"count": self.count, "spot_number": self.spot_number, **texts}

    @classmethod
    def from_state(cls, held: Mapping[str, Any]) -> PassDigest:
        texts = {name: bytes.fromhex(held[name]) for name in DIGESTS}
        return cls(count=int(held["count"]), spot_number=int(held["spot_number"]), **texts)


def _find_parts(batch: Any, found: list[Any], depth: int) -> None:
    """Add the tensors and arrays of a batch to `found`, in order, and texts for everything else.

    A text describes the structure of a container, a number, a string or the content of any other
    object.
    """
    if isinstance(batch, ARRAYS):
        if isinstance(batch, np.ndarray) and batch.dtype == object:
            found.append(f"objects {batch.shape}")
            _find_all(batch.ravel().tolist(), found, depth)
        elif isinstance(batch, Tensor) and (batch.is_nested or batch.layout is not torch.strided):
            found.append(f"{batch.layout} {batch.dtype} {batch.is_nested}")
            _find_all(_dense_parts(batch), found, depth)
        else:
            found.append(batch)
    elif isinstance(batch, str | bytes | int | float | complex | np.generic | enum.Enum | None):
        found.append(repr(batch))
    elif isinstance(batch, os.PathLike):  # its other attributes are computed on access
        found.append(f"{type(batch).__name__} {os.fspath(batch)!r}")
    elif depth >= MAX_DEPTH:
        found.append(type(batch).__name__)
    elif isinstance(batch, Mapping):
        found.append(f"{type(batch).__name__} {len(batch)}")
        _find_all([each for item in batch.items() for each in item], found, depth)
    elif isinstance(batch, Sequence | deque):
        found.append(f"{type(batch).__name__} {len(batch)}")
        _find_all(batch, found, depth)
    elif isinstance(batch, AbstractSet):
        found.append(f"{type(batch).__name__} {sorted(map(repr, batch))[:MAX_PARTS]}")
    else:  # graphs, tokenizer encodings, dataclasses, dates
        found.append(type(batch).__name__)
        slots = [
            name
            for kind in type(batch).__mro__
            for name in getattr(kind, "__slots__", ())
            if hasattr(batch, name)
        ]
        held = [*getattr(batch, "__dict__", {}).values(), *(getattr(batch, name) for name in slots)]
        words = repr(batch) if not held else ""
        found.append("" if " at 0x" in words else words)
        _find_all(held, found, depth)


def _find_all(parts: Iterable[Any], found: list[Any], depth: int) -> None:
    """Add the items of a container to `found`; if it has too many, add some at even strides.

    The maximum is MAX_PARTS.
    """
    held = parts if isinstance(parts, list | tuple) else list(parts)
    for part in held[:: max(1, -(-len(held) // MAX_PARTS))]:
        _find_parts(part, found, depth + 1)


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors inside a sparse or nested tensor; [] if it does not expose them."""
    try:
        if tensor.is_nested:
            return list(tensor.unbind())
        if tensor.layout is torch.sparse_coo:
            held = tensor.coalesce()
            return [held.indices(), held.values()]
        return [tensor.to_dense()]
    except (RuntimeError, NotImplementedError, TypeError):
        return []


def _add_elements(taken: Any, tensor: Tensor | np.ndarray, num_bytes: int) -> None:
    taken.update(f"{list(tensor.shape)}{tensor.dtype}".encode())
    if isinstance(tensor, Tensor):
        if tensor.device.type != "cpu" or tensor.is_quantized:
            return
        tensor = _as_array(tensor.detach())
    if tensor.size == 0:
        return
    flat = tensor.reshape(-1)
    taken.update(flat[:: max(1, -(-flat.nbytes // num_bytes))].tobytes())


def _as_array(tensor: Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # NumPy has no bfloat16, no float8 and no lazy conjugation
        plain = tensor.resolve_conj().resolve_neg()
        return (
            torch.view_as_real(plain)
            if plain.is_complex()
            else plain.view(SAME_SIZE[plain.element_size()])
        ).numpy()


# ---- the content of the data, of which a resume reads only a part again


def digest_of_content(data: Any) -> str:
    """Return a digest, as hex, of about 4 KiB at even strides of the data in a dataset's memory.

    The digest covers tensors, arrays, and the values in lists, tuples and dicts, in attributes of
    the dataset and of the datasets inside it. It does not cover settings (single values, also
    in a dict that holds several types of them, as a script's arguments do), attributes with `cache`
    in their name, and the folders of paths: these may differ between two attempts with the same
    data.
    """
    taken = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add_value(
        taken,
        data.dataset if isinstance(data, DataLoader) else data,
        SAMPLED_BYTES // VALUE_BYTES,
        0,
    )
    return taken.hexdigest()


def compare_content(now: str | None, before: str | None) -> ReadingDifference | None:
    """Return the difference between two digests of the data's content.

    Returns None if they are equal, or if one of them is unknown.
    """
    return (
        None if now is None or before in (None, now) else ReadingDifference(CONTENT, CONTENT_HINT)
    )


def check_content(source: Any, before: str | None) -> None:
    """Raise OtherDataError if the content of a source has changed since a checkpoint was saved.

    `before` is the digest in the checkpoint, None if it has none.
    """
    if (found := compare_content(getattr(source, "content_digest", None), before)) is not None:
        raise OtherDataError(found.what, hint=found.hint)


def _add_value(taken: Any, value: Any, share: int, depth: int) -> None:
    """Add up to `share` values of an object to the hash `taken`."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.ravel().tolist()
    if isinstance(value, Tensor | np.ndarray):
        try:
            _add_elements(taken, value, max(1, share) * VALUE_BYTES)
        except Exception:  # noqa: BLE001 - a tensor of a class without readable elements
            taken.update(type(value).__name__.encode())
    elif isinstance(value, str | bytes | PurePath):
        text = _without_folder(value)
        taken.update(
            f"{len(text)} {text[:: max(1, -(-len(text) // TEXT_CHARACTERS))]!r}".encode(
                errors="replace"
            )
        )
    elif isinstance(value, bool | int | float | complex | np.generic | None):
        taken.update(repr(value).encode())
    elif isinstance(value, CONTAINERS):
        _add_container(taken, value, share, depth)
    else:
        taken.update(type(value).__name__.encode())
        fingerprint = getattr(value, "_fingerprint", None)  # of Hugging Face
        if isinstance(fingerprint, str):
            taken.update(fingerprint.encode())
        elif depth == 0 or isinstance(value, Dataset):
            held = {
                name: each
                for name, each in getattr(value, "__dict__", {}).items()
                if _is_content(name, each)
            }
            for name, each in held.items():
                taken.update(name.encode())
                _add_value(taken, _without_settings(each), share, depth + 1)
    taken.update(b"\0")


def _add_container(taken: Any, value: Any, share: int, depth: int) -> None:
    taken.update(f"{type(value).__name__} {len(value)}".encode())
    if depth >= MAX_DEPTH or not share or not value:
        return
    inner = next(iter(value.values() if isinstance(value, dict) else value))
    num_inner = (
        len(inner) if isinstance(inner, CONTAINERS) else share if isinstance(inner, Dataset) else 1
    )
    stride = -(-len(value) // max(min(share, MIN_PARTS), share // max(1, num_inner)))
    keys = list(value)[::stride] if isinstance(value, dict) else range(0, len(value), stride)
    for key in keys:
        if isinstance(value, dict):
            _add_value(taken, key, 1, depth + 1)
        _add_value(taken, value[key], max(share // len(keys), min(num_inner, MIN_PARTS)), depth + 1)


def _is_content(name: str, value: Any) -> bool:
    return (
        isinstance(value, (Tensor, np.ndarray, Dataset, *CONTAINERS))
        and "cache" not in name.lower()
    )


def _without_settings(value: Any) -> Any:
    """Return a dict without its single values if these are settings; other values unchanged."""
    if (
        not isinstance(value, dict)
        or len(value) > MAX_SETTINGS
        or not all(isinstance(key, str) for key in value)
    ):
        return value
    single = {key: type(each) for key, each in value.items() if isinstance(each, SINGLE)}
    types = set(single.values())
    left_out = single if len(types) > 1 or types & {bool, type(None)} else ()
    kept = {key: _without_settings(each) for key, each in value.items() if key not in left_out}
    is_same = len(kept) == len(value) and all(kept[key] is value[key] for key in kept)
    return value if is_same else kept


def _without_folder(text: Any) -> Any:
    """Return the file name of a path, since data may have been moved; other values unchanged."""
    if isinstance(text, PurePath):
        return text.name
    return text.rpartition("/")[2] if isinstance(text, str) and text.startswith("/") else text
