"""Child process that opens tensor files of other programs.

This is the only module that unpickles or calls torch.load. Its command is `python -P -m
surefoot.components.checkpoint.foreign.child SOURCE FOLDER MEMORY_BYTES CPU_S`. The process
restricts its own rights before it opens SOURCE. It reads only tensors, numbers and text
(`weights_only=True`), and saves them in FOLDER as safetensors and JSON. Reading these two formats
runs no code.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from surefoot.components.checkpoint.foreign.confinement import confine
from surefoot.components.checkpoint.save import Content, Stamp, commit
from surefoot.components.checkpoint.tensor_files import DTYPES
from surefoot.contract.manifest import find_excess
from surefoot.core.errors import InputError

MAX_DEPTH, MAX_ENTRIES = 100, 1_000_000
MAX_NAME = 1_000
DCP_FILE = ".metadata"
# classes in the metadata of torch.distributed.checkpoint; the unpickler makes each of them a
# _MetadataObject
DCP_RECORDS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "WindowsPath"),
}


# ---- reading


def read(source: Path) -> Any:
    """Read a tensor file or a folder, and return its nested tensors, numbers and text.

    Raises InputError if the contents are invalid, or include any other object.
    """
    if source.is_dir():
        return _read_dcp(source) if (source / DCP_FILE).is_file() else _read_folder(source)
    return load_file(source) if source.suffix == ".safetensors" else _load(source)


def is_flat(source: Path) -> bool:
    """Return whether tensor names in `source` are flat: a `/` in a name is not a separator.

    This is the case for safetensors. The other formats contain nested mappings.
    """
    return not (source / DCP_FILE).is_file() if source.is_dir() else source.suffix == ".safetensors"


def _load(source: Path) -> Any:
    """Load a file that torch.save wrote.

    A file in the zip format is memory-mapped, so that the weights are not in memory twice. Raises
    InputError if the file contains more than tensors, numbers and text.
    """
    try:
        return torch.load(
            source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source)
        )
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{source} contains more than tensors, numbers and text: {_first_line(error)}",
            hint=(
                "save it again with torch.save(model.state_dict(), FILE); "
                "code in a file is never run"
            ),
        ) from None
    except EOFError:
        raise InputError(f"{source} is truncated", hint="check that the copy is complete") from None


def _first_line(error: BaseException) -> str:
    """Return the line of an error message that names the refused object.

    torch's advice to load a trusted file with `weights_only=False` is left out.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (telling or lines or [type(error).__name__])[0][:300]


