"""How much memory a process may use, read from files as the kernel writes them.

And an allocation that is refused, which is exit code 7.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from surefoot.core.hardware import find_machine
from surefoot.core.place import child_environment
from surefoot.core.process import memory_limits
from surefoot.core.process.memory_limits import count_kills, find_available_bytes, find_limit
from surefoot.core.process.refused import is_refused
from tests.cli.forked_commands import run_forked
from tests.world.launched import Supervised

HOST = psutil.virtual_memory().total
MIB = 1 << 20


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


SELF, V2, V1 = "proc/self/cgroup", "sys/fs/cgroup", "sys/fs/cgroup/memory"
TREES: dict[str, tuple[dict[str, object], int, str]] = {
    "v2 with a limit": (
        {SELF: "0::/job", f"{V2}/job/memory.max": 900 * MIB},
        900 * MIB,
        "memory.max",
    ),
    "v2, the group above has the limit": (
        {
            SELF: "0::/slurm/a/b",
            f"{V2}/slurm/a/b/memory.max": "max",
            f"{V2}/slurm/memory.max": 800 * MIB,
        },
        800 * MIB,
        "memory.max",
    ),
    "v2 in a container": ({SELF: "0::/", f"{V2}/memory.max": 700 * MIB}, 700 * MIB, "memory.max"),
    "v2, the path is that of the host": (
        {SELF: "0::/docker/1f", f"{V2}/memory.max": 600 * MIB},
        600 * MIB,
        "memory.max",
    ),
    "v2 without a limit": ({SELF: "0::/job", f"{V2}/job/memory.max": "max"}, HOST, "host"),
    "v1 with a limit": (
        {SELF: "9:cpu:/a\n7:memory:/job", f"{V1}/job/memory.limit_in_bytes": 500 * MIB},
        500 * MIB,
        "memory.limit_in_bytes",
    ),
    "v1 beside v2": (
        {SELF: "0::/\n3:hugetlb,memory:/", f"{V1}/memory.limit_in_bytes": 400 * MIB},
        400 * MIB,
        "memory.limit_in_bytes",
    ),
    "v1 without a limit": (
        {SELF: "7:memory:/job", f"{V1}/job/memory.limit_in_bytes": 9223372036854771712},
        HOST,
        "host",
    ),
    "above the memory of the host": (
        {SELF: "0::/job", f"{V2}/job/memory.max": 4 * HOST},
        HOST,
        "host",
    ),
    "no cgroup": ({}, HOST, "host"),
}


@pytest.mark.parametrize("name", TREES)
def test_the_least_limit_is_that_of_the_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, num_bytes, source = TREES[name]
    found = find_limit(write(tmp_path, files))
    assert found.num_bytes == num_bytes
    assert source in found.source
    monkeypatch.setattr(memory_limits, "ROOT", tmp_path)
    assert find_machine().memory_bytes == num_bytes


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({f"{V2}/memory.max": 64 * MIB, f"{V2}/memory.current": 40 * MIB}, 24 * MIB),
        (
            {
                f"{V2}/memory.max": 64 * MIB,
                f"{V2}/memory.current": 60 * MIB,
                f"{V2}/memory.stat": f"inactive_file {16 * MIB}",
            },
            20 * MIB,
        ),
        ({f"{V2}/memory.max": 64 * MIB, f"{V2}/memory.current": 70 * MIB}, 0),
        (
            {f"{V1}/memory.limit_in_bytes": 32 * MIB, f"{V1}/memory.usage_in_bytes": 30 * MIB},
            2 * MIB,
        ),
    ],
)
def test_what_is_left_is_what_the_group_has_left(
    files: dict[str, object], left: int, tmp_path: Path
) -> None:
    assert find_available_bytes(write(tmp_path, {SELF: "0::/\n3:memory:/", **files})) == left


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{V2}/job/memory.events", "low 0\nmax 9\noom 3\noom_kill 3"),
        (f"{V1}/job/memory.oom_control", "under_oom 0\noom_kill 3"),
    ],
)
def test_the_kills_of_the_kernel_are_counted(name: str, text: str, tmp_path: Path) -> None:
    assert count_kills(write(tmp_path, {SELF: "0::/job\n3:memory:/job", name: text})) == 3
    assert count_kills(tmp_path / "nothing") == 0


def test_ulimit_is_a_limit() -> None:
    code = "from surefoot.core.process.memory_limits import find_limit; print(find_limit())"
    limited = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    assert limited.stdout == f"Limit(num_bytes={1 << 30}, source='ulimit -v')\n"


def wrapped(cause: BaseException) -> Exception:
    try:
        raise ValueError("the task failed") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 8 bytes"
            ),
            True,
        ),
        (RuntimeError("unable to mmap 64 bytes from file: Cannot allocate memory (12)"), True),
        (wrapped(MemoryError()), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (wrapped(KeyError("a")), False),
        (RuntimeError("can't start new thread"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("bad_alloc"), False),
    ],
    ids=repr,
)
def test_refused_memory_is_known_wherever_it_is_said(error: Exception, refused: bool) -> None:
    assert is_refused(error) is refused


TASK = """
import numpy, torch
from surefoot.tasks.digits import Digits

class Large(Digits):
    def __init__(self, where: str):
        super().__init__()
        self.where = where
        self.take("init")
    def take(self, where):
        if where == self.where:
            torch.zeros(1 << 40) if where != "data" else numpy.zeros(1 << 42)
    def model(self):
        self.take("model")
        return super().model()
    def data(self, split):
        self.take("data")
        return super().data(split)
    def loss(self, output, batch):
        self.take("loss")
        return super().loss(output, batch)
