"""What is defined in an interactive session goes to no process that is spawned.

The same holds for a notebook and a script on standard input.
"""

from __future__ import annotations

import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from surefoot.components.data.loader.crew import check_picklable
from surefoot.components.data.loader.jobs import Reader
from surefoot.core.errors import DataError
from tests.components.loading import Numbers

SESSION = """
import sys
from surefoot.data import as_source
from surefoot.components.data.loader.batches import LoaderSettings
from surefoot.core.errors import DataError
from tests.components.test_loader_attacks import loader

class Squares:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return number * number

try:
    loader(as_source(Squares()), LoaderSettings(workers=1, kind="process", start="spawn")).take(1)
except DataError as error:
    print(error)
reading = loader(as_source(Squares()), LoaderSettings(workers=0))
print(len(reading.take(1).window.ids))
"""


@pytest.mark.quick("a command")
@pytest.mark.parametrize("words", [["-"], ["-c", SESSION]], ids=["standard input", "a command"])
def test_a_dataset_of_a_session_is_refused_by_its_name_before_a_worker_is_spawned(
    words: list[str],
) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        input=SESSION,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "the source._dataset cannot be pickled for a spawned worker: "
        "Squares is defined in an interactive session" in done.stdout
    )
    assert (
        'import it; or set loader.start = "fork", or loader.kind = "thread", or loader.workers = 0'
        in done.stdout
    )
    assert done.stdout.splitlines()[-1] == "16"


def double(batch: Any, keys: Any) -> Any:
    return batch


class Holding(Numbers):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


@pytest.mark.parametrize("place", ["self", "list", "dict"])
def test_what_a_source_holds_of_a_session_is_named_and_a_script_has_a_file(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"self": double, "list": [1, double], "dict": {"a": double}}[place]
    reader = Reader(Holding(held), None, 0)
    check_picklable(reader)
    monkeypatch.setattr(double, "__module__", "__main__")
    module = types.ModuleType("__main__")
    # python -m mine, which another process imports
    module.__spec__ = ModuleSpec("mine.__main__", None)
    module.double = double  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", module)
    check_picklable(reader)
    session = types.ModuleType("__main__")
    session.double = double  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", session)
    with pytest.raises(
        DataError, match=r"the source\.held.* double is defined in an interactive session"
    ):
        check_picklable(reader)
    session.__file__ = __file__
    check_picklable(reader)
