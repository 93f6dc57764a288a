"""Import of tensor files that other programs wrote.

The formats are `.pt`, `.ckpt`, `.bin`, safetensors, and folders of torch.distributed.checkpoint. A
separate process with restricted rights (`child`) opens each file, and converts it to safetensors
and JSON. Reading these two formats runs no code. A file that contains more than tensors, numbers
and text is refused; no option overrides this.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.components.checkpoint.load import Commit
from surefoot.components.checkpoint.save import Content, Stamp, commit
from surefoot.contract import commits, digest, manifest
from surefoot.contract.manifest import Manifest
from surefoot.core import place
from surefoot.core.errors import InputError, RunFolderError
from surefoot.core.units import name_some

CHILD = "surefoot.components.checkpoint.foreign.child"
PACKAGE = Path(__file__).resolve().parents[4]  # the folder that contains surefoot/
MAX_NAMED = 8
# how the child begins the reason for a tensor that it left out; other entries are not weights
LOST = "a tensor "
SPARE_BYTES = 1 << 30  # memory that reading may take in addition to three times the file size
SPARE_CPU_S, BYTES_PER_CPU_S = 60, 20 << 20
# keys under which common programs keep the weights of a model in a larger file, the likeliest
# first
WEIGHTS_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights", "params", "net")


@dataclass(frozen=True)
class ForeignFile:
    """Contents of a tensor file that a different program wrote.

    `tensors` and `values` (numbers and text) are dicts by path, in which `/` joins the names of
    nested mappings. If `is_flat`, the file has no nested mappings, and a `/` is part of a name.
    `left_out` gives the reason for each entry that was not read. `unbounded` names the resources,
    such as the network, that could not be denied to the process that read the file.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    unbounded: tuple[str, ...] = ()
    is_flat: bool = False


def open_foreign(path: Path) -> ForeignFile:
    """Read a tensor file or a folder of a different program, without running code from it.

    Raises InputError if the file is refused, and RunFolderError for a damaged checkpoint of
    surefoot.
    """
    size = _size(path)
    _check_own(path)
    memory_bytes, cpu_s = 3 * size + SPARE_BYTES, SPARE_CPU_S + size // BYTES_PER_CPU_S
    with tempfile.TemporaryDirectory(prefix="surefoot-import-") as folder:
        _run_child(path.absolute(), Path(folder), memory_bytes, cpu_s)
        try:
            one = Commit(Path(folder), 0)
            found, tensors = one.json("found.json"), one.read("tensors.safetensors")
        # about the files that the child process wrote, whose names mean nothing to the user
        except RunFolderError as error:
            reason = error.message.rpartition(": ")[2]
            raise InputError(
                f"{path} cannot become a checkpoint: {reason}",
                hint="convert only the weights, or convert them in parts",
            ) from None
        return ForeignFile(
            tensors, found["values"], found["left_out"], tuple(found["unbounded"]), found["is_flat"]
        )


def _run_child(source: Path, folder: Path, memory_bytes: int, cpu_s: int) -> None:
    environment = place.child_environment(threads=1)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(PACKAGE), environment.get("PYTHONPATH", "")))
    )
    given = [str(each) for each in (source, folder, memory_bytes, cpu_s)]
    command = [sys.executable, "-P", "-m", CHILD, *given]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=2 * cpu_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{source} was not read within {2 * cpu_s} s",
            hint="check whether the disk is slow, or the file is malicious",
        ) from None
    if done.returncode == 0:
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        row = json.loads((folder / "refused.json").read_text())
        raise InputError(str(row["message"]), hint=row["hint"])
    tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    raise InputError(
        f"{source} cannot be read: the process that tried ended with {done.returncode}: "
        f"{tail[0][:300]}",
        hint=f"it may use {memory_bytes >> 20} MiB and {cpu_s} s of a processor",
    )


def _size(path: Path) -> int:
    """Return the size in bytes of a file, or of the files directly in a folder.

    Raises InputError for a path that cannot be read, is empty, or is neither a file nor a folder.
    """
    try:
        if path.is_dir():
            return sum(each.stat().st_size for each in path.iterdir() if each.is_file())
        status = path.stat()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}",
            hint="give a file, or the folder of a checkpoint",
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"{path} is neither a file nor a folder",
            hint="give a file, or the folder of a checkpoint",
        )
    if not status.st_size:
        raise InputError(f"{path} is empty", hint="check that the copy is complete")
    return status.st_size


def _check_own(path: Path) -> None:
    """Verify a checkpoint of surefoot, or one of its files, against the manifest.

    Files of other programs are not checked. Raises RunFolderError if the checkpoint is damaged.
    """
    whole = path.resolve()
    folder = whole if whole.is_dir() else whole.parent
    stated = folder / manifest.FILE
    if not stated.is_file() or not (
        manifest.STEP_FOLDER.match(folder.name) or b'"spec_id"' in stated.read_bytes()
    ):
        return
    if whole == folder:
        commits.check(folder)
        return
    with commits.hashing() as pool:
        for entry in manifest.read(folder).files:
            if entry.name == whole.name:
                commits.check_file(folder, entry, pool)


# ---- selecting the weights


