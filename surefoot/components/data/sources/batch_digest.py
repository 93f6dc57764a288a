"""Digests of batches: enough bytes of each to notice that other data came, few enough to take of every batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SAMPLED_BYTES = 4096  # of one batch, over all of its tensors
DIGEST_BYTES = 16
MAX_DEPTH = 8  # of containers in one another
PLAIN = (str, bytes, int, float, type(None))
SPOT_EVERY = 8  # batches
OTHER_HINT = "give an iterable that gives the same batches each time it is iterated, or one with state_dict and load_state_dict"
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(batch: Any) -> bytes:
    """Return a digest (BLAKE2b, 16 bytes) of the shapes and dtypes of a batch and 4 KiB of its elements at even strides.

    Tensors on a device other than the CPU count by shape and dtype alone: to read them would wait for the device.
    """
    taken = hashlib.blake2b(digest_size=DIGEST_BYTES)
    parts: list[Any] = []
    _find_parts(batch, parts, 0)
    arrays = [part for part in parts if not isinstance(part, PLAIN)]
    share = SAMPLED_BYTES // max(1, len(arrays))
    for part in parts:
        if isinstance(part, PLAIN):
            taken.update(repr(part).encode())
        else:
            _add_elements(taken, part, share)
    return taken.digest()


class Difference(NamedTuple):
    """What of a second reading is not as before, and what to do; `same_samples`: only their values are others."""

    what: str
    hint: str
    same_samples: bool = False


def chain(before: bytes, item: bytes) -> bytes:
    """Return the digest of a sequence: `before` is that of all items up to here, `item` comes behind them."""
    return hashlib.blake2b(before + item, digest_size=DIGEST_BYTES).digest()


def digest_of_ids(ids: Iterable[Any]) -> bytes:
    """Return a digest of the indices of a batch, in their order."""
    return hashlib.blake2b(repr(tuple(ids)).encode(), digest_size=DIGEST_BYTES).digest()


@dataclass(eq=False)
class PassDigest:
    """What the batches of a pass over the data were, `count` of them: enough to notice that a second reading gives others.

    `digest` is that of all batches: of their samples by number where they are known, else of the batches themselves. Where samples are
    known, `spot` is the digest of batch `spot_number` itself, which is taken now and then.
    """

    count: int = 0
    first: bytes = b""
    digest: bytes = b""
    spot_number: int = -1
    spot: bytes = b""

    def add(self, batch: Any, samples: Iterable[Any] | None, *, spots: bool = True) -> bytes:
        """Add the next batch, whose `samples` are None where they are not known; returns its digest.

        Without `spots` no batch is looked into whose samples are known.
        """
        digest = digest_of(batch) if samples is None else digest_of_ids(samples)
        if self.count == 0:
            self.first = digest
        self.digest = chain(self.digest, digest)
        if samples is not None and spots and (self.count < SPOT_EVERY or self.count % SPOT_EVERY == 0):
            self.spot_number, self.spot = self.count, digest_of(batch)
        self.count += 1
        return digest

    def compare(self, before: PassDigest, *, knows_samples: bool) -> Difference | None:
        """Return how this second reading of a pass differs from the first one, up to the same batch; None where it does not."""
        if self.digest != before.digest:
            if knows_samples:
                return Difference(
                    f"the {self.count:,} batches that are read again to resume hold other samples than those trained on",
                    "give the sampler a generator, or seed it by the epoch: the same order must come again",
                )
            return Difference(f"the {self.count:,} batches that are read again to resume are not those trained on", OTHER_HINT)
        if self.spot_number == before.spot_number >= 0 and self.spot != before.spot:
            return Difference(
                f"batch {self.spot_number + 1:,}, read again to resume, holds the same samples with other values than before",
                "augmentation that draws from the global streams of torch, NumPy or Python is the same again",
                same_samples=True,
            )
        return None

    def compare_first(self, batch: Any) -> Difference | None:
        """Return how the first batch of a pass that is over, read again, differs from what it was; None where it does not."""
        if digest_of(batch) == self.first:
            return None
        return Difference("the first batch of the pass before, read again, is not the one trained on", OTHER_HINT)

    def as_state(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        texts = {"first": self.first.hex(), "digest": self.digest.hex(), "spot": self.spot.hex()}
        return {"count": self.count, "spot_number": self.spot_number, **texts}

    @classmethod
    def from_state(cls, held: Mapping[str, Any]) -> PassDigest:
        texts = {name: bytes.fromhex(held[name]) for name in ("first", "digest", "spot")}
        return cls(count=int(held["count"]), spot_number=int(held["spot_number"]), **texts)


def _find_parts(batch: Any, found: list[Any], depth: int) -> None:
    """Add the tensors, arrays, numbers and texts of a batch in order; of any other object its type and what it holds."""
    if isinstance(batch, (Tensor, np.ndarray, *PLAIN)):
        found.append(batch)
        return
    if not isinstance(batch, list | tuple):
        found.append(type(batch).__name__)
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = (each for item in batch.items() for each in item)
    elif isinstance(batch, tuple | list):
        parts = batch
    elif hasattr(batch, "__dict__"):  # graphs, the encodings of a tokenizer, dataclasses
        parts = vars(batch).values()
    if depth < MAX_DEPTH:
        for part in parts:
            _find_parts(part, found, depth + 1)


def _add_elements(taken: Any, tensor: Tensor | np.ndarray, num_bytes: int) -> None:
    if isinstance(tensor, Tensor) and tensor.is_nested:
        return
    taken.update(f"{list(tensor.shape)}{tensor.dtype}".encode())
    if isinstance(tensor, Tensor):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
            return
        tensor = _as_array(tensor.detach())
    if tensor.size == 0 or tensor.dtype == object:
        return
    flat = tensor.reshape(-1)
    taken.update(flat[:: max(1, -(-flat.nbytes // num_bytes))].tobytes())


def _as_array(tensor: Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # NumPy has no bfloat16 and no float8
        return tensor.resolve_conj().resolve_neg().view(SAME_SIZE[tensor.element_size()]).numpy()
