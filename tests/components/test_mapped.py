"""Safetensors and .npy files are read by rows out of the map.

A header is believed only where it can be true.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.data.sources.tensors import TORCH, Safetensors
from surefoot.contract.manifest import ITEM_BYTES
from surefoot.core.errors import DataError


def write(path: Path, header: Any, content: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_rows_of_every_dtype_come_back_as_they_were_written(dtype: str, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(
        0,
        2 if dtype == "BOOL" else 100,
        (7, 3, ITEM_BYTES[dtype]),
        generator=draw,
        dtype=torch.uint8,
    )
    values = raw.view(TORCH[dtype]).squeeze(-1)
    safetensors.torch.save_file(
        {"x": values, "odd": torch.zeros(7, 1, dtype=torch.uint8)}, tmp_path / "a.safetensors"
    )
    source = Safetensors(tmp_path / "a.safetensors", rows="x")
    read = source.read(np.array([6, 0, 6]))["rows"]
    assert read.dtype == values.dtype
    assert torch.equal(
        read.contiguous().view(torch.uint8), values[[6, 0, 6]].contiguous().view(torch.uint8)
    )


def test_every_dtype_that_has_a_size_has_a_type() -> None:
    assert TORCH.keys() == ITEM_BYTES.keys()
    assert all(TORCH[name].itemsize == size for name, size in ITEM_BYTES.items())


def test_tensors_are_named_or_all_and_a_file_is_mapped_again_in_another_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(
        {"x": torch.arange(12.0).view(6, 2), "y": torch.arange(6)}, path, metadata={"made": "here"}
    )
    everything, named = Safetensors(path), Safetensors(path, labels="y")
    assert everything.read(np.array([4]))["x"].tolist() == [[8.0, 9.0]]
    assert named.read(np.array([5, 0])).keys() == {"labels"}
    again = pickle.loads(pickle.dumps(named))
    assert again.read(np.array([5, 0]))["labels"].tolist() == [5, 0]
    assert again.digest == named.digest != everything.digest
    assert named.describe() == "6 samples of a.safetensors: labels (6,) I64"


def test_bytes_at_odd_places_are_read_too(tmp_path: Path) -> None:
    values = torch.arange(5, dtype=torch.float64)
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F64", "shape": [5], "data_offsets": [3, 43]},
    }
    path = write(tmp_path / "a.safetensors", header, b"abc" + values.numpy().tobytes())
    assert torch.equal(Safetensors(path, x="x").read(np.arange(5))["x"], values)


def row(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


INVALID = "is not a valid safetensors file: "
HOSTILE: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{", INVALID),
    "deep nesting": (b'{"x": ' + b"[" * 100_000, INVALID),
    "not a table": ([1], INVALID),
    "a row that is none": ({"x": 3}, INVALID),
    "an unknown dtype": ({"x": row(dtype="F4")}, INVALID),
    "a dtype that torch does not read": ({"x": row("F8_E8M0", (4, 4))}, "F8_E8M0"),
    "a dtype that is no word": ({"x": row(dtype=["F32"])}, INVALID),
    "a negative size": ({"x": row(shape=(-2, -2))}, INVALID),
    "a size that is no number": ({"x": row(shape=(True, "4"))}, INVALID),
    "a giant size": ({"x": row(shape=(1 << 60,))}, INVALID),
    "three offsets": ({"x": row(offsets=(0, 16, 16))}, INVALID),
    "beyond the end": (
        {"x": row(shape=(2, 3), offsets=(0, 24))},
        INVALID,
    ),
    "backwards": ({"x": row(offsets=(16, 0))}, INVALID),
    "another size": ({"x": row(shape=(2, 1))}, INVALID),
    "overlap": ({"x": row(), "y": row(shape=(2,), offsets=(8, 16))}, INVALID),
    "a name twice": (b'{"x": 1, "x": 2}', INVALID),
    "unequal lengths": (
        {"x": row(shape=(2,), offsets=(0, 8)), "y": row(shape=(1, 2), offsets=(8, 16))},
        "do not have one length",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_header_that_cannot_be_true_is_refused(what: str, tmp_path: Path) -> None:
    header, says = HOSTILE[what]
    with pytest.raises(DataError, match=says) as caught:
        Safetensors(write(tmp_path / "a.safetensors", header, bytes(16)))
    assert caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 8, (1 << 20).to_bytes(8, "little") + b"{}"]
)
def test_a_file_that_is_cut_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=INVALID):
        Safetensors(tmp_path / "a.safetensors")
    with pytest.raises(DataError, match="No such file"):
        Safetensors(tmp_path / "b.safetensors")


def test_a_name_that_is_not_in_the_file_is_answered_with_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"x": row()}, bytes(16))
    with pytest.raises(DataError, match=r"has no tensor images\nhint: it contains x"):
        Safetensors(path, images="images")


def test_npy_files_are_mapped_by_name(tmp_path: Path) -> None:
    images, labels = np.arange(24, dtype=np.uint8).reshape(6, 2, 2), np.arange(6)
    np.save(tmp_path / "x.npy", images)
    np.save(tmp_path / "y.npy", labels)
    source = Arrays.of_files(images=tmp_path / "x.npy", labels=str(tmp_path / "y.npy"))
    batch = source.read(np.array([5, 1]))
    assert batch["images"].tolist() == images[[5, 1]].tolist()
    assert batch["labels"].tolist() == [5, 1]
    assert source.digest == Arrays(images=images, labels=labels).digest
    assert Arrays.of_files(tmp_path / "y.npy").read(np.array([3]))[0].tolist() == [3]
    for wrong in (-1, 6):
        with pytest.raises(DataError, match=f"sample {wrong} was requested"):
            source.read(np.array([wrong]))
    for wrong in (np.array(["a", "b"]), np.arange(4, dtype=">i4"), np.arange(4)[::-1]):
        with pytest.raises(DataError, match="cannot become a tensor"):
            Arrays(wrong)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-3])
    with pytest.raises(DataError, match=r"cut\.npy cannot be mapped"):
        Arrays.of_files(tmp_path / "cut.npy")


# ---- memory: each file is larger than all the memory that the process may have, and is trained on

TRAIN = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from surefoot.data import Arrays, Safetensors, TokenFile, Tokens

def pages(which):
    return int(Path("/proc/self/statm").read_text().split()[which]) * resource.getpagesize()

def train(source):
    model = torch.nn.Embedding(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = np.random.default_rng(0)
    for step in range(5):
        batch = source.read(draw.integers(0, len(source), size=8))
        model(batch["inputs"].long().clamp(0, 7)).sum().backward()
        optimizer.step()

tokens, array, tensors = sys.argv[1:]
torch.set_num_threads(1)
train(Tokens(np.zeros(9999, "uint16"), 256))
resource.setrlimit(resource.RLIMIT_DATA, (pages(5) + {allowed}, -1))
before = pages(1)
rows = Safetensors(tensors, inputs="x")
for source in (TokenFile(tokens, 256), Arrays.of_files(inputs=array), rows):
    train(source)
    print(pages(1) - before)
try:
    np.fromfile(tokens, "uint16")
except MemoryError:
    print("a copy does not fit")
"""
FILE_BYTES, ALLOWED_BYTES = 1 << 30, 256 << 20


def hole(path: Path, head: bytes) -> Path:
    """A file of 1 GiB behind `head` that takes no disk."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + FILE_BYTES)
    return path


@pytest.mark.slow
def test_maps_larger_than_the_memory_allowed_train_with_small_resident_growth(
    tmp_path: Path,
) -> None:
    shape = (FILE_BYTES // 512, 256)
    header = json.dumps({"x": row("U16", shape, (0, FILE_BYTES))}).encode()
    tokens = hole(tmp_path / "a.bin", b"")
    tensors = hole(tmp_path / "a.safetensors", len(header).to_bytes(8, "little") + header)
    np.lib.format.open_memmap(tmp_path / "a.npy", mode="w+", dtype=np.uint16, shape=shape).flush()
    command = [
        sys.executable,
        "-c",
        TRAIN.format(allowed=ALLOWED_BYTES),
        str(tokens),
        str(tmp_path / "a.npy"),
        str(tensors),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *grown, last = done.stdout.splitlines()
    assert last == "a copy does not fit"
    assert len(grown) == 3
    assert all(int(each) < FILE_BYTES // 10 for each in grown), grown
