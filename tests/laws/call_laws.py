"""Laws of statements: what code calls, opens, prints and raises."""

from __future__ import annotations

from tests.laws import calls, exceptions
from tests.laws.law import Law, Plant

ERRORS = '''"""Ours.

    SurefootError        base
    `-- InputError    2  found before any work

Other exit codes: 0 success, 70 an error.
"""
EXIT_OK = 0
class SurefootError(Exception):
    exit_code = 70
class InputError(SurefootError):
    exit_code = 2
'''
TABLE = "| code | errors |\n| --- | --- |\n| 0 | done |\n| 2 | InputError |\n| 70 | our own |\n"
HELP = 'app = dict(epilog="Exit codes: 0 success, 2 bad input, 70 an error of ours.")\n'
E = "surefoot/core/errors.py"

CALL_LAWS: dict[str, Law] = {
    "nothing runs code hidden in data": Law(
        calls.dangerous,
        tuple(
            Plant(says, {"surefoot/core/a.py": text})
            for says, text in {
                "imports pickle": "import pickle\n",
                "imports joblib": "from joblib import load\n",
                "imports torch.load": "from torch import load\n",
                "calls torch.load": "import torch as t\nt.load('x', weights_only=True)\n",
                "calls torch.save": "import torch\ntorch.save(1, 'x')\n",
                "imports marshal": "import marshal\n",
                "calls eval": "eval('1')\n",
                "calls exec": "exec('x = 1')\n",
                "calls os.system": "import os\nos.system('ls')\n",
                "passes shell=True": "import subprocess\nsubprocess.run('ls', shell=True)\n",
                "calls yaml.load": "import yaml\nyaml.load('x')\n",
                "calls archive.extractall": "def f(archive):\n    archive.extractall()\n",
                "calls extractall": "open('x').extractall()\n",
                "passes allow_pickle=True": "import numpy as np\nnp.load('x', allow_pickle=True)\n",
                "calls torch.distributed.all_gather_object": (
                    "import torch.distributed as dist\ndist.all_gather_object([], 1)\n"
                ),
            }.items()
        )
        + tuple(
            Plant(
                "calls torch.load",
                {next(iter(calls.FREE)): f"import pickle, torch\ntorch.load('x'{how})\n"},
            )
            for how in ("", ", weights_only=False", ", weights_only=True, pickle_module=pickle")
        ),
        {
            "surefoot/core/a.py": "import torch, numpy as np\n"
            "def f(model, executable):\n    model.eval()\n    executable()\n"
            "    np.load('x')\n    np.load('x', allow_pickle=False)\n    open('x').extractfile()\n",
            next(iter(calls.FREE)): "import pickle, torch\ntorch.load('x', weights_only=True)\n",
        },
    ),
    "the environment is read in one place": Law(
        calls.environment,
        (
            Plant(
                "reads os.environ", {"surefoot/train/a.py": "import os\nx = os.environ.get('A')\n"}
            ),
            Plant(
                "reads os.getenv",
                {"surefoot/train/a.py": "from os import getenv\nx = getenv('A')\n"},
            ),
        ),
        {
            "surefoot/core/place.py": "import os\nx = os.environ['A']\n",
            "surefoot/train/a.py": "import os\nos.replace('a', 'b')\n",
        },
    ),
    "the allocator's cache is emptied in one place": Law(
        calls.cleared_caches,
        (
            Plant(
                "empties the allocator's cache",
                {"surefoot/train/step/a.py": "import torch\ntorch.cuda.empty_cache()\n"},
            ),
            Plant(
                "empties the allocator's cache",
                {"surefoot/train/a.py": "from torch.cuda import empty_cache\nempty_cache()\n"},
            ),
            Plant(
                "empties the allocator's cache",
                {"examples/a.py": "import torch\nclear = torch.mps.empty_cache\n"},
            ),
        ),
        {
            calls.CLEARS: "import torch\ntorch.cuda.empty_cache()\n",
            "surefoot/train/a.py": "def f(cache):\n    cache.empty()\n",
        },
    ),
    "nothing reaches the network": Law(
        calls.network,
        (
            Plant(
                "imports urllib.request", {"surefoot/train/a.py": "from urllib import request\n"}
            ),
            Plant("imports http", {"surefoot/train/a.py": "import http.server\n"}),
        ),
        {"surefoot/train/a.py": "import socket\nfrom urllib import parse\n"},
    ),
    "files of a run folder are opened in one place": Law(
        calls.opened_in_runs,
        (
            Plant(
                "calls path.read_text",
                {"surefoot/train/a.py": "def f(path):\n    return path.read_text()\n"},
            ),
            Plant(
                "calls (run / 'x').open",
                {"surefoot/cli/look/a.py": "def f(run):\n    return (run / 'x').open('rb')\n"},
            ),
            Plant(
                "calls os.open",
                {"surefoot/components/observe/a.py": "import os\nos.open('x', os.O_RDONLY)\n"},
            ),
            Plant("calls open", {"surefoot/contract/a.py": "open('x')\n"}),
        ),
        {
            "surefoot/train/a.py": (
                "from surefoot.contract.run_folder import files\n\ndef f(run):\n"
                "    return files.read_text(run, 'x')\n"
            ),
            "surefoot/components/data/a.py": "open('x')\n",
        },
    ),
    "a private part of torch has its row": Law(
        calls.private_torch,
        (
            Plant(
                "uses torch._fused_sgd_",
                {"surefoot/train/a.py": "import torch\ntorch._fused_sgd_()\n"},
            ),
            Plant("uses torch._dynamo", {"surefoot/train/a.py": "import torch._dynamo\n"}),
            Plant(
                "uses torch.autograd._b",
                {"surefoot/train/a.py": "import torch\ngetattr(torch.autograd, '_b', None)\n"},
            ),
            Plant(
                "uses torch.nn.utils._a", {"surefoot/train/a.py": "from torch.nn.utils import _a\n"}
            ),
        ),
        {
            "surefoot/train/a.py": (
                "import torch as t\nt._fused_sgd_()\nt._foreach_mul_()\nt.nn.Linear(1, 1)\n"
                "t.__version__\n"
            ),
            "docs/architecture.md": (
                "| `torch._fused_sgd_`, `torch._foreach_*` | `train/a.py` | slower | t |\n"
            ),
        },
    ),
    "only cli and the console write to the terminal": Law(
        calls.prints,
        (
            Plant("calls print", {"surefoot/train/a.py": "print(1)\n"}),
            Plant("calls sys.exit", {"surefoot/train/a.py": "import sys\nsys.exit(1)\n"}),
            Plant("calls os._exit", {"surefoot/train/a.py": "import os\nos._exit(1)\n"}),
        ),
        {"surefoot/cli/a.py": "print(1)\n", next(iter(calls.ENDS))[0]: "import os\nos._exit(1)\n"},
    ),
    "every exception of ours stands in one file": Law(
        exceptions.in_one_file,
        (
            Plant("Mine belongs", {"surefoot/train/a.py": "class Mine(ValueError): ...\n"}),
            Plant(
                "Mine belongs",
                {
                    E: ERRORS,
                    "surefoot/train/a.py": (
                        "from surefoot.core.errors import InputError\nclass Mine(InputError): ...\n"
                    ),
                },
            ),
        ),
        {E: ERRORS, "surefoot/train/a.py": "class Mine(dict): ...\n"},
    ),
    "the drawn tree of errors is the real one": Law(
        exceptions.drawn,
        (
            Plant("New is not in the drawing", {E: ERRORS + "class New(InputError): ...\n"}),
            Plant(
                "InputError, which is no class",
                {E: ERRORS.replace("class InputError", "class Other")},
            ),
            Plant(
                "drawn under SurefootError and derives from ValueError",
                {E: ERRORS.replace("InputError(SurefootError)", "InputError(ValueError)")},
            ),
            Plant(
                "drawn with exit code 2 and has 9",
                {E: ERRORS.replace("exit_code = 2", "exit_code = 9")},
            ),
        ),
        {E: ERRORS},
    ),
    "every exit code has its row": Law(
        exceptions.in_the_table,
        (
            Plant("no row for exit code 5", {E: ERRORS + "EXIT_X = 5\n", exceptions.TABLE: TABLE}),
            Plant(
                "does not name InputError",
                {E: ERRORS, exceptions.TABLE: TABLE.replace("InputError", "bad input")},
            ),
            Plant(
                "exit code 9 is nowhere", {E: ERRORS, exceptions.TABLE: TABLE + "| 9 | other |\n"}
            ),
        ),
        {E: ERRORS, exceptions.TABLE: TABLE},
    ),
    "the help and the docstring of the errors list every exit code": Law(
        exceptions.in_the_help,
        (
            Plant(
                "exit codes [0, 70], and they are [0, 2, 70]",
                {E: ERRORS, exceptions.HELP: HELP.replace("2 bad input, ", "")},
            ),
            Plant("they are [0, 2, 5, 70]", {E: ERRORS + "EXIT_X = 5\n", exceptions.HELP: HELP}),
            Plant(
                "exit codes [0], and they are [0, 70]",
                {E: ERRORS.replace(", 70 an error", ""), exceptions.HELP: HELP},
            ),
        ),
        {E: ERRORS, exceptions.HELP: HELP},
    ),
    "what is raised is of our tree": Law(
        exceptions.raised,
        (
            Plant("raises ValueError", {"surefoot/core/a.py": "raise ValueError('x')\n"}),
            Plant("raises RuntimeError", {"surefoot/core/a.py": "raise RuntimeError\n"}),
        ),
        {
            "surefoot/core/a.py": "def __getattr__(name):\n    raise AttributeError(name)\n",
            "surefoot/core/b.py": (
                "from pydantic import BaseModel\ndef check():\n    raise ValueError('x')\n"
            ),
            "surefoot/core/c.py": (
                "def f():\n    try:\n        raise FileNotFoundError\n    except OSError:\n"
                "        return\n"
            ),
        },
    ),
}
