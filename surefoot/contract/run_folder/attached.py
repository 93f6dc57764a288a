"""Errors for folders that have no spec.toml, but a log or checkpoints.

Such a folder is that of a loop with `surefoot.attach`, that of a run that lost its spec, or one
that holds only weights. The error says which of these it is, and what the user can do with it.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from surefoot.contract import events, manifest
from surefoot.contract.events import Started
from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError

SPEC_ID = "attached"  # spec id of a training loop of the user, which has no spec
WORDS = "is the folder of a training loop with surefoot.attach"


def no_spec(run: Path, name: str) -> RunFolderError:
    """Return the error for a folder that does not exist or lacks its spec, the file `name`."""
    found = explain(run, name)
    return files.no_run(run, name) if found is None else RunFolderError(found[0], hint=found[1])


def explain(run: Path, name: str) -> tuple[str, str] | None:
    """Return a description of a folder without the spec `name`, and a hint.

    None if the folder has neither a readable log nor checkpoints.
    """
    if not run.is_dir():
        return None
    steps, started = manifest.steps(run), _find_start(run)
    ids = {_find_spec_id(run, steps)} if started is None else {started.spec_id}
    folder = shlex.quote(str(run))
    weights = [f"  load its weights, in Python: {load_call(run)}"] if steps else []
    if SPEC_ID in ids:
        ways = [
            "choose one:",
            "  resume the loop: run its script again",
            *weights,
            f"  read its records: surefoot show {folder}; why, ledger and check read it too",
        ]
        return f"{run} {WORDS}: it has no spec and no task", "\n".join(ways)
    if started is not None:
        return (
            f"{run} is a run without its {name}",
            (
                f"put its spec back as {shlex.quote(str(run / name))}; the log has the values: "
                f'surefoot show {folder} --json prints them under "spec"'
            ),
        )
    if steps:
        return f"{run} holds checkpoints and no {name}, so it is not a run", "\n".join(
            ["choose one:", *weights, f"  list them: surefoot checkpoint list {folder}"]
        )
    return None


def load_call(run: Path) -> str:
    """Return the Python call that loads the weights of a folder without a spec into a model."""
    return f"surefoot.checkpoint.load_into(model, {str(run)!r}, 'last')"


def _find_start(run: Path) -> Started | None:
    """Return the newest Started event of a log; None for a folder without a readable one."""
    starts: list[Started] = []
    with contextlib.suppress(RunFolderError):
        every = events.read(run, Started, damaged=[])
        starts = [event for event in every if isinstance(event, Started)]
    return starts[-1] if starts else None


def _find_spec_id(run: Path, steps: list[int]) -> str | None:
    """Return the spec id in the newest readable manifest; None if there is none."""
    for step in reversed(steps):
        with contextlib.suppress(RunFolderError):
            return manifest.read(manifest.step_folder(run, step)).spec_id
    return None
