"""Laws of modules: what they import, how large they are, what they are called."""

from __future__ import annotations

from tests.laws import fresh, imports, sizes, words
from tests.laws.law import MAIN, Law, Plant

E = "surefoot/core/errors.py"


def lines(count: int, text: str = "x = 1\n") -> str:
    return text * count


STRUCTURE_LAWS: dict[str, Law] = {
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
            "surefoot/contract/a.py": (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
                "    from surefoot.train import run\n"
            ),
            "surefoot/train/run.py": (
                "from surefoot import __version__\nfrom surefoot.train import step\n"
            ),
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
            Plant(
                "inside a function",
                {
                    "surefoot/train/run.py": "import surefoot.train.b\n",
                    "surefoot/train/b.py": "",
                    "surefoot/train/a.py": "def f():\n    from surefoot.train import b\n",
                },
            ),
            Plant("optional package PIL", {"surefoot/train/a.py": "from PIL import Image\n"}),
            Plant(
                "every process",
                {"surefoot/train/a.py": "from torch.distributed.fsdp import fully_shard\n"},
            ),
        ),
        {
            "surefoot/cli/a.py": "def f():\n    import torch\n",
            "surefoot/contract/task.py": "def f():\n    import json\n",
            "surefoot/train/run.py": "def f():\n    from surefoot.train import b\n",
            "surefoot/train/b.py": "",
            "surefoot/tasks/a.py": (
                "def f():\n    import sklearn\n"
                "    from torch.utils.tensorboard import SummaryWriter\n"
            ),
        },
    ),
    "a plain run loads only what it uses": Law(
        imports.weight_of_a_plain_run,
        (
            Plant(
                "loads 201 modules",
                {
                    "surefoot/train/run.py": "".join(
                        f"from surefoot.core import m{number}\n" for number in range(200)
                    ),
                    **{f"surefoot/core/m{number}.py": "" for number in range(200)},
                },
            ),
        ),
        {
            "surefoot/train/run.py": "from surefoot.core import a\ndef f(): ...\n",
            "surefoot/core/a.py": "def f():\n    from surefoot.core import b\n",
            "surefoot/core/b.py": "",
        },
    ),
    "code is loaded by name in one place": Law(
        imports.loads_by_name,
        (
            Plant(
                "loads code by name",
                {"surefoot/train/a.py": "from importlib import import_module as f\nf('x')\n"},
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
                    "surefoot/control/plan/a.py": (
                        "try:\n    from torch import Tensor\nexcept ImportError: ...\n"
                    )
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
                    "surefoot/core/a.py": (
                        "class A:\n    def __init__(self, a, b, c, d, *e, f, g, h, i): ...\n"
                    )
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
        {"surefoot/core/utilization.py": ""},
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
    "a message names public modules": Law(
        words.public_homes,
        (
            Plant(
                "surefoot.components.data",
                {"surefoot/core/a.py": "hint = f'use {1} of surefoot.components.data'\n"},
            ),
        ),
        {
            "surefoot/core/a.py": (
                '"""A surefoot.core.b."""\n'
                'x = ["surefoot.cli.watch", "-m surefoot.cli.watch x", "of surefoot.data"]\n'
            )
        },
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
}
