"""A process that has imported torch and surefoot once and forks itself for each program.

So a hundred snippets cost one import.
Reads one JSON job a line from standard input: {"folder", "log", "variables", "arguments"};
`arguments` is either ["surefoot", ...] or what Python is given: ["python", file, ...] or
["python", "-m", module, ...], of which the programs that it starts are forks, too. Answers with
the exit code.
A job has its own process, output file and working folder.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

from tests.prove.forked import be, forking

MAX_S = 180
# it imports the compiler of torch, which takes longer than all others and is seldom needed
LEFT_OUT = "surefoot.components.compiler.kernels"


def serve() -> None:
    sys.path[0] = os.getcwd()
    import_all()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def import_all() -> None:
    """All that any command may import, which is the point of this process.

    What needs an extra that is not here is left out.
    """
    import sklearn.datasets  # noqa: F401 - the data of digits

    import surefoot.cli

    with suppress(ImportError):
        importlib.import_module("torch.utils.tensorboard")
    for module in pkgutil.walk_packages(surefoot.__path__, "surefoot."):
        if not module.name.endswith("__main__") and module.name != LEFT_OUT:
            with suppress(ImportError):
                importlib.import_module(module.name)


def run(job: dict[str, Any]) -> None:
    """Become the program of `job`; never returns."""
    os.setsid()
    signal.alarm(MAX_S)
    os.chdir(job["folder"])
    os.environ.update(job["variables"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.argv = job["arguments"]
    code = 0
    try:
        if sys.argv[0] == "surefoot":
            from surefoot.cli.main import main

            main()
        else:
            sys.path.insert(0, job["folder"])
            with forking():
                be(sys.argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever a snippet raises is told, as Python itself would
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
