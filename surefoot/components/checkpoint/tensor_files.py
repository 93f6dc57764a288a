"""Reading and writing of safetensors files, with a digest for each tensor.

A file (https://huggingface.co/docs/safetensors) begins with the length of its header in eight
bytes. The header in JSON follows, and then the bytes of the tensors without gaps. Digests are
verified when a file is read. The safetensors library is not used, because it makes a second copy of
all tensors and cannot hash what it writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.components.checkpoint import direct
from surefoot.contract import commits, digest
from surefoot.contract.manifest import Entry, Piece, find_excess
from surefoot.contract.state import part_of
from surefoot.core.errors import RunFolderError, TaskError

ALIGNMENT = 8
BLOCK = 1 << 18  # elements checked together: they stay in the cache
EXPONENT = np.uint16(0x7F80)  # exponent bits of bfloat16
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
METADATA = "__metadata__"  # a key of the header that is not a tensor
NAMES = {name: dtype for dtype, name in DTYPES.items()}
Give = Callable[[str, Piece], Tensor]
Parts = Mapping[str, tuple[int, tuple[int, ...]]]  # name -> first row, and shape of the whole
WHOLE: Parts = {}


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise TaskError if a checkpoint cannot store a tensor, or a tensor of this name."""
    _check_name(name)
    if tensor.is_meta:
        raise TaskError(
            f"{name} is a tensor on the meta device, which has no values to save",
            hint='create it on a device: "cpu", "cuda"',
        )
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise TaskError(
            f"{name} is a tensor of {tensor.dtype} and {kind}, which a checkpoint cannot store",
            hint=(
                "use dense tensors of "
                f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in DTYPES))}"
            ),
        )
    _check_shape(name, tensor)


def _check_shape(name: str, tensor: Tensor) -> None:
    excess = find_excess(whole_shape(tensor))
    if excess is not None:  # no reader would accept such a checkpoint
        raise TaskError(
            f"{name} is a tensor of {excess}, which a checkpoint cannot store",
            hint="save it in a different shape: x.flatten()",
        )


def _check_name(name: str) -> None:
    if name == METADATA:
        raise TaskError(
            f"a tensor has the name {METADATA!r}, which every safetensors file reserves",
            hint="rename it",
        )


def as_buffer(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, without a copy.

    Only a tensor whose conjugate or negative bit is set is copied.
    """
    flat = _resolved(tensor).reshape(-1)
    if flat.numel() == 1:
        # one element is contiguous with any stride, but can be viewed as bytes with stride 1 alone
        flat = flat.as_strided((1,), (1,))
    return (
        memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(bytearray())
    )


def _resolved(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element of a tensor on the host is finite.

    The check works in small blocks, so that it needs no extra memory, and uses only the calling
    thread. Integers and 8-bit floats count as finite.
    """
    if not tensor.is_floating_point() or tensor.element_size() == 1 or not tensor.numel():
        return True
    flat = _resolved(tensor).reshape(-1)
    # numpy has no bfloat16: the exponent of NaN and Inf is all ones
    if tensor.dtype is torch.bfloat16:
        bits = flat.view(torch.int16).numpy().view(np.uint16)
        return not any(((block & EXPONENT) == EXPONENT).any() for block in _blocks(bits))
    values = flat.numpy()
    with np.errstate(all="ignore"):
        # a finite sum means finite elements, in half the time; a non-finite sum may be an overflow
        return bool(np.isfinite(values.sum())) or all(
            np.isfinite(block).all() for block in _blocks(values)
        )


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[start : start + BLOCK] for start in range(0, len(values), BLOCK))


def lay_out(tensors: Mapping[str, Tensor], parts: Parts = WHOLE) -> tuple[bytes, dict[str, Piece]]:
    """Return the header of a safetensors file of `tensors`, and the `Piece` of each tensor.

    Tensors with the largest elements come first, so that all tensors are aligned. The pieces have
    no digests yet. `parts` gives the first row of each tensor that is a shard, and the shape of the
    whole tensor.
    """
    pieces, start = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        _check_name(name)
        shape = tuple(tensors[name].shape)
        first, whole = parts.get(name, (0, shape))
        piece = Piece(
            dtype=DTYPES[tensors[name].dtype],
            shape=shape,
            start=start,
            sha256="",
            whole=whole,
            offset=(first, *(0 for _ in shape[1:])) if shape else (),
        )
        pieces[name] = piece
        start += piece.num_bytes
    rows: dict[str, object] = {METADATA: {"format": "pt"}}
    for name, piece in pieces.items():
        rows[name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [piece.start, piece.start + piece.num_bytes],
        }
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + commits.LENGTH_BYTES) % ALIGNMENT)
    return len(text).to_bytes(commits.LENGTH_BYTES, "little") + text, pieces


