"""The watch of tests/conftest.py over what a test leaves behind is seen to catch it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CRASHING = """
import os, signal, multiprocessing, pytest
def crash(number):
    os.kill(os.getpid(), number)
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE])
def test_forked(number):
    pid = os.fork()
    if pid == 0:
        crash(number)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number
def test_worker():
    worker = multiprocessing.get_context("fork").Process(target=crash, args=(signal.SIGSEGV,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGSEGV
"""

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


def run_pytest(folder: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            str(folder),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )


def test_a_crash_that_is_planted_in_a_forked_process_prints_no_stack(tmp_path: Path) -> None:
    (tmp_path / "test_crashing.py").write_text(CRASHING)
    done = run_pytest(tmp_path)
    assert "5 passed" in done.stdout, done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert "Fatal Python error" not in done.stdout


def test_a_test_that_leaves_something_behind_fails_and_the_next_one_starts_clean(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    done = run_pytest(tmp_path)
    for said in (
        "behind: variable LEFT",
        "behind: working folder",
        "behind: thread waiting",
        "behind: torch's default dtype",
        "5 passed, 4 errors",
    ):
        assert said in done.stdout, done.stdout
