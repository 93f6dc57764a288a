"""`surefoot runs` where the log of a run is missing."""

from __future__ import annotations

from pathlib import Path

from tests.cli import past_runs as past
from tests.cli.conftest import Command


def test_the_log_of_another_rank_is_no_run_where_that_of_the_run_is_missing(
    surefoot: Command,
) -> None:
    past.write(Path("runs/a-1/ranks/1"), [past.started(), past.step(10, 1.0)])
    Path("runs/a-1/run.lock").touch()
    rows = surefoot("runs", "--json").row["runs"]
    assert [row["run"] for row in rows] == ["runs/a-1"]
    assert rows[0]["state"] == "unreadable"
