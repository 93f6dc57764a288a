"""What two runs of a script left, held against each other: tensors and plain values by name where they can be read, others by SHA-256.

What holds times or attempts by its nature (surefoot's own logs, locks and manifests, TensorBoard's files) is left out by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from surefoot.components.checkpoint.foreign import open_foreign
from surefoot.contract import digest, events, manifest, runlock
from surefoot.core.errors import InputError, SurefootError

TIMED_IN_RUN, TIMED_IN_COMMIT = (events.FILE, runlock.FILE, "ledger.bin"), ("clock.json", manifest.FILE)
TIMED_PREFIXES = ("events.out.tfevents",)
FOREIGN = (".pt", ".pth", ".ckpt", ".bin")
RANDOM = {
    "random",
    "pass_random",
}  # streams that a script does not seed differ between any two processes; what they decided does not


def list_files(folder: Path) -> list[str]:
    """The files below, by their path in it; links are none, and what goes away meanwhile is left out."""
    found = []
    for place, _, names in os.walk(folder):
        paths = (Path(place) / name for name in names)
        found += [str(path.relative_to(folder)) for path in paths if path.is_file() and not path.is_symlink()]
    return sorted(found)


def list_timed(folder: Path) -> tuple[str, ...]:
    """Those of them that no two runs have alike."""
    return tuple(name for name in list_files(folder) if _is_timed(folder / name))


def compare(one: Path, two: Path) -> tuple[str | None, tuple[str, ...]]:
    """The first difference in words, and the files that could only be compared as a whole."""
    names, others = ([name for name in list_files(folder) if not _is_timed(folder / name)] for folder in (one, two))
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
    of_run = path.name in TIMED_IN_RUN and all((path.parent / name).is_file() for name in TIMED_IN_RUN[:2])
    return of_run or (path.name in TIMED_IN_COMMIT and _is_commit(path.parent)) or path.name.startswith(TIMED_PREFIXES)


def _is_commit(folder: Path) -> bool:
    return manifest.STEP_FOLDER.match(folder.name) is not None and (folder / manifest.FILE).is_file()


def _difference(one: Path, two: Path, name: str, by_digest: list[str]) -> str | None:
    if digest.of_file(one) == digest.of_file(two):
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
        if (apart := _apart(first[key], second[key])) is not None:
            return f"{name}: {key} differs{apart}"
    return None  # other bytes around the same contents


def _contents(path: Path) -> Mapping[str, Any] | None:
    """The tensors and plain values of a file by name; None for a file of another kind, or with more in it than can be read."""
    if path.name == "state.json" and _is_commit(path.parent):
        return {"": _without_random(manifest.parse_json(path.read_bytes(), path))}
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                texts = {f"metadata/{key}": text for key, text in (file.metadata() or {}).items()}
                return {**texts, **{name: _as_array(file.get_tensor(name)) for name in file.keys()}}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
    if path.suffix in FOREIGN:
        found = open_foreign(path)
        return None if found.left_out else {**found.values, **{name: _as_array(tensor) for name, tensor in found.tensors.items()}}
    return None


def _without_random(tree: Any) -> Any:
    return {key: _without_random(value) for key, value in tree.items() if key not in RANDOM} if isinstance(tree, dict) else tree


def _as_array(tensor: Any) -> np.ndarray:
    found = tensor.detach().cpu().contiguous()
    return np.asarray(found.float().numpy() if str(found.dtype) == "torch.bfloat16" else found.numpy())


def _apart(one: Any, two: Any) -> str | None:
    """By how much two contents differ, in words; None where they do not."""
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        if (one.shape, one.dtype) == (two.shape, two.dtype) and one.tobytes() == two.tobytes():
            return None
        if one.shape != two.shape or one.dtype.kind != "f":
            return ""
        return f" by {np.nanmax(np.abs(one.astype(np.float64) - two.astype(np.float64))):.3g} at most"
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        return ""
    texts = [json.dumps(value, sort_keys=True) for value in (one, two)]  # nan equals nan
    return None if texts[0] == texts[1] else f": {texts[0][:80]} and {texts[1][:80]}" if max(map(len, texts)) <= 80 else ""