def write(
    folder: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    pool: Executor,
    known: Mapping[str, str],
    parts: Parts = WHOLE,
) -> Callable[[], Entry]:
    """Write tensors on the host to a new safetensors file, and sync it.

    Args:
        folder: The folder of the file.
        name: The name of the file.
        tensors: The tensors, by name.
        step: The step that the manifest entry records.
        pool: Threads that compute the digests while the file is written.
        known: Digests by tensor name, which are not computed again.
        parts: First row of each tensor that is a shard, and shape of the whole tensor.

    Returns:
        A function that waits for the last digest and returns the manifest entry of the file. Until
        it is called, the next file can be written.
    """
    header, pieces = lay_out(tensors, parts)
    buffers = {key: as_buffer(tensors[key]) for key in pieces}
    hashing = digest.begin(
        pool, {key: buffer for key, buffer in buffers.items() if key not in known}
    )
    direct.write_new(folder / name, (memoryview(header), *buffers.values()))
    return lambda: _entry(name, header, pieces, {**known, **hashing.finish()}, step)


def _entry(
    name: str, header: bytes, pieces: Mapping[str, Piece], found: Mapping[str, str], step: int
) -> Entry:
    made = {key: Piece(**{**vars(piece), "sha256": found[key]}) for key, piece in pieces.items()}
    num_bytes = len(header) + sum(piece.num_bytes for piece in pieces.values())
    return Entry(
        name=name,
        num_bytes=num_bytes,
        sha256=commits.digest_of(header, found, pieces),
        tensors=made,
        since=step,
    )


def find_unchanged(
    tensors: Mapping[str, Tensor], earlier: Entry, pool: Executor, parts: Parts = WHOLE
) -> tuple[bool, dict[str, str]]:
    """Return whether all tensors have the digests in `earlier`, and the digests computed so far.

    The digests are computed from the smallest tensor to the largest, and the comparison ends soon
    after the first difference. In a file of trained tensors, the smallest tensor usually differs.
    """
    _, pieces = lay_out(tensors, parts)
    before = earlier.tensors or {}
    found: dict[str, str] = {}
    if {key: replace(each, sha256="") for key, each in pieces.items()} != {
        key: replace(each, sha256="") for key, each in before.items()
    }:
        return False, found
    order = sorted(pieces, key=lambda key: pieces[key].num_bytes)
    while len(found) < len(order):
        keys = order[len(found) : 2 * len(found) + 1]  # twice as many each time, hashed in parallel
        found |= digest.begin(pool, {key: as_buffer(tensors[key]) for key in keys}).finish()
        if any(found[key] != before[key].sha256 for key in keys):
            return False, found
    return True, found


def read(folder: Path, entry: Entry, give: Give, pool: Executor) -> dict[str, Tensor]:
    """Read a file of tensors into the tensors that `give` returns, and verify their digests.

    A contiguous tensor on the host with the stored dtype is read in place. Any other tensor needs a
    temporary copy of its size.

    Args:
        folder: The folder of the checkpoint.
        entry: The manifest entry of the file.
        give: Function of a tensor's name and its `Piece`, which has the shape of the whole tensor.
            It returns the tensor to read into, or a shard of its rows. For a shard, only stored
            pieces that overlap with it are read.
        pool: Threads that compute digests.

    Returns:
        The tensors that `give` returned, by name.

    Raises:
        RunFolderError: If a digest does not match. The tensors have been overwritten by then.
    """
    pieces = entry.tensors or {}
    found: dict[str, str] = {}
    with commits.open_file(folder, entry) as file, torch.no_grad():
        header = commits.read_header(file, folder / entry.name, entry)
        # after read_header, which has checked the file size
        given = {name: give(name, whole_piece(piece)) for name, piece in pieces.items()}
        meetings = {name: _find_overlap(tensor, pieces[name]) for name, tensor in given.items()}
        # pieces of which this rank needs no row
        found = {name: pieces[name].sha256 for name, met in meetings.items() if met is None}
        direct = {
            name: met.into
            for name, met in meetings.items()
            if met and met.is_all and _is_direct(met.into, pieces[name])
        }
        found |= _read(file, len(header), pieces, direct, pool)
        for name, met in meetings.items():
            if met is not None and name not in direct:
                held = create(name, pieces[name])
                found |= _read(file, len(header), pieces, {name: held}, pool)
                fill(name, met.into, held if met.is_all else held[met.rows.start : met.rows.stop])
    for name, piece in pieces.items():
        if found[name] != piece.sha256:
            raise RunFolderError(
                f"{folder / entry.name} is damaged: the digest of {name} does not match"
            )
    if commits.digest_of(header, found, pieces) != entry.sha256:
        raise RunFolderError(f"{folder / entry.name} is damaged: its digest does not match")
    return given


