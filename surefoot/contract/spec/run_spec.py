"""RunSpec: the specification of a run as one immutable, checked value.

This module reads no files. `spec_file` reads a spec from TOML, with bases and overrides, and
records the origin of each value.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from surefoot.contract.spec import synonyms
from surefoot.contract.spec.effects import Read, describe, find_idle
from surefoot.contract.spec.execution import (
    CompileTable,
    LayoutTable,
    LoaderTable,
    MemoryTable,
    NcclTable,
    PrecisionTable,
)
from surefoot.contract.spec.renamed import (
    warn_renamed,
    with_new_names,
    with_previous_names,
)
from surefoot.contract.spec.training import (
    CheckpointTable,
    DataTable,
    EvaluateTable,
    FaultTable,
    ObserveTable,
    OptimTable,
    StabilityTable,
    TaskTable,
    TrainTable,
)
from surefoot.contract.spec.values import SpecTable, show
from surefoot.core.errors import SpecError, hint_nearest
from surefoot.core.schedule.plan import ScheduleSettings
from surefoot.core.schedule.settings import DURATIONS

FORMAT = 1
ALLOWED = "allowed"  # in the context of a validation: keys that may have no effect
SEQUENCE = "schedule.sequence"
IN_TOML = {"a valid string": "a string in quotes", "a valid tuple": "an array, in brackets"}


def _read_schedule(given: Any) -> Any:
    """Return a [schedule] table as ScheduleSettings; a value that is not a table is unchanged.

    The table is validated as JSON, because there pydantic's strict mode accepts arrays and nested
    tables.
    """
    if not isinstance(given, Mapping):
        return given
    try:
        return _SCHEDULE.validate_json(json.dumps(given))
    except ValidationError as error:
        raise explain(error, prefix=("schedule",)) from None
    except TypeError:
        raise SpecError(
            "schedule holds a TOML value of an unsupported type, such as a date",
            hint='write a duration as a string, such as "5 epochs"',
        ) from None


_SCHEDULE = TypeAdapter(ScheduleSettings)
ScheduleTable = Annotated[ScheduleSettings, BeforeValidator(_read_schedule)]


class RunSpec(SpecTable):
    """Specification of a run, such as `RunSpec(task={"use": "digits"}, train={"batch": 64})`.

    The arguments are the tables of a spec; docs/reference/spec.md lists their keys.

    Raises:
        SpecError: For a key or value that is not allowed.
    """

    task: TaskTable = TaskTable()
    data: DataTable = DataTable()
    loader: LoaderTable = LoaderTable()
    optim: OptimTable = OptimTable()
    schedule: ScheduleTable = ScheduleSettings()
    train: TrainTable = TrainTable()
    evaluate: EvaluateTable = EvaluateTable()
    precision: PrecisionTable = PrecisionTable()
    compile: CompileTable = CompileTable()
    memory: MemoryTable = MemoryTable()
    layout: LayoutTable = LayoutTable()
    nccl: NcclTable = NcclTable()
    checkpoint: CheckpointTable = CheckpointTable()
    stability: StabilityTable = StabilityTable()
    observe: ObserveTable = ObserveTable()
    fault: FaultTable = FaultTable()

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(with_tuples(_renamed(given)))
        except ValidationError as error:
            raise explain(error) from None

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Self:
        _check_effects(self, allowed=(info.context or {}).get(ALLOWED, ()))
        if self.memory.update_in_backward:
            _check_update_in_backward(self)
        _check_plateau(self)
        return self

    @classmethod
    def of_record(cls, tables: Mapping[str, Any]) -> RunSpec:
        """Return the spec from the tables that a run recorded. Raises SpecError.

        Old names of keys, and keys without effect, are accepted, because earlier versions accepted
        them.
        """
        current, _ = with_new_names(tables)
        return cls.model_validate(current, context={ALLOWED: find_idle_keys(current)})

    def replace(self, **tables: Mapping[str, Any]) -> RunSpec:
        """Return this spec with some keys changed: `spec.replace(optim={"lr": 0.1})`.

        Keys that have no effect with the new values, such as those of the previous optimizer, are
        left out. Raises SpecError.
        """
        tables, before = _renamed(tables), self.as_tables()
        merged = {
            **before,
            **{name: {**before.get(name, {}), **table} for name, table in tables.items()},
        }
        return self.replace_all(
            merged, [f"{name}.{key}" for name, table in tables.items() for key in table]
        )

    def replace_all(self, tables: Mapping[str, Any], changed: Collection[str] = ()) -> RunSpec:
        """Return the spec of `tables`, which differ from this spec only in the keys `changed`.

        Other keys that have no effect with the new values are left out. Raises SpecError.
        """
        known = find_idle_keys(self.as_tables())
        kept, _ = leave_out_idle(tables, {*known, *changed})
        return RunSpec.model_validate(kept, context={ALLOWED: known})

    def as_tables(self) -> dict[str, Any]:
        """Return the values that were given explicitly, as plain dicts.

        A given value that equals its default is included, because it may take precedence over the
        task.
        """
        tables = self.model_dump(exclude_defaults=True, mode="python")
        for name in (name for name in RunSpec.model_fields if name in self.model_fields_set):
            table = getattr(self, name)
            stated = (
                table.model_dump(exclude_unset=True, exclude_none=True)
                if isinstance(table, SpecTable)
                else {"name": table.name}
            )
            tables[name] = {**stated, **tables.get(name, {})}
        return {name: table for name, table in tables.items() if table}

    @property
    def id(self) -> str:
        """Hash of the values that can change the training, as twelve hex digits.

        It does not depend on comments, the order of keys, the folders of task file and data, the
        tables observe, checkpoint, memory, compile, loader and nccl, the layout of the ranks
        (except compression and virtual ranks), the device, and settings of speed such as the number
        of threads.
        """
        tables = self.model_dump(exclude_defaults=True, mode="python")
        if self.task.use is not None:
            file, colon, name = self.task.use.partition(":")
            tables["task"]["use"] = f"{PurePath(file).name}{colon}{name}"
        for table in ("observe", "checkpoint", "memory", "compile", "loader", "nccl"):
            tables.pop(table, None)
        tables["layout"] = {
            key: value
            for key, value in tables.get("layout", {}).items()
            if key.startswith(("compress", "virtual"))
        }
        tables.get("data", {}).pop("folder", None)
        for key in ("threads", "device", "keep_freed_memory", "cudnn_benchmark", "attention"):
            tables.get("train", {}).pop(key, None)
        tables = {table: keys for table, keys in tables.items() if keys}
        text = json.dumps({"format": FORMAT, **with_previous_names(tables)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _renamed(given: Any) -> Any:
    """Return tables with the current names of keys; warn of each old name."""
    if not isinstance(given, Mapping):
        return given
    made, old = with_new_names(given)
    for key in old:
        warn_renamed(key)
    return made


def _read_from(tables: Mapping[str, Any]) -> Read:
    """Return a function that returns the value of a key in `tables`, or else its default.

    `tables` are plain dicts, or the tables of a spec.
    """

    def read(key: str) -> Any:
        table, name = key.split(".")
        given = tables.get(table, {})
        if isinstance(given, Mapping):
            return with_tuples(given[name]) if name in given else _default_of(key)
        return getattr(given, name, None)

    return read


def _readers(tables: Mapping[str, Any]) -> Iterator[tuple[int, Read]]:
    """Yield (number, reader): 0 for the tables, 1, 2 ... for the curves of schedule.sequence.

    A reader returns the value of a key. That of a curve reads the curve as if it were [schedule].
    """
    read = _read_from(tables)
    yield 0, read
    pieces = read(SEQUENCE)  # any value: nothing has been checked yet
    for number, piece in enumerate(pieces if isinstance(pieces, tuple) else (), 1):
        yield number, _read_from({"schedule": piece})


def _default_of(key: str) -> Any:
    table, name = key.split(".")
    return getattr(RunSpec.model_fields[table].default, name)


def find_idle_keys(tables: Mapping[str, Any], decided: Collection[str] = ()) -> set[str]:
    """Return the keys in `tables` (plain dicts) that have no effect with the values of other keys.

    `decided` are keys that the command sets itself. `schedule.sequence` is in the result if a key
    of one of its curves has no effect.
    """
    return {
        SEQUENCE if number else key
        for number, read in _readers(tables)
        for key in find_idle(read, _default_of, () if number else decided)
    }


def leave_out_idle(
    tables: Mapping[str, Any], kept: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the tables without the keys that have no effect, and a list of the removed keys.

    Keys in `kept` are not removed.
    """
    made, gone = (
        {
            name: dict(table) if isinstance(table, Mapping) else table
            for name, table in tables.items()
        },
        [],
    )
    while found := sorted(find_idle_keys(made) - {*kept, SEQUENCE}):
        for key in found:
            table, name = key.split(".")
            del made[table][name]
        gone += found
    return made, gone


