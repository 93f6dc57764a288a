"""Ranks that never join the others, and ranks that end while they join."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from surefoot.core import place
from surefoot.core.errors import LostRank
from surefoot.runtime.comm.join import join
from tests.world.launched import Supervised
from tests.world.ranks import run_ranks

GENEROUS_S = 60.0


def test_a_rank_that_never_joins_is_lost_to_the_others_and_a_launcher_may_restart(
    tmp_path: Path,
) -> None:
    def job(rank: int) -> int:
        try:
            if not rank:
                with join(place.here(), torch.device("cpu"), wait_s=0.5, timeout_s=5.0):
                    return 0
            time.sleep(1000.0)
        except LostRank as error:
            (tmp_path / "said").write_text(error.message)
            return error.exit_code
        return 0

    supervised = Supervised(job, 2, tmp_path / "ranks")
    assert supervised.wait(GENEROUS_S) in (LostRank.exit_code, 137)  # it ends the other one
    assert (tmp_path / "said").read_text() == "rank 1 of 2 did not connect within 0.5 s"


def test_a_rank_that_ends_while_the_ranks_join_is_lost_to_the_others(tmp_path: Path) -> None:
    """It raised what torch raises, told as an error of the task.

    It came before the rank that had been killed.
    """

    def job(rank: int) -> None:
        if rank == 1:
            # it has come, and goes no further
            torch.distributed.init_process_group = lambda *given, **more: os._exit(0)
        with join(place.here(), torch.device("cpu"), wait_s=20.0, timeout_s=0.5):
            pass

    with pytest.raises(FileNotFoundError):  # rank 1 leaves no word
        run_ranks(2, job, tmp_path)
    said = json.loads((tmp_path / "rank-0.json").read_text())
    assert (said["kind"], said["code"]) == ("LostRank", 8)
    assert "another rank, which had joined before, has exited" in said["error"]
