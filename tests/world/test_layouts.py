"""`surefoot verify --layouts`: the same batches on one process and on several ranks, and a task that is another one on a rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.test_launch import environment

OTHER = """
import os
from surefoot.tasks.digits import Digits

class Other(Digits):
    def loss(self, output, batch):
        return super().loss(output * (1.0 + 1e-6 * int(os.environ.get("RANK", "0"))), batch)
"""


def verify(spec: str, layouts: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", "-m", "surefoot", "verify", spec, "--layouts", layouts, "--steps", "1", "--json"]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=120)


def test_ranks_compute_what_one_process_does_and_a_layout_that_is_named_twice_is_tried_once() -> None:
    done = verify("digits", "1; replicate=2; replicate=2,shard=1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["layout"], row["precision"], row["holds"]) for row in found["rows"]] == [
        ("replicate=2", "float64", True), ("replicate=2", "fp32", True),
    ]  # fmt: skip
    assert all(row["count"] > 10 and row["off"] <= row["allowed"] for row in found["rows"])


@pytest.mark.slow  # five processes that import torch
def test_a_rank_that_computes_a_millionth_more_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OTHER)
    done = verify(f"{tmp_path / 'other.py'}:Other", "replicate=2")
    assert done.returncode == 1, done.stderr
    wide, _ = json.loads(done.stdout)["rows"]
    assert not wide["holds"]
    assert 1e-8 < wide["off"] < 1e-4
