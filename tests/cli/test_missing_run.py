"""A run folder that does not exist: each verb names the runs beside its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import past_runs as past
from tests.cli.conftest import Command


@pytest.mark.parametrize(
    "words",
    [
        ("show",),
        ("why",),
        ("report",),
        ("ledger",),
        ("check",),
        ("resume",),
        ("evaluate",),
        ("archive", "a.tar"),
        ("remove", "--yes"),
        ("checkpoint list",),
        ("checkpoint prune",),
    ],
    ids=" ".join,
)
def test_a_run_that_does_not_exist_is_looked_for_beside_its_place(
    words: tuple[str, ...], surefoot: Command
) -> None:
    for name in ("runs/a-2", "runs/a-10", "runs/digits-1"):
        (past.write_finished(Path(name)) / "spec.toml").touch()
        Path(name, "checkpoints").mkdir(exist_ok=True)
    Path("runs/a-11").mkdir()  # no run
    verb, *more = words
    answer = surefoot(*verb.split(), "runs/a", *more)
    assert answer.code == 2
    assert answer.err == (
        "error: runs/a does not exist\nhint: did you mean runs/a-10 or runs/a-2?\n"
    )
    assert "did you mean runs/digits-1?" in surefoot(*verb.split(), "runs/digit", *more).err
    assert "hint: surefoot runs lists" in surefoot(*verb.split(), "runs/other", *more).err
