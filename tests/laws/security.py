"""SECURITY.md promises nothing without a test."""

from __future__ import annotations

import re
from pathlib import Path

from tests.laws.features import is_a_test
from tests.laws.tree import Violation

PAGE = "SECURITY.md"


def promises(root: Path) -> list[Violation]:
    """Each row below `What holds today` names a test that exists."""
    text = (root / PAGE).read_text(encoding="utf-8") if (root / PAGE).is_file() else ""
    section = text.partition("\n## What holds today\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    if not rows:
        return [Violation(PAGE, "promises nothing under `What holds today`")]
    found = []
    for row in rows:
        tests = re.findall(r"`(tests/[^`]+)`", row)
        if not tests:
            found.append(Violation(PAGE, f"promises without a test: {row}"))
        found += [
            Violation(PAGE, f"there is no test {test}")
            for test in tests
            if not is_a_test(root, test)
        ]
    return found
