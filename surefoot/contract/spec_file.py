"""Read a spec from TOML, with bases, overrides and the origin of each value; write it to TOML."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from surefoot.contract import signature
from surefoot.contract.run_folder import files
from surefoot.contract.spec import (
    ALLOWED,
    RunSpec,
    as_value,
    find_idle_keys,
    find_place,
    leave_out_idle,
    suggest_keys,
)
from surefoot.contract.spec.renamed import RENAMED, current_key, warn_renamed, with_new_names
from surefoot.core.errors import (
    InputError,
    RunFolderError,
    SpecError,
    TaskError,
    hint_nearest,
    hint_unread,
)

FILE = "spec.toml"  # in a run folder
MAX_BYTES = 1 << 20
MAX_BASES = 16
_HEADER = re.compile(r"^\s*\[\[?\s*([^\]]+?)\s*\]\]?")
_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_KEY = re.compile(rf"^\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


@dataclass(frozen=True)
class Origin:
    """A spec and the origin of each value that was given.

    `places` maps a key such as `optim.lr` to an origin such as `mine.toml:7` or `--set optim.lr`.
    It does not contain values that are defaults.
    """

    spec: RunSpec
    places: Mapping[str, str] = field(default_factory=dict)


def builtin_folder() -> Path:
    """Return the folder of the built-in tasks and their recipes, found without importing them."""
    found = importlib.util.find_spec("surefoot")
    if found is None or found.origin is None:
        raise SpecError("the package surefoot cannot be found")
    return Path(found.origin).parent / "tasks"


def builtin_names() -> list[str]:
    return sorted(path.stem for path in builtin_folder().glob("*.toml"))


def read(
    given: str, overrides: Sequence[tuple[str, Any, str]] = (), *, decided: Collection[str] = ()
) -> Origin:
    """Return the spec that `given` names, together with the origin of each value.

    Args:
        given: A TOML file, a built-in task's name, or `file.py:Task`.
        overrides: (key, value, origin) of each override.
        decided: Keys that the calling command sets itself. If a key has no effect only because
            of the values of these keys, it is not refused.

    Raises:
        SpecError: With file, line and the nearest valid name.
    """
    return _build_spec(_tables_of(given, Path.cwd(), depth=0), overrides, decided=decided)


def as_spec(given: RunSpec | Origin | Mapping[str, Any] | str | Path) -> RunSpec:
    """Return the RunSpec that `given` describes: a spec, tables, a TOML file or a task's name.

    Raises InputError for a value of another type, SpecError for an invalid spec.
    """
    match given:
        case RunSpec():
            return given
        case Origin():
            return given.spec
        case str() | Path():
            return read(str(given)).spec
        case Mapping():
            return RunSpec.model_validate(dict(given))
    raise InputError(
        f"the spec is {given!r}",
        hint='give a RunSpec, a TOML file, the name of a task, or tables: {"optim": {"lr": 0.1}}',
    )


def read_written(path: Path | str) -> RunSpec:
    """Return the spec in a file that surefoot wrote for one of its own processes.

    The spec was checked before, so keys without effect are accepted.
    """
    stated = _tables_of(str(path), Path.cwd(), depth=0)
    return _build_spec(stated, (), allowed=find_idle_keys(stated[0])).spec


def read_of_run(
    run: Path,
    overrides: Sequence[tuple[str, Any, str]] = (),
    *,
    task: str | None = None,
    checks_task: bool = True,
) -> Origin:
    """Return the spec of the run in the folder `run`, with the origin of each value.

    `task` (`file.py:Task`) is the new location of the run's task, if it was moved. With
    `checks_task` False, the task may be missing. Raises RunFolderError for a folder that is not a
    run, SpecError for an invalid spec or override, TaskError if the task is missing.
    """
    try:
        files.check_no_link(run, FILE)
    except OSError as error:
        raise RunFolderError(
            f"{run / FILE} cannot be read: {error.strerror}", hint=hint_unread(error)
        ) from None
    if not (run / FILE).is_file():
        from surefoot.contract.run_folder import attached  # no plain run needs it

        raise attached.no_spec(run, FILE)
    tables, places = _tables_of_file((run / FILE).resolve(), depth=0, warns=False)
    if task is not None:
        tables.setdefault("task", {})["use"] = _resolve_use(task, Path.cwd())
        places["task.use"] = "--task"
    try:
        return _build_spec(
            (tables, places), overrides, checks_task=checks_task, allowed=find_idle_keys(tables)
        )
    except TaskError as error:
        hint = (
            "if the task was moved, give its new name: --task FILE:NAME, in Python task='FILE:NAME'"
        )
        raise TaskError(
            f"{run}: {error.message}", hint=error.hint if task is not None else hint
        ) from None


def _build_spec(
    stated: tuple[dict[str, Any], dict[str, str]],
    overrides: Sequence[tuple[str, Any, str]],
    *,
    checks_task: bool = True,
    allowed: Collection[str] = (),
    decided: Collection[str] = (),
) -> Origin:
    """Return the spec of tables with overrides; keys in `allowed` may be without effect.

    `stated` holds the tables and the origin of each value.
    """
    tables, places = stated
    overrides = [
        (current_key(key, origin.partition(" ")[0]), value, origin)
        for key, value, origin in overrides
    ]
    before = find_idle_keys(tables)
    for key, value, origin in overrides:
        _override(tables, places, key, value, origin)
    tables = _drop_overridden_keys(
        tables, places, {*before, *(_short(key) for key, _, _ in overrides)}
    )
    allowed = {*allowed, *(find_idle_keys(tables) - find_idle_keys(tables, decided))}
    try:
        spec = RunSpec.model_validate(tables, context={ALLOWED: allowed})
    except SpecError as error:
        where = find_place(error.key or _key_in(error.message), places)
        raise SpecError(error.message, hint=error.hint, where=where) from None
    if checks_task and spec.task.use is not None:
        signature.check(spec.task.use, spec.task.parameters, places)
    return Origin(spec, places)


def _drop_overridden_keys(
    tables: dict[str, Any], places: dict[str, str], kept: Collection[str]
) -> dict[str, Any]:
    """Return the tables without keys that a later file or flag made ineffective, except `kept`.

    For example, `optim.momentum` has no effect if a later file sets a different optimizer. The
    origins of these keys are removed from `places`.
    """
    made, gone = leave_out_idle(tables, kept)
    for key in gone:
        places.pop(key, None)
    return made


def _short(key: str) -> str:
    return ".".join(key.split(".")[:2])


def _key_in(message: str) -> tuple[str, ...]:
    """Return the table and key that an error message names, as in `schedule.cycle is ...`.

    This is for errors of the schedule, which are raised without a key. If the message names no key,
    the result is `("schedule",)`.
    """
    found = re.search(r"\b([a-z_]+)\.([a-z_]+)\b", message)
    return found.groups() if found else ("schedule",)


def write(spec: RunSpec) -> str:
    """Return `spec` as TOML, from which `read` returns the same spec.

    Values that were not given are left out.
    """
    return tomli_w.dumps(spec.as_tables())


def parse_set(text: str) -> tuple[str, Any, str]:
    """Return (key, value, origin) of the text of `--set table.key=value`.

    The value is parsed as TOML; if it is not valid TOML, it is a string. Raises SpecError for a
    text of a different form.
    """
    key, equals, value = text.partition("=")
    if not equals or key.count(".") < 1 or not all(key.split(".")):
        near = [
            f"{each}={as_value(each, key, value or '...')}"
            for each in suggest_keys(None, key.strip())
        ]
        hint = (
            f"did you mean --set {' or --set '.join(map(shlex.quote, near))}?"
            if near
            else "for example --set optim.lr=0.01"
        )
        raise SpecError(f"--set {text!r} is not table.key=value", hint=hint)
    try:
        return key.strip(), tomllib.loads(f"x = {value}")["x"], f"--set {key.strip()}"
    except (ValueError, RecursionError):
        return key.strip(), value, f"--set {key.strip()}"


def _tables_of(given: str, beside: Path, depth: int) -> tuple[dict[str, Any], dict[str, str]]:
    if depth > MAX_BASES:
        raise SpecError(
            f"{given}: a chain of more than {MAX_BASES} bases",
            hint="check whether a base names itself",
        )
    if not given.strip():
        raise SpecError("the spec is an empty text", hint=_hint_specs())
    file, colon, _ = given.partition(":")
    if colon and (file.endswith(".py") or "/" not in file):
        return {"task": {"use": _resolve_use(given, beside)}}, {"task.use": "the SPEC argument"}
    path = builtin_folder() / f"{given}.toml"
    if given not in builtin_names():
        path = beside / given
    if path.is_dir():
        raise _folder_as_spec(Path(given) if not depth else path)
    if not path.is_file():
        hint = hint_nearest(given, builtin_names())
        raise SpecError(
            f"{given!r} is not a spec: there is no such file and no such built-in task",
            hint=f"{hint}{_hint_specs()}",
        )
    return _tables_of_file(path, depth)


def _folder_as_spec(folder: Path) -> SpecError:
    """Return the error for a folder that was given as a spec.

    For the folder of a run, the hint is a command that accepts it.
    """
    from surefoot.contract.run_folder import attached  # no plain run needs it

    with contextlib.suppress(OSError):  # a folder of another user
        if (folder / FILE).is_file():
            return SpecError(
                f"{folder} is a run folder, not a spec",
                hint=(
                    f"surefoot resume {shlex.quote(str(folder))} resumes that run; its spec is "
                    f"{shlex.quote(str(folder / FILE))}"
                ),
            )
        if (found := attached.explain(folder, FILE)) is not None:
            return SpecError(found[0], hint=found[1])
    return SpecError(
        f"{str(folder)!r} is not a spec: it is a folder",
        hint=_hint_specs(),
    )


def _hint_specs() -> str:
    return f"give a TOML file, file.py:Task, or one of {', '.join(builtin_names())}"


def _tables_of_file(
    path: Path, depth: int, *, warns: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    text = _read_text(path)
    try:
        stated = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # tomllib lets through errors of huge integers and of deep nesting
        ways = (
            signature.suggest_class(path)
            if path.suffix == ".py"
            else "surefoot init NEW writes a spec that runs"
        )
        raise SpecError(
            f"{path} is not valid TOML, the format of a spec: {error}", hint=ways
        ) from None
    lines = _lines(text)
    stated = _with_new_names(stated, path.name, lines, warns=warns)
    base = stated.pop("base", None)
    kept = {
        f"{table}.{key}" for table, keys in stated.items() if isinstance(keys, dict) for key in keys
    }
    tables: dict[str, Any] = {}
    places: dict[str, str] = {}
    if base is not None:
        if not isinstance(base, str):
            raise SpecError(
                f"base must be a string; got {base!r}",
                hint='base = "other.toml"',
                where=f"{path.name}:{lines.get('base', 1)}",
            )
        tables, places = _tables_of(base, path.parent, depth + 1)
        kept |= find_idle_keys(tables)
    _make_paths_absolute(stated, path.parent)
    for table, keys in stated.items():
        if not isinstance(keys, dict):
            near = " or ".join(
                f"{name} under [{of}]"
                for of, name in (each.split(".") for each in suggest_keys(None, table))
            )
            raise SpecError(
                f"{table!r} is outside of a table",
                hint=f"did you mean {near}?"
                if near
                else f"put {table!r} in a table, such as [train]",
                where=f"{path.name}:{lines.get(table, 1)}",
            )
        into = tables.setdefault(table, {})
        if table == "task" and "use" in keys and keys["use"] != into.get("use"):
            into.clear()  # another task has other parameters
        for key, value in keys.items():
            into[key] = value
            line = lines.get(f"{table}.{key}", lines.get(table, 1))
            places[f"{table}.{key}"] = f"{path.name}:{line}"
        # for what is wrong with the table as a whole
        places[table] = f"{path.name}:{lines.get(table, 1)}"
    return (tables if base is None else _drop_overridden_keys(tables, places, kept)), places


def _with_new_names(
    stated: dict[str, Any], file: str, lines: dict[str, int], *, warns: bool
) -> dict[str, Any]:
    """Return the tables of a file with the current names of their keys.

    The current names are added to `lines`, which maps keys to line numbers. With `warns`, there is
    a warning for each old name.
    """
    try:
        made, previous = with_new_names(stated)
    except SpecError as error:
        place = find_place(error.key or (), {key: f"{file}:{line}" for key, line in lines.items()})
        raise SpecError(error.message, hint=error.hint, where=place) from None
    for old in previous:
        line = lines.get(old, lines.get(old.partition(".")[0], 1))
        lines[RENAMED[old]] = line
        if warns:
            warn_renamed(old, f"{file}:{line}")
    return made


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path} is larger than 1 MiB, which no spec is")
        # with or without the byte order mark that editors on Windows write
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError(
            f"{path} is not UTF-8 text", hint="save the spec as UTF-8: a spec is a TOML file"
        ) from None
    except OSError as error:
        raise SpecError(
            f"{path} cannot be read: {error.strerror}", hint=hint_unread(error)
        ) from None


def _lines(text: str) -> dict[str, int]:
    """Return the line number of each `table.key`, which tomllib does not provide."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = header.group(1).replace('"', "").replace(" ", "")
            found.setdefault(table, number)
            outer, _, inner = table.partition(".")
            if inner:
                found.setdefault(f"{outer}.{inner.split('.')[0]}", number)
        elif key := _KEY.match(line):
            name = key.group(1).replace('"', "").replace("'", "").replace(" ", "")
            dotted = f"{table}.{name}" if table else name
            found.setdefault(".".join(dotted.split(".")[:2]), number)
            if not table:
                found.setdefault(name.split(".")[0], number)
    return found


