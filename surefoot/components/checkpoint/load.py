"""Loading of checkpoints.

Names, shapes and dtypes are compared with the model first. Then the digest of every byte is
verified. A damaged checkpoint is never deleted: it is renamed to `.bad-step-...`, and the next
older one is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.components.checkpoint import tensor_files as files
from surefoot.contract import commits, digest
from surefoot.contract import manifest as manifests
from surefoot.contract.manifest import Entry, Manifest, Piece
from surefoot.contract.state import part_of
from surefoot.core.errors import RunFolderError
from surefoot.core.units import name_some

# the file, whole or in parts, of the weights for evaluation and serving
MODEL = "model.safetensors"
COMPILED = "_orig_mod."  # in the parameter names of a model that torch.compile wraps
# as Hugging Face names the parts of a file
PART = re.compile(r"(.*)-[0-9]{5}-of-[0-9]{5}\.safetensors")


class Commit:
    """Checkpoint on disk, whose manifest is read at once and whose files are read on request.

    Args:
        run: The folder of the checkpoints: a run folder, or the `folder` that was passed to `save`.
        step: The step of the checkpoint.

    Raises:
        RunFolderError: If there is no such checkpoint, or its manifest is damaged.
    """

    def __init__(self, run: Path, step: int) -> None:
        self.folder = commits.find_folder(run, step) or manifests.step_folder(run, step)
        self.manifest: Manifest = manifests.read(self.folder)
        self._entries = {entry.name: entry for entry in self.manifest.files}

    def names(self, file: str) -> list[str]:
        """Return the names of the files in which the tensors of `file` are stored.

        The tensors are in one file, in one file per rank, or in numbered parts. If `file` is empty,
        the names of all tensor files are returned.
        """
        held = [entry.name for entry in self.manifest.files if entry.tensors is not None]
        # one file, or one file per rank
        own = [name for name in held if file in ("", manifests.file_of(name))]
        return own or [
            name
            for name in held
            if (part := PART.fullmatch(manifests.file_of(name)))
            and f"{part.group(1)}.safetensors" == file
        ]

    def pieces(self, file: str) -> dict[str, Piece]:
        """Return the dtype and the shape of each tensor of `file`, as `Piece` objects by name.

        The shape is that of the whole tensor, even if each rank has stored a shard of it.
        """
        return {
            name: files.whole_piece(piece)
            for each in self.names(file)
            for name, piece in (self._entries[each].tensors or {}).items()
        }

    def read(self, file: str, give: files.Give = files.create) -> dict[str, Tensor]:
        """Read the tensors of `file`, verify their digests, and return them by name.

        Args:
            file: Name of a tensor file, such as model.safetensors; empty for all tensor files.
            give: Function of a tensor's name and its `Piece` that returns the tensor to read into.
                By default, a new tensor on the host is created.

        Raises:
            RunFolderError: If a file is damaged or missing.
        """
        if not (names := self.names(file)) and file:
            raise RunFolderError(
                f"{self.folder} contains no tensors in {file!r}",
                hint=f"it contains {', '.join(self.names('')) or 'none'}",
            )
        found: dict[str, Tensor] = {}

        def give_once(name: str, piece: Piece) -> Tensor:
            return found[name] if name in found else give(name, piece)

        with commits.hashing(commits.MANY_THREADS, nice=0) as pool:  # nothing else runs now
            for each in names:
                found |= files.read(self.folder, self._entries[each], give_once, pool)
        return found

    def text(self, name: str) -> bytes:
        """Return the verified contents of a file without tensors, such as state.json.

        Raises RunFolderError if the file is missing, damaged, or larger than the available memory.
        """
        entry = self._entry(name)
        with (
            commits.open_file(self.folder, entry) as descriptor,
            open(descriptor, "rb", closefd=False) as file,
        ):
            try:
                data = file.read(entry.num_bytes)
            except MemoryError:
                raise RunFolderError(
                    f"{self.folder / name} has {entry.num_bytes} bytes, more than the "
                    "available memory"
                ) from None
        if digest.digest_of_bytes(data) != entry.sha256:
            raise RunFolderError(f"{self.folder / name} is damaged: its digest does not match")
        return data

    def json(self, name: str) -> Any:
        return manifests.parse_json(self.text(name), self.folder / name)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise RunFolderError(
                f"{self.folder} contains no {name}", hint="it is a weights-only checkpoint"
            )
        return self._entries[name]


def read_weights(commit: Commit, own: Mapping[str, Any], file: str, *, widen: bool = False) -> None:
    """Read the tensors of `file` in a checkpoint into those of the state dict `own`, in place.

    A tied tensor is stored once, under any of its names. With `widen`, bf16 may be read into fp32.
    Raises RunFolderError if the tensors do not fit (before any of them changes), or if the file is
    damaged.
    """
    stored = commit.pieces(file)
    live = {
        name: tensor if part_of(tensor) else tensor.detach()
        for name, tensor in own.items()
        if isinstance(tensor, Tensor)
    }
    check_fit(commit.folder, stored, live, widen=widen)
    commit.read(file, lambda name, piece: live[name])


def check_fit(
    place: Path, stored: Mapping[str, Piece], live: Mapping[str, Tensor], *, widen: bool = False
) -> None:
    """Raise RunFolderError if the stored tensors do not fit the tensors of the model.

    The error lists the differences in names, shapes and dtypes.

    Args:
        place: Folder of the checkpoint, for the error.
        stored: The tensors in the checkpoint, by name.
        live: The tensors of the model, by name.
        widen: Allow bf16 to be read into fp32.
    """
    held = {identity(live[name]) for name in stored if name in live}
    missing = [
        name
        for name, tensor in live.items()
        if name not in stored
        and (identity(tensor) not in held or not (tensor.numel() or part_of(tensor)))
    ]
    unexpected = [name for name in stored if name not in live]
    both = [(name, piece, live[name]) for name, piece in stored.items() if name in live]
    reshaped = [
        f"{name} {list(piece.whole)}, now {list(files.whole_shape(tensor))}"
        for name, piece, tensor in both
        if piece.whole != files.whole_shape(tensor)
    ]
    retyped = [
        f"{name} {piece.dtype}, now {files.DTYPES.get(tensor.dtype)}"
        for name, piece, tensor in both
        if piece.dtype != files.DTYPES.get(tensor.dtype)
        and not (widen and piece.dtype == "BF16" and tensor.dtype == torch.float32)
    ]
    empty = [name for name, tensor in live.items() if tensor.is_meta]
    wrong = {
        "missing": missing,
        "unexpected": unexpected,
        "of a different shape": reshaped,
        "of a different dtype": retyped,
        "on the meta device, without values": empty,
    }
    if any(wrong.values()):
        told = "; ".join(f"{what}: {name_some(names, 8)}" for what, names in wrong.items() if names)
        raise RunFolderError(
            f"the weights of {place} do not fit the model: {told}", hint=_find_way(stored, live)
        )


def _find_way(stored: Collection[str], live: Collection[str]) -> str:
    """Return a hint for weights that do not fit the model.

    The hint is different if only one of the two models is wrapped by torch.compile.
    """
    was_compiled, is_compiled = (
        any(COMPILED in name for name in names) for names in (stored, live)
    )
    if was_compiled != is_compiled and {name.replace(COMPILED, "") for name in stored} <= {
        name.replace(COMPILED, "") for name in live
    }:
        if was_compiled:
            return (
                "the checkpoint is of a model wrapped by torch.compile: wrap the same "
                "part of the model first, as model = torch.compile(model)"
            )
        return (
            "the checkpoint is of a model not wrapped by torch.compile: give the model "
            "itself, which is model._orig_mod"
        )
    return "build the model with the parameters that the run had"


def identity(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a key that is equal for all names of a tied tensor.

    It consists of the address, the shape and the strides of the tensor.
    """
    if part_of(tensor) is not None:
        return id(tensor), (), ()  # a shard may have no rows, and then it has no data pointer
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def newest_loadable(
    run: Path, load: Callable[[Commit], None], *, at_most: int | None = None
) -> tuple[int | None, list[str]]:
    """Load the newest undamaged checkpoint, and rename the damaged ones.

    Every byte of a checkpoint is verified before `load` is called. If every checkpoint is damaged,
    `load` is not called. An error of `load`, for example because the checkpoint does not fit the
    model, is raised, since an older checkpoint would not fit either. Checkpoints that contain only
    weights are skipped.

    Args:
        run: The run folder.
        load: Function of a `Commit` that restores its state.
        at_most: Largest step to load; None for no limit.

    Returns:
        The step of the loaded checkpoint (None if there is none), and a message about each damaged
        checkpoint.
    """
    troubles: list[str] = []
    for step in reversed(commits.readable_steps(run)):
        if at_most is not None and step > at_most:
            continue
        made = _check_newest(run, step, troubles)
        if made is not None and made.is_whole_state:
            load(Commit(run, step))
            return step, troubles
    return None, troubles


def _check_newest(run: Path, step: int, troubles: list[str]) -> Manifest | None:
    """Verify the checkpoint of a step, and return its manifest.

    A damaged checkpoint is renamed, and a message about it is added to `troubles`. If it was about
    to replace an older checkpoint of the same step, that one is verified instead. Returns None if
    no checkpoint of the step is undamaged.
    """
    while (folder := commits.find_folder(run, step)) is not None:
        try:
            return commits.check(folder)
        except RunFolderError as error:
            troubles.append(error.message)
        own = manifests.step_folder(run, step)
        if folder == own:
            commits.set_aside(folder)
        elif not own.is_dir():  # otherwise the new checkpoint has appeared meanwhile
            break
    return None
