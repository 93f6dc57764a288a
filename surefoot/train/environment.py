"""What a run sets in the process and puts back, and what it records of where it ran."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from surefoot.components.stability import GuardFault
from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.core import place
from surefoot.core.hardware import find_machine
from surefoot.train.assemble import Assembly

_DETERMINISM: Any = torch.utils.deterministic
RECORDED_PACKAGES = ("surefoot", "torch", "numpy", "safetensors", "pydantic")


def apply(spec: RunSpec) -> Callable[[], None]:
    """Set threads and deterministic kernels as the spec says; gives the function that puts them back."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = _DETERMINISM.fill_uninitialized_memory
    if spec.train.threads is not None:
        torch.set_num_threads(spec.train.threads)
    if spec.train.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        _DETERMINISM.fill_uninitialized_memory = False  # filling costs a pass over every new tensor

    def put_back() -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        _DETERMINISM.fill_uninitialized_memory = fill

    return put_back


def as_run(spec: RunSpec) -> RunSpec:
    """The spec with what the machine decided filled in, so that it repeats the run: the number of threads."""
    return spec.replace(train={"threads": torch.get_num_threads()})


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change numbers."""
    found = {"python": sys.version.split()[0]}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def started(assembly: Assembly, generation: int, code_digest: str, notes: tuple[str, ...]) -> events.Started:
    """The record that opens an attempt."""
    spec, here = assembly.spec, place.here()
    source = assembly.feed.source
    return events.Started(
        generation=generation, time_s=time.time(), spec_id=spec.id, spec=spec.as_tables(), task=assembly.task.name,
        code_digest=code_digest, data={"describe": source.describe(), "digest": source.digest, "guarantee": source.guarantee},
        versions=versions(), machine={**find_machine().as_row(), "device": str(assembly.engine.device), "threads": torch.get_num_threads()},
        place={"rank": here.rank, "world_size": here.world_size, "host": here.host}, variables=place.recorded_variables(),
        command=tuple(sys.argv), commit=_commit(), seed=spec.train.seed,
        num_parameters=sum(parameter.numel() for parameter in assembly.model.parameters()), total_steps=assembly.course.total_steps,
        steps_per_epoch=assembly.feed.steps_per_epoch, notes=notes, unit=assembly.task.unit,
    )  # fmt: skip


def _commit() -> str | None:
    """The git commit of the working folder, if it is one; read from the files, since starting git costs more than the run's start."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        head = folder / ".git" / "HEAD"
        if head.is_file():
            text = head.read_text().strip()
            reference = folder / ".git" / text.removeprefix("ref: ")
            if not text.startswith("ref: "):
                return text
            return reference.read_text().strip() if reference.is_file() else None
    return None


def fault(generation: int, found: GuardFault) -> events.Fault:
    """The record of a fault."""
    here = place.here()
    return events.Fault(
        generation=generation, time_s=time.time(), step=found.step, fault=found.fault, rank=here.rank, host=here.host,
        action=found.action, detail=found.detail,
    )  # fmt: skip
