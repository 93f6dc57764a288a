"""Files of tensors that others wrote: `.pt`, `.ckpt`, `.bin`, safetensors, folders of torch.distributed.checkpoint.

Each is opened by a process of its own, which foreign_child.py confines, and comes back as files of tensors that run nothing when they
are read. A file that holds more than tensors, numbers and text is refused; there is no way to trust it after all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.components.checkpoint.load import Commit
from surefoot.components.checkpoint.save import Content, Stamp, commit
from surefoot.contract import digest
from surefoot.contract.manifest import Manifest
from surefoot.core import place
from surefoot.core.errors import InputError, RunFolderError

CHILD = "surefoot.components.checkpoint.foreign_child"
PACKAGE = Path(__file__).resolve().parents[3]  # where the folder surefoot/ stands
SPARE_BYTES = 1 << 30  # what reading may take besides three times the size of what is read
SPARE_CPU_S, BYTES_PER_CPU_S = 60, 20 << 20
# under which names the programs that people use keep a model's weights in a larger file, the likeliest first
WEIGHTS_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights", "params", "net")


@dataclass(frozen=True)
class Foreign:
    """What a stranger's file held: tensors and plain values by their path in it, parts joined by `/`; and what was left out, why.

    `unbounded` names what this system could not keep from the process that read it.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    unbounded: tuple[str, ...] = ()


def read_foreign(path: Path) -> dict[str, Tensor]:
    """Every tensor of a foreign file or folder by its path in it, as `model/0.weight`. Raises InputError for what is refused."""
    return dict(open_foreign(path).tensors)


def open_foreign(path: Path) -> Foreign:
    """Read a foreign file or folder in a confined process; no code in it runs. Raises InputError for what is refused."""
    size = _size(path)
    memory_bytes, cpu_s = 3 * size + SPARE_BYTES, SPARE_CPU_S + size // BYTES_PER_CPU_S
    with tempfile.TemporaryDirectory(prefix="surefoot-import-") as folder:
        _run_child(path.absolute(), Path(folder), memory_bytes, cpu_s)
        one = Commit(Path(folder), 0)
        found = one.json("found.json")
        return Foreign(one.read("tensors"), found["values"], found["left_out"], tuple(found["unbounded"]))


def _run_child(source: Path, folder: Path, memory_bytes: int, cpu_s: int) -> None:
    environment = place.child_environment(threads=1)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE), environment.get("PYTHONPATH", ""))))
    command = [sys.executable, "-P", "-m", CHILD, str(source), str(folder), str(memory_bytes), str(cpu_s)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * cpu_s, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(f"{source} was not read within {2 * cpu_s} s", hint="is the disk slow, or the file hostile?") from None
    if done.returncode == 0:
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        row = json.loads((folder / "refused.json").read_text())
        raise InputError(str(row["message"]), hint=row["hint"])
    tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    raise InputError(
        f"{source} cannot be read: the process that tried ended with {done.returncode}: {tail[0][:300]}",
        hint=f"it may use {memory_bytes >> 20} MiB and {cpu_s} s of a processor",
    )


def _size(path: Path) -> int:
    """Bytes of a file, or of the files of a folder."""
    try:
        if path.is_dir():
            return sum(each.stat().st_size for each in path.iterdir() if each.is_file())
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint="give a file, or the folder of a checkpoint") from None


# ---- what becomes of it


def choose_weights(found: Foreign, key: str | None = None, strip: str = "") -> dict[str, Tensor]:
    """The weights among the tensors: those below `key`, or those that stand at the top or below a name that is used for them.

    `strip` is taken from the front of each name that begins so, as `module.`. Raises InputError where it is not clear which.
    """
    if key is None:
        key = _find_key(found)
    below = f"{key}/" if key else ""
    chosen = {
        name.removeprefix(below).replace("/", "."): tensor for name, tensor in found.tensors.items() if name.startswith(below)
    }
    if key == "":
        chosen = {name: tensor for name, tensor in found.tensors.items() if "/" not in name}
    if not chosen:
        raise InputError(f"nothing below {key!r} is a tensor", hint=f"give --key one of {', '.join(_groups(found)) or 'none'}")
    stripped = {name.removeprefix(strip): tensor for name, tensor in chosen.items()}
    if len(stripped) != len(chosen):
        raise InputError(f"without {strip!r} two tensors have the same name", hint="leave --strip out")
    return stripped


def _find_key(found: Foreign) -> str:
    groups = _groups(found)
    likely = [each for each in WEIGHTS_KEYS if each in groups]
    if not likely and any("/" not in name for name in found.tensors):
        return ""
    if len(likely) == 1 or len(groups) == 1:
        return (likely or groups)[0]
    raise InputError(
        f"it is not clear which tensors are the weights: they stand below {', '.join(groups) or 'nothing'}",
        hint="name them with --key",
    )


def _groups(found: Foreign) -> list[str]:
    """The names at the top below which tensors stand."""
    return list(dict.fromkeys(name.partition("/")[0] for name in found.tensors if "/" in name))


def check_new(to: Path) -> None:
    """Raise RunFolderError for a folder that holds something."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunFolderError(f"{to} is there already, and is left as it is", hint="give a new folder with --to")


def import_weights(path: Path, to: Path, weights: Mapping[str, Tensor], environment: Mapping[str, str]) -> Manifest:
    """Commit foreign weights as step 0 of `to`, a new folder; `parent` in the manifest says what they were read from.

    Raises RunFolderError for a folder that holds something, StorageError when the disk refuses.
    """
    check_new(to)
    parent: dict[str, Any] = {"folder": str(path.absolute()), "step": 0, "imported": True}
    if path.is_file():
        parent["sha256"] = digest.of_file(path)
    content = Content(step=0, tensors={"model.safetensors": {name: tensor.contiguous() for name, tensor in weights.items()}})
    named = hashlib.sha256("\n".join(weights).encode()).hexdigest()[:12]
    return commit(to, content, Stamp(spec_id=f"imported-{named}", environment=environment, parent=parent))
