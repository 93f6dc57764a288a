"""An error of the user's code is told with the innermost line of the user's own.

So is one that torch raises below it.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from surefoot.contract.task import load
from surefoot.core.errors import SurefootError, TaskError
from surefoot.train.failure import blame
from surefoot.train.run import Run
from tests.train.small import spec

ROOT = Path(__file__).resolve().parents[2]
HELP = "import torch\n\ndef grow(x):\n    return torch.cat([x, torch.ones(7, 7, 7)])  # BROKEN\n"
TASK = """
import torch
from torch import nn
from helping import grow
from tests.train.small import Small

class Model(nn.Linear):
    {decorator}
    def __init__(self):
        super().__init__(4, 3)
        {in_constructor}

    def forward(self, x):
        {in_forward}
        return super().forward(x)

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        {in_dataset}
        return torch.ones(4), number % 3

class Mine(Small):
    {decorator_of_task}
    def __init__(self):
        super().__init__()
        {in_task}

    def model(self):
        return Model()

    def data(self, split):
        {in_data}
        return Items()

    def augment(self, batch, keys):
        {in_augment}
        return batch

    def loss(self, output, batch):
        {in_loss}
        return super().loss(output, batch)

    def metrics(self, output, batch):
        {in_metrics}
        return super().metrics(output, batch)
"""
PLACES = ("constructor", "forward", "dataset", "task", "data", "augment", "loss", "metrics")


def write(folder: Path, place: str, *, decorated: bool) -> str:
    """A task that calls `grow`, of a file beside it, in one place.

    Where it is decorated, torch calls its constructors.
    """
    parts = {f"in_{each}": "grow(torch.ones(2))" if each == place else "pass" for each in PLACES}
    decorator = "@torch.no_grad()" if decorated else ""
    (folder / "mine.py").write_text(
        TASK.format(**parts, decorator=decorator, decorator_of_task=decorator)
    )
    (folder / "helping.py").write_text(HELP)
    return f"{folder / 'mine.py'}:Mine"


@pytest.mark.parametrize("place", PLACES)
def test_the_innermost_line_of_the_users_own_is_named_wherever_torch_raises(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "helping", raising=False)
    monkeypatch.setitem(sys.modules, "surefoot_task_mine", sys)
    use = write(tmp_path, place, decorated=True)
    how = spec(4, task={"use": use}, evaluate={"every": "2 steps"})
    with (
        pytest.raises(SurefootError) as raised,
        Run(how, load(use, {}).task, folder=tmp_path / "run", quiet=True) as run,
    ):
        list(run.steps())
    monkeypatch.delitem(sys.modules, "helping", raising=False)
    assert f"{tmp_path / 'helping.py'}:4, in grow" in raised.value.message
    assert "site-packages" not in raised.value.message


@pytest.mark.parametrize("kind", ["import", "constructor"])
def test_a_task_that_cannot_be_built_names_its_own_line_not_that_of_a_decorator_of_torch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "surefoot_task_odd", sys)
    lines = (
        "import torch\n\nclass Odd:\n    @torch.no_grad()\n    def __init__(self):\n"
        "        torch.ones(2) @ torch.ones(3)\n"
    )
    path = tmp_path / "odd.py"
    path.write_text(lines + ("Odd()\n" if kind == "import" else ""))
    with pytest.raises(TaskError, match=r"odd\.py:6, in __init__\)\nhint") as raised:
        load(f"{path}:Odd", {})
    assert "site-packages" not in raised.value.message


@pytest.mark.quick("compiled as one")
@pytest.mark.parametrize("how", ["compiled as one", "read by an interpreter"])
def test_the_line_of_a_script_on_standard_input_is_named(how: str, tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "from surefoot.train.run import Run\n"
        "from tests.train.small import Small, spec\n"
        "class Odd(Small):\n"
        "    def loss(self, output, batch):\n"
        "        return output @ torch.ones(99)\n"
        f"with Run(spec(2), Odd(), folder={str(tmp_path / 'run')!r}, quiet=True) as run:\n"
        "    list(run.steps())\n"
    )
    if how == "compiled as one":
        with pytest.raises(SurefootError) as raised:
            exec(compile(script, "<stdin>", "exec"), {"__name__": "__main__"})
        assert "(<stdin>:6, in loss)" in raised.value.message
        return
    done = subprocess.run(
        [sys.executable, "-"],
        input=script,
        text=True,
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert "(<stdin>:6, in loss)" in done.stderr.splitlines()[-2], done.stderr


@pytest.mark.parametrize("kind", ["ValueError", "KeyError", "Broken"])
def test_an_error_in_a_worker_of_a_loader_is_told_as_itself_with_its_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "items.py").write_text(
        "class Broken(Exception):\n    pass\n\n"
        "class Items:\n    def __len__(self):\n        return 8\n\n"
        f"    def __getitem__(self, number):\n        raise {kind}('record 3')  # BROKEN\n"
    )
    made = spec_from_file_location("items_of_a_worker", tmp_path / "items.py")
    assert made is not None
    assert made.loader is not None
    items = module_from_spec(made)
    made.loader.exec_module(items)
    # a worker sends the class of its error by name, or nothing ever
    monkeypatch.setitem(sys.modules, "items_of_a_worker", items)
    with pytest.raises(Exception, match="DataLoader worker process") as caught:
        next(iter(torch.utils.data.DataLoader(items.Items(), num_workers=1)))
    for worker in multiprocessing.active_children():  # the error refers to it, and keeps it alive
        worker.terminate()
        worker.join()
    told = blame.describe(caught.value)
    assert "record 3" in told
    assert f"{kind}: " in told
    assert f"{tmp_path / 'items.py'}:9, in __getitem__: raise" in told
