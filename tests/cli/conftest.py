"""The command line called in this process, in a folder of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import main


@dataclass(frozen=True)
class Answer:
    """What a command gave back."""

    code: int
    out: str
    err: str

    @property
    def row(self) -> dict[str, Any]:
        """The one object of `--json`."""
        row: dict[str, Any] = json.loads(self.out)
        assert row.pop("version") == 1
        return row


Command = Callable[..., Answer]


@pytest.fixture
def surefoot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """`surefoot("spec", "show", "digits")` as if typed in `tmp_path`, in a pipe of 100 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def command(*words: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["surefoot", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert isinstance(left.value.code, int)
        assert "--traceback" in words or "Traceback" not in out + err
        return Answer(left.value.code, out, err)

    return command


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """A spec and its task, whose file would fail if it were imported."""
    (tmp_path / "task.py").write_text(
        "raise RuntimeError('imported')\n\n\nclass Mine:\n"
        "    def __init__(self, width: int = 8, kind: str = 'plain', "
        "folder: str | None = None) -> None: ...\n"
    )
    path = tmp_path / "mine.toml"
    path.write_text(
        '[task]\nuse = "task.py:Mine"\n\n[optim]\nlr = 0.02\n\n[train]\nlength = "100 steps"\n'
    )
    return path
