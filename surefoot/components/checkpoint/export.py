"""Export of a model to safetensors, torch.export or ONNX, with a check of the file.

The file is written under a temporary name, read back, and run on real inputs. It gets its final
name if its outputs equal those of the model in evaluation mode to within 1e-5. Otherwise it is
deleted.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surefoot.contract.manifest import STEP_FOLDER
from surefoot.contract.run_folder.files import apply_umask
from surefoot.core.errors import (
    InputError,
    MissingExtra,
    StorageError,
    TaskError,
    hint_unwritten,
    require_package,
)
from surefoot.runtime.nested_tensors import find_tensors

TOLERANCE = 1e-5
CACHE_HINT = (
    "call the model without use_cache=True, since a graph returns no cache of keys and values; or "
)
Format = Literal["safetensors", "torch-export", "onnx"]
ENDINGS: Mapping[str, Format] = {
    ".safetensors": "safetensors",
    ".pt2": "torch-export",
    ".onnx": "onnx",
}


@dataclass(frozen=True)
class ExportResult:
    """Result of an export.

    `max_error` is the largest difference between an output of the exported file and that of the
    model, relative for outputs whose magnitude is above 1. `holds` is False if `max_error` is above
    1e-5; the file has then been deleted. `batch` is the only batch size that the file accepts; None
    means any.
    """

    path: Path
    format: Format
    num_bytes: int
    max_error: float
    batch: int | None = None

    @property
    def holds(self) -> bool:
        return self.max_error <= TOLERANCE


@dataclass(frozen=True)
class ModelCall:
    """Arguments of one call of a model, and the output of that call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


def capture(model: nn.Module, forward: Callable[[], Any]) -> ModelCall:
    """Run `forward()`, and return the arguments and the output of its call of `model`.

    Raises TaskError unless `forward` calls the model exactly once.
    """
    calls: list[ModelCall] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(ModelCall(args, kwargs, output))

    handle = model.register_forward_hook(keep, with_kwargs=True)
    try:
        forward()
    finally:
        handle.remove()
    if len(calls) != 1:
        raise TaskError(
            f"the task's forward calls its model {len(calls)} times, "
            "and an exported graph is one call",
            hint="export the weights: --format safetensors",
        )
    return calls[0]


@torch.no_grad()
def export_weights(
    model: nn.Module,
    build: Callable[[], nn.Module],
    forward: Callable[[nn.Module], Any],
    path: Path,
) -> ExportResult:
    """Write the state dict of `model` as safetensors, and check that a new model can load it.

    A tied tensor is written under each of its names, so that `load_state_dict(strict=True)` accepts
    the file. A second model loads the file. If its outputs differ from those of `model`, the file
    is deleted, and `holds` of the result is False.

    Args:
        model: The model, in evaluation mode.
        build: Function that builds the second model.
        forward: Function that runs a given model on real inputs and returns the output.
        path: The file to write.

    Raises:
        InputError: If `path` exists, is inside a checkpoint, or has no parent folder.
        TaskError: If the state dict contains a value that is not a tensor, or if the second model
            refuses the state dict.
        StorageError: If the file cannot be written.
    """
    draft = _make_draft_path(path)
    state = _clone_shared_tensors(model.state_dict())
    try:
        save_file(state, draft, metadata={"format": "pt"})
        stored = load_file(draft)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}",
            hint=hint_unwritten(error, "give another --to"),
        ) from error
    other = build().eval()
    try:
        other.load_state_dict(stored)
    except RuntimeError as error:
        draft.unlink()
        reason = " ".join(str(error).split())[:300]
        raise TaskError(
            f"the model does not load its own state dict: {reason}",
            hint="make its state_dict() hold what load_state_dict() reads",
        ) from error
    return _commit_draft(
        draft, path, "safetensors", max_error(forward(model), forward(other)), None
    )