def _check_effects(spec: RunSpec, allowed: Collection[str]) -> None:
    """Raise SpecError for a key that is given but has no effect, unless it is in `allowed`."""
    for number, read in _readers(vars(spec)):
        where = f"table {number} of {SEQUENCE}: " if number else ""
        for key, need in find_idle(read, _default_of).items():
            given = SEQUENCE if number else key
            if given not in allowed:
                message, hint = describe(key, need, read, _default_of)
                raise SpecError(f"{where}{message}", hint=hint, key=tuple(given.split(".")))


def _check_plateau(spec: RunSpec) -> None:
    """Raise SpecError for a schedule that waits for scores of which there are none."""
    if spec.evaluate.every == "never" and spec.schedule.name == "plateau":
        raise SpecError(
            'evaluate.every is "never", and schedule.name = "plateau" lowers the learning rate '
            "when the score no longer improves",
            hint="give evaluate.every an interval, or use another schedule",
        )


def _check_update_in_backward(spec: RunSpec) -> None:
    """Raise SpecError for a setting that cannot be used with memory.update_in_backward.

    Such a setting needs all gradients at once.
    """
    train, optim = spec.train, spec.optim
    reasons = (
        (
            train.microbatch not in (None, train.batch) or train.accumulate > 1,
            "the gradients of several microbatches are summed first",
            f"leave train.{'accumulate' if train.accumulate > 1 else 'microbatch'} out",
        ),
        (
            spec.memory.on_oom == "halve",
            "half a batch would be one of several microbatches",
            "leave memory.on_oom out",
        ),
        (bool(train.ramp), "a batch that grows is cut into microbatches", "leave train.ramp out"),
        (
            bool(optim.clip),
            f"optim.{show(optim, 'clip')} needs the norm of all gradients",
            "set optim.clip = 0",
        ),
        (
            optim.clip_value is not None,
            "optim.clip_value clips all gradients at once",
            "leave optim.clip_value out",
        ),
        (
            optim.name not in ("sgd", "adam", "adamw"),
            f"optim.name = {optim.name!r} updates all parameters at once",
            'set optim.name = "adamw"',
        ),
        (
            spec.precision.weights == "bf16" and spec.precision.master == "fp32",
            "master weights collect the gradients of all weights first",
            'set precision.weights = "fp32"',
        ),
        (
            not optim.fused,
            "the update of a single parameter already uses a fused kernel",
            "leave optim.fused out",
        ),
        (
            spec.stability.nonfinite == "skip",
            "a partly applied step cannot be skipped",
            'set stability.nonfinite = "stop"',
        ),
    )
    for applies, reason, hint in reasons:
        if applies:
            raise SpecError(
                f"memory.update_in_backward cannot be combined with this spec: {reason}",
                hint=hint,
                key=("memory", "update_in_backward"),
            )


