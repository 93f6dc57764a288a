"""Importing torch for a verb: no garbage collection meanwhile, and its objects are frozen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

# a module named torch that is imported fast, yet creates enough objects for many collections
TORCH = "import gc\nhas_collector = gc.isenabled()\nobjects = [[n] for n in range(100_000)]\n"
PROGRAM = """
import gc, json, sys
from surefoot.cli import options
if "paused" in sys.argv:
    gc.disable()
if "imported" in sys.argv:
    import torch
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
options.import_torch()
import torch
print(json.dumps({
    "during": torch.has_collector, "after": gc.isenabled(), "collections": len(collections) > 4,
    "frozen": gc.get_freeze_count() >= 100_000,
}))
"""
QUIET = {"during": False, "after": True, "collections": False, "frozen": True}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param([], QUIET, id="first"),
        pytest.param(["paused"], {**QUIET, "after": False}, id="without a collector"),
        # what a program imported before may hold objects that become garbage
        pytest.param(["imported"], {**QUIET, "during": True, "frozen": False}, id="imported"),
    ],
)
def test_a_verb_imports_torch_without_collections(
    tmp_path: Path, words: list[str], expected: dict[str, bool]
) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    paths = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
    command = [sys.executable, "-c", paths + PROGRAM, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected
