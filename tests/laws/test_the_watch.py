"""The watch of tests/conftest.py over what a test leaves behind is seen to catch it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LEAVING = """
import os, threading, torch
DONE = threading.Event()
def test_variable():
    os.environ["LEFT"] = "1"
def test_folder(tmp_path):
    os.chdir(tmp_path)
def test_thread():
    threading.Thread(target=DONE.wait, name="waiting").start()
def test_setting():
    torch.set_default_dtype(torch.float64)
def test_clean(monkeypatch, tmp_path):
    assert torch.get_default_dtype() == torch.float32 and "LEFT" not in os.environ
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.chdir(tmp_path)
    DONE.set()
"""


def test_a_test_that_leaves_something_behind_fails_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    for said in (
        "behind: variable LEFT",
        "behind: working folder",
        "behind: thread waiting",
        "behind: torch's default dtype",
        "5 passed, 4 errors",
    ):
        assert said in done.stdout, done.stdout