def _read_folder(source: Path) -> dict[str, Tensor]:
    """Read the weights in a folder of safetensors files, such as a Hugging Face model.

    Raises InputError if a file is missing, or if two files contain the same name.
    """
    indexes = sorted(source.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise InputError(
            f"{source} contains {' and '.join(path.name for path in indexes)}",
            hint="keep one model in a folder",
        )
    stated = _read_index(indexes[0]) if indexes else {}
    files = [source / name for name in sorted(set(stated.values()))]
    files = (
        files or sorted(source.glob("model*.safetensors")) or sorted(source.glob("*.safetensors"))
    )
    if not files:
        raise InputError(
            f"{source} contains no {DCP_FILE} and no .safetensors file",
            hint="give a file, or the folder of a checkpoint",
        )
    found: dict[str, Tensor] = {}
    held: dict[str, str] = {}
    for file in files:
        _need_file(file)
        for name, tensor in load_file(file).items():
            if name in found:
                raise InputError(
                    f"{held[name]} and {file.name} in {source} both contain {name[:100]}",
                    hint="give one of the files",
                )
            found[name], held[name] = tensor, file.name
    for name, where in stated.items():
        if held.get(name) != where:
            raise InputError(
                f"{source / where} does not contain {name[:100]}, which the index lists in it",
                hint="check that the copy is complete",
            )
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Read the index of a Hugging Face folder, and return the file name of each tensor.

    Raises InputError for an invalid index.
    """
    _need_file(path)
    try:
        stated = dict(json.loads(path.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not an index of weights: {_first_line(error)}") from None
    for name in stated.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{path} names the file {str(name)[:100]!r}, which is not a plain file name"
            )
    return stated


def _need_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(
            f"{path} is missing, or not a regular file",
            hint="partial imports are not supported: copy every file of the model",
        )


class _MetadataObject:
    """Replacement for any class in the metadata of torch.distributed.checkpoint.

    An instance stores the constructor arguments in `given`, and the pickled state in `fields`.
    """

    given: tuple[Any, ...] = ()
    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {"state": state}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.fields:
            raise AttributeError(name)
        return self.fields[name]


class _Metadata(pickle.Unpickler):
    """Unpickler for the metadata of torch.distributed.checkpoint.

    It creates only `_MetadataObject`, tuples (for torch.Size), OrderedDict and dtypes. It refuses
    every other name, so that a file cannot choose a function to call.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in DCP_RECORDS:
            return _MetadataObject
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _read_dcp(source: Path) -> dict[str, Any]:
    """Read a folder of torch.distributed.checkpoint, and return its nested state dict.

    Every tensor is assembled from its shards. Raises InputError if the folder is invalid.
    """
    try:
        with (source / DCP_FILE).open("rb") as file:
            metadata = _Metadata(file).load()
        entries, storage = dict(metadata.state_dict_metadata), list(metadata.storage_data.items())
        paths = metadata.fields.get("planner_data") or {}
        pieces: dict[str, list[tuple[Any, Any]]] = {}
        for index, info in storage:
            pieces.setdefault(str(index.fqn), []).append((index, info))
        tree: dict[str, Any] = {}
        for name, entry in entries.items():
            path = paths.get(name) if isinstance(paths, dict) else None
            read = _assemble_tensor if "size" in entry.fields else _plain_value
            _insert_value(
                tree,
                path if isinstance(path, tuple) and path else (name,),
                read(source, entry, pieces.get(name, [])),
            )
        return tree
    except (
        pickle.UnpicklingError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        EOFError,
        IndexError,
    ) as error:
        raise InputError(
            f"{source / DCP_FILE} is not the metadata of a checkpoint: {_first_line(error)}"
        ) from None


def _assemble_tensor(source: Path, entry: Any, pieces: list[tuple[Any, Any]]) -> Tensor:
    shape = tuple(int(size) for size in entry.size)
    whole: Tensor | None = None
    done = 0
    for index, info in pieces:
        piece = _piece(source, info)
        if not isinstance(piece, Tensor):
            raise InputError(
                f"{source} contains a {type(piece).__name__} where a tensor is expected"
            )
        offsets = (
            tuple(int(each) for each in index.offset)
            if index.offset is not None
            else (0,) * len(shape)
        )
        if whole is None:
            whole = torch.zeros(shape, dtype=piece.dtype)
        part = whole[
            tuple(
                slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True)
            )
        ]
        if part.shape != piece.shape:
            raise InputError(f"{source}: a part of {index.fqn} is outside the tensor")
        part.copy_(piece)
        done += piece.numel()
    if whole is None or done < whole.numel():
        raise InputError(f"{source} lacks parts of a tensor of shape {list(shape)}")
    return whole


def _plain_value(source: Path, entry: Any, pieces: list[tuple[Any, Any]]) -> Any:
    """Load an entry that is not a tensor, such as a number or text.

    If it is a different object, its metadata entry is returned, and `sort` leaves it out.
    """
    try:
        return _piece(source, pieces[0][1])
    except (pickle.UnpicklingError, IndexError):
        return entry


def _piece(source: Path, info: Any) -> Any:
    """Load the object that `info` locates: a range of bytes in a file of the folder `source`."""
    name, offset, length = str(info.relative_path), int(info.offset), int(info.length)
    path = source / name
    if Path(name).name != name or path.is_symlink():
        raise InputError(f"{source} names the file {name[:100]!r}, which is not a plain file name")
    if info.fields.get("transform_descriptors"):
        raise InputError(
            f"{source} is compressed, which is not supported",
            hint="save it without extensions",
        )
    _need_file(path)
    with path.open("rb") as file:
        if not 0 < length <= path.stat().st_size:
            raise InputError(f"{path} is shorter than its metadata says")
        file.seek(offset)
        return torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)


