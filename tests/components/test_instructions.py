"""Nothing is compiled to find the instructions of a CPU that torch and the compiler know.

Where one of them may not, torch looks as it always did; and the kernels are the same.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surefoot.components.compiler import instructions
from surefoot.core.place import child_environment

COMPILE = """
import torch
from torch import nn
from surefoot.components.compiler.regions import compile_regions
torch.manual_seed(0)
model, points = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
plain = model(points)
compile_regions(model, on_failure="stop")
torch.testing.assert_close(model(points), plain)
"""
# seconds of them for each compiler
WITHOUT_HEADERS = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
PROBE = "__avx_chk_kernel"


def compiler(folder: Path, release: str) -> str:
    """A compiler that says it is of `release`, and is the one that is here."""
    path = folder / "bin" / "g++"
    path.parent.mkdir()
    path.write_text(
        f'#!/bin/sh\n[ "$1" = "-dumpversion" ] && echo {release} && exit\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX-512"
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("release", "probes"),
    [
        pytest.param("12", False, marks=pytest.mark.slow),
        pytest.param("9.4.0", True, marks=pytest.mark.faults),
    ],
)
def test_a_compiler_that_knows_the_instructions_is_not_tried(
    release: str, probes: bool, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    environment = child_environment() | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "CXX": compiler(tmp_path, release),
        **WITHOUT_HEADERS,
    }
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=600)
    written = [path.read_text() for path in cache.rglob("*.cpp")]
    assert any(PROBE in text for text in written) is probes
    assert any("kernel" in text and PROBE not in text for text in written)


@pytest.mark.parametrize("release", ["11.4.0", "", "unknown"])
def test_a_compiler_that_is_old_or_does_not_say_is_tried(release: str, tmp_path: Path) -> None:
    assert not instructions.are_known((None, compiler(tmp_path, release)))


def test_without_a_compiler_nothing_is_known() -> None:
    assert not instructions.are_known((None, "/nowhere/g++"))
    assert not instructions.are_known(())