def _clone_shared_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return contiguous tensors of a state dict that share no storage, as safetensors requires.

    Raises TaskError for a value that is not a tensor.
    """
    seen, found = set[int](), dict[str, Tensor]()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TaskError(
                (
                    f"the state dict of the model contains {name!r}, a {type(value).__name__}, "
                    "and safetensors stores only tensors"
                ),
                hint="export a graph with --format torch-export, or register the value as a buffer",
            )
        place = value.untyped_storage().data_ptr()
        is_own = place not in seen and value.is_contiguous()
        found[name] = (
            value.detach()
            if is_own
            else value.detach().clone(memory_format=torch.contiguous_format)
        )
        seen.add(place)
    return found


def export_graph(
    model: nn.Module, calls: Sequence[ModelCall], path: Path, kind: Format
) -> ExportResult:
    """Write the model as a graph that runs without the code of the model.

    If the outputs of a graph with a dynamic batch size match those of the model in all calls, that
    graph is written. Otherwise the batch size is fixed to that of the first call. A dataclass in
    the output becomes a dict.

    Args:
        model: The model.
        calls: Recorded calls of the model: two with different batch sizes, the larger first, or
            one.
        path: The file to write.
        kind: Format of the file.

    Raises:
        InputError: If `path` exists, is inside a checkpoint, or has no parent folder.
        TaskError: If the model cannot be exported.
        MissingExtra: If `kind` is "onnx" and the ONNX packages are not installed.
    """
    # a file has no class of the user's
    handle = model.register_forward_hook(lambda module, args, output: _without_dataclasses(output))
    try:
        return _export_graph(model, calls, path, kind)
    finally:
        handle.remove()


def _export_graph(
    model: nn.Module, calls: Sequence[ModelCall], path: Path, kind: Format
) -> ExportResult:
    write = _write_onnx if kind == "onnx" else _write_export
    draft = _make_draft_path(path)
    first, size = calls[0], _batch_size(calls[0])
    for taken, is_free in ((calls, True), (calls[:1], False)):
        if is_free and (len(calls) < 2 or size is None):
            continue
        try:
            run = write(model, first, _free_batch(model, first, size) if is_free else None, draft)
            error = max(max_error(call.output, run(call)) for call in taken)
        except (MissingExtra, OSError):
            raise
        except Exception as problem:  # a tracer can raise anything for a user's model
            if is_free:
                continue
            raise TaskError(
                f"the model cannot be exported: {type(problem).__name__}: "
                f"{str(problem).strip().splitlines()[0][:200]}",
                hint=(
                    f"{CACHE_HINT if first.kwargs.get('use_cache') else ''}export the weights: "
                    "--format safetensors"
                ),
            ) from problem
        if error <= TOLERANCE or not is_free:
            return _commit_draft(draft, path, kind, error, None if is_free else size)
    raise TaskError("the model was not called")


def _write_export(
    model: nn.Module, call: ModelCall, shapes: Any, draft: Path
) -> Callable[[ModelCall], Any]:
    made = torch.export.export(model, call.args, dict(call.kwargs), dynamic_shapes=shapes)
    torch.export.save(made, draft)
    read = torch.export.load(draft).module()
    return lambda call: read(*call.args, **call.kwargs)


def _write_onnx(
    model: nn.Module, call: ModelCall, shapes: Any, draft: Path
) -> Callable[[ModelCall], Any]:
    """Write the model as ONNX, and return a function that runs the file.

    The function uses the reference evaluator of the onnx package, which needs no other runtime.
    """
    with require_package("onnx", "onnx", extra="onnx", needed_for="exporting to ONNX"):
        import onnx
        import onnx.reference
    with require_package("onnxscript", "onnxscript", extra="onnx", needed_for="exporting to ONNX"):
        import onnxscript  # noqa: F401 - torch's exporter needs it
    torch.onnx.export(
        model,
        call.args,
        draft,
        kwargs=dict(call.kwargs),
        dynamo=True,
        dynamic_shapes=shapes,
        external_data=False,
        verbose=False,
    )
    graph = onnx.load(draft)
    onnx.checker.check_model(graph)
    read = onnx.reference.ReferenceEvaluator(graph)
    names = [each.name for each in graph.graph.input]

    def run(call: ModelCall) -> Any:
        given = [leaf.numpy() for leaf in leaves((call.args, call.kwargs))]
        return [
            torch.from_numpy(each.copy())
            for each in read.run(None, dict(zip(names, given, strict=True)))
        ]

    return run


def _free_batch(model: nn.Module, call: ModelCall, size: int | None) -> Any:
    """Return `dynamic_shapes` for torch.export, in which the batch size is dynamic.

    Dimension 0 of a tensor counts as its batch size if it equals `size`.
    """

    def free(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {0: torch.export.Dim.AUTO} if value.ndim and value.shape[0] == size else None
        if isinstance(value, Mapping):
            return {key: free(part) for key, part in value.items()}
        return (
            type(value)(free(part) for part in value) if isinstance(value, list | tuple) else None
        )

    given = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    return {name: free(value) for name, value in given.items()}


def _batch_size(call: ModelCall) -> int | None:
    return next((leaf.shape[0] for leaf in leaves((call.args, call.kwargs)) if leaf.ndim), None)


def max_error(one: Any, other: Any) -> float:
    """Return the largest difference between the tensors of two outputs.

    The difference of two elements is divided by the larger magnitude, if that is above 1. The
    result is infinite if the shapes differ, if there are no tensors, or if a non-finite element
    differs from its counterpart.

    >>> max_error(torch.tensor([1.0, 200.0]), {"logits": torch.tensor([1.0, 202.0])}) < 0.01
    True
    """
    mine, theirs = list(leaves(one)), list(leaves(other))
    if [each.shape for each in mine] != [each.shape for each in theirs] or not mine:
        return math.inf
    worst = 0.0
    for a, b in zip(mine, theirs, strict=True):
        if not a.numel():
            continue
        x, y = a.double(), b.double()
        apart = (x - y).abs() / torch.maximum(x.abs(), y.abs()).clamp(min=1)
        same = (x == y) | (x.isnan() & y.isnan())
        worst = max(worst, float(torch.where(same, 0.0, apart.nan_to_num(nan=math.inf)).max()))
    return worst


def leaves(value: Any) -> Iterator[Tensor]:
    """Return an iterator over the tensors of a nested output, detached from the autograd graph."""
    return (each.detach() for each in find_tensors(value))


def _without_dataclasses(value: Any) -> Any:
    """Return a nested output in which each dataclass is replaced by a dict of its fields.

    Fields that are None are left out. A dataclass that is also a mapping, such as `ModelOutput` of
    Hugging Face, is unchanged.
    """
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(_without_dataclasses(part) for part in value)
    if isinstance(value, Mapping):
        return (
            {key: _without_dataclasses(part) for key, part in value.items()}
            if type(value) is dict
            else value
        )
    if isinstance(value, type) or not is_dataclass(value):
        return value
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: _without_dataclasses(part) for name, part in held.items() if part is not None}


def check_new(path: Path) -> None:
    """Raise InputError if `path` exists, is inside a checkpoint, or has no parent folder."""
    if any(STEP_FOLDER.match(folder.name) for folder in path.resolve().parents):
        raise InputError(
            f"--to {path} is inside a checkpoint, and a checkpoint is never changed",
            hint="give another --to",
        )
    if os.path.lexists(path):
        raise InputError(
            f"{path} exists already, and existing files are not overwritten",
            hint="give a new file with --to",
        )
    if not path.parent.is_dir():
        raise InputError(
            f"{path} cannot be written: {path.parent} is not a folder",
            hint="create the folder first",
        )


def _make_draft_path(path: Path) -> Path:
    check_new(path)
    return path.with_name(f".draft-{path.name}")


def _commit_draft(
    draft: Path, path: Path, kind: Format, error: float, batch: int | None
) -> ExportResult:
    """Rename the file `draft` to `path`, or delete it if `error` is above 1e-5."""
    made = ExportResult(path, kind, draft.stat().st_size, error, batch)
    if made.holds:
        apply_umask(draft)  # safetensors creates files that only their owner can read
        draft.replace(path)
    else:
        draft.unlink()
    return made
