"""Comparison of the files that two runs of a script left.

Tensors and plain values are compared by name if they can be read, other files by SHA-256. A link is
compared by the text of its target, never by the file behind it; files inside the folder are
compared themselves. Files that contain times or attempts by nature (surefoot's logs, locks and
manifests, TensorBoard's files) are ignored by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surefoot.components.checkpoint.foreign import open_foreign
from surefoot.contract import digest, events, manifest, runlock
from surefoot.contract.run_folder import removals
from surefoot.core.errors import InputError, SurefootError

TIMED_IN_RUN, TIMED_IN_COMMIT = (
    (events.FILE, runlock.FILE, removals.FILE, "ledger.bin"),
    ("clock.json", manifest.FILE),
)
TIMED_PREFIXES = ("events.out.tfevents",)
FOREIGN = (".pt", ".pth", ".ckpt", ".bin")
# random streams that a script does not seed differ between processes; their effects are compared
RANDOM = {"random", "pass_random", "last_random"}
TIMES = {"training_s"}


def list_files(folder: Path) -> list[str]:
    """Return the relative paths of all files and links below `folder`.

    Links are not followed. Files that vanish meanwhile are left out.
    """
    found = []
    for place, folders, names in os.walk(folder):
        paths = (Path(place) / name for name in (*folders, *names))
        found += [
            str(path.relative_to(folder)) for path in paths if path.is_symlink() or path.is_file()
        ]
    return sorted(found)


def list_unfollowed(folder: Path) -> tuple[str, ...]:
    """Return the links whose target is not compared: outside of `folder`, or missing."""
    links = (name for name in list_files(folder) if (folder / name).is_symlink())
    return tuple(name for name in links if not _is_inside(folder, name))


def _is_inside(folder: Path, name: str) -> bool:
    try:
        return (folder / name).resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a broken or circular link
        return False


def list_timed(folder: Path) -> tuple[str, ...]:
    """Return the files and links below `folder` that differ in any two runs, such as logs."""
    return tuple(name for name in list_files(folder) if _is_timed(folder / name))


def compare(one: Path, two: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return the first difference of two folders, and the files without readable contents.

    The first value is None if there is no difference. The second value has the files that could
    only be compared by SHA-256.
    """
    names, others = (
        [name for name in list_files(folder) if not _is_timed(folder / name)]
        for folder in (one, two)
    )
    if names != others:
        name = next(iter(sorted(set(names) ^ set(others))))
        return f"{name} is left by one of them alone", ()
    by_digest: list[str] = []
    for name in names:
        apart = _difference(one / name, two / name, name, by_digest)
        if apart is not None:
            return apart, tuple(by_digest)
    return None, tuple(by_digest)


def _is_timed(path: Path) -> bool:
    of_run = path.name in TIMED_IN_RUN and all(
        (path.parent / name).is_file() for name in TIMED_IN_RUN[:2]
    )
    return (
        of_run
        or (path.name in TIMED_IN_COMMIT and _is_commit(path.parent))
        or path.name.startswith(TIMED_PREFIXES)
    )


def _is_commit(folder: Path) -> bool:
    return (
        manifest.STEP_FOLDER.match(folder.name) is not None and (folder / manifest.FILE).is_file()
    )


def _difference(one: Path, two: Path, name: str, by_digest: list[str]) -> str | None:
    links = [os.readlink(path) if path.is_symlink() else None for path in (one, two)]
    if links != [None, None]:
        return (
            None if links[0] == links[1] else f"{name} {', and '.join(map(_describe_link, links))}"
        )
    if digest.digest_of_file(one) == digest.digest_of_file(two):
        return None
    try:
        first, second = _contents(one), _contents(two)
    except SurefootError:
        first = second = None
    if first is None or second is None:
        by_digest.append(name)
        return f"{name} differs"
    if first.keys() != second.keys():
        return f"{name}: {next(iter(sorted(first.keys() ^ second.keys())))} is in one of them alone"
    for key in sorted(key for key in first if not RANDOM & set(key.split("/"))):
        if (apart := _describe_difference(first[key], second[key])) is not None:
            return f"{name}: {key} differs{apart}"
    return None  # different bytes, but the same contents


def _describe_link(target: str | None) -> str:
    return "is a file" if target is None else f"is a link to {target}"


def _contents(path: Path) -> Mapping[str, Any] | None:
    """Return the tensors and plain values in a file by name.

    Returns None for an unknown type of file, and for one with contents that cannot be read.
    """
    if path.name == "state.json" and _is_commit(path.parent):
        return {"": _comparable(manifest.parse_json(path.read_bytes(), path))}
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                texts = {f"metadata/{key}": text for key, text in (file.metadata() or {}).items()}
                names = file.keys()  # the file is no mapping
                return {**texts, **{name: file.get_tensor(name) for name in names}}
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
    if path.suffix in FOREIGN:
        found = open_foreign(path)
        return None if found.left_out else {**found.values, **found.tensors}
    return None


def _comparable(tree: Any) -> Any:
    return (
        {key: _comparable(value) for key, value in tree.items() if key not in RANDOM | TIMES}
        if isinstance(tree, dict)
        else tree
    )


def _describe_difference(one: Any, two: Any) -> str | None:
    """Describe the size of the difference of two values; return None if they are equal."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return _tensors_apart(one.detach(), two.detach())
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return ""
    texts = [json.dumps(value, sort_keys=True) for value in (one, two)]  # nan equals nan
    return (
        None
        if texts[0] == texts[1]
        else f": {texts[0][:80]} and {texts[1][:80]}"
        if max(map(len, texts)) <= 80
        else ""
    )


def _tensors_apart(one: Tensor, two: Tensor) -> str | None:
    if one.dtype != two.dtype:
        return f": {_name(one)} and {_name(two)}"
    if one.shape != two.shape:
        return f": {list(one.shape)} and {list(two.shape)}"
    if torch.equal(_bits(one, torch.uint8), _bits(two, torch.uint8)):
        return None
    if one.dtype is torch.bool:
        return f" in {int((one != two).sum())} of its {one.numel()} values"
    try:
        apart = _numbers_apart(_to_fp64(one), _to_fp64(two))
    except (RuntimeError, TypeError):
        # a dtype without conversion, such as float4: the bytes showed that they differ
        return ""
    if apart is None and one.dtype in (torch.int64, torch.uint64):
        # integers that float64 rounds to the same value
        return f" by {int((_bits(one, torch.int64) - _bits(two, torch.int64)).abs().max())} at most"
    return " in the bits of equal numbers" if apart is None else apart


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # no arithmetic, which few operators support in every dtype
    return tensor.contiguous().reshape(-1).view(dtype)


def _to_fp64(tensor: Tensor) -> Tensor:
    return (
        torch.view_as_real(tensor.to(torch.complex128))
        if tensor.is_complex()
        else tensor.to(torch.float64)
    )


def _numbers_apart(one: Tensor, two: Tensor) -> str | None:
    """Describe the largest difference of two tensors, or the number of NaN in only one of them.

    Returns None if only the bits differ, such as those of 0 and -0.
    """
    in_one = int((one.isnan() != two.isnan()).sum())
    if in_one:
        return (
            f": {in_one} of its {one.numel()} numbers {'is' if in_one == 1 else 'are'} nan "
            "in one of them alone"
        )
    differ = (one != two) & ~one.isnan()
    return (
        f" by {(one[differ] - two[differ]).abs().max().item():.3g} at most"
        if differ.any()
        else None
    )