def with_tuples(value: Any) -> Any:
    """Convert TOML arrays to tuples, recursively.

    The spec is immutable, and pydantic's strict mode distinguishes lists from tuples.
    """
    if isinstance(value, Mapping):
        return {key: with_tuples(part) for key, part in value.items()}
    return tuple(with_tuples(part) for part in value) if isinstance(value, list | tuple) else value


def key_names(table: str | None) -> list[str]:
    """Return the valid keys of `table`; for None, the names of the tables."""
    if table is None:
        return list(RunSpec.model_fields)
    field = RunSpec.model_fields.get(table)
    kind = field.annotation if field else None
    if kind is ScheduleSettings:
        return [each.name for each in fields(ScheduleSettings)]
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def explain(error: ValidationError, prefix: tuple[str, ...] = ()) -> SpecError:
    """Return a SpecError for the first fault in a pydantic error, with the nearest valid name.

    `prefix` is the path of the validated value in the spec. The attribute `key` of the result is
    the path of the fault.
    """
    faults = error.errors()
    fault = faults[0]
    path = _find_key(fault, prefix)
    given, kind = fault.get("input"), fault["type"]
    dotted = ".".join(path)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown_key(path, given)
    if kind == "missing":
        hint = (
            'a spec needs at least [task] use = "digits"'
            if len(path) < 3
            else f"{'.'.join(path[:2])} needs more values"
        )
        return SpecError(f"{dotted} is not given", hint=hint, key=path)
    if kind == "string_unicode":
        hint = (
            "TOML is UTF-8: rename the file or folder; or, if its name is UTF-8 and "
            "this terminal is not, set LC_ALL=C.UTF-8"
        )
        return SpecError(f"{dotted} is {given!r}, which is not UTF-8 text", hint=hint, key=path)
    if kind == "value_error":
        text, _, hint = str(fault["msg"]).removeprefix("Value error, ").partition("; ")
        if len(path) == 1:
            named = next((word for word in text.split() if word in key_names(dotted)), None)
            return SpecError(
                f"[{dotted}] {text}",
                hint=hint or None,
                key=path if named is None else (dotted, named),
            )
        return SpecError(f"{dotted}: {text}", hint=hint or None, key=path)
    # a key that accepts several types has a fault for each
    of_key = (str(each["msg"]) for each in faults if _find_key(each, prefix) == path)
    allowed = " or ".join(dict.fromkeys(map(_describe_allowed, of_key)))
    for name, words in IN_TOML.items():
        allowed = allowed.replace(name, words)
    options = re.findall(r"'([^']*)'", allowed) if kind == "literal_error" else []
    near = synonyms.hint_value(dotted, str(given), options)
    if path[:1] == ("schedule",) and path[-1] in DURATIONS:
        allowed = 'a number with its unit in quotes: "500 steps", "2 epochs", "5 %"'
    is_entry = dotted == "optim.lr_multipliers" and len(fault["loc"]) > 2 - len(prefix)
    entry = f" for {fault['loc'][2 - len(prefix)]!r}" if is_entry else ""
    should = "it should" if allowed.startswith("have ") else "it should be"
    return SpecError(f"{dotted} is {given!r}{entry}", hint=f"{near}{should} {allowed}", key=path)


