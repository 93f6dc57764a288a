"""Classify stack frames as surefoot, library or user code by the path of their source file."""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[2])  # the folder of surefoot's own modules
TASKS = "tasks"  # a built-in task counts as the user's code
LIBRARY_FOLDERS = ("site-packages", "dist-packages")


def is_of_surefoot(file: str, below: str = "") -> bool:
    """Return whether `file` is a module of surefoot, in its subfolder `below` if that is not "".

    The result is False for the modules of built-in tasks, because these count as user code.

    >>> is_of_surefoot(__file__), is_of_surefoot("/home/me/surefoot/train/task.py")
    (True, False)
    """
    found = _resolve(file)
    return _is_in(found, os.path.join(PACKAGE, below)) and not _is_in(
        found, os.path.join(PACKAGE, TASKS)
    )


def is_of_library(file: str) -> bool:
    """Return whether `file` belongs to Python or an installed package.

    Code without a file, such as `<string>`, counts as library code.

    >>> import enum
    >>> is_of_library(enum.__file__), is_of_library("/home/me/lib/python/task.py")
    (True, False)
    """
    return file.startswith("<") or any(
        _is_in(_resolve(file), folder) for folder in _library_folders()
    )


def find_user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost user-code frame in the traceback of `error`; None if there is none."""
    chosen = None
    for frame, summary in zip(
        traceback.walk_tb(error.__traceback__),
        traceback.extract_tb(error.__traceback__),
        strict=True,
    ):
        file = summary.filename
        # a session, a cell, `python -c`
        is_typed = file.startswith("<") and frame[0].f_globals.get("__name__") == "__main__"
        if is_typed or not (is_of_surefoot(file) or is_of_library(file)):
            chosen = summary
    return chosen


def is_of_torch(file: str, below: str = "") -> bool:
    """Return whether `file` is a module of torch, in its subfolder `below` if that is not "".

    The folder of torch is found without importing torch.
    """
    folder = _torch_folder()
    return folder is not None and _is_in(_resolve(file), os.path.join(folder, below))


def _is_in(file: str, folder: str) -> bool:
    return file.startswith(f"{folder.rstrip(os.sep)}{os.sep}")


@cache
def _resolve(file: str) -> str:
    return os.path.realpath(file)


@cache
def _library_folders() -> frozenset[str]:
    named = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    searched = [
        entry for entry in map(os.path.realpath, sys.path) if Path(entry).name in LIBRARY_FOLDERS
    ]
    torch = [] if (folder := _torch_folder()) is None else [folder]
    return frozenset(
        map(
            os.path.realpath,
            (*named, *site.getsitepackages(), site.getusersitepackages(), *searched, *torch),
        )
    )


@cache
def _torch_folder() -> str | None:
    found = importlib.util.find_spec("torch")
    return (
        None
        if found is None or found.origin is None
        else os.path.dirname(os.path.realpath(found.origin))
    )
