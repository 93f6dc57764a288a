"""What several files about ranks share."""

from __future__ import annotations

import importlib

import pytest

from tests.conftest import freeze


@pytest.fixture(scope="session")
def loaded_for_shards() -> None:
    """What each rank under FSDP2 or DDP would load for itself, for two seconds, is loaded here."""
    for name in ("torch.distributed.fsdp", "torch._dynamo"):
        importlib.import_module(name)
    freeze()  # else the collector looks through it again, in each rank too
