"""The tree keeps each law, and each law is seen to catch what it forbids."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.laws.call_laws import CALL_LAWS
from tests.laws.document_laws import DOCUMENT_LAWS
from tests.laws.law import Plant, Rule
from tests.laws.structure_laws import STRUCTURE_LAWS
from tests.laws.tree import forget

ROOT = Path(__file__).resolve().parents[2]
LAWS = {**STRUCTURE_LAWS, **CALL_LAWS, **DOCUMENT_LAWS}


@pytest.fixture(scope="module", autouse=True)
def frees_what_was_parsed() -> Iterator[None]:
    """Keep 850,000 objects from the collector: while they are there, and for every later test."""
    gc.disable()
    yield
    gc.enable()
    forget()


def grow(root: Path, files: Mapping[str, str]) -> Path:
    (root / "surefoot").mkdir()
    # without `__init__.py` an installed surefoot would stand in for it
    for name, text in {"surefoot/__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("name", LAWS)
def test_the_project_keeps_the_law(name: str) -> None:
    found = LAWS[name].rule(ROOT)
    assert not found, "\n".join(map(str, found))


PLANTS = [
    pytest.param(law.rule, plant, id=f"{name}-{plant.says}")
    for name, law in LAWS.items()
    for plant in law.plants
]


@pytest.mark.parametrize(("rule", "plant"), PLANTS)
def test_the_law_catches_a_planted_violation(rule: Rule, plant: Plant, tmp_path: Path) -> None:
    found = [str(one) for one in rule(grow(tmp_path, plant.files))]
    assert any(plant.says in one for one in found), found


@pytest.mark.parametrize("name", [name for name, law in LAWS.items() if law.allowed])
def test_the_law_lets_pass_what_only_looks_like_a_violation(name: str, tmp_path: Path) -> None:
    assert not LAWS[name].rule(grow(tmp_path, LAWS[name].allowed))
