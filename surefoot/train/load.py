"""A run's model back in Python."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from surefoot.components import checkpoint
from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Resolved
from surefoot.core.errors import RunFolderError
from surefoot.train.assemble import load_task
from surefoot.train.folder import SPEC_FILE


def load(run: str | Path, step: int | str = "best") -> nn.Module:
    """The model of a run with the weights of `step` ("best", "last" or a number), in evaluation mode, on the CPU.

    Every digest is checked first. Raises RunFolderError for a folder that is no run, or holds no such step, or is damaged.
    """
    return load_with_task(Path(run), step)[0]


def load_with_task(run: Path, step: int | str = "best", *, data: str | None = None) -> tuple[nn.Module, Resolved, RunSpec, int]:
    """The model, the task, the spec and the step that was chosen."""
    path = run / SPEC_FILE
    if not path.is_file():
        raise RunFolderError(f"{run} is no run: it holds no {SPEC_FILE}", hint="surefoot runs lists the runs below a folder")
    found = checkpoint.find_step(run, int(step) if isinstance(step, str) and step.isdigit() else step)
    origin = spec_file.read(str(path.resolve()), [] if data is None else [("data.folder", data, "--data")])
    task = load_task(origin.spec)
    model = task.task.model()
    checkpoint.load_into(model, run, found)
    return model.eval(), task, origin.spec, found
