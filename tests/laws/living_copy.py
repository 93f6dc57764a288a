"""docs/architecture.md is kept true.

Its rooms stand, the rooms that stand are in it, and so is every dependency.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.laws.features import is_a_test
from tests.laws.imports import NESTED
from tests.laws.tree import Violation

COPY = "docs/architecture.md"
BY_MODULE = ("core", "contract")  # rooms told file by file


def rooms(root: Path) -> list[Violation]:
    """Every room (every module of core and contract) has its line.

    A line that does not begin with `later` stands.
    """
    told = dict(
        re.findall(r"^\| `([a-z_/]+)` \| (.+) \|$", _section(root, "The rooms"), re.MULTILINE)
    )
    real = _rooms(root / "surefoot")
    found = [
        Violation(COPY, f"has no line for the room {name}") for name in sorted(real - told.keys())
    ]
    found += [
        Violation(COPY, f"the room {name} is told as later, and stands")
        for name in sorted(real & told.keys())
        if told[name].startswith("later")
    ]
    return found + [
        Violation(COPY, f"the room {name} is told, and does not stand")
        for name, what in told.items()
        if name not in real and not what.startswith("later")
    ]


def dependencies(root: Path) -> list[Violation]:
    """Every package of pyproject.toml has a line that says why it is here.

    No line names another package.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    every = [
        *project["dependencies"],
        *(one for extra in project.get("optional-dependencies", {}).values() for one in extra),
    ]
    real = {re.split(r"[^A-Za-z0-9_-]", one)[0] for one in every} - {"surefoot"}
    told = set(
        re.findall(
            r"^\| `([A-Za-z0-9_-]+)` \| [a-z]* ?\| .+ \|$",
            _section(root, "Dependencies"),
            re.MULTILINE,
        )
    )
    found = [Violation(COPY, f"does not say why {name} is needed") for name in sorted(real - told)]
    return found + [
        Violation(COPY, f"{name} is no dependency of pyproject.toml")
        for name in sorted(told - real)
    ]


def private_apis(root: Path) -> list[Violation]:
    """Each row of the private torch APIs names a seam that stands and a test that exists."""
    rows = [
        line for line in _section(root, "Private torch APIs").splitlines() if line.startswith("| `")
    ]
    found = []
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        seam, tests = cells[1].strip("`"), re.findall(r"`(tests/[^`]+)`", cells[-1])
        if not (root / "surefoot" / seam).is_file():
            found.append(Violation(COPY, f"there is no seam {seam}"))
        if not tests or not all(is_a_test(root, test) for test in tests):
            found.append(Violation(COPY, f"no test holds {cells[0]} against the public way"))
    return found


def _rooms(package: Path) -> set[str]:
    found: set[str] = set()
    for top in (
        path for path in package.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))
    ):
        inside = [path for path in top.iterdir() if not path.name.startswith(("_", "."))]
        if top.name in BY_MODULE:
            found |= {f"{top.name}/{path.stem}" for path in inside}
        elif top.name in NESTED:
            found |= {f"{top.name}/{path.name}" for path in inside if path.is_dir()}
        elif inside:
            found.add(top.name)
    return found


def _section(root: Path, title: str) -> str:
    path = root / COPY
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
