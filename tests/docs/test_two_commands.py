"""`make demo` and `make test` set up anywhere, again in no time, and say what is missing.

The interpreters here stand in for those of other machines: an old Python, one without venv, one
without a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# what a Python answers to set-up; each call is written down in `calls`
PYTHON = """#!/bin/sh
echo "$*" >> "{calls}"
case "$*" in
  *version_info*) exit {is_old} ;;
  *python_version*) echo 3.9.2 ;;
  *ensurepip*) exit {lacks_venv} ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip"*) exit {pip_fails} ;;
esac
"""


class Machine:
    """A clone of the project's set-up in a folder with a space, and one interpreter."""

    def __init__(
        self, folder: Path, *, is_old: int = 0, lacks_venv: int = 0, pip_fails: int = 0
    ) -> None:
        self.clone = folder / "a clone" / "of surefoot"
        (self.clone / ".ci").mkdir(parents=True)
        (self.clone / "surefoot" / "native").mkdir(parents=True)
        for name in (
            "Makefile",
            "pyproject.toml",
            "constraints.txt",
            ".ci/setup",
            "hatch_build.py",
            "surefoot/native/sha256.c",
        ):
            shutil.copy(ROOT / name, self.clone / name)
        self.calls = folder / "calls"
        self.python = folder / "other python"
        self.python.write_text(
            PYTHON.format(
                calls=self.calls, is_old=is_old, lacks_venv=lacks_venv, pip_fails=pip_fails
            )
        )
        self.python.chmod(0o755)

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(self.python),
            "HOME": "/nonexistent",
        }
        return subprocess.run(
            ["make", "--no-print-directory", target],
            cwd=self.clone,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def called(self, what: str) -> bool:
        return any(line.startswith(what) for line in self.calls.read_text().splitlines())


@pytest.mark.parametrize(("target", "extra"), [("demo", "demo"), ("test", "dev"), ("lint", "dev")])
def test_a_command_sets_up_in_a_path_with_spaces_and_goes_on(
    target: str, extra: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    done = machine.make(target)
    assert done.returncode == 0, done.stderr
    assert f"-c constraints.txt -e .[{extra}]" in machine.calls.read_text()
    assert machine.called(
        {"demo": "-m surefoot demo", "test": "-m pytest -q", "lint": "-m ruff check ."}[target]
    )


def test_a_second_time_installs_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.make("test")
    assert machine.called("-m pip")
    for target in ("test", "demo"):  # what the tests need brings along what the demo needs
        machine.make(target)
        assert not machine.called("-m pip")
        assert not machine.called("-m venv")


def test_changed_pins_or_a_moved_folder_install_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.make("demo")
    pins = machine.clone / "constraints.txt"
    pins.write_text(pins.read_text() + "another==1.0\n")
    machine.make("demo")
    assert machine.called("-m pip")
    machine.clone = machine.clone.rename(tmp_path / "elsewhere")
    machine.make("demo")
    assert machine.called("-m pip")


def test_an_old_python_is_named_with_its_version(tmp_path: Path) -> None:
    machine = Machine(tmp_path, is_old=1)
    done = machine.make("demo")
    assert done.returncode != 0
    assert "no Python 3.11 or newer was found" in done.stderr
    assert f"{machine.python} is 3.9.2" in done.stderr
    assert "hint: install Python 3.11 or newer, or name one" in done.stderr
    assert not (machine.clone / ".venv").exists()


def test_a_missing_venv_module_is_named_with_its_package(tmp_path: Path) -> None:
    done = Machine(tmp_path, lacks_venv=1).make("demo")
    assert done.returncode != 0
    assert "has no venv module" in done.stderr
    assert "apt install python3-venv" in done.stderr


def test_a_failed_installation_says_what_it_needs_and_is_tried_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, pip_fails=1)
    for _ in range(2):
        done = machine.make("demo")
        assert done.returncode != 0
        assert "pip could not install surefoot[demo]" in done.stderr
        assert "hint: it needs the network once" in done.stderr
        assert machine.called("-m pip")
        assert not machine.called("-m surefoot")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.clone.chmod(0o555)
    done = machine.make("demo")
    machine.clone.chmod(0o755)
    assert done.returncode != 0
    assert "cannot be written" in done.stderr
