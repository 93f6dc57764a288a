"""What `surefoot verify --command` finds of other trainers' scripts.

Each is written as its own documents say.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("scripts")


def verify(folder: Path, script: str, *words: str) -> dict[str, Any]:
    """The verdict on a script that keeps all it has in `out`."""
    command = shlex.join((sys.executable, str(SCRIPTS / script), "out", *words))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "surefoot",
            "verify",
            "--command",
            command,
            "--state",
            "out",
            "--kills",
            "2",
            "--json",
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    row: dict[str, Any] = json.loads(done.stdout)
    assert row["repeat"] is None, row
    assert row["kills"], row
    return row


@pytest.mark.slow
def test_a_careful_accelerate_script_goes_on_exactly(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: the extra bench")
    row = verify(tmp_path, "accelerate_loop.py", "own")
    assert row["holds"], row


@pytest.mark.slow
def test_accelerate_does_not_go_on_exactly_where_the_loader_draws_from_the_global_stream(
    tmp_path: Path,
) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: the extra bench")
    row = verify(tmp_path, "accelerate_loop.py")
    assert not row["holds"], row
    assert "differs" in row["resume"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["epoch", "mid"])
def test_lightning_does_not_go_on_exactly(when: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning: the extra bench")
    row = verify(tmp_path, "lightning_loop.py", when)
    assert not row["holds"], row
    assert "differs" in row["resume"]
