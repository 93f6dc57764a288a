"""Command `surefoot init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, TracebackOption

# name of the written file -> name in STARTER
FILES = {
    "my_task.py": "my_task.py.txt",
    "my_spec.toml": "my_spec.toml",
}
STARTER = Path(__file__).with_name("starter")


def init(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="the folder for the task file and the spec file"),
    ] = Path(),
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Write a task file and a spec that run unchanged.

    The task generates its own data; its comments say what to change. Existing files are never
    overwritten.
    """
    import shlex

    paths = {folder / name: STARTER / source for name, source in FILES.items()}
    _write(folder, paths)
    command = f"surefoot train {shlex.quote(str(folder / 'my_spec.toml'))}"
    if json:
        options.print_json({"files": [str(path) for path in paths], "next": command})
        return
    for path in paths:
        print(f"wrote {path}")
    print(f"next: {command}")


def _write(folder: Path, paths: dict[Path, Path]) -> None:
    import contextlib

    from surefoot.core.errors import InputError

    there = [path for path in paths if path.exists() or path.is_symlink()]
    if there:
        raise InputError(
            f"{there[0]} already exists and is not overwritten",
            hint="give another folder: surefoot init FOLDER",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as unless_whole:
            for path, source in paths.items():
                with path.open("x", encoding="utf-8") as file:
                    unless_whole.callback(path.unlink)
                    file.write(source.read_text(encoding="utf-8"))
            unless_whole.pop_all()
    except FileExistsError:
        raise InputError(
            f"{folder} is a file, not a folder", hint="give another folder: surefoot init FOLDER"
        ) from None
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror}",
            hint="give another folder: surefoot init FOLDER",
        ) from error
