"""Laws that only a fresh interpreter can show.

What an import brings along, the public names, the verbs, what `--help` loads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.laws.imports import FLOORS, room_of
from tests.laws.tree import Violation, modules

HEAD = "import contextlib, importlib, io, json, sys\nsys.path.insert(0, sys.argv[1])\n"

LOAD = """
loaded = {}
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
    for heavy in ("torch", "transformers", "tensorboard", "matplotlib"):
        if heavy in sys.modules and heavy not in loaded:
            loaded[heavy] = name
print(json.dumps(loaded))
"""

NAMES = """
import surefoot
light = "torch" not in sys.modules and "numpy" not in sys.modules
listed, shown = list(surefoot.__all__), [name for name in dir(surefoot) if not name.startswith("_")]
missing, silent = [], []
for name in listed:
    value = getattr(surefoot, name, None)
    if value is None:
        missing.append(name)
        continue
    words = (getattr(value, "__doc__", None) or "").strip()
    if (callable(value) or isinstance(value, type)) and not words:
        silent.append(name)
found = {"light": light, "listed": listed, "shown": shown, "missing": missing, "silent": silent}
print(json.dumps(found))
"""

VERBS = """
from surefoot.cli.main import main
ends = []
for words in json.loads(sys.argv[2]):
    sys.argv = ["surefoot", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    ends.append(code or 0)
loaded = [name for name in ("torch", "numpy") if name in sys.modules]
print(json.dumps({"ends": ends, "loaded": loaded}))
"""


def stays_light(root: Path) -> list[Violation]:
    """`import surefoot` brings no torch, nor does any module of the light rooms.

    Those are floors 0 to 2, the control wing and cli.
    """
    names = [
        module.name
        for module in modules(root)
        if (room := room_of(module.name)) and _is_light(*room)
    ]
    loaded = _ask(root, LOAD, ["surefoot", *sorted(names)])
    return [
        Violation(
            name,
            f"brings {heavy} along when imported; import it where it is used, on a floor above",
        )
        for heavy, name in loaded.items()
    ]


def _is_light(room: str, floor: int) -> bool:
    return floor <= FLOORS["contract"] or room == "cli" or room.partition("/")[0] == "control"


def public_names(root: Path) -> list[Violation]:
    """`surefoot.__all__` is sorted, all that `dir` shows, resolves, is documented.

    `import surefoot` loads no torch, no numpy.
    """
    told = _ask(root, NAMES)
    where = "surefoot/__init__.py"
    found = [Violation(where, f"{name} is listed and cannot be had") for name in told["missing"]]
    found += [
        Violation(where, f"the public name {name} has no docstring") for name in told["silent"]
    ]
    if told["listed"] != sorted(set(told["listed"])):
        found.append(
            Violation(where, f"__all__ is not sorted, or names one twice: {told['listed']}")
        )
    odd = sorted(set(told["listed"]) ^ set(told["shown"]))
    if odd:
        found.append(Violation(where, f"__all__ and dir(surefoot) differ in {odd}"))
    if not told["light"]:
        found.append(Violation(where, "import surefoot loads torch or numpy"))
    return found


def help_is_light(root: Path) -> list[Violation]:
    """`surefoot --help` ends 0 and loads neither torch nor numpy."""
    told = _ask(root, VERBS, [["--help"]])
    found = [Violation("surefoot --help", f"loads {name}") for name in told["loaded"]]
    return found + (
        [Violation("surefoot --help", f"ends with {told['ends'][0]}")]
        if told["ends"] != [0]
        else []
    )


def ends_of_help(root: Path, verbs: Sequence[Sequence[str]]) -> list[int]:
    """The exit code of `surefoot WORDS --help` for each list of words."""
    ends: list[int] = _ask(root, VERBS, [[*words, "--help"] for words in verbs])["ends"]
    return ends


def _ask(root: Path, program: str, question: Any = None) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PYTHONDONTWRITEBYTECODE": "1"
    }
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program, str(root), json.dumps(question)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise AssertionError(
            f"a fresh interpreter could not load the tree in {root}:\n{done.stderr}"
        )
    return json.loads(done.stdout.splitlines()[-1])