def _describe_allowed(message: str) -> str:
    """Return what a message of pydantic allows, without its names of types.

    >>> _describe_allowed("Tuple should have at most 2 items after validation, not 3")
    'have at most 2 items, not 3'
    """
    allowed = message.removeprefix("Input should be ").replace(" after validation", "")
    return re.sub(r"^[A-Z]\w+ should (?=have )", "", allowed)


def _find_key(fault: Mapping[str, Any], prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of a fault: table, key and list index.

    Pydantic's names of union members are left out.
    """
    path = (*prefix, *map(str, fault["loc"]))
    return (*path[:2], *(part for part in path[2:] if part.isdigit()))


def find_place(key: Sequence[str], places: Mapping[str, str]) -> str | None:
    """Return where `key` was given, or else where the table around it was; None if unknown."""
    for length in range(len(key), 0, -1):
        dotted = ".".join(key[:length])
        if dotted in places:
            return places[dotted]
        inside = [place for name, place in places.items() if name.startswith(f"{dotted}.")]
        if inside:
            return inside[0].rpartition(":")[0] or inside[0]
    return None


def suggest_keys(table: str | None, key: str) -> list[str]:
    """Return the valid dotted keys that the user may mean by `table.key`, or by `key` alone."""
    return synonyms.suggest(table, key, {each: key_names(each) for each in key_names(None)})


def _unknown_key(path: tuple[str, ...], given: object) -> SpecError:
    key = path[-1]
    if len(path) == 1:
        names = key_names(None)
        hint = hint_nearest(synonyms.TABLES.get(key.lower(), key), names, 0.5)
        return SpecError(
            f"{key!r} is not a table", hint=f"{hint}allowed: {', '.join(names)}", key=path
        )
    table = path[0]
    found = [
        (each.removeprefix(f"{table}."), synonyms.as_value(each, key, str(given)))
        for each in suggest_keys(table, key)
    ]
    words = [
        repr(name) if value == str(given) else f'{name!r}, as in {name} = "{value}"'
        for name, value in found
    ]
    hint = f"did you mean {' or '.join(words)}? " if words else ""
    return SpecError(
        f"{key!r} is not a key in [{table}]",
        hint=f"{hint}allowed: {', '.join(key_names(table))}",
        key=path,
    )
