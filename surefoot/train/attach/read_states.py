"""Global random states before the reads of an epoch, so that a resumed loop can repeat them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from surefoot.components.data.sources.batch_digest import ReadingDifference

MAX_BYTES = 16 << 20  # of the random states of an epoch in a checkpoint
PLACE = struct.Struct("<qqd")  # position, whether there is a second normal number, this number
TOO_MANY_HINT = (
    "draw from a generator that only the data use, such as random.Random(seed) or "
    "numpy.random.default_rng(seed), as an attribute of the dataset"
)


class ReadStates:
    """States of the global random generators before each read of an epoch that depends on them.

    Data may draw from a global generator in the middle of an epoch, such as a shuffle buffer that
    uses `random`. A second reading then gets different numbers if the loop drew from the generator
    in between. The state before such a read is recorded, and restored before the read is repeated.

    Args:
        saved: Return value of `as_state`, for the reads that are to be repeated.
        num_saved: Number of reads that are to be repeated.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, num_saved: int = 0) -> None:
        self._states: dict[str, dict[int, bytes]] = {name: {} for name in STREAMS}
        self._num_saved, self._num_bytes = num_saved, 0
        self.is_over_limit = bool((saved or {}).get("is_over_limit"))
        # a checkpoint of an earlier version holds none
        self.is_complete = not self.is_over_limit and (saved is not None or num_saved == 0)
        for name, (numbers, rows) in (saved or {}).get("streams", {}).items():
            self._states[name] = {
                number: row.numpy().tobytes() for number, row in zip(numbers, rows, strict=True)
            }
            self._num_bytes += rows.numel()

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; record the random states before reads, or restore recorded ones."""
        number = 0
        repeated = _read_streams()  # states that a second reading has before the next read
        while True:
            if number < self._num_saved:
                for name, states in self._states.items():
                    if number in states:
                        STREAMS[name].restore(states[number])
            before = _read_streams()
            try:
                batch = next(batches)
            except StopIteration:
                return
            after = _read_streams()
            for name, state in before.items():
                if state != after[name]:
                    if number >= self._num_saved and state != repeated[name]:
                        self._add(name, number, state)
                    repeated[name] = after[name]
            number += 1
            yield batch

    def _add(self, name: str, number: int, state: Any) -> None:
        if not self.is_complete:
            return
        self._states[name][number] = packed = STREAMS[name].pack(state)
        self._num_bytes += len(packed)
        if self._num_bytes > MAX_BYTES:
            self.is_over_limit, self.is_complete = True, False
            self._states = {name: {} for name in STREAMS}

    def as_state(self) -> dict[str, Any]:
        """Return the states in a form that a checkpoint can hold."""
        streams = {
            name: [
                list(states),
                torch.from_numpy(
                    np.frombuffer(b"".join(states.values()), np.uint8)
                    .reshape(len(states), -1)
                    .copy()
                ),
            ]
            for name, states in self._states.items()
            if states
        }
        return {"is_over_limit": self.is_over_limit, "streams": streams}


def describe_too_many() -> ReadingDifference:
    """Return the message for an epoch whose random states take more than MAX_BYTES."""
    return ReadingDifference(
        "the data and the loop both draw from the same global random generator between batches, "
        f"in so many reads that their states take more than {MAX_BYTES >> 20} MiB: a resume in the "
        "middle of this epoch reads different batches",
        TOO_MANY_HINT,
    )


class _RandomStream(NamedTuple):
    """Access to a global random generator; `pack` converts a state to bytes for `restore`."""

    read: Callable[[], Any]
    pack: Callable[[Any], bytes]
    restore: Callable[[bytes], None]


def _read_numpy() -> tuple[Any, ...]:
    _, words, *place = np.random.get_state()  # noqa: NPY002 - the user's stream
    return np.asarray(words).tobytes(), *place


def _restore_numpy(state: bytes) -> None:
    words = np.frombuffer(state[: -PLACE.size], np.uint32)
    np.random.set_state(("MT19937", words, *PLACE.unpack(state[-PLACE.size :])))  # noqa: NPY002


def _pack_python(state: Any) -> bytes:
    _, (*words, position), normal = state
    place = PLACE.pack(position, normal is not None, normal or 0.0)
    return np.array(words, np.uint32).tobytes() + place


def _restore_python(state: bytes) -> None:
    position, has_normal, normal = PLACE.unpack(state[-PLACE.size :])
    words = np.frombuffer(state[: -PLACE.size], np.uint32).tolist()
    random.setstate((3, (*words, position), normal if has_normal else None))


STREAMS = {
    "torch": _RandomStream(
        lambda: torch.get_rng_state().numpy().tobytes(),
        bytes,
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    "numpy": _RandomStream(
        _read_numpy, lambda state: state[0] + PLACE.pack(*state[1:]), _restore_numpy
    ),
    "python": _RandomStream(random.getstate, _pack_python, _restore_python),
}


def _read_streams() -> dict[str, Any]:
    return {name: stream.read() for name, stream in STREAMS.items()}
