"""A safetensors file is read as the text of its format says.

Any other is refused with what is wrong in it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from surefoot.components.data.sources.tensors import Safetensors
from surefoot.core.errors import DataError

SIZES = {"F32": 4, "U8": 1}


def entry(
    start: int, stop: int, shape: list[Any] | None = None, dtype: str = "U8"
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def write(path: Path, header: Any, num_bytes: int, pad: str = "") -> Path:
    text = header if isinstance(header, bytes) else (json.dumps(header) + pad).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(num_bytes)))
    return path


SOUND: dict[str, tuple[Any, int]] = {
    "tensors in a different order than their names": ({"b": entry(0, 3), "a": entry(3, 6)}, 6),
    "an empty tensor between two": (
        {"a": entry(0, 3), "c": entry(3, 3, [0, 4]), "b": entry(3, 6)},
        6,
    ),
    "a single number": ({"a": entry(0, 3), "b": entry(3, 6), "c": entry(6, 7, [])}, 7),
    "metadata of texts": (
        {"__metadata__": {"format": "pt"}, "a": entry(0, 3), "b": entry(3, 6)},
        6,
    ),
    "numbers that are not aligned": ({"a": entry(0, 3), "b": entry(3, 15, [3], "F32")}, 15),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_the_format_allows_is_read(name: str, tmp_path: Path) -> None:
    header, num_bytes = SOUND[name]
    source = Safetensors(
        write(tmp_path / "a.safetensors", header, num_bytes, pad="   "), x="a", y="b"
    )
    assert len(source.read(np.array([2, 0]))["x"]) == 2


def test_the_library_s_own_files_are_read(tmp_path: Path) -> None:
    held = {
        "x": torch.randn(3, 2),
        "y": torch.arange(3),
        "z": torch.ones(3, dtype=torch.bfloat16),
        "w": torch.zeros(3, 0),
    }
    save_file(held, tmp_path / "a.safetensors", metadata={"by": "nobody"})
    read = Safetensors(tmp_path / "a.safetensors").read(np.arange(3))
    assert all(torch.equal(read[name], held[name]) for name in held)


BROKEN: dict[str, tuple[Any, int]] = {
    "a hole between two tensors": ({"a": entry(0, 3), "b": entry(5, 8)}, 8),
    "a hole before the first": ({"a": entry(1, 4), "b": entry(4, 7)}, 7),
    "bytes behind the last": ({"a": entry(0, 3), "b": entry(3, 6)}, 9),
    "bytes and no tensor": ({}, 4),
    "tensors that overlap": ({"a": entry(0, 3), "b": entry(2, 5)}, 5),
    "one tensor over another": ({"a": entry(0, 3), "b": entry(0, 3)}, 3),
    "an empty tensor inside another": ({"a": entry(0, 3), "b": entry(1, 1, [0])}, 3),
    "an empty tensor in a hole": ({"a": entry(0, 3), "b": entry(5, 5, [0])}, 5),
    "a tensor beyond the end": ({"a": entry(0, 3), "b": entry(3, 9)}, 6),
    "a shape of other bytes": ({"a": entry(0, 3, [2]), "b": entry(3, 6)}, 6),
    "an unknown dtype": ({"a": entry(0, 3, dtype="F3"), "b": entry(3, 6)}, 6),
    "a truth value for a size": ({"a": entry(0, 1, [True]), "b": entry(1, 2)}, 2),
    "a fraction for a size": ({"a": entry(0, 1, [1.0]), "b": entry(1, 2)}, 2),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, 1),
    "metadata with a number": ({"__metadata__": {"n": 1}, "a": entry(0, 3)}, 3),
    "metadata with a table": ({"__metadata__": {"n": {"a": "b"}}, "a": entry(0, 3)}, 3),
    "metadata that is a list": ({"__metadata__": ["x"], "a": entry(0, 3)}, 3),
    "metadata that is nothing": ({"__metadata__": None, "a": entry(0, 3)}, 3),
    "a name twice": (
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        ),
        1,
    ),
    "a key of the metadata twice": (b'{"__metadata__":{"a":"1","a":"2"}}', 0),
    "a list for a header": (b"[1]", 0),
    "blanks before the header": (b' {"a":1}', 0),
    "a byte order mark": (b"\xef\xbb\xbf{}", 0),
    "a header of UTF-16": ('{"a":1}'.encode("utf-16-le"), 0),
    "no number of JSON": (b'{"a":NaN}', 0),
    "no UTF-8": (b'{"\xff":1}', 0),
    "lists without end": (b'{"a":' + b"[" * 100_000 + b"}", 0),
    "a number without end": (b'{"a":' + b"9" * 10_000 + b"}", 0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_the_format_forbids_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        Safetensors(write(tmp_path / "a.safetensors", *BROKEN[name]))
    assert "a.safetensors is not a valid safetensors file: " in refused.value.message
    assert len(refused.value.message) < 400 + len(str(tmp_path))


NO_SET: dict[str, tuple[Any, int]] = {
    "no rows": ({"x": entry(0, 0, [0, 2])}, 0),
    "a single number": ({"x": entry(0, 1, [])}, 1),
    "no tensors": ({"__metadata__": {}}, 0),
}


@pytest.mark.parametrize("name", NO_SET)
def test_a_sound_file_without_samples_is_refused_as_such(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not have one length"):
        Safetensors(write(tmp_path / "a.safetensors", *NO_SET[name]))


def test_a_header_larger_than_the_format_allows_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(100_000_016)  # a hole of the disk
    with pytest.raises(DataError, match=r"not a valid safetensors file: .*header too large"):
        Safetensors(path)
    path.write_bytes(math.comb(64, 32).to_bytes(8, "little") + b"{}")
    with pytest.raises(DataError, match=r"not a valid safetensors file: .*header"):
        Safetensors(path)
