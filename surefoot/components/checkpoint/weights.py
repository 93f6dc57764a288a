"""The weights of a step as safetensors under a manifest. A step folder exists only when it is whole.

Draft folder, write, fsync, manifest, fsync, rename, fsync of the parent; nothing is ever changed after the rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surefoot.contract import manifest as manifests
from surefoot.contract.manifest import Entry, Manifest
from surefoot.core.errors import NumbersError, RunFolderError, StorageError

WEIGHTS = "model.safetensors"
DRAFT, GONE = ".draft-", ".gone-"


def commit(
    run: Path,
    step: int,
    model: nn.Module,
    *,
    generation: int = 1,
    spec_id: str = "",
    environment: Mapping[str, str] | None = None,
    score: Mapping[str, Any] | None = None,
) -> int:
    """Commit the model's weights and buffers as step `step` of `run`; gives the bytes written, 0 where this attempt did so already.

    Tied tensors are stored once. What an earlier generation committed as the same step is replaced, and only once the new one is
    whole. Raises StorageError, and NumbersError for a trained parameter that is not finite; what was committed before stays as it is.
    """
    spoiled = _find_not_finite(model)
    if spoiled is not None:
        raise NumbersError(f"step {step}: the parameter {spoiled} is not finite", hint="lower optim.lr, or warm up longer")
    final = manifests.step_folder(run, step)
    draft = final.with_name(f"{DRAFT}{final.name}")
    try:
        if _generation(final) == generation:
            return 0
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True, mode=0o700)
        save_file(_stored(model), draft / WEIGHTS, metadata={"format": "pt"})
        entry = _sync_and_digest(draft / WEIGHTS)
        made = Manifest(
            step=step, generation=generation, spec_id=spec_id, files=(entry,), environment=environment or {}, score=score
        )  # fmt: skip
        _write_synced(draft / manifests.FILE, made.as_text().encode())
        _sync_folder(draft)
        if final.exists():
            _remove(final)
        draft.rename(final)
        _sync_folder(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise StorageError(f"step {step} could not be saved in {run}: {_reason(error)}", hint="free some space") from error
    return entry.num_bytes


def _find_not_finite(model: nn.Module) -> str | None:
    """The first trained parameter that holds a number that is none. Buffers and frozen ones may: a mask of -inf does."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad and each.numel()]
    # the largest magnitude is not finite where any number is not; isfinite would make three tensors of the parameter's size
    largest = [torch.linalg.vector_norm(parameter.detach(), math.inf) for _, parameter in trained]
    sound = [bool(value.isfinite()) for value in largest]
    return next((name for (name, _), is_sound in zip(trained, sound, strict=True) if not is_sound), None)


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with shared storage stored once, contiguous, on the host."""
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    storages: set[int] = set()
    stored = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        key = (tensor.data_ptr(), int(tensor.storage_offset()), tuple(tensor.shape))
        if key in seen and tensor.numel():
            continue
        seen.add(key)
        whole = tensor.detach().cpu().contiguous()
        storage = whole.untyped_storage()
        if storage.nbytes() != whole.nbytes or storage.data_ptr() in storages:
            whole = whole.clone()  # a part or another view of a storage, which safetensors refuses
        storages.add(storage.data_ptr())
        stored[name] = whole
    return stored


def _sync_and_digest(path: Path) -> Entry:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry(name=path.name, num_bytes=file.tell(), sha256=digest)


def _write_synced(path: Path, payload: bytes) -> None:
    with path.open("xb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def retain(run: Path, *, keep: int, best: int | None = None, generation: int = 1) -> list[int]:
    """Delete all but the newest `keep` commits and the best, and those of earlier generations, which this one overrules.

    Gives the steps deleted. Foreign names are never touched.
    """
    steps = manifests.steps(run)
    overruled = [step for step in steps if _generation(manifests.step_folder(run, step)) != generation]
    own = [step for step in steps if step not in overruled]
    gone = [*overruled, *(step for step in own[:-keep] if step != best)]
    for step in gone:
        with contextlib.suppress(OSError):  # a folder that cannot be deleted harms nothing; the next commit tries again
            _remove(manifests.step_folder(run, step))
    return gone


def clear_drafts(run: Path) -> None:
    """Delete what a killed attempt left of commits that it began or was deleting."""
    folder = run / manifests.FOLDER
    for prefix in (DRAFT, GONE) if folder.is_dir() else ():
        for path in folder.glob(f"{prefix}step-*"):
            shutil.rmtree(path, ignore_errors=True)


def _generation(folder: Path) -> int | None:
    """The generation that committed a step, None where there is no whole commit."""
    try:
        return manifests.read(folder).generation
    except RunFolderError:
        return None


def _remove(folder: Path) -> None:
    """Out of sight at once, then deleted: a kill in between leaves nothing that looks like a commit."""
    hidden = folder.with_name(f"{GONE}{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _reason(error: Exception) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


def find_step(run: Path, step: int | str) -> int:
    """The step that `step` names: a number, "last", or "best" by the scores in the manifests. Raises RunFolderError."""
    steps = manifests.steps(run)
    if not steps:
        raise RunFolderError(f"{run} holds no saved weights", hint="they are saved at evaluations and at the end of a run")
    if step == "last":
        return steps[-1]
    if step == "best":
        return _best(run, steps)
    if step in steps:
        return int(step)
    raise RunFolderError(f"{run} holds no step {step}", hint=f'it holds {", ".join(map(str, steps))}; or use "best", "last"')


def _best(run: Path, steps: list[int]) -> int:
    scored = []
    for step in steps:
        score = manifests.read(manifests.step_folder(run, step)).score
        value = None if score is None else score.get("value")
        if isinstance(value, int | float) and score is not None and math.isfinite(value):
            scored.append((value if score.get("better") == "higher" else -value, step))
    return max(scored, key=lambda pair: (pair[0], -pair[1]))[1] if scored else steps[-1]


def load_into(model: nn.Module, run: Path, step: int) -> Manifest:
    """Check every digest of a commit, then copy its tensors into `model`.

    Raises RunFolderError when a file is damaged, or names and shapes are not the model's.
    """
    folder = manifests.step_folder(run, step)
    manifest = manifests.check(folder)
    stored = load_file(folder / WEIGHTS)
    own = model.state_dict()
    tied = _tied_names(own, stored)
    missing = [name for name in own if name not in stored and name not in tied]
    unexpected = [name for name in stored if name not in own]
    reshaped = [name for name in stored if name in own and own[name].shape != stored[name].shape]
    if missing or unexpected or reshaped:
        raise RunFolderError(
            f"the weights of {folder} do not fit the model: missing {missing}, unexpected {unexpected}, reshaped {reshaped}",
            hint="build the model with the parameters that the run had",
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)
    return manifest


def _tied_names(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> set[str]:
    pointers = {own[name].data_ptr() for name in stored if name in own}
    return {name for name, tensor in own.items() if name not in stored and tensor.data_ptr() in pointers}
