"""Names are importable for one release from where scripts imported them before, and a run loads
only the modules that it uses."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

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


NEIGHBORS, DIGITS = "the neighbors of a submodule", "a run of digits"
# each program in a process that has loaded torch and nothing of surefoot
FORKS = """
import json, os, sys, traceback
import torch
codes = {}
for name, program in json.loads(sys.argv[1]).items():
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for number, kind in ((1, "out"), (2, "error")):
                path = os.path.join(sys.argv[2], f"{name}.{kind}")
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            exec(program, {"__name__": "__main__"})
            sys.stdout.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """The exit code, the output and the errors of each program, by its name."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {
        NEIGHBORS: (
            "import sys; from surefoot.components.data import order; "
            "print('surefoot.components.data.tars' in sys.modules)"
        ),
        DIGITS: (
            "import sys\n"
            "from surefoot.cli.main import main\n"
            f"sys.argv = ['surefoot', 'train', 'digits', '--steps=2', '--run={folder / 'r'}']\n"
            "try:\n    main()\n"
            "except SystemExit as end:\n    assert end.code == 0, end.code\n"
            "loaded = [name for name in sys.modules if name.partition('.')[0] == 'surefoot']\n"
            "print('loaded', len(loaded))\n"
        ),
    }
    for home, names in BEFORE.items():
        listed = ", ".join(names.split())
        programs[home] = f"from {home} import {listed}; print(*({listed},), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(programs), str(folder)],
        check=True,
        timeout=600,
        capture_output=True,
        text=True,
    )
    return {
        name: (code, (folder / f"{name}.out").read_text(), (folder / f"{name}.error").read_text())
        for name, code in json.loads(done.stdout).items()
    }


@pytest.mark.parametrize("home", BEFORE)
def test_every_name_of_an_old_path_can_be_imported(
    home: str, said: dict[str, tuple[int, str, str]]
) -> None:
    code, out, error = said[home]
    assert code == 0, error
    assert len(out.splitlines()) == len(BEFORE[home].split())


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


def test_a_submodule_is_found_without_its_neighbors(
    said: dict[str, tuple[int, str, str]],
) -> None:
    code, out, error = said[NEIGHBORS]
    assert code == 0, error
    assert out.strip() == "False"


def test_a_run_of_digits_loads_fewer_than_200_modules_of_surefoot(
    said: dict[str, tuple[int, str, str]],
) -> None:
    code, out, error = said[DIGITS]
    assert code == 0, error
    assert int(out.split()[-1]) < 200