"""


@pytest.mark.parametrize("where", ["init", "model", "data", "loss"])
def test_a_task_that_is_refused_memory_ends_with_7_wherever_it_asks(
    where: str, tmp_path: Path
) -> None:
    (tmp_path / "large.py").write_text(TASK)
    words = (
        "train",
        "large.py:Large",
        "--set",
        f"task.where={where}",
        "--steps",
        "2",
        "--set",
        "schedule.warmup=1 steps",
        "--quiet",
    )
    done = run_forked(
        *words,
        folder=tmp_path,
        prepare=lambda: resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30)),
    )
    assert done.returncode == 7, done.stderr
    assert "allocate" in done.stderr
    assert "this process may use at most " in done.stderr
    assert "fault of surefoot" not in done.stderr


FILLED = """
import resource
from pathlib import Path
from surefoot.cli import main

held = []
def fill(**_):
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    size = 1 << 20
    while size > 16:
        try:
            held.append(bytes(size))
        except MemoryError:
            size //= 2
    raise {error}

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
main.build_verbs = lambda: fill
main.main()
"""


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError",
        "ImportError('failed to map segment from shared object')",
        "UserCodeError('lost') from MemoryError()",
    ],
)
def test_a_process_without_a_byte_left_still_prints_its_limit_and_ends_with_7(
    error: str, tmp_path: Path
) -> None:
    code = "from surefoot.core.errors import UserCodeError\n" + FILLED.format(error=error)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 7, done.stderr
    assert "hint: this process may use at most " in done.stderr
    assert "(ulimit -v)" in done.stderr
    assert "Traceback" not in done.stderr


ENDED_BY_C = (
    "cannot allocate memory for thread-local data: ABORT",
    "terminate called after throwing an instance of 'std::",
    "OpenBLAS error: Memory allocation still failed",
)


@pytest.mark.quick("576716800", "419430400")
@pytest.mark.parametrize("num_bytes", [400 * MIB, 550 * MIB, 700 * MIB])
def test_a_limit_that_torch_itself_does_not_fit_into_ends_with_7(
    num_bytes: int, tmp_path: Path
) -> None:
    done = run(
        tmp_path,
        ("train", "digits", "--steps", "2", "--set", "schedule.warmup=1 steps", "--quiet"),
        num_bytes,
    )
    # while torch is loaded: no Python is left to say more
    if done.returncode < 0 or any(words in done.stderr for words in ENDED_BY_C):
        assert "Traceback" not in done.stderr
        return
    # what torch itself takes differs between its builds
    assert done.returncode in (0, 7), done.stderr
    assert "fault of surefoot" not in done.stderr


def run(folder: Path, words: tuple[str, ...], num_bytes: int) -> subprocess.CompletedProcess[str]:
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    return subprocess.run(
        [sys.executable, "-m", "surefoot", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes)),
    )


@pytest.mark.quick("two ranks")
@pytest.mark.parametrize("numbers", [(2,), (1, 2)], ids=["two ranks", "one or two"])
def test_a_rank_that_the_kernel_killed_for_memory_is_named_with_the_limit(
    numbers: tuple[int, ...], tmp_path: Path
) -> None:
    root = write(
        tmp_path / "root",
        {
            SELF: "0::/job",
            f"{V2}/job/memory.max": 600 * MIB,
            f"{V2}/job/memory.events": "oom_kill 4",
        },
    )
    attempts = tmp_path / "attempts"

    def job(rank: int) -> int:
        if rank == 1:
            with attempts.open("a") as file:
                file.write("x")
            (root / f"{V2}/job/memory.events").write_text(
                f"oom_kill {4 + attempts.stat().st_size}\n"
            )
            os.kill(os.getpid(), signal.SIGKILL)
        if numbers == (2,) or os.environ["WORLD_SIZE"] == "2":
            time.sleep(60)
        return 0

    supervised = Supervised(
        job,
        2,
        tmp_path / "ranks",
        run=tmp_path / "run",
        max_restarts=3,
        numbers=numbers,
        prepare=lambda: setattr(memory_limits, "ROOT", root),
    )
    assert supervised.wait() == (7 if numbers == (2,) else 0), supervised.said
    assert "the kernel killed 1 process of this run's cgroup for memory" in supervised.said
    assert "600 MiB (memory.max of the cgroup)" in supervised.said
    assert attempts.stat().st_size == (1 if numbers == (2,) else 2), (
        "as many ranks again would end alike, fewer may not"
    )


def test_a_rank_that_somebody_else_killed_is_not_said_to_be_killed_for_memory(
    tmp_path: Path,
) -> None:
    root = write(tmp_path / "root", {SELF: "0::/job", f"{V2}/job/memory.events": "oom_kill 4"})

    def job(rank: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    supervised = Supervised(
        job, 2, tmp_path / "ranks", prepare=lambda: setattr(memory_limits, "ROOT", root)
    )
    assert supervised.wait() == 128 + signal.SIGKILL
    assert "for memory" not in supervised.said


def test_an_error_that_is_its_own_cause_is_read_once() -> None:
    error, other = RuntimeError("a wrong shape"), RuntimeError("another")
    error.__cause__ = error
    assert not is_refused(error)
    error.__cause__, other.__cause__ = other, error
    assert not is_refused(error)
    other.__context__ = MemoryError()
    error.__cause__ = MemoryError()
    assert is_refused(error)


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 4 << 30], ids=["none", "4 GiB"])
def test_torch_that_fails_while_it_is_imported_near_a_limit_was_refused_memory(
    limit: int, tmp_path: Path
) -> None:
    write(tmp_path, {"torch/__init__.py": "raise RuntimeError('Unable to create type object!')"})
    code = (
        "import resource\nfrom surefoot.core.process.refused import is_refused\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
        "try:\n    import torch\nexcept RuntimeError as error:\n    print(is_refused(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{limit != resource.RLIM_INFINITY}\n", done.stderr
