"""`surefoot tune-loader` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError
from surefoot.prove.bench.loading import tune
from tests.cli.conftest import Command

TASK = f"{Path(__file__).parents[1] / 'prove' / 'slow_data.py'}:Slow"


def test_no_time_and_no_number_are_refused(surefoot: Command) -> None:
    with pytest.raises(InputError, match="0 seconds a setting"):
        tune(RunSpec(task={"use": "digits"}), seconds=0)
    answer = surefoot("tune-loader", "digits", "--most", "-1")
    assert answer.code == 2
    assert "use --seconds 2 --most 4" in answer.err


def test_what_a_person_sees(surefoot: Command) -> None:
    answer = surefoot(
        "tune-loader",
        TASK,
        "--set",
        "task.read_s=0.02",
        "--set",
        "task.compute_s=0.02",
        "--seconds",
        "0.1",
        "--most",
        "1",
    )
    assert answer.code == 0
    assert answer.out.startswith("the steps need ")
    assert answer.out.count("chosen") == 1
    assert "[loader]\nworkers = 1\nkind = " in answer.out
