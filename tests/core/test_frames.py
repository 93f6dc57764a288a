"""Whose code a stack frame is.

The folder of its file decides, whatever the folders above it are called.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

import pytest

import surefoot
from surefoot.control.diagnose.hang import find_frame
from surefoot.control.launch.looking import parse_stacks
from surefoot.core.process import frames

PACKAGE = Path(surefoot.__file__).parent
TORCH = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
LOOP, LIBRARY = (
    f"{PACKAGE / 'train' / 'run.py'}:9 in steps",
    f"{TORCH / 'nn' / 'modules' / 'linear.py'}:3 in forward",
)
NAMED_ALIKE = [  # files of users, in folders that are called like ours, torch's or Python's
    "/home/me/surefoot/task.py",
    "/home/me/surefoot/train/task.py",
    "/home/me/my surefoot/tests/task.py",
    "/srv/lib/python/task.py",
    "/data/site-packages-of-mine/task.py",
    "/home/me/torch/distributed/task.py",
    "/home/me/a in b:3 in c/task.py",
    "/home/ö/surefoot/ü.py",
]


@pytest.mark.parametrize("file", NAMED_ALIKE)
def test_a_user_file_is_the_users_whatever_its_folders_are_called(file: str) -> None:
    assert not frames.is_of_surefoot(file)
    assert not frames.is_of_library(file)
    assert not frames.is_of_torch(file, "distributed")
    assert find_frame([LIBRARY, f"{file}:31 in loss", LOOP]) == f"{file}:31 in loss"


@pytest.mark.parametrize("file", NAMED_ALIKE)
def test_the_thread_that_takes_steps_is_found_among_threads_in_folders_named_alike(
    file: str,
) -> None:
    def block(*shown: str) -> str:
        escaped = (
            "\n".join(f'  File "{each}", line 3 in f' for each in shown)
            .encode("ascii", "backslashreplace")
            .decode()
        )
        return f"Thread 0x01 (most recent call first):\n{escaped}\n\n"

    text = block("/home/me/surefoot/train/reader.py", file) + block(
        file, str(PACKAGE / "train" / "run.py")
    )
    # faulthandler writes what is not ASCII as an escape
    assert parse_stacks(text)[0] == f"{file}:3 in f"
    assert parse_stacks(text)[1].startswith(str(PACKAGE))


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (PACKAGE / "train" / "run.py", "surefoot"),
        (PACKAGE / "tasks" / "digits.py", "user"),
        (TORCH / "nn" / "functional.py", "library"),
        (enum.__file__, "library"),
        (threading.__file__, "library"),
        ("<frozen importlib._bootstrap>", "library"),
        (Path(__file__), "user"),
        (PACKAGE.parent / "surefoot_of_mine" / "train" / "run.py", "user"),
    ],
)
def test_each_file_has_one_owner(file: str | Path, owner: str) -> None:
    found = (
        "surefoot"
        if frames.is_of_surefoot(str(file))
        else "library"
        if frames.is_of_library(str(file))
        else "user"
    )
    assert found == owner


def test_a_module_of_surefoot_is_found_through_a_link_to_its_folder(tmp_path: Path) -> None:
    os.symlink(PACKAGE.parent, tmp_path / "checkout")
    assert frames.is_of_surefoot(
        str(tmp_path / "checkout" / "surefoot" / "train" / "run.py"), "train"
    )
    assert not frames.is_of_surefoot(
        str(tmp_path / "checkout" / "surefoot" / "tasks" / "digits.py")
    )


def test_an_error_in_a_checkout_named_surefoot_is_placed_in_the_users_line(tmp_path: Path) -> None:
    task = tmp_path / "surefoot" / "train" / "task.py"
    task.parent.mkdir(parents=True)
    task.write_text("import torch\n\ndef loss():\n    return torch.zeros(2) @ torch.zeros(3)\n")
    loss = runpy.run_path(str(task))["loss"]
    with pytest.raises(RuntimeError) as raised:
        loss()
    place = frames.find_user_frame(raised.value)
    assert isinstance(place, traceback.FrameSummary)
    assert (place.filename, place.lineno) == (str(task), 4)


def test_packages_of_an_interpreter_below_another_are_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A venv with system-site-packages finds torch in folders that are not its own."""
    monkeypatch.setattr(sys, "path", [*sys.path, "/opt/base/lib/python3/dist-packages"])
    frames._library_folders.cache_clear()
    assert frames.is_of_library("/opt/base/lib/python3/dist-packages/torch/nn.py")
    assert not frames.is_of_library("/opt/base/lib/python3/task.py")
    monkeypatch.undo()
    frames._library_folders.cache_clear()
