"""The tree keeps each law, and each law is seen to catch what it forbids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.laws import (
    calls,
    exceptions,
    features,
    fresh,
    imports,
    living_copy,
    security,
    sizes,
    words,
)
from tests.laws.tree import Violation

ROOT = Path(__file__).resolve().parents[2]
Rule = Callable[[Path], list[Violation]]


@dataclass(frozen=True)
class Plant:
    """Files that break a law, and a piece of what the law must say of them."""

    says: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Law:
    """A rule over a tree, trees that break it, and files that look like a break and are none."""

    rule: Rule
    plants: tuple[Plant, ...]
    allowed: Mapping[str, str] = field(default_factory=dict)


MAIN = "import sys\ndef main():\n    {body}\n"
VERBS = "words = sys.argv[1:]\n    sys.exit(0 if words[0] in ('--help', 'train') else 2)"
ERRORS = '''"""Ours.

    SurefootError        base
    `-- InputError    2  found before any work
"""
EXIT_OK = 0
class SurefootError(Exception):
    exit_code = 70
class InputError(SurefootError):
    exit_code = 2
'''
TABLE = "| code | errors |\n| --- | --- |\n| 0 | done |\n| 2 | InputError |\n| 70 | our own |\n"
E = "surefoot/core/errors.py"
GOOD_ROW = "| BAT-01 | it trains | `surefoot train digits` | `tests/test_a.py::test_it` |\n"
HEAD = "| id | what | command | test |\n| --- | --- | --- | --- |\n"
A_TEST = {
    "tests/test_a.py": "def test_it(): ...\n",
    "surefoot/cli/main.py": MAIN.format(body=VERBS),
}
F = "docs/reference/features.md"
PRIVATE = "\n## Private torch APIs\n\n| what | seam | gone | held by |\n| `torch._x` | `train/a.py` | slow | `tests/test_a.py` |\n"
PROMISES = "\n## What holds today\n\n| promise | held by |\n| --- | --- |\n{row}\n"
ROOMS = "\n## The rooms\n\n| room | what |\n| --- | --- |\n{row}\n\n## Next\n"
PROJECT = (
    "[project]\ndependencies = ['torch>=2.11']\noptional-dependencies = {images = ['pillow']}\n"
)
NEEDS = "\n## Dependencies\n\n| package | extra | why |\n| --- | --- | --- |\n| `torch` | | runs |\n| `pillow` | images | decodes |\n"


def lines(count: int, text: str = "x = 1\n") -> str:
    return text * count


LAWS: dict[str, Law] = {
    "a room imports only floors below its own": Law(
        imports.floors,
        (
            Plant(
                "imports train (floor 5)",
                {
                    "surefoot/components/data/a.py": "from surefoot.train.run import Run\n",
                    "surefoot/train/run.py": "",
                },
            ),
            Plant(
                "imports components/optim",
                {
                    "surefoot/components/data/a.py": "import surefoot.components.optim\n",
                    "surefoot/components/optim/__init__.py": "",
                },
            ),
            Plant(
                "imports components/optim",
                {
                    "surefoot/components/data/a.py": "from ..optim import b\n",
                    "surefoot/components/optim/b.py": "",
                },
            ),
            Plant(
                "floor 1",
                {
                    "surefoot/core/units.py": "from surefoot.core import place\n",
                    "surefoot/core/place.py": "",
                },
            ),
            Plant(
                "imports nothing of ours",
                {E: "from surefoot.core import units\n", "surefoot/core/units.py": ""},
            ),
            Plant(
                "only through documents",
                {
                    "surefoot/train/a.py": "from surefoot.control.plan import b\n",
                    "surefoot/control/plan/b.py": "",
                },
            ),
            Plant(
                "only through documents",
                {
                    "surefoot/control/report/a.py": "from surefoot.runtime.comm import b\n",
                    "surefoot/runtime/comm/b.py": "",
                },
            ),
            Plant(
                "through the package",
                {"surefoot/tasks/a.py": "from surefoot import Loss\n", "surefoot/__init__.py": ""},
            ),
            Plant(
                "stands on no floor",
                {"surefoot/extra/a.py": "from surefoot.core import errors\n", E: ""},
            ),
            Plant(
                "stays empty",
                {"surefoot/components/__init__.py": "from surefoot.core import errors\n", E: ""},
            ),
        ),
        {
            "surefoot/core/units.py": "from surefoot.core.errors import InputError\n",
            E: "class InputError(Exception): ...\n",
            "surefoot/control/report/a.py": "from surefoot.control.diagnose import b\n",
            "surefoot/control/diagnose/b.py": "",
            "surefoot/contract/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from surefoot.train import run\n",
            "surefoot/train/run.py": "from surefoot import __version__\nfrom surefoot.train import step\n",
            "surefoot/train/step.py": "",
        },
    ),
    "no module imports itself through others": Law(
        imports.cycles,
        (
            Plant(
                "-> surefoot.core.a",
                {
                    "surefoot/core/a.py": "from surefoot.core import b\n",
                    "surefoot/core/b.py": "import surefoot.core.a\n",
                },
            ),
        ),
        {
            "surefoot/core/a.py": "def f():\n    from surefoot.core import b\n",
            "surefoot/core/b.py": "import surefoot.core.a\n",
        },
    ),
    "an import inside a function is for an optional package": Law(
        imports.local_imports,
        (
            Plant("inside a function", {"surefoot/train/a.py": "def f():\n    import json\n"}),
            Plant("inside a function", {"surefoot/core/a.py": "def f():\n    import torch\n"}),
            Plant("optional package PIL", {"surefoot/train/a.py": "from PIL import Image\n"}),
            Plant(
                "every process",
                {"surefoot/train/a.py": "from torch.distributed.fsdp import fully_shard\n"},
            ),
        ),
        {
            "surefoot/cli/a.py": "def f():\n    import torch\n",
            "surefoot/contract/task.py": "def f():\n    import json\n",
            "surefoot/tasks/a.py": "def f():\n    import sklearn\n    from torch.utils.tensorboard import SummaryWriter\n",
        },
    ),
    "code is loaded by name in one place": Law(
        imports.loads_by_name,
        (
            Plant(
                "loads code by name",
                {
                    "surefoot/train/a.py": "from importlib import import_module\nimport_module('x')\n"
                },
            ),
        ),
        {"surefoot/contract/task.py": "import importlib\nimportlib.import_module('x')\n"},
    ),
    "light floors name no heavy package at the top": Law(
        imports.torch_at_the_top,
        (
            Plant("imports torch.nn", {"surefoot/contract/a.py": "import torch.nn\n"}),
            Plant(
                "imports torch.Tensor",
                {
                    "surefoot/control/plan/a.py": "try:\n    from torch import Tensor\nexcept ImportError: ...\n"
                },
            ),
        ),
        {
            "surefoot/core/a.py": "import typing\nif typing.TYPE_CHECKING:\n    import torch\n",
            "surefoot/train/a.py": "import torch\n",
        },
    ),
    "what is imported is declared": Law(
        imports.declared,
        (Plant("imports requests", {"surefoot/core/a.py": "import requests\n"}),),
        {"surefoot/core/a.py": "import json\nimport torch\nfrom PIL import Image\n"},
    ),
    "light floors bring no torch in a fresh interpreter": Law(
        fresh.stays_light,
        (
            Plant(
                "surefoot.core.a: brings torch",
                {
                    "surefoot/__init__.py": "",
                    "surefoot/core/a.py": "import torch\n",
                    "torch.py": "",
                },
            ),
            Plant(
                "surefoot: brings torch",
                {
                    "surefoot/__init__.py": "import other\n",
                    "other.py": "import torch\n",
                    "torch.py": "",
                },
            ),
        ),
        {"surefoot/__init__.py": "", "surefoot/train/a.py": "import torch\n", "torch.py": ""},
    ),
    "the public names are one sorted list": Law(
        fresh.public_names,
        (
            Plant("not sorted", {"surefoot/__init__.py": "__all__ = ['b', 'a']\na = b = 1\n"}),
            Plant("differ in ['b']", {"surefoot/__init__.py": "__all__ = ['a']\na = b = 1\n"}),
            Plant("cannot be had", {"surefoot/__init__.py": "__all__ = ['a']\n"}),
            Plant("has no docstring", {"surefoot/__init__.py": "__all__ = ['f']\ndef f(): ...\n"}),
            Plant(
                "loads torch or numpy",
                {"surefoot/__init__.py": "__all__ = []\nimport torch as _t\n", "torch.py": ""},
            ),
        ),
        {"surefoot/__init__.py": "__all__ = ['a', 'f']\na = 1\ndef f():\n    'Nothing.'\n"},
    ),
    "help is light": Law(
        fresh.help_is_light,
        (
            Plant(
                "loads numpy",
                {"surefoot/cli/main.py": MAIN.format(body="import numpy"), "numpy.py": ""},
            ),
            Plant("ends with 3", {"surefoot/cli/main.py": MAIN.format(body="sys.exit(3)")}),
        ),
        {"surefoot/cli/main.py": MAIN.format(body="sys.exit(0)")},
    ),
    "a file has at most 500 lines": Law(
        sizes.files,
        (Plant("501 lines", {"surefoot/core/a.py": lines(501)}),),
        {"surefoot/core/a.py": lines(500)},
    ),
    "a function has at most 80 lines": Law(
        sizes.functions,
        (
            Plant(
                "81 lines",
                {
                    "surefoot/core/a.py": "class A:\n    def f(self):\n"
                    + lines(80, "        x = 1\n")
                },
            ),
        ),
        {"surefoot/core/a.py": "def f():\n" + lines(79, "    x = 1\n")},
    ),
    "a constructor takes at most 8 arguments": Law(
        sizes.constructors,
        (
            Plant(
                "takes 9",
                {
                    "surefoot/core/a.py": "class A:\n    def __init__(self, a, b, c, d, *e, f, g, h, i): ...\n"
                },
            ),
            Plant(
                "takes 9",
                {
                    "surefoot/core/a.py": "@dataclass\nclass A:\n"
                    + "".join(f"    a{i}: int\n" for i in range(9))
                },
            ),
        ),
        {
            "surefoot/core/a.py": "@dataclass(frozen=True)\nclass A:\n"
            + "".join(f"    a{i}: int\n" for i in range(9))
        },
    ),
    "no loose arguments": Law(
        sizes.loose_arguments,
        (
            Plant("**kwargs", {"surefoot/core/a.py": "def f(**kwargs: int): ...\n"}),
            Plant("**o", {"surefoot/core/a.py": "def f(**o): ...\n"}),
        ),
        {"surefoot/core/a.py": "def f(**arrays: int): ...\n"},
    ),
    "a folder shows at most 14 entries": Law(
        sizes.folders,
        (
            Plant("surefoot/core: shows 15", {f"surefoot/core/a{i}.py": "" for i in range(15)}),
            Plant("shows 15", {"surefoot/a.py": "", **{f"a{i}.md": "" for i in range(14)}}),
        ),
        {
            "surefoot/core/.hidden": "",
            ".gitignore": "/runs/\n",
            "runs/a": "",
            **{f"surefoot/core/a{i}.py": "" for i in range(14)},
        },
    ),
    "the package's root shows the floors": Law(
        sizes.package_root,
        (Plant("surefoot/run.py", {"surefoot/run.py": ""}),),
        {"surefoot/py.typed": "", "surefoot/core/a.py": ""},
    ),
    "a module's name says what is inside": Law(
        sizes.module_names,
        (
            Plant("utils says nothing", {"surefoot/core/data_utils.py": ""}),
            Plant("common", {"surefoot/common/a.py": ""}),
        ),
        {"surefoot/core/utilisation.py": ""},
    ),
    "a class's name stands in one file": Law(
        words.class_names,
        (
            Plant(
                "A is a class of",
                {"surefoot/core/a.py": "class A: ...\n", "surefoot/core/b.py": "class A: ...\n"},
            ),
        ),
        {"surefoot/core/a.py": "class A: ...\nclass _A: ...\n", "tests/a.py": "class A: ...\n"},
    ),
    "a docstring does not begin with a pronoun": Law(
        words.first_words,
        (
            Plant("begins with 'What'", {"surefoot/core/a.py": '"""What there is."""\n'}),
            Plant(
                "begins with 'Whether'",
                {"surefoot/core/a.py": 'def f():\n    """Whether it is so."""\n'},
            ),
            Plant(
                "begins with 'One'", {"surefoot/core/a.py": 'class A:\n    """One of many."""\n'}
            ),
        ),
        {"surefoot/core/a.py": 'def f():\n    """Return what there is."""\n'},
    ),
    "a message names public modules": Law(
        words.public_homes,
        (
            Plant(
                "surefoot.components.data",
                {"surefoot/core/a.py": "hint = f'use {1} of surefoot.components.data'\n"},
            ),
        ),
        {
            "surefoot/core/a.py": '"""A surefoot.core.b."""\nx = ["surefoot.cli.watch", "-m surefoot.cli.watch x", "of surefoot.data"]\n'
        },
    ),
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
                "calls torch.distributed.all_gather_object": "import torch.distributed as dist\ndist.all_gather_object([], 1)\n",
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
            "surefoot/core/a.py": "import torch, numpy as np\ndef f(model, executable):\n    model.eval()\n    executable()\n"
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
            "surefoot/train/a.py": "from surefoot.contract.run_folder import files\n\ndef f(run):\n    return files.read_text(run, 'x')\n",
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
            "surefoot/train/a.py": "import torch as t\nt._fused_sgd_()\nt._foreach_mul_()\nt.nn.Linear(1, 1)\nt.__version__\n",
            "docs/architecture.md": "| `torch._fused_sgd_`, `torch._foreach_*` | `train/a.py` | slower | t |\n",
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
                    "surefoot/train/a.py": "from surefoot.core.errors import InputError\nclass Mine(InputError): ...\n",
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
    "what is raised is of our tree": Law(
        exceptions.raised,
        (
            Plant("raises ValueError", {"surefoot/core/a.py": "raise ValueError('x')\n"}),
            Plant("raises RuntimeError", {"surefoot/core/a.py": "raise RuntimeError\n"}),
        ),
        {
            "surefoot/core/a.py": "def __getattr__(name):\n    raise AttributeError(name)\n",
            "surefoot/core/b.py": "from pydantic import BaseModel\ndef check():\n    raise ValueError('x')\n",
            "surefoot/core/c.py": "def f():\n    try:\n        raise FileNotFoundError\n    except OSError:\n        return\n",
        },
    ),
    "the architecture's rooms are the real ones": Law(
        living_copy.rooms,
        (
            Plant(
                "no line for the room train",
                {"surefoot/train/run.py": "", "docs/architecture.md": ROOMS.format(row="")},
            ),
            Plant(
                "no line for the room core/a",
                {"surefoot/core/a.py": "", "docs/architecture.md": ROOMS.format(row="")},
            ),
            Plant(
                "train is told as later",
                {
                    "surefoot/train/a.py": "",
                    "docs/architecture.md": ROOMS.format(row="| `train` | later: x |"),
                },
            ),
            Plant(
                "train is told, and does not",
                {"docs/architecture.md": ROOMS.format(row="| `train` | steps |")},
            ),
        ),
        {
            "surefoot/train/a.py": "",
            "docs/architecture.md": ROOMS.format(
                row="| `train` | steps |\n| `tune` | later: searches |"
            ),
        },
    ),
    "each private part of torch has a seam and a test": Law(
        living_copy.private_apis,
        (
            Plant("no seam train/a.py", {**A_TEST, "docs/architecture.md": PRIVATE}),
            Plant(
                "no test holds `torch._x`",
                {"surefoot/train/a.py": "", "docs/architecture.md": PRIVATE},
            ),
        ),
        {**A_TEST, "surefoot/train/a.py": "", "docs/architecture.md": PRIVATE},
    ),
    "each dependency has its reason": Law(
        living_copy.dependencies,
        (
            Plant(
                "why torch",
                {
                    "pyproject.toml": PROJECT,
                    "docs/architecture.md": NEEDS.replace("`torch`", "`other`"),
                },
            ),
            Plant(
                "other is no dep",
                {
                    "pyproject.toml": PROJECT,
                    "docs/architecture.md": NEEDS + "| `other` | x | y |\n",
                },
            ),
        ),
        {"pyproject.toml": PROJECT, "docs/architecture.md": NEEDS},
    ),
    "security promises nothing without a test": Law(
        security.promises,
        (
            Plant("without a test", {"SECURITY.md": PROMISES.format(row="| it is safe | |")}),
            Plant(
                "there is no test",
                {"SECURITY.md": PROMISES.format(row="| it is safe | `tests/test_gone.py` |")},
            ),
            Plant("promises nothing", {"SECURITY.md": "all is well"}),
        ),
        {
            **A_TEST,
            "SECURITY.md": PROMISES.format(row="| it is safe | `tests/test_a.py::test_it` |"),
        },
    ),
    "no word that belongs to one machine": Law(
        words.words,
        (
            Plant("path of one machine", {"docs/a.md": "see /wo" + "rk/main\n"}),
            Plant("path of one machine", {"surefoot/core/a.py": "x = '/tm" + "p/x'\n"}),
            Plant("note to oneself", {"README.md": "TO" + "DO\n"}),
            Plant("registry", {"Makefile": "x: # from py" + "pi.org\n"}),
        ),
        {"docs/a.md": "the work/ of others, https://example.org/work/x, todo lists\n"},
    ),
    "a row of what works names a verb and a test that exist": Law(
        features.features,
        (
            Plant("is missing", {"docs/a.md": ""}),
            Plant(
                "there is no verb fly",
                {**A_TEST, F: HEAD + GOOD_ROW.replace("surefoot train", "surefoot fly")},
            ),
            Plant(
                "there is no test", {**A_TEST, F: HEAD + GOOD_ROW.replace("test_it", "test_other")}
            ),
            Plant("there is no test", {**A_TEST, F: HEAD + GOOD_ROW.replace("test_a", "test_b")}),
            Plant("not of the form", {**A_TEST, F: HEAD + GOOD_ROW + GOOD_ROW}),
            Plant("not of the form", {**A_TEST, F: HEAD + GOOD_ROW.replace("BAT-01", "BAT-1")}),
            Plant(
                "has 3 cells", {**A_TEST, F: HEAD + "| BAT-01 | it trains | `tests/test_a.py` |\n"}
            ),
            Plant(
                "names no command",
                {**A_TEST, F: HEAD + GOOD_ROW.replace("`surefoot train digits`", "run it")},
            ),
        ),
        {**A_TEST, F: HEAD + GOOD_ROW},
    ),
}


def grow(root: Path, files: Mapping[str, str]) -> Path:
    (root / "surefoot").mkdir()
    for name, text in {
        "surefoot/__init__.py": "",
        **files,
    }.items():  # else an installed surefoot would stand in for it
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
