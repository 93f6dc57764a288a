"""docs/reference holds what the code has, row for row: keys of a spec and fields of an event."""

from __future__ import annotations

import pytest

from tests.cli import reference


@pytest.mark.parametrize("table", reference.spec_rows())
def test_the_table_of_the_spec_is_documented_key_by_key(table: str) -> None:
    section = reference.sections(reference.SPEC)[f"[{table}]"]
    assert reference.table_rows(section) == reference.spec_rows()[table]


def test_the_schedules_are_documented_with_their_defaults() -> None:
    section = reference.sections(reference.SPEC)["[schedule]"]
    assert reference.table_rows(section) == [*reference.curve_rows(), *reference.schedule_rows()]


def test_every_table_has_its_place_and_none_is_made_up() -> None:
    found = reference.sections(reference.SPEC)
    documented = {title.strip("[]") for title in found if title.startswith("[")}
    assert documented == {*reference.spec_rows(), "schedule"}


def test_the_keys_that_need_others_and_the_formulas_are_documented_row_for_row() -> None:
    found = reference.sections(reference.SPEC)
    assert reference.table_rows(found["Keys that need others"]) == reference.effect_rows()
    assert reference.table_rows(found["Formulas"]) == reference.formula_rows()


def test_every_key_says_what_it_means() -> None:
    rows = [row for rows in reference.spec_rows().values() for row in rows]
    assert [row for row in rows if row.endswith("|  |")] == []


TYPES = {
    "int": "integer",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "bool | None": "true, false or null",
    "int | None": "integer or null",
    "float | None": "number or null",
    "str | None": "text or null",
    "tuple[str, ...]": "list of texts",
    "tuple[float, ...]": "list of numbers",
    "tuple[Mapping[str, Any], ...]": "list of objects",
}


@pytest.mark.parametrize("kind", reference.event_fields())
def test_the_record_is_documented_field_by_field(kind: str) -> None:
    section = reference.sections(reference.EVENTS)[kind or "every record"].partition("\n### ")[0]
    rows = [row.split(" | ") for row in reference.table_rows(section)]
    documented = {row[0].strip("| `"): row[1] for row in rows}
    written = {
        name: "object" if type_.startswith("Mapping") else TYPES[type_]
        for name, type_ in reference.event_fields()[kind].items()
    }
    assert documented == (written if kind else {"v": "integer", "kind": "text", **written})
