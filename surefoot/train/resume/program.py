"""Code of a run: the file of the task, imported modules of its project, git commit, versions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from surefoot.contract import signature
from surefoot.contract.events import Started
from surefoot.contract.task import find_use

# one of them marks the folder of a project
PROJECT_FILES = (".git", "pyproject.toml", "setup.py", "setup.cfg")
INSTALLED = frozenset(("site-packages", "dist-packages"))
# a script that holds the task is the task's file; the code of any other script may change
SCRIPTS = ("__main__", "__mp_main__")
GIT_LIMIT_S = 5.0  # a large repository on a slow disk must not hold up a run
_SUREFOOT = str(Path(__file__).parents[2]) + os.sep
_STANDARD = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
_FOREIGN = (
    _SUREFOOT,
    *{f"{folder}{os.sep}" for folder in (*_STANDARD, *map(os.path.realpath, _STANDARD))},
)


@dataclass(frozen=True)
class Program:
    """Code that a run trains with.

    `digest` is the SHA-256 of `file`, which holds the task, or of the class name if there is no
    file.
    """

    digest: str
    file: Path | None

    @classmethod
    def of(cls, use: str | None, task: object) -> Program:
        """Return the program of `task`; `use` is its import name, or None to look the name up."""
        known = use or find_use(task)
        path = signature.find_source(known) if known else None
        if path is not None and path.is_file():
            return cls(hashlib.sha256(path.read_bytes()).hexdigest(), path.resolve())
        name = f"{type(task).__module__}.{type(task).__qualname__}"
        return cls(hashlib.sha256(name.encode()).hexdigest(), None)

    @property
    def project(self) -> Path:
        """Folder of the task's project: the nearest one above its file with .git or a build file.

        Without such a folder, it is the folder of the file, or the folder that contains its
        package. For a built-in task or without a file, it is the working folder.
        """
        if self.file is None or str(self.file).startswith(_SUREFOOT):
            return Path.cwd()
        folder = self.file.parent
        while (folder / "__init__.py").is_file() and folder != folder.parent:
            folder = folder.parent
        marked = (
            each
            for each in (folder, *folder.parents)
            if any((each / name).exists() for name in PROJECT_FILES)
        )
        return next(marked, folder)

    def modules(self) -> dict[str, str]:
        """Return the SHA-256 of each imported module of the project, except the task's own."""
        return {
            name: digest
            for name, path in self._files().items()
            if (digest := _digest(path)) is not None
        }

    def changes(self, before: Started) -> list[str]:
        """Return the files that have changed since the attempt whose record is `before`.

        Only files that the attempt recorded and that are imported now are compared.
        """
        task = (
            []
            if before.code_digest == self.digest
            else [self._display_path(self.file) if self.file else "the class of the task"]
        )
        files = self._files()
        others = {name: _digest(files[name]) for name in before.modules.keys() & files.keys()}
        changed = sorted(
            name for name, digest in others.items() if digest not in (None, before.modules[name])
        )
        return [*task, *(self._display_path(files[name]) for name in changed)]

    def _files(self) -> dict[str, Path]:
        roots = tuple(
            {
                f"{os.path.realpath(each)}{os.sep}"
                for each in (self.project, Path.cwd())
                if each != each.parent
            }
        )
        return {
            name: path
            for name, path in _sources()
            if str(path).startswith(roots) and path != self.file
        }

    def _display_path(self, path: Path) -> str:
        above = next(
            (each for each in (self.project, Path.cwd()) if path.is_relative_to(each)), None
        )
        return str(path if above is None else path.relative_to(above))


def _sources() -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of each imported module, except installed, standard and surefoot ones."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(file, str) and name not in SCRIPTS and (path := _user_file(file)) is not None:
            yield name, path


@functools.cache
def _user_file(file: str) -> Path | None:
    """Return the real path of a module's file; None for installed, standard or surefoot ones."""
    if file.startswith(_FOREIGN) or not INSTALLED.isdisjoint(file.split(os.sep)):
        return None  # before the path is resolved, which reads each folder on the way
    path = os.path.realpath(file)
    is_own = not path.startswith(_FOREIGN) and INSTALLED.isdisjoint(path.split(os.sep))
    return Path(path) if is_own else None


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None for a file that is missing or cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def tell_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a note for Python and for each package whose version has changed."""
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    return [
        f"{name} is version {now[name]}, was {before[name]}: results may differ in the last bits"
        for name in changed
    ]


def find_commit(folder: Path, *, asks_git: bool = True) -> tuple[str | None, bool | None]:
    """Return the git commit of `folder`, and if a tracked file is modified; None if unknown."""
    if asks_git and (found := _ask_git(folder)) is not None:
        return found
    return _read_commit(folder), None


def _ask_git(folder: Path) -> tuple[str, bool] | None:
    # no monitor, which is a program that the repository names; no lock, which would write into it
    words = [
        "git",
        "--no-optional-locks",
        "-c",
        "core.fsmonitor=false",
        "status",
        "--porcelain=v2",
        "--branch",
        "--untracked-files=no",
    ]
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            timeout=GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    commit = next(
        (line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)"
    )
    return (
        None if commit == "(initial)" else (commit, any(not line.startswith("#") for line in lines))
    )


def _read_commit(folder: Path) -> str | None:
    """Return the commit from the files in .git, without calling git."""
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if not (each / ".git" / "HEAD").is_file():
                continue
            text = (each / ".git" / "HEAD").read_text().strip()
            reference = each / ".git" / text.removeprefix("ref: ")
            if not text.startswith("ref: "):
                return text
            return reference.read_text().strip() if reference.is_file() else None
    return None
