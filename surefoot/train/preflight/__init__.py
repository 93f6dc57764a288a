"""Checks before a run: the task's methods are called on a few samples; nothing is written."""

from __future__ import annotations

import torch

from surefoot.core.errors import InputError, SpecError
from surefoot.train.assemble import Assembly
from surefoot.train.preflight import contract, norms, samples
from surefoot.train.quiet import preserve_attributes
from surefoot.train.record.noticed.unheld import describe_task, watch_task
from surefoot.train.resume.state import LiveState


def check(assembly: Assembly, *, is_again: bool = False) -> list[str]:
    """Check the assembled run; return notes. Warnings are added to `assembly.warnings`.

    If the attempt resumes a run (`is_again`), a measurement that can only lead to a warning is
    skipped: the first attempt has made it. Raises TaskError or SpecError for a run that cannot be
    trained.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise InputError(
            "the run starts where gradients are disabled: inside torch.no_grad(), "
            "torch.inference_mode() or after torch.set_grad_enabled(False)",
            hint="start the run outside of it, or inside `with torch.enable_grad():`",
        )
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
    # no step repeats these passes
    with assembly.engine.steps.eager(), preserve_attributes(assembly.task.task):
        notes = contract.check(assembly)
        samples.check_order(assembly)
        measured = []
        if not is_again:
            measured = [*norms.check(assembly), *samples.check_collated(assembly)]
        assembly.warnings.extend(
            [*measured, *samples.check_draws(assembly), *describe_task(assembly, generators)]
        )
    return notes
