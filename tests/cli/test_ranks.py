"""How many ranks a command may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "0:2"), "error: --ranks is 0:2"),
        (("--ranks", "3:2"), "error: --ranks is 3:2"),
        (("--ranks", "2:"), "error: --ranks is 2:,"),
        (("--ranks", ":2"), "error: --ranks is :2"),
        (("--ranks", "1:2:3"), "error: --ranks is 1:2:3"),
        (("--ranks", "two"), "error: --ranks is two"),
        (("--ranks", "-1"), "error: --ranks is -1"),
        (("--ranks", "1:2", "--fresh"), "error: --ranks 1:2 goes on with what is left"),
        (
            ("--ranks", "2:3", "--set", "layout.replicate=4"),
            "error: --ranks is 2:3, and this spec can be trained with none of these",
        ),
        (
            ("--ranks", "5:9", "--set", "train.microbatch=16", "--set", "train.batch=32"),
            "2 microbatches for 9 ranks",
        ),
    ],
)
def test_a_range_that_is_none_is_told_before_any_work(
    words: tuple[str, ...], said: str, surefoot: Command, tmp_path: Path
) -> None:
    answer = surefoot("train", "digits", "--run", tmp_path / "run", *words)
    assert answer.code == 2, answer.err
    assert said in answer.err
    assert not (tmp_path / "run").exists()