class _Overlap(NamedTuple):
    """Overlap of a tensor and a stored piece of it.

    `into` is the part of the tensor that receives `rows` of the piece. If `is_all`, it receives all
    rows of the piece.
    """

    into: Tensor
    rows: range
    is_all: bool


def _find_overlap(tensor: Tensor, piece: Piece) -> _Overlap | None:
    """Return the overlap of `tensor`, which may be a shard, with the stored `piece`, or None."""
    part = part_of(tensor)
    if part is None and not piece.is_part:
        return _Overlap(tensor, range(0), is_all=True)
    begin, length = (0, piece.whole[0]) if part is None else (part.start, len(tensor))
    first, last = max(begin, piece.offset[0]), min(begin + length, piece.offset[0] + piece.shape[0])
    if first >= last:
        return None
    rows = range(first - piece.offset[0], last - piece.offset[0])
    return _Overlap(tensor[first - begin : last - begin], rows, is_all=len(rows) == piece.shape[0])


def whole_piece(piece: Piece) -> Piece:
    """Return `piece` with the shape of the whole tensor, even if it is only a part of it."""
    return (
        replace(piece, shape=piece.whole, offset=(0,) * len(piece.whole))
        if piece.is_part
        else piece
    )


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; for a shard, the shape of the whole tensor."""
    part = part_of(tensor)
    return tuple(tensor.shape) if part is None else part.whole


@torch.no_grad()
def fill(name: str, tensor: Tensor, held: Tensor) -> None:
    """Copy the values of `held` into `tensor`, which has the same shape.

    Raises RunFolderError, with `name` in its message, if `tensor` is expanded and `held` has
    different values along the expanded dimension.
    """
    strides = tensor.stride() if tensor.layout is torch.strided else [1] * tensor.ndim
    for dim, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        if stride == 0 and size > 1:
            one = held.narrow(dim, 0, 1)
            if as_buffer(one.expand_as(held).cpu().contiguous()) != as_buffer(
                held.cpu().contiguous()
            ):
                raise RunFolderError(
                    (
                        f"{name} is expanded, one value for {size} along dimension {dim}, but "
                        "the checkpoint contains different values"
                    ),
                    hint="make it contiguous: tensor.clone()",
                )
            tensor, held = tensor.narrow(dim, 0, 1), one
    tensor.copy_(held)


def _is_direct(tensor: Tensor, piece: Piece) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and DTYPES.get(tensor.dtype) == piece.dtype
        and tuple(tensor.shape) == piece.shape
    )


def _read(
    file: int, data: int, pieces: Mapping[str, Piece], tensors: Mapping[str, Tensor], pool: Executor
) -> dict[str, str]:
    """Read `tensors` from a file, and return their digests by name.

    `data` is the position of the first byte after the header of the file.
    """
    spans = commits.spans(data, {name: pieces[name] for name in tensors})
    into = {
        name: as_buffer(tensor) for name, tensor in tensors.items() if math.prod(pieces[name].shape)
    }
    return digest.begin_read(pool, file, spans, into).finish()


def create(name: str, piece: Piece) -> Tensor:
    """Return a new tensor on the host, uninitialized, with the shape and dtype of `piece`.

    Raises RunFolderError if the tensor does not fit into memory.
    """
    try:
        return torch.empty(piece.shape, dtype=NAMES[piece.dtype])
    except (RuntimeError, MemoryError):
        raise RunFolderError(
            f"a tensor {name} of {piece.num_bytes} bytes is larger than the available memory"
        ) from None
