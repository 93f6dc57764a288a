"""Use of the saved weights of a run: load the model, evaluate it, write its outputs, export it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.components.checkpoint import export
from surefoot.components.checkpoint.load import check_fit
from surefoot.components.checkpoint.tensor_files import lay_out
from surefoot.components.memory.caches import without_caches
from surefoot.components.observe.console import Console
from surefoot.components.precision.policy import Compute, compute_context
from surefoot.contract import events, spec_file
from surefoot.contract.commits import DRAFT
from surefoot.contract.events import Started
from surefoot.contract.manifest import FOLDER, STEP_FOLDER
from surefoot.contract.run_folder import attached, files
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import ResolvedTask, Source, resolve
from surefoot.core.errors import (
    InputError,
    SpecError,
    StorageError,
    UnknownSplitError,
    hint_unwritten,
)
from surefoot.train.assemble import build_model, load_task, set_storage
from surefoot.train.assemble.reading import read_split
from surefoot.train.evaluate import (
    Evaluation,
    batches,
    count_batches,
    count_samples,
    evaluate,
    evaluation_key,
)
from surefoot.train.failure.blame import describe
from surefoot.train.quiet import preserve_state, restore_entry
from surefoot.train.record.noticed.moved_outside import load_outside
from surefoot.train.record.outputs import Outputs
from surefoot.train.resume.state_files import read_task_state
from surefoot.train.session.folder import SPEC_FILE

ENDINGS = (".safetensors", ".npz")
# two sizes, so that the batch dimension is dynamic; a size of 1 would become a constant
EXPORT_BATCHES = (4, 3)


def load(run: str | Path, step: int | str = "best", *, task: Any = None) -> nn.Module:
    """Return the model of a run with the weights of a step, in evaluation mode, on the CPU.

    All digests are verified first.

    Args:
        run: The run folder.
        step: "best" by score, "last" or a number.
        task: The task object if the spec cannot build the task, for example for a run of a
            notebook; or the name (`file.py:Task`) under which the task can be imported now. None
            reads it from the spec.

    Raises:
        RunFolderError: If the folder is not a run, has no such step or is damaged.
        SpecError: If the task is unknown.
    """
    if task is None or isinstance(task, str):
        return load_with_task(Path(run), step, use=task)[0]
    found = _find_step(Path(run), step)
    resolved = resolve(task)
    model = _build(resolved, spec_file.read_of_run(Path(run), checks_task=False).spec)
    checkpoint.load_into(model, Path(run), found, widen=True)
    load_outside(resolved, model, Path(run), found)
    return model.eval()


def load_with_task(
    run: Path,
    step: int | str = "best",
    *,
    data: str | None = None,
    use: str | None = None,
    warnings: list[str] | None = None,
) -> tuple[nn.Module, ResolvedTask, RunSpec, int]:
    """Return the model with the weights of a step, the task, the spec and the number of the step.

    `data` is the current data folder, if it has moved. `use` is the current name of the task, if it
    can no longer be imported under the name in the spec. With a list of `warnings`, the `state()`
    of the task is restored too, and warnings are appended to it.
    """
    found = _find_step(run, step)
    origin = spec_file.read_of_run(
        run, [] if data is None else [("data.folder", data, "--data")], task=use
    )
    if origin.spec.task.use is None:
        raise SpecError(
            f"the task of {run} was built in a script and cannot be imported",
            hint="in Python: surefoot.load(run, task=...)",
        )
    task = load_task(origin.spec)
    model = _build(task, origin.spec)
    if warnings is not None:
        # before the weights, which an entry of state() may hold without their average
        warnings += _restore_state(task, run, found)
    checkpoint.load_into(model, run, found, widen=True)
    load_outside(task, model, run, found)
    return model.eval(), task, origin.spec, found


def _build(task: ResolvedTask, spec: RunSpec) -> nn.Module:
    """Return the model in the dtypes in which its weights were saved.

    Weights with fp32 masters are saved in fp32. Frozen weights are saved as stored, and converted
    to the wider dtype on loading.
    """
    model = build_model(spec, task)
    if spec.precision.master == "none":
        set_storage(model, spec)
    return model


def _find_step(run: Path, step: int | str) -> int:
    if not (run / SPEC_FILE).is_file():
        raise attached.no_spec(run, SPEC_FILE)
    return checkpoint.find_step(run, step)


def evaluate_run(
    run: Path,
    step: str,
    split: str | None,
    data: str | None,
    *,
    fp32: bool = False,
    quiet: bool = True,
    use: str | None = None,
) -> tuple[list[Evaluation], int]:
    """Evaluate the weights of `step` on `split` in the run's precision, with `fp32` in fp32 too.

    Returns the results and the number of the step that was chosen.
    """
    warnings = list[str]()
    model, task, spec, used = load_with_task(run, step, data=data, use=use, warnings=warnings)
    name = split or spec.evaluate.first_split
    device = torch.device("cpu")
    source = read_split(task, name)
    own = _own_precision(run, spec)
    wide = copy.deepcopy(model) if own == "float8" and fp32 else model  # layers are changed
    set_storage(model, spec, with_masters=False)
    with contextlib.closing(Console(total_steps=None, unit=task.unit, quiet=quiet)) as console:
        for warning in warnings:
            console.warn(warning)
        results = [
            evaluate(
                wide.float() if precision == "fp32" else model,
                task,
                source,
                split=name,
                device=device,
                precision=precision,
                batch=spec.evaluate.batch or spec.train.batch,
                score=spec.evaluate.score,
                tell=functools.partial(console.reading, name),
                seed=spec.train.seed,
            )
            for precision in dict.fromkeys((own, "fp32") if fp32 else (own,))
        ]
    return results, used


def _restore_state(task: ResolvedTask, run: Path, step: int) -> list[str]:
    """Restore the task's `state()` from a checkpoint, as far as it can be; return warnings.

    A forward pass or a metric may read it. On several ranks, that of rank 0 is restored.
    """
    if task.state is None:
        return []
    saved = read_task_state(run, step)
    try:
        for name, value in task.state().items():
            if name in saved:
                restore_entry(name, value, saved[name])
    except Exception as error:  # noqa: BLE001 - of the task, whose state may have changed
        return [f"state() of the task is not restored from the checkpoint: {describe(error)}"]
    return []


def _own_precision(run: Path, spec: RunSpec) -> Compute:
    """Return the precision in which the run computed, as far as a CPU supports it.

    "auto" is replaced by the choice of the newest attempt, "tf32" by "fp32".
    """
    compute: Any = spec.precision.compute
    if compute == "auto":
        chosen = [
            each.precision.get("compute", "fp32")
            for each in events.read(run, Started)
            if isinstance(each, Started)
        ]
        compute = chosen[-1] if chosen else "fp32"
    return "fp32" if compute == "tf32" else cast("Compute", compute)


def predict_run(
    run: Path,
    step: str,
    split: str | None,
    data: str | None,
    output: Path | None,
    *,
    quiet: bool = True,
    use: str | None = None,
) -> tuple[Path, dict[str, tuple[int, ...]], int]:
    """Write the model outputs for a split to a file.

    Returns the file, the shape of each array, and the number of the step. Raises InputError for an
    output file or a split name that is not allowed, and for a file that cannot be written.
    """
    if output is not None and output.suffix not in ENDINGS:
        raise InputError(
            f"--output {output} ends in {output.suffix or 'nothing'}",
            hint=f"use one of {', '.join(ENDINGS)}",
        )
    if output is not None and STEP_FOLDER.match(output.absolute().parent.name):
        raise InputError(
            f"--output {output} is inside a checkpoint, and checkpoints are never changed",
            hint="give another --output",
        )
    if split is not None and Path(split).name != split:
        raise InputError(
            f"--split is {split!r}, which is not a plain file name",
            hint="give a split that the task's data(split) returns",
        )
    warnings = list[str]()
    model, task, spec, used = load_with_task(run, step, data=data, use=use, warnings=warnings)
    name = split or spec.evaluate.first_split
    path = output or run / f"predictions-{name}.safetensors"
    outputs = Outputs()
    device = torch.device("cpu")
    compute = compute_context(_own_precision(run, spec), device)
    set_storage(model, spec, with_masters=False)
    source, num_done = read_split(task, name), 0
    with (
        contextlib.closing(Console(total_steps=None, unit=task.unit, quiet=quiet)) as console,
        preserve_state(model),
    ):
        for warning in warnings:
            console.warn(warning)
        for batch, count in count_batches(
            source,
            spec.evaluate.batch or spec.train.batch,
            device,
            evaluation_key(spec.train.seed, name),
        ):
            with compute():
                outputs.add(task.task.forward(model, batch), count)
            if not num_done:
                _check_first(source, count, lambda few: task.task.forward(model, few), outputs)
            num_done += count or 0
            console.reading(name, num_done, count_samples(source))
        arrays = outputs.arrays()
        for key, why in outputs.left_out.items():
            console.warn(f"{key!r} is left out, {why}")
    try:
        if path.suffix == ".npz":
            np.savez(path, **arrays)  # type: ignore[arg-type]
        else:
            save_file(arrays, path)
            files.apply_umask(path)  # safetensors writes for its user alone
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{path} cannot be written: {reason}",
            hint=hint_unwritten(error, "give another --output"),
        ) from error
    return path, {key: array.shape for key, array in arrays.items()}, used


def _check_first(
    source: Source, count: int | None, forward: Callable[[Any], Any], outputs: Outputs
) -> None:
    """Run the first batch again with one sample less, to check that dimension 0 is the batch.

    This is done only if a different dimension of an output is as long as the batch. Raises
    TaskError if dimension 0 is not the batch.
    """
    if source.guarantee != "proven" or not count or count < 2 or not outputs.is_ambiguous(count):
        return
    try:
        made = forward(next(iter(batches(source, count - 1, torch.device("cpu")))))
    except Exception:  # noqa: BLE001 - a model may be built for batches of one size
        return
    outputs.check_num_rows(made, count - 1)


def export_run(
    run: Path, step: str, to: Path, kind: str | None, data: str | None, *, use: str | None = None
) -> tuple[export.ExportResult, int]:
    """Export the model of a run to a different format; return the result and the step number.

    Raises InputError for an unknown format, or for a target that exists or is in the checkpoints
    folder of the run. Raises StorageError if the file cannot be written.
    """
    chosen = kind or export.ENDINGS.get(to.suffix)
    if chosen not in export.ENDINGS.values():
        raise InputError(
            f"--format is {kind}" if kind else f"--to {to} ends in {to.suffix or 'nothing'}",
            hint=(
                f"use --format {', '.join(export.ENDINGS.values())}, or one of the endings "
                f"{', '.join(export.ENDINGS)}"
            ),
        )
    export.check_new(to)
    if (run / FOLDER).resolve() in to.resolve().parents:
        raise InputError(
            f"--to {to} is inside the checkpoints folder of the run, which holds only checkpoints",
            hint="give another --to",
        )
    with _raise_if_unwritten(to):
        to.with_name(f"{DRAFT}{to.name}").touch()  # fails before the work
    try:
        return _export(run, step, to, cast("export.Format", chosen), data, use)
    finally:
        with contextlib.suppress(OSError):
            to.with_name(f"{DRAFT}{to.name}").unlink(missing_ok=True)


def _read_any(task: ResolvedTask, split: str) -> Source:
    """Return the data of `split`; without this split, the training data."""
    try:
        return read_split(task, split)
    except UnknownSplitError:
        return read_split(task, "train")


def _export(
    run: Path, step: str, to: Path, kind: export.Format, data: str | None, use: str | None
) -> tuple[export.ExportResult, int]:
    model, task, spec, used = load_with_task(run, step, data=data, use=use)
    source, device = _read_any(task, spec.evaluate.first_split), torch.device("cpu")
    samples = [
        next(iter(batches(source, min(size, len(source)), device))) for size in EXPORT_BATCHES
    ]
    if kind == "safetensors":
        build = functools.partial(_build, task, spec)

        def forward(one: nn.Module) -> Any:
            return task.task.forward(one, samples[0])

        with _raise_if_unwritten(to):
            return export.export_weights(model, build, forward, to), used
    with without_caches(model):
        with torch.no_grad():
            calls = [
                export.capture(model, functools.partial(task.task.forward, model, batch))
                for batch in samples
            ]
        with _raise_if_unwritten(to):
            return export.export_graph(model, calls, to, kind), used


@contextlib.contextmanager
def _raise_if_unwritten(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StorageError(
            f"{path} cannot be written: {reason}", hint=hint_unwritten(error, "give another --to")
        ) from error


def check_weights_fit(place: Path, spec: RunSpec, weights: dict[str, Tensor]) -> None:
    """Raise RunFolderError unless `weights` have the names and shapes of the model's weights.

    The error lists both.
    """
    model = build_model(spec, load_task(spec))
    own = checkpoint.module_state(model, weights).tensors
    stored = {
        name: torch.empty(
            tensor.shape, dtype=own[name].dtype if name in own else tensor.dtype, device="meta"
        )
        for name, tensor in weights.items()
    }
    check_fit(place, lay_out(stored)[1], own)
