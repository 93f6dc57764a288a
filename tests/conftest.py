"""What every test shares: data sets, small settings, a watch over what a test leaves behind."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
num_frozen = [0]  # modules that were loaded at the last freeze
MANY = 300  # modules: torch loads more at the first optimizer, and to compile

# no deadline: a busy machine is no failure; derandomised: the same examples each time, nothing
# kept on disk
settings.register_profile(
    "surefoot",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("surefoot")

# what a shell starts in the background, or nohup does, ignores these, and so does all that it
# starts: tests send them
for _number, _how in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _how)

# pytest's handler prints pages of stacks past its own capture: a process that a test forks and that
# crashes, as planted, has an exit code
os.register_at_fork(after_in_child=faulthandler.disable)


@pytest.hookimpl(tryfirst=True)  # before pytest itself leaves out what is marked slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow_members(items, is_whole=not any("::" in str(each) for each in config.args))
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting:
        import torch

        if not torch.cuda.is_available():
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def mark_slow_members(items: list[pytest.Item], is_whole: bool) -> None:
    """Mark slow the members that `quick` does not name.

    Where whole files were collected, an id that is no member's is an error.
    """
    named, members = dict[str, set[str]](), dict[str, set[str]]()
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick is None or not isinstance(item, pytest.Function):
            continue
        test, member = item.nodeid.partition("[")[0], item.callspec.id
        named[test] = set(quick.args)
        members.setdefault(test, set()).add(member)
        if member not in quick.args:
            item.add_marker(pytest.mark.slow)
    unknown = {test: ids - members[test] for test, ids in named.items() if ids - members[test]}
    if unknown and is_whole:
        raise pytest.UsageError(f"marked as quick, but no member has the id: {unknown}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # a third of the time: millions of objects are made, and hardly any is freed
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    freeze()
    # by its own measure the collector would run 70 times a second: 7 % of the tests' time
    gc.set_threshold(10_000)


def freeze() -> None:
    """Spare each later collection a look through every module and test: seconds, each time."""
    gc.collect()
    gc.freeze()
    num_frozen[0] = len(sys.modules)


def find_data(name: str) -> Path:
    """The folder of the data set `name` under DATA; skips the test without it.

    DATA is by default ../shared/data beside the project.
    """
    folder = (ROOT / os.environ.get("DATA", "../shared/data") / name).resolve()
    if not folder.is_dir():
        pytest.skip(
            f"the data set {name} is not in {folder.parent}: set DATA to the folder that holds it"
        )
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
def on_the_cpu(
    request: pytest.FixtureRequest,
    leaves_nothing_behind: None,  # which looks after the variable is as before
) -> Iterator[None]:
    """Unless it is marked as a GPU test, a test and what it starts see no GPU, as most machines."""
    import torch

    if request.node.get_closest_marker("gpu") or not torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes; this one has read it
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """A test fails that leaves something changed; the next starts clean.

    That is a thread, a process group, a variable, a folder or a setting of torch.
    """
    variables, folder, threads, settings_before = (
        dict(os.environ),
        Path.cwd(),
        set(threading.enumerate()),
        _torch_settings(),
    )
    yield
    for each in [each for each in threading.enumerate() if each not in threads and not each.daemon]:
        gc.collect()  # a pool that nobody holds any more tells its threads to end
        each.join(timeout=30.0)
    found = [
        f"thread {one.name}"
        for one in threading.enumerate()
        if one not in threads and not one.daemon and one.is_alive()
    ]
    for name in sorted(variables.keys() | os.environ.keys()):
        if variables.get(name) != os.environ.get(name) and name not in SET_BY_OTHERS:
            found.append(f"variable {name}")
            os.environ.pop(name, None)
            if name in variables:
                os.environ[name] = variables[name]
    if Path.cwd() != folder:
        found.append("working folder (use monkeypatch.chdir)")
        os.chdir(folder)
    torch = sys.modules.get("torch")
    for name, value in _torch_settings().items():
        if torch is not None and settings_before.get(name, value) != value:
            found.append(f"torch's {name}")
            getattr(torch, SETTERS[name])(settings_before[name])
    if (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        found.append("process group")
        torch.distributed.destroy_process_group()
    if len(sys.modules) > num_frozen[0] + MANY:
        freeze()
    assert not found, f"the test left behind: {', '.join(found)}"


SETTERS = {
    "default dtype": "set_default_dtype",
    "determinism": "use_deterministic_algorithms",
    "gradients": "set_grad_enabled",
    "threads": "set_num_threads",
}


def _torch_settings() -> dict[str, Any]:
    """What torch holds for the whole process; nothing while it is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


# pytest's own, and those of packages that set variables when first imported or used: not the
# test's doing
SET_BY_OTHERS = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TF2_BEHAVIOR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "CUBLAS_WORKSPACE_CONFIG",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}
