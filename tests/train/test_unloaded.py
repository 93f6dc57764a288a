"""A run that compiles nothing leaves torch's compiler unimported.

One that comes later is told what the run has set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.components.compiler import unloaded
from tests.conftest import ROOT

SCRIPT = """
import sys
from surefoot.train.run import Run
from tests.train.small import Small, spec
with Run(spec(4, optim={"name": NAME}), Small(), folder="run", quiet=True) as run:
    for report in run.steps():
        if LATER and report.step == 2:
            import torch._inductor.config as config
            print("told", config.deterministic)
    run.evaluate()
if LATER:
    print("after", config.deterministic)
import torch
assert LATER or "sympy" not in sys.modules
is_deterministic = torch.are_deterministic_algorithms_enabled()
print("compiler", "torch._dynamo" in sys.modules, "deterministic", is_deterministic)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
print("compiler", "torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "later", "said"),
    [
        ("adamw", False, ["compiler False deterministic False", "compiler True"]),
        pytest.param(
            "sgd",
            True,
            ["told True", "after False", "compiler True deterministic False", "compiler True"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_compiles_nothing_imports_no_compiler_and_one_that_comes_later_is_told(
    name: str, later: bool, said: list[str], tmp_path: Path
) -> None:
    script = SCRIPT.replace("NAME", repr(name)).replace("LATER", str(later))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(unloaded.VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr
