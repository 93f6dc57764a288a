"""docs/reference/models.md has a row for each model that is compared, in order, and no other."""

from __future__ import annotations

import pytest

from tests.models import operators, table


def test_the_page_has_a_row_for_each_case() -> None:
    operators.declare()
    for package in table.MODULES:
        pytest.importorskip(
            package, reason=f"needs {package}: the extra models", exc_type=ImportError
        )
    rows = table.read_rows()
    assert list(rows) == [(package, name) for package, name, _ in table.cases()]
    bounds = [f"| {case.bound:g} |" for _, _, case in table.cases()]
    assert all(line.endswith(bound) for line, bound in zip(rows.values(), bounds, strict=True))
