"""Tests of `.ci/run` in a small project.

What failed is run once more, alone; up to three tests that then pass are FLAKY and count as passed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / ".ci" / "run"
MAKEFILE = """
lint:
\t@echo linted; exit $(LINT)
test:
\t@.venv/bin/python -m pytest -q $(WORDS)
"""
HEAD = """
import os, pathlib, pytest
STARTED = pathlib.Path("started")
def is_first(name):
    path = pathlib.Path(f"seen-{name}")
    with STARTED.open("a") as file:
        print(name, os.getpid(), file=file)
    if path.exists():
        return False
    path.touch()
    return True
"""
GOOD = "def test_good(): is_first('good')\n"
FLAKY = "def test_flaky_{0}(): assert not is_first('flaky {0}')\n"
BAD = "def test_bad(): assert is_first('bad') is None\n"
NAMED = """
@pytest.mark.parametrize("text", ["a - b [c] 'd' $e"])
def test_named(text): assert not is_first("named")
"""
FIXTURE = """
@pytest.fixture
def server():
    assert not is_first("server")
def test_with_a_server(server): pass
"""


def run(folder: Path, *tests: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / ".ci").mkdir()
    shutil.copy(RUN, folder / ".ci" / "run")
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "test_small.py").write_text(HEAD + "\n".join(tests))
    (folder / "pytest.ini").write_text("[pytest]\n")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "MAKE", "MFLAGS"))
    }
    return subprocess.run(
        [str(folder / ".ci" / "run")],
        env=environment
        # the plugins of this environment take longer to import than the small project to test
        | {"LINT": "0", "CI": "true", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def closing(output: str) -> tuple[int, int]:
    """The tests that passed and failed, as the last line tells."""
    found = re.fullmatch(r"(\d+) passed, (\d+) failed", output.splitlines()[-1])
    assert found is not None, output
    return int(found[1]), int(found[2])


def test_tests_that_pass_are_run_once_and_the_last_line_is_that_of_pytest(tmp_path: Path) -> None:
    done = run(tmp_path, GOOD, GOOD.replace("good", "fine"))
    assert done.returncode == 0, done.stdout
    assert re.search(r"2 passed in [0-9.]+s\n$", done.stdout)
    assert "FLAKY" not in done.stdout
    assert len((tmp_path / "started").read_text().splitlines()) == 2


@pytest.mark.quick("three", "a name that a shell reads")
@pytest.mark.parametrize(
    ("tests", "names", "passed"),
    [
        ((GOOD, FLAKY.format(1)), ["test_flaky_1"], 2),
        ((GOOD, *map(FLAKY.format, "123")), ["test_flaky_1", "test_flaky_2", "test_flaky_3"], 4),
        ((FLAKY.format(1),), ["test_flaky_1"], 1),
        ((GOOD, NAMED), ["test_named[a - b [c] 'd' $e]"], 2),
        ((GOOD, FIXTURE), ["test_with_a_server"], 2),
    ],
    ids=["one", "three", "no other", "a name that a shell reads", "a fixture"],
)
def test_what_fails_once_is_named_and_counts_as_passed(
    tests: tuple[str, ...], names: list[str], passed: int, tmp_path: Path
) -> None:
    done = run(tmp_path, *tests)
    assert done.returncode == 0, done.stdout
    flaky = [line for line in done.stdout.splitlines() if line.startswith("FLAKY")]
    assert flaky == [f"FLAKY test_small.py::{name}" for name in names]
    assert closing(done.stdout) == (passed, 0)
    started = [line.rsplit(" ", 1) for line in (tmp_path / "started").read_text().splitlines()]
    again = [
        pid for at, (name, pid) in enumerate(started) if name in [each for each, _ in started[:at]]
    ]
    assert len({*again, started[0][1]}) == len(names) + 1, "each in a process of its own"


@pytest.mark.quick("one of two fails twice", "four fail once")
@pytest.mark.parametrize(
    ("tests", "passed", "failed"),
    [
        ((GOOD, BAD), 1, 1),
        ((GOOD, BAD, FLAKY.format(1)), 2, 1),
        ((GOOD, *map(FLAKY.format, "1234")), 1, 4),
    ],
    ids=["fails twice", "one of two fails twice", "four fail once"],
)
def test_what_fails_twice_and_more_than_three_are_red(
    tests: tuple[str, ...], passed: int, failed: int, tmp_path: Path
) -> None:
    done = run(tmp_path, *tests)
    assert done.returncode == 1, done.stdout
    assert closing(done.stdout) == (passed, failed)


@pytest.mark.quick("not collected", "no test", "style")
@pytest.mark.parametrize(
    ("tests", "variables"),
    [
        ((GOOD, "import no_such_module"), {}),
        ((FLAKY.format(1), "def test_stops(): raise KeyboardInterrupt"), {}),
        ((GOOD,), {"WORDS": "--no-such-option"}),
        ((GOOD,), {"WORDS": "-k nothing"}),
        ((GOOD,), {"LINT": "3"}),
    ],
    ids=["not collected", "interrupted", "an option", "no test", "style"],
)
def test_where_not_all_tests_ran_nothing_is_run_again(
    tests: tuple[str, ...], variables: dict[str, str], tmp_path: Path
) -> None:
    done = run(tmp_path, *tests, **variables)
    assert done.returncode == 2, done.stdout
    assert "FLAKY" not in done.stdout


def test_failures_of_an_earlier_time_are_not_run_again(tmp_path: Path) -> None:
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text('{"test_small.py::test_of_yesterday": true}')
    done = run(tmp_path, GOOD, FLAKY.format(1))
    assert done.returncode == 0, done.stdout
    assert closing(done.stdout) == (2, 0)
