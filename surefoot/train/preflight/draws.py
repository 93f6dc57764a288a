"""Whether what is read draws from streams that workers do not share with the run."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from surefoot.components.data import Keys
from surefoot.components.data.loader import read_sound
from surefoot.train.assemble import Assembly
from surefoot.train.preflight.contract import NUM_SAMPLES
from surefoot.train.quiet import untouched


def check(assembly: Assembly) -> list[str]:
    """Words where workers would change numbers: a source that no two threads may read has its streams set before each microbatch."""
    loader, source, augment = assembly.spec.loader, assembly.feed.source, assembly.task.augment
    if not loader.workers or not (getattr(source, "thread_safe", False) or loader.kind == "thread"):
        return []
    window = assembly.feed.window(0)
    ids = window.ids[:NUM_SAMPLES]
    with untouched(assembly.model, assembly.task.state):
        before = _streams()
        read = read_sound(source, ids)
        if augment is not None and assembly.engine.device.type == "cpu":  # else the run does it, and no worker
            augment(read.whole, Keys(assembly.spec.train.seed, window.epoch, read.kept(ids)))
        if _streams() == before:
            return []
    what = (
        f"what is read draws from the streams of torch, numpy or Python: with loader.workers = {loader.workers!r} it draws other "
    )
    return [f"{what}numbers than without, in threads others each time; the keys of augment draw the same everywhere"]


def _streams() -> tuple[Any, ...]:
    name, numbers, *place = np.random.get_state()  # noqa: NPY002 - the user's stream
    return torch.get_rng_state().tolist(), name, np.asarray(numbers).tolist(), place, random.getstate()
