"""Code of a run: the file of the task, imported modules of its project, git commit, versions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot.contract import signature
from surefoot.contract.events import Committed, Event, Started
from surefoot.contract.task import find_use
from surefoot.core import place

# one of them marks the folder of a project
PROJECT_FILES = (".git", "pyproject.toml", "setup.py", "setup.cfg")
INSTALLED = frozenset(("site-packages", "dist-packages"))
# a script that holds the task is the task's file; the code of any other script may change
SCRIPTS = ("__main__", "__mp_main__")
GIT_LIMIT_S = 5.0  # a large repository on a slow disk must not hold up a run
SHORT = 12  # characters of a git commit in a note
_SUREFOOT = str(Path(__file__).parents[2]) + os.sep
_STANDARD = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
_FOREIGN = (
    _SUREFOOT,
    *{f"{folder}{os.sep}" for folder in (*_STANDARD, *map(os.path.realpath, _STANDARD))},
)
# installed, standard and surefoot modules that were found before, by name: thousands at each start
_foreign = dict[str, ModuleType]()


@dataclass(frozen=True)
class Program:
    """Code that a run trains with.

    `digest` is the SHA-256 of `file`, which holds the task, or of the class name if there is no
    file.
    """

    digest: str
    file: Path | None
    # names of the modules that earlier attempts imported after their start
    _late: set[str] = field(default_factory=set, compare=False)
    _seen: set[str] = field(default_factory=set, compare=False)  # names of recorded modules

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
        return _digests(self._files())

    @functools.cached_property
    def commit(self) -> tuple[str | None, bool | None]:
        """Git commit of the project, and if a tracked file is modified; None if unknown."""
        return find_commit(self.project, asks_git=place.here().rank == 0)

    def started_fields(self) -> dict[str, Any]:
        """Return the fields of a Started record that describe the code."""
        commit, is_dirty = self.commit
        self._seen.update(sys.modules)
        modules = self.modules()
        late = self._find_late(self._late - modules.keys())
        return {
            "code_digest": self.digest,
            "modules": modules,
            "late_modules": _digests(late),
            "commit": commit,
            "is_dirty": is_dirty,
        }

    def take_late_modules(self) -> dict[str, str]:
        """Return the SHA-256 of each module of the project that was imported since the last call.

        The first call returns those that were imported since `started_fields`.
        """
        names = sys.modules.keys() - self._seen
        self._seen.update(names)
        return _digests(self._of_project(_sources(names)))

    def changes(self, before: Started, late: Mapping[str, str]) -> list[str]:
        """Return the files that have changed since the attempt whose record is `before`.

        `late` are the digests of modules that the attempt imported after its start. Of the other
        modules, only those that are imported now are compared.
        """
        self._late.update(late)
        task = (
            []
            if before.code_digest == self.digest
            else [self._display_path(self.file) if self.file else "the class of the task"]
        )
        files, modules = self._find_late(late) | self._files(), {**before.modules, **late}
        others = _digests({name: files[name] for name in modules.keys() & files.keys()})
        changed = sorted(name for name, digest in others.items() if digest != modules[name])
        return [*task, *(self._display_path(files[name]) for name in changed)]

    def _files(self) -> dict[str, Path]:
        imported = list(sys.modules.items())
        unknown = [name for name, module in imported if _foreign.get(name) is not module]
        return self._of_project(_sources(unknown))

    def _find_late(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the files of modules of the project that may not be imported yet.

        No module is imported, and none is found by an import hook.
        """
        folders = [Path(each or ".") for each in dict.fromkeys((*sys.path, str(self.project)))]
        return self._of_project(
            (name, path) for name in names if (path := _find_source(name, folders)) is not None
        )

    def _of_project(self, sources: Iterable[tuple[str, Path]]) -> dict[str, Path]:
        roots = tuple(
            {
                f"{os.path.realpath(each)}{os.sep}"
                for each in (self.project, Path.cwd())
                if each != each.parent
            }
        )
        return {
            name: path
            for name, path in sources
            if str(path).startswith(roots) and path != self.file
        }

    def _display_path(self, path: Path) -> str:
        above = next(
            (each for each in (self.project, Path.cwd()) if path.is_relative_to(each)), None
        )
        return str(path if above is None else path.relative_to(above))


def _sources(names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of imported modules, except installed, standard and surefoot ones."""
    for name in names:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if module is None or not isinstance(file, str) or name in SCRIPTS:
            continue
        if (path := _user_file(file)) is not None:
            yield name, path
        else:
            _foreign[name] = module


@functools.cache
def _user_file(file: str) -> Path | None:
    """Return the real path of a module's file; None for installed, standard or surefoot ones."""
    if file.startswith(_FOREIGN) or not INSTALLED.isdisjoint(file.split(os.sep)):
        return None  # before the path is resolved, which reads each folder on the way
    path = os.path.realpath(file)
    is_own = not path.startswith(_FOREIGN) and INSTALLED.isdisjoint(path.split(os.sep))
    return Path(path) if is_own else None


def _find_source(name: str, folders: Iterable[Path]) -> Path | None:
    """Return the real path of the source of module `name` in the first folder that has one."""
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)):  # a name in a log can be anything
        return None
    for folder in folders:
        above = folder.joinpath(*parts)
        for path in (above / "__init__.py", above.with_name(f"{parts[-1]}.py")):
            if path.is_file():
                return _user_file(str(path.absolute()))
    return None


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: digest for name, path in files.items() if (digest := _digest(path)) is not None}


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None for a file that is missing or cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def late_modules_after(late: dict[str, str], event: Event) -> dict[str, str]:
    """Return the digests of the modules that the newest attempt has imported after its start.

    `late` are those before `event`, the next record of the log.
    """
    if isinstance(event, Started):
        return dict(event.late_modules)
    return {**late, **event.late_modules} if isinstance(event, Committed) else late


def tell_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a note for Python and for each package whose version has changed."""
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    return [
        f"{name} is version {now[name]}, was {before[name]}: results may differ in the last bits"
        for name in changed
    ]


def tell_commit(before: Started, program: Program) -> list[str]:
    """Return a note if the git commit, or whether a tracked file is modified, has changed."""
    (commit, is_dirty), then = program.commit, before.is_dirty
    if commit is None or before.commit is None:
        return []
    if commit == before.commit and (is_dirty is None or then is None or is_dirty == then):
        return []
    now, was = _describe_commit(commit, is_dirty), _describe_commit(before.commit, then)
    return [f"the git commit of the code is {now}, was {was}"]


def _describe_commit(commit: str, is_dirty: bool | None) -> str:
    return f"{commit[:SHORT]}{' with modified files' if is_dirty else ''}"


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
