"""Every built-in task, every example and both loops pass `surefoot verify`.

With dropout, augmentation and shuffling on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verify import run as verify_run
from benchmarks.verify.run import CASES, Case
from tests.conftest import ROOT, find_data

KILLS = 2


@pytest.mark.slow  # test_verify.py holds the verb to tasks of each kind in seconds
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_task_repeats_and_goes_on_exactly(case: Case) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: the extra demo")
    pytest.importorskip("transformers", reason="needs transformers: the extra hf")
    data = Path() if case.wants is None else find_data(case.wants).parent
    row = verify_run.verify(case, data, KILLS)
    assert "error" not in row, row
    assert row["holds"], row
    assert len(row["kills"]) == KILLS


def test_the_cases_are_all_tasks_examples_and_loops_that_there_are() -> None:
    built_in = {path.stem for path in (ROOT / "surefoot" / "tasks").glob("*.toml")}
    text = (ROOT / verify_run.TASKS).read_text()
    wrapped = dict(re.findall(r"^class (\w+)\(Noisy, (\w+)\.\w+\)", text, re.MULTILINE))
    loops = {"attach", "plain_loop"}
    assert {case.name.removesuffix(".py") for case in CASES} == built_in | wrapped.keys() | loops
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    # no training; five sources, not a task; saves nothing; sums and nothing else
    assert set(wrapped.values()) | loops == examples - {
        "read_checkpoint",
        "bring_your_data",
        "loss_scaler",
        "ring_all_reduce",
    }


def test_the_table_tells_what_was_tried_and_what_was_not() -> None:
    rows: list[dict[str, Any]] = [
        {
            "name": "a",
            "what": "x",
            "seconds": 2.0,
            "num_steps": 12,
            "kills": [[3, 1.0, True], [7, 2.0, False]],
            "holds": True,
            "repeat": None,
            "resume": None,
        },
        {
            "name": "b",
            "what": "y",
            "seconds": 2.0,
            "kills": [1, 2],
            "holds": False,
            "repeat": None,
            "resume": "model.pt: w differs",
        },
        {"name": "c", "what": "z", "error": "no data\nhint: --data"},
    ]
    table = verify_run.render(rows)
    assert "| `a` | x | 12 | 2, 1 in a save | goes on exactly | 2 s |" in table
    assert "| `b` | y | a whole run | 2 | parts: model.pt: w differs | 2 s |" in table
    assert "| `c` | z |  |  | could not be tried: no data |  |" in table
