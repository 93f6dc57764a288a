"""What several files about ranks share."""

from __future__ import annotations

import gc
import importlib

import pytest


@pytest.fixture(scope="session")
def loaded_for_shards() -> None:
    """What each rank under FSDP2 or DDP would load for itself, for two seconds, is loaded here."""
    for name in ("torch.distributed.fsdp", "torch._dynamo"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the collector looks through it again, and in each rank
