"""The rows that docs/reference/spec.md and events.md must hold, made from the code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from surefoot.contract import events
from surefoot.contract.spec import RunSpec, SpecTable, effects, formulas
from surefoot.core.schedule.settings import USES, ScheduleSettings

ROOT = Path(__file__).resolve().parents[2]
SPEC, EVENTS, CLI = (
    ROOT / "docs" / "reference" / name for name in ("spec.md", "events.md", "cli.md")
)
WARM = ("warmup", "warmup_shape", "warmup_start")


def spec_rows() -> dict[str, list[str]]:
    """Table -> its rows: `| key | values | default | meaning |`."""
    found = {}
    for name, field in RunSpec.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, SpecTable):
            schema = kind.model_json_schema()["properties"]
            found[name] = [
                _spec_row(key, each, schema[key]) for key, each in kind.model_fields.items()
            ]
    return found


def _spec_row(key: str, field: Any, schema: Mapping[str, Any]) -> str:
    is_duration = "_canonical_duration" in repr((field.annotation, field.metadata))
    default = field.get_default(call_default_factory=True)
    meaning = (field.description or "").replace("|", r"\|")
    return f"| `{key}` | {_values(schema, is_duration)} | {_toml(default)} | {meaning} |"


def _values(schema: Mapping[str, Any], is_duration: bool) -> str:
    if "anyOf" in schema:
        return " or ".join(
            _values(one, is_duration) for one in schema["anyOf"] if one.get("type") != "null"
        )
    if "const" in schema:
        return _toml(schema["const"])
    if "enum" in schema:
        return ", ".join(_toml(one) for one in schema["enum"])
    if is_duration:
        return "list of durations" if schema["type"] == "array" else "duration"
    if schema["type"] == "array":
        inside = schema.get("prefixItems") or [schema["items"]]
        if inside[0].get("type") == "array":
            return "list of pairs"
        return f"list of {len(inside)} numbers" if "prefixItems" in schema else "list of texts"
    names = {
        "integer": "integer",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "object": "table of numbers",
    }
    if schema["type"] == "object" and "propertyNames" in schema:
        return (
            f"table of {_values(schema['propertyNames'], False)} to "
            f"{_values(schema['additionalProperties'], False)}"
        )
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    limits = [f"{sign} {schema[limit]:g}" for limit, sign in signs.items() if limit in schema]
    return " ".join([names[schema["type"]], ", ".join(limits)]).strip()


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def schedule_rows() -> list[str]:
    """`| key | meaning |` of each key of [schedule]."""
    return [
        f"| `{each.name}` | {each.metadata['description']} |" for each in fields(ScheduleSettings)
    ]


def curve_rows() -> list[str]:
    """`| curve | the keys it uses, with their defaults | the same for the warm-up |`."""
    rows = []
    for name, uses in USES.items():
        stated = {
            key: f"`{key}`" if value is None else f"`{key} = {json.dumps(value)}`"
            for key, value in uses.items()
        }
        warm = "yes" if "warmup" in uses else "no"
        keys = ", ".join(text for key, text in stated.items() if key not in WARM)
        rows.append(f"| `{name}` | {keys} | {warm} |")
    return rows


def effect_rows() -> list[str]:
    """`| keys | what they need | why |` of each row of the table of keys that need others."""
    return [
        f"| {', '.join(f'`{key}`' for key in need.keys)} | "
        f"{' or '.join(map(_condition, need.any_of))} | {need.why} |"
        for need in effects.NEEDS
    ]


def _condition(when: effects.When) -> str:
    if when.is_not:
        return (
            f"`{when.key}`"
            if when.values == (None,)
            else f"`{when.key}` other than `{json.dumps(when.values[0])}`"
        )
    return f"`{when.key}` = {' or '.join(f'`{json.dumps(value)}`' for value in when.values)}"


def formula_rows() -> list[str]:
    """`| key | with | formula |`."""
    return [f"| `{each.key}` | {each.applies} | `{each.text}` |" for each in formulas.FORMULAS]


def event_fields() -> dict[str, dict[str, str]]:
    """Kind -> its own fields, each with its type; what every record has stands apart under ''."""
    shared = {each.name for each in fields(events.Event)}
    found = {"": {each.name: str(each.type) for each in fields(events.Event)}}
    for kind, made in events.KINDS.items():
        found[kind] = {
            each.name: str(each.type) for each in fields(made) if each.name not in shared
        }
    return found


def optional_fields() -> set[str]:
    """`kind.field` of what a record of an older version may lack."""
    return {
        f"{kind}.{each.name}"
        for kind, made in events.KINDS.items()
        for each in fields(made)
        if each.default is not MISSING or each.default_factory is not MISSING
    }


def sections(path: Path, level: str = "##") -> dict[str, str]:
    """Heading -> the text below it."""
    parts = re.split(rf"^{level} (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table_rows(text: str) -> list[str]:
    """The body rows of every table in a text."""
    return [line for line in text.splitlines() if re.match(r"^\| `", line)]
