"""Names are importable for one release from where scripts imported them before, and a run loads
only the modules that it uses."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BEFORE = {
    "surefoot.components.data": (
        "Arrays BlockShuffle Feed ImageFolder Iterated Keys Order Safetensors Table TarStream Tars "
        "Texts TokenFile Tokens as_source block_diagonal find_documents join_texts"
    ),
    "surefoot.components.data.blocks": "measure_mixing",
    "surefoot.components.data.remote": "Remote",
    "surefoot.components.data.transforms": "Crop Erase Jitter Mirror Normalise Pipeline mixup",
    "surefoot.components.metrics": "Mean accuracy bits_per_byte mean_of perplexity top_k",
    "surefoot.components.observe": "Meter",
    "surefoot.components.optim": (
        "GuardedUpdate build_groups find_trained master_of publish store_narrow"
    ),
    "surefoot.components.parallel": "Replicas",
    "surefoot.components.precision": "LossScaler compute_context",
    "surefoot.components.profiler.tracing": "Profiler Window analyse draw",
    "surefoot.components.stability": "convert_batchnorm",
    "surefoot.runtime.comm": "ALONE",
}
LAZY = "surefoot.components.data"


@pytest.mark.parametrize("home", BEFORE)
def test_every_name_of_an_old_path_can_be_imported(home: str) -> None:
    names = BEFORE[home].split()
    code = f"from {home} import {', '.join(names)}; print(*({', '.join(names)},), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=600, capture_output=True, text=True
    )
    assert len(done.stdout.splitlines()) == len(names)


def test_an_old_path_names_the_new_one() -> None:
    module = importlib.import_module(LAZY)
    with pytest.warns(DeprecationWarning, match=r"data.Arrays is now surefoot.data.Arrays"):
        assert module.Arrays is importlib.import_module("surefoot.data").Arrays


@pytest.mark.parametrize(
    ("home", "old", "now"),
    [("surefoot.profiler", "analyse", "analyze"), ("surefoot.data", "Normalise", "Normalize")],
)
def test_an_old_name_is_the_new_one(home: str, old: str, now: str) -> None:
    module = importlib.import_module(home)
    with pytest.warns(DeprecationWarning, match=f"{home}.{old} is now {home}.{now};"):
        assert getattr(module, old) is getattr(module, now)
    with pytest.raises(AttributeError, match=f"{home}.* has no attribute 'Analyse'"):
        _ = module.Analyse


def test_a_name_that_is_nowhere_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Arays"):
        _ = importlib.import_module(LAZY).Arays


def test_a_submodule_is_found_without_its_neighbors() -> None:
    code = (
        "import sys; from surefoot.components.data import order; "
        "print('surefoot.components.data.tars' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=600, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"


def test_a_run_of_digits_loads_fewer_than_200_modules_of_surefoot(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from surefoot.cli.main import main\n"
        f"sys.argv = ['surefoot', 'train', 'digits', '--steps=2', '--run={tmp_path / 'r'}']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print('loaded', sum(name.partition('.')[0] == 'surefoot' for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=600, capture_output=True, text=True
    )
    assert int(done.stdout.split()[-1]) < 200
