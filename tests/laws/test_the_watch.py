"""The watch of tests/conftest.py over what a test leaves behind is seen to catch it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
WAIT = "timeout=30.0"

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


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Both files, tested under the conftest in one process; it waits a second for a thread."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "test_crashing.py").write_text(CRASHING)
    (folder / "test_leaving.py").write_text(LEAVING)
    watch = CONFTEST.read_text()
    assert watch.count(WAIT) == 1
    (folder / "conftest.py").write_text(watch.replace(WAIT, "timeout=1.0"))  # for one that waits
    words = ["-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )


def test_a_crash_that_is_planted_in_a_forked_process_prints_no_stack(
    done: subprocess.CompletedProcess[str],
) -> None:
    assert done.stdout.count("PASSED test_crashing.py::") == 5, done.stdout
    assert "ERROR test_crashing.py" not in done.stdout
    assert (done.returncode, done.stderr) == (1, "")  # for the tests that leave something
    assert "Fatal Python error" not in done.stdout


def test_a_test_that_leaves_something_behind_fails_and_the_next_one_starts_clean(
    done: subprocess.CompletedProcess[str],
) -> None:
    for said in (
        "behind: variable LEFT",
        "behind: working folder",
        "behind: thread waiting",
        "behind: torch's default dtype",
        "10 passed, 4 errors",
    ):
        assert said in done.stdout, done.stdout
    assert done.stdout.count("PASSED test_leaving.py::") == 5, done.stdout
    assert done.stdout.count("ERROR test_leaving.py::") == 4, done.stdout
