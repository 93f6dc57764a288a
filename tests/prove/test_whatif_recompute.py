"""`surefoot whatif activation-checkpointing`: the worth of each block, and ways beside none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command, surefoot
from tests.train.small import write_task

__all__ = ["surefoot"]
UNEVEN = """nn.Sequential(
            nn.Linear(4, 64),
            *(
                nn.Sequential(nn.Linear(64, each), nn.Tanh(), nn.Linear(each, 64))
                for each in (32, 2048, 32)
            ),
            nn.Linear(64, 3))"""


@pytest.fixture
def uneven(tmp_path: Path) -> str:
    return write_task(
        tmp_path,
        change=(
            "nn.Sequential(nn.Linear(4, self.width), nn.ReLU(), nn.Linear(self.width, 3))",
            UNEVEN,
        ),
    )


@pytest.mark.slow  # half a minute: the tests have ten
def test_blocks_and_ways_are_measured_and_a_budget_chooses_the_blocks_that_are_worth_it(
    uneven: str, surefoot: Command
) -> None:
    answer = surefoot(
        "whatif",
        "activation-checkpointing",
        uneven,
        "--rounds",
        "1",
        "--set",
        "train.batch=24",
        "--json",
    )
    assert answer.code == 0
    row = answer.row
    assert "profiler_start" not in answer.err  # torch's own notes
    blocks, ways = row["blocks"], {each["how"]: each for each in row["rows"]}
    assert [each["inner_bytes"] > 20 * blocks[0]["inner_bytes"] for each in blocks] == [
        False,
        True,
        False,
    ]
    assert all(
        each["again_s"] > 0 and each["bytes_per_s"] == each["inner_bytes"] / each["again_s"]
        for each in blocks
    )
    held = {how: each["held_bytes"] for how, each in ways.items()}
    assert held["none"] == sum(each["inner_bytes"] + each["input_bytes"] for each in blocks)
    assert next(iter(ways)) == "none"
    assert list(ways)[-2:] == ["operators", "full"]
    assert held["full"] <= held["every 2"] <= held["none"]
    assert all(
        each["failure"] is None and each["peak_bytes"] > 0 and each["step_s"] > 0
        for each in ways.values()
    )
    assert ways["none"]["ratio"] is None
    assert ways["full"]["ratio"]["count"] == 1


def test_a_model_without_blocks_and_a_whole_step_as_one_graph_are_refused(
    tmp_path: Path, surefoot: Command
) -> None:
    use = write_task(tmp_path)
    answer = surefoot("whatif", "activation-checkpointing", use)
    assert (answer.code, "block" in answer.err) == (2, True)
    answer = surefoot("whatif", "activation-checkpointing", use, "--set", 'compile.what="step"')
    assert (answer.code, "goes with no recomputation" in answer.err) == (2, True)
