"""What every test shares: the data sets, small settings, and a watch over what a test leaves behind."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# no deadline: a busy machine is no failure; derandomised: the same examples each time, nothing kept on disk
settings.register_profile("surefoot", deadline=None, derandomize=True, database=None)
settings.load_profile("surefoot")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting:
        import torch

        if not torch.cuda.is_available():
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def find_data(name: str) -> Path:
    """The folder of the data set `name` under DATA (default ../shared/data beside the project); skips the test without it."""
    folder = (ROOT / os.environ.get("DATA", "../shared/data") / name).resolve()
    if not folder.is_dir():
        pytest.skip(f"the data set {name} is not in {folder.parent}: set DATA to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def cifar10_folder() -> Path:
    """CIFAR-10 as WebDataset tars."""
    return find_data("cifar10-webdataset")


@pytest.fixture(scope="session")
def wikitext2_folder() -> Path:
    """WikiText-2 as token files."""
    return find_data("wikitext-2")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """A test that leaves a thread, a process group, a variable or another working folder fails: the next one would inherit it."""
    variables, folder, threads = dict(os.environ), Path.cwd(), set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon and thread.is_alive()]
    changed = sorted(name for name in variables.keys() | os.environ.keys() if variables.get(name) != os.environ.get(name))
    changed = [name for name in changed if name != "PYTEST_CURRENT_TEST" and name not in SET_BY_OTHERS]
    moved = Path.cwd() != folder
    for name in changed:
        os.environ.pop(name, None)
        if name in variables:
            os.environ[name] = variables[name]
    os.chdir(folder)
    torch = sys.modules.get("torch")
    distributed = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch is not None:
        torch.distributed.destroy_process_group()
    assert not left, f"the test left threads behind: {left}"
    assert not changed, f"the test changed variables: {changed}"
    assert not moved, "the test changed the working folder; use monkeypatch.chdir"
    assert not distributed, "the test left a process group behind"


# packages that set variables when first imported or used: not the test's doing
SET_BY_OTHERS = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TF2_BEHAVIOR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUBLAS_WORKSPACE_CONFIG",
}
