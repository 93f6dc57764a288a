"""Renamed keys of a spec; their old names are read until the next release.

The id of a spec is computed with the old names, so that the id of a run does not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from surefoot.core.errors import RenamedKeyWarning, SpecError

RENAMED: Mapping[str, str] = {
    "optim.decay": "optim.weight_decay",
    "optim.trust": "optim.trust_coefficient",
    "optim.rates": "optim.lr_multipliers",
    "memory.recompute": "memory.activation_checkpointing",
    "layout.stage": "layout.zero_stage",
    "layout.bucket": "layout.bucket_size",
    "layout.first_bucket": "layout.first_bucket_size",
    "layout.stall": "layout.hang_timeout",
}
PREVIOUS: Mapping[str, str] = {new: old for old, new in RENAMED.items()}


def with_new_names(tables: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return tables in which each key has its current name, and a list of the old names found.

    Raises SpecError if a key is given by both names.
    """
    made, found = dict(tables), []
    for old, new in RENAMED.items():
        table, key = old.split(".")
        given = made.get(table)
        if not isinstance(given, Mapping) or key not in given:
            continue
        name = new.partition(".")[2]
        if name in given:
            raise SpecError(
                f"{old} is the previous name of {new}, and both are given",
                hint=f"leave {old} out",
                key=(table, key),
            )
        made[table] = {name if each == key else each: value for each, value in given.items()}
        found.append(old)
    return made, found


def with_previous_names(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables in which each key has the name that it had in the previous release."""
    return {
        table: {
            PREVIOUS.get(f"{table}.{key}", f"{table}.{key}").partition(".")[2]: value
            for key, value in keys.items()
        }
        for table, keys in tables.items()
    }


def current_key(key: str, place: str = "") -> str:
    """Return the current name of a dotted key, such as `optim.lr`; warn if `key` is an old name.

    `place` is where the key was given, for the warning.
    """
    old = ".".join(key.split(".")[:2])
    if old not in RENAMED:
        return key
    warn_renamed(old, place)
    return RENAMED[old] + key[len(old) :]


def warn_renamed(old: str, place: str = "") -> None:
    """Warn that `old` is an old name of a key; `place` is where it was given."""
    where = f"{place}: " if place else ""
    text = f"{where}{old} is now {RENAMED[old]}; the next release will not read {old}"
    warnings.warn(text, RenamedKeyWarning, stacklevel=5)
