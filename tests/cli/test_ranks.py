"""How many ranks a command may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "0:2"), "1 <= MIN <= MAX; got 0:2\n"),
        (("--ranks", "3:2"), "1 <= MIN <= MAX; got 3:2\n"),
        (("--ranks", "2:"), "1 <= MIN <= MAX; got 2:\n"),
        (("--ranks", ":2"), "1 <= MIN <= MAX; got :2\n"),
        (("--ranks", "1:2:3"), "1 <= MIN <= MAX; got 1:2:3\n"),
        (("--ranks", "two"), "1 <= MIN <= MAX; got two\n"),
        (("--ranks", "-1"), "1 <= MIN <= MAX; got -1\n"),
        (("--ranks", "1:2", "--fresh"), "error: --ranks 1:2 restarts the remaining ranks"),
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
