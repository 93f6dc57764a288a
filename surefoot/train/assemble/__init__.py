"""All parts of a training step, built from a spec and a task."""

from surefoot.train.assemble.assembly import Assembly, Engine
from surefoot.train.assemble.build import assemble
from surefoot.train.assemble.model import (
    build_model,
    find_wanted_blocks,
    load_task,
    set_storage,
    take_task,
)

__all__ = [
    "Assembly",
    "Engine",
    "assemble",
    "build_model",
    "find_wanted_blocks",
    "load_task",
    "set_storage",
    "take_task",
]
