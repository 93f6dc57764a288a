"""torch.compile with torch, its cache or the temporary folder at a path with a space.

Of such paths torch quotes only folders of headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from surefoot.components.compiler import quoting
from surefoot.core.place import child_environment
from tests.components.test_instructions import COMPILE, WITHOUT_HEADERS

ROOT = Path(__file__).resolve().parents[2]
PLACES: Mapping[str, tuple[str, ...]] = {
    "torch, the cache and the temporary folder": ("torch", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"),
    "the cache of kernels": ("TORCHINDUCTOR_CACHE_DIR",),
    "torch": ("torch",),
    "the temporary folder": ("TMPDIR",),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    "spaced",
    [pytest.param(each, marks=[pytest.mark.slow] * bool(at)) for at, each in enumerate(PLACES)],
)
def test_regions_are_compiled_at_a_path_with_a_space(spaced: str, tmp_path: Path) -> None:
    """The script fails where a region cannot be compiled.

    Precompiled headers, in the temporary folder, are made in the slow tests only.
    """
    folder = tmp_path / "my 'new' project"
    folder.mkdir()
    variables = {
        name: str(folder if name in PLACES[spaced] else tmp_path / "plain")
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")
    }
    (tmp_path / "plain").mkdir()
    packages = Path(torch.__file__).parents[1]
    if "torch" in PLACES[spaced]:
        os.symlink(packages, folder / "site-packages")
        packages = folder / "site-packages"
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(packages)))
    if len(PLACES[spaced]) > 1:
        variables |= WITHOUT_HEADERS
    done = subprocess.run(
        [sys.executable, "-c", f"{COMPILE}assert torch.__file__.startswith({str(packages)!r})"],
        env=child_environment() | variables,
        check=False,
        timeout=300,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_command_that_torch_quotes_itself_stays_as_it_is() -> None:
    assert quoting._quote("-L'/my lib' -L/lib ", "/my lib", "/lib") == "-L'/my lib' -L/lib "
    quoting.patch_compiler_commands()
    once = torch._inductor.cpp_builder.CppBuilder.__init__
    quoting.patch_compiler_commands()
    assert torch._inductor.cpp_builder.CppBuilder.__init__ is once