def _make_paths_absolute(stated: dict[str, Any], beside: Path) -> None:
    task, data = stated.get("task"), stated.get("data")
    if isinstance(task, dict) and isinstance(task.get("use"), str):
        task["use"] = _resolve_use(task["use"], beside)
    if isinstance(data, dict) and isinstance(data.get("folder"), str):
        data["folder"] = str((beside / Path(data["folder"]).expanduser()).resolve())


def _resolve_use(use: str, beside: Path) -> str:
    file, colon, name = use.partition(":")
    if not colon or not file.endswith(".py"):
        return use
    return f"{(beside / Path(file).expanduser()).resolve()}:{name}"


def _override(
    tables: dict[str, Any], places: dict[str, str], key: str, value: Any, origin: str
) -> None:
    table, *inner = key.split(".")
    into = tables.setdefault(table, {})
    if table == "task" and inner == ["use"]:
        into.clear()
        value = _resolve_use(value, Path.cwd()) if isinstance(value, str) else value
    if table == "data" and inner == ["folder"] and isinstance(value, str):
        value = str(Path(value).expanduser().resolve())
    for part in inner[:-1]:
        into = into.setdefault(part, {})
        if not isinstance(into, dict):
            raise SpecError(f"{key}: {part} is not a table", where=origin)
    into[inner[-1]] = value
    places[f"{table}.{inner[0]}"] = origin


def rows(origin: Origin) -> list[tuple[str, Any, str]]:
    """Return every value of a spec as (key, value, origin); defaults have the origin "default"."""
    dumped = origin.spec.model_dump(mode="python")
    dumped["task"] = {"use": origin.spec.task.use, **origin.spec.task.parameters}
    dumped["schedule"] = origin.spec.schedule.used_keys()
    known = signature.find_parameters(origin.spec.task.use) if origin.spec.task.use else None
    for parameter in known or ():
        if (
            parameter.has_default
            and parameter.name not in dumped["task"]
            and parameter.name != "folder"
        ):
            dumped["task"][parameter.name] = _literal(parameter.default_text)
    return [
        (f"{table}.{key}", value, origin.places.get(f"{table}.{key}", "default"))
        for table, keys in dumped.items()
        for key, value in keys.items()
    ]


def _literal(text: str | None) -> Any:
    try:
        return ast.literal_eval(text or "None")
    except (ValueError, SyntaxError):
        return text