def _insert_value(tree: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(str(part), {})
    if not isinstance(tree, dict) or str(path[-1]) in tree:
        raise _duplicate_name_error("/".join(map(str, path)))
    tree[str(path[-1])] = value


# ---- writing


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of every leaf in nested mappings and lists.

    A list of plain values (None, numbers and text) is one leaf. Raises InputError if the nesting is
    too deep, or a name too long.
    """
    if len(path) > MAX_DEPTH:
        raise InputError(f"the state is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        for key, part in value.items():
            if len(str(key)) > MAX_NAME:
                raise InputError(
                    f"a name has {len(str(key)):,} letters, {MAX_NAME:,} are allowed: "
                    f"{str(key)[:100]}"
                )
            yield from walk(part, (*path, str(key)))
    elif isinstance(value, list | tuple) and not (
        len(value) <= MAX_ENTRIES and all(_is_plain(part) for part in value)
    ):
        for number, part in enumerate(value):
            yield from walk(part, (*path, str(number)))
    else:
        yield path, value


def _duplicate_name_error(name: str) -> InputError:
    return InputError(
        f"two entries have the name {name[:100]}",
        hint="rename one of them in the program that wrote it",
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def sort(tree: Any) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Split nested contents into tensors, plain values, and entries that are left out.

    Returns three dicts by path, in which `/` joins the names: the tensors, the plain values, and
    the reason for each entry that a checkpoint cannot store. Raises InputError if two entries have
    the same path, or if there are too many.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for number, (path, value) in enumerate(walk(tree)):
        if number >= MAX_ENTRIES:
            raise InputError(f"the state has more than {MAX_ENTRIES:,} entries")
        name = "/".join(path) or "tensor"
        if any(name in kind for kind in (tensors, values, left_out)):
            raise _duplicate_name_error(name)
        if isinstance(value, Tensor):
            if (why := _reason_to_refuse(name, value)) is None:
                tensors[name] = value.detach()
            else:
                left_out[name] = why
        elif isinstance(value, list | tuple) or _is_plain(value):
            values[name] = list(value) if isinstance(value, tuple) else value
        else:
            left_out[name] = type(value).__name__
    return tensors, values, left_out


def _reason_to_refuse(name: str, tensor: Tensor) -> str | None:
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.dtype not in DTYPES
        or tensor.is_nested
    ):
        return f"a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device}"
    if (excess := find_excess(tensor.shape)) is not None:
        return f"a tensor of {excess}, which a checkpoint cannot store"
    return "a tensor whose name the file format reserves" if name == "__metadata__" else None


def main() -> None:
    """Read SOURCE and save its contents in FOLDER.

    If SOURCE is refused, the reason is written to `refused.json` in FOLDER, and the exit code is 1.
    """
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    unbounded = confine(folder, int(sys.argv[3]), int(sys.argv[4]))
    try:
        tensors, values, left_out = sort(read(source))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        found = {
            "values": values,
            "left_out": left_out,
            "unbounded": unbounded,
            "is_flat": is_flat(source),
        }
        text = json.dumps(found, default=str).encode()
        commit(
            folder,
            Content(step=0, tensors={"tensors.safetensors": whole}, texts={"found.json": text}),
            Stamp(),
        )
    except InputError as error:
        _refuse(folder, error.message, error.hint)
    except MemoryError:
        _refuse(folder, f"{source} needs more memory than a file of its size can need", None)
    except Exception as error:  # noqa: BLE001 - a hostile file can make the reader raise anything
        _refuse(
            folder, f"{source} cannot be read: {type(error).__name__}: {_first_line(error)}", None
        )


def _refuse(folder: Path, message: str, hint: str | None) -> None:
    (folder / "refused.json").write_text(json.dumps({"message": message, "hint": hint}))
    raise SystemExit(1)


if __name__ == "__main__":
    main()
