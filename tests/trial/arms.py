"""Small arms for the tests: the bare interpreter with a line of code.

No package is loaded, so that each starts in a moment.
"""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.trial import Arm

REPORTS = (
    "import json, sys; json.dump({{'version': 1, 'measures': {measures}, "
    "'facts': {{}}}}, open(sys.argv[1], 'w'))"
)


def code_arm(
    name: str, code: str, *, timeout_s: float = 60.0, ranks: int = 1, folder: Path | None = None
) -> Arm:
    """An arm that runs `code`; its report file, for code that writes one, is sys.argv[1]."""
    words = (sys.executable, "-I", "-S", "-c", code, *(["{report}"] if "argv[1]" in code else []))
    return Arm(name=name, command=words, timeout_s=timeout_s, ranks=ranks, folder=folder or Path())


def telling_arm(name: str, measures: str, **options: float) -> Arm:
    """An arm that reports the dict that the expression `measures` gives."""
    return code_arm(
        name, REPORTS.format(measures=measures), timeout_s=options.get("timeout_s", 60.0)
    )
