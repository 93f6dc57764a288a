"""surefoot trains any PyTorch model, from a laptop to a cluster, and proves what it claims."""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "Loss": "surefoot.contract.task",
    "Metric": "surefoot.contract.task",
    "Run": "surefoot.train.run",
    "RunSpec": "surefoot.contract.spec",
    "Source": "surefoot.contract.task",
    "Start": "surefoot.train.resume.start",
    "StepReport": "surefoot.contract.state",
    "SurefootError": "surefoot.core.errors",
    "Task": "surefoot.contract.task",
    "Term": "surefoot.contract.task",
    "Update": "surefoot.contract.task",
    "all_gather": "surefoot.runtime.comm.gathered",
    "attach": "surefoot.train.attach",
    "compile_regions": "surefoot.components.compiler.regions",
    "compile_step": "surefoot.train.step.joined.whole",
    "linear_cross_entropy": "surefoot.components.memory.chunked",
    "load": "surefoot.train.look_back",
    "rank_seed": "surefoot.train.environment",
    "read_spec": "surefoot.contract.spec_file",
    "recompute": "surefoot.components.memory.recompute",
    "timed": "surefoot.components.profiler.phases.timed",
}
# modules of public names, one a subject: `surefoot.data.Arrays`
_MODULES = (
    "checkpoint",
    "data",
    "events",
    "memory",
    "metrics",
    "observe",
    "optim",
    "parallel",
    "precision",
    "profiler",
    "schedules",
    "stability",
)
__all__ = sorted([*_PLACES, *_MODULES])
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import surefoot` stays fast."""
    if name in _MODULES:
        return importlib.import_module(f"surefoot.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    module = importlib.import_module(_PLACES[name])
    return getattr(module, "read" if name == "read_spec" else name)


def __dir__() -> list[str]:
    return list(__all__)
