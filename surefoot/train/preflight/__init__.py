"""Checks before a run: the task's methods are tried on a few samples; nothing is written."""

from __future__ import annotations

from surefoot.core.errors import SpecError
from surefoot.train.assemble import Assembly
from surefoot.train.preflight import contract, draws, norms
from surefoot.train.record.compiling import run_uncompiled
from surefoot.train.record.noticed.unheld import describe_task, watch_task
from surefoot.train.resume.state import LiveState


def check(assembly: Assembly, *, is_again: bool = False) -> list[str]:
    """Check the assembled run; return notes and add to its warnings.

    Measurements that only lead to a warning were made by the first attempt, and are skipped if the
    attempt resumes a run (`is_again`). Raises TaskError or SpecError for a run that cannot be
    trained.
    """
    offload = assembly.spec.memory.offload
    if offload != "none" and assembly.engine.device.type == "cpu":
        raise SpecError(
            f"memory.offload is {offload!r}, but the run is on a CPU: the tensors are "
            "already in host memory",
            hint=(
                "leave memory.offload out; to use less memory set "
                "memory.activation_checkpointing, or "
                'optim.name = "sgd"'
            ),
        )
    LiveState(assembly).check()
    generators = watch_task(assembly)
    with run_uncompiled(assembly.engine.compiled):  # what is tried here no step repeats
        notes = contract.check(assembly)
        measured = [] if is_again else norms.check(assembly)
        assembly.warnings.extend(
            [*measured, *draws.check(assembly), *describe_task(assembly, generators)]
        )
    return notes