def choose_weights(
    found: ForeignFile, key: str | None = None, strip: str = ""
) -> dict[str, Tensor]:
    """Return the model weights among the tensors of a file, by name.

    Args:
        found: The contents of the file.
        key: The path below which the weights are, such as `state_dict`; empty for the top level;
            None to use `find_key`.
        strip: Prefix such as `module.`, which is removed from each name that starts with it.

    Raises:
        InputError: If it is not clear which tensors are the weights, if there are none, if a weight
            cannot be converted, or if two weights would get the same name.
    """
    if key is None:
        key = find_key(found)
    lost = {
        name: why
        for name, why in found.left_out.items()
        if why.startswith(LOST) and _is_chosen(found, key, name)
    }
    if lost:
        raise InputError(
            f"these entries of the weights cannot be converted: {_reasons(lost)}",
            hint=(
                "partial imports are not supported: convert these entries to plain "
                "tensors, or leave them out, in the program that wrote the file"
            ),
        )
    names = [name for name in found.tensors if _is_chosen(found, key, name)]
    if not names:
        groups = ", ".join(_groups(found.tensors)) or "none"
        raise InputError(f"nothing below {key!r} is a tensor", hint=f"give --key one of {groups}")
    chosen: dict[str, Tensor] = {}
    for name in names:
        below = name.removeprefix(f"{key}/") if key else name
        dotted = below if found.is_flat else below.replace("/", ".")
        if dotted in chosen:
            raise InputError(
                f"two tensors have the name {dotted[:100]}",
                hint="rename one of them in the program that wrote it",
            )
        chosen[dotted] = found.tensors[name]
    stripped = {name.removeprefix(strip): tensor for name, tensor in chosen.items()}
    if len(stripped) != len(chosen):
        raise InputError(
            f"without {strip!r} two tensors have the same name", hint="leave --strip out"
        )
    return stripped


def list_other_entries(found: ForeignFile, key: str) -> list[str]:
    """Return the names of the entries that are not weights, sorted.

    The weights are the tensors below `key`. An entry below `key` that is not a tensor has its whole
    path as its name; all other entries have the first part of their paths.
    """
    every = [
        *found.values,
        *found.left_out,
        *(name for name in found.tensors if not _is_chosen(found, key, name)),
    ]
    return sorted(
        {name if _is_chosen(found, key, name) else name.partition("/")[0] for name in every}
    )


def _reasons(lost: Mapping[str, str]) -> str:
    return name_some([f"{name[:100]} ({why})" for name, why in lost.items()], MAX_NAMED)


def _is_chosen(found: ForeignFile, key: str, name: str) -> bool:
    return name.startswith(f"{key}/") if key else found.is_flat or "/" not in name


def find_key(found: ForeignFile) -> str:
    """Return the path below which the weights are; an empty string for the top level.

    Raises InputError if it is not clear which tensors are the weights, or if there are no tensors.
    """
    if not found.tensors:
        but = f" that can be converted, but {_reasons(found.left_out)}" if found.left_out else ""
        raise InputError(
            f"the file contains no tensors{but}",
            hint="give a file of weights: torch.save(model.state_dict(), FILE)",
        )
    groups = _groups(found.tensors)
    likely = [each for each in WEIGHTS_KEYS if each in _groups((*found.tensors, *found.left_out))]
    if found.is_flat or (not likely and any("/" not in name for name in found.tensors)):
        return ""
    if len(likely) == 1 or len(groups) == 1:
        return (likely or groups)[0]
    raise InputError(
        (
            "it is not clear which tensors are the weights: the key prefixes are "
            f"{', '.join(groups) or 'none'}"
        ),
        hint="select them with --key",
    )


def _groups(names: Iterable[str]) -> list[str]:
    """Return the first parts of the names that contain a `/`, without repetition."""
    return list(dict.fromkeys(name.partition("/")[0] for name in names if "/" in name))


def check_new(to: Path) -> None:
    """Raise RunFolderError if `to` exists and is not an empty folder, or cannot be created."""
    try:
        if (to.exists() or to.is_symlink()) and (not to.is_dir() or any(to.iterdir())):
            raise RunFolderError(
                f"{to} exists already, and existing folders are not overwritten",
                hint="give a new folder with --to",
            )
        above = next(folder for folder in (to, *to.absolute().parents) if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".draft-", dir=above))
    except OSError as error:
        raise RunFolderError(
            f"{to} cannot be created: {error.strerror}", hint="give another folder with --to"
        ) from None


def import_weights(
    path: Path, to: Path, weights: Mapping[str, Tensor], environment: Mapping[str, str]
) -> Manifest:
    """Save weights of a different program as the checkpoint of step 0 in the new folder `to`.

    Args:
        path: The file from which the weights were read. The manifest records it as `parent`.
        to: The folder to create.
        weights: The tensors, by name.
        environment: Versions of the installed packages, for the manifest.

    Raises:
        RunFolderError: If `to` exists and is not an empty folder, or cannot be created.
        StorageError: If a file cannot be written.
    """
    check_new(to)
    parent: dict[str, Any] = {"folder": str(path.absolute()), "step": 0, "imported": True}
    if path.is_file():
        parent["sha256"] = digest.digest_of_file(path)
    content = Content(
        step=0,
        tensors={
            "model.safetensors": {name: tensor.contiguous() for name, tensor in weights.items()}
        },
    )
    named = hashlib.sha256("\n".join(weights).encode()).hexdigest()[:12]
    return commit(
        to, content, Stamp(spec_id=f"imported-{named}", environment=environment, parent=parent)
    )
