"""The same question to any training command: does it leave after a kill and a restart what it leaves when it is not broken off?

Every trial begins without the state folder. The files that are there at the end are compared: tensors by name where they can be
read, others by SHA-256; what holds times by its nature is left out, by name, and said so.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from surefoot.components.checkpoint.foreign import read_foreign
from surefoot.contract import digest
from surefoot.core.errors import InputError, SurefootError, TaskError
from surefoot.core.place import child_environment

TIMED = ("events.jsonl", "clock.json", "manifest.json", "run.lock", "ledger.bin")  # surefoot's own that hold times or attempts
TIMED_PREFIXES = ("events.out.tfevents",)
FOREIGN = (".pt", ".pth", ".ckpt", ".bin")
RANDOM = (
    "random",
    "pass_random",
)  # streams that a script does not seed differ between any two processes; what they decided does not
LOOK_S = 0.005
MAX_TRIES = 20
TOLD_LINES = 12
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CommandVerdict:
    """What was tried and what came of it; `repeat` and `resume` name the first difference.

    `num_changes` were seen in the state folder of an unbroken run; `kills` say how many an attempt had made when it was killed.
    """

    seed: int
    num_files: int
    num_changes: int
    elapsed_s: float
    kills: tuple[int, ...] = ()
    repeat: str | None = None
    resume: str | None = None
    by_digest: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.repeat is None and self.resume is None


def verify_command(command: str, state: Path, folder: Path, *, kills: int, seed: int, tell: Tell) -> CommandVerdict:
    """Run `command` unbroken twice, then killed `kills` times and restarted, each time into `state`, which is moved to `folder`.

    Raises InputError for a state folder that is there already or a command that cannot be run, TaskError for one that fails by itself.
    """
    words = shlex.split(command)
    if not words:
        raise InputError("--command is empty", hint='give one such as "python train.py"')
    if state.exists():
        raise InputError(f"--state {state} is there already", hint="each run begins without it: move it away, or name another")
    for name in ("first", "second"):
        tell(f"{name} unbroken run")
        pace = _run_whole(words, state)
        _keep(state, folder / name)
    files = _files(folder / "first")
    found = CommandVerdict(
        seed=seed, num_files=len(files), num_changes=pace.num_changes, elapsed_s=pace.took_s,
        left_out=tuple(name for name in files if _is_timed(name)),
    )  # fmt: skip
    repeat, by_digest = _compare(folder / "first", folder / "second")
    if repeat is not None:
        return replace(found, repeat=repeat, by_digest=by_digest)
    done = _run_killed(words, state, pace, kills, random.Random(seed), tell)
    _keep(state, folder / "killed")
    resume, by_digest = _compare(folder / "first", folder / "killed")
    return replace(found, kills=done, resume=resume, by_digest=by_digest)


@dataclass(frozen=True)
class Pace:
    """How an unbroken run went: the seconds it took, when its state folder changed first, and how many changes were seen."""

    took_s: float
    first_s: float
    num_changes: int


def _start(words: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            words, env=child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise InputError(
            f"{words[0]} cannot be run: {error.strerror}", hint="give the command as you type it in a shell"
        ) from None


def _run_whole(words: list[str], state: Path) -> Pace:
    """Run the command to its end. Raises TaskError when it fails or leaves nothing."""
    started_s = first_s = time.monotonic()
    process, look, num_changes = _start(words), _look(state), 0
    while process.poll() is None:
        if (now := _look(state)) != look:
            look, num_changes = now, num_changes + 1
            first_s = time.monotonic() if num_changes == 1 else first_s
        time.sleep(LOOK_S)
    _, said = process.communicate()
    if process.returncode:
        told = "\n".join(said.strip().splitlines()[-TOLD_LINES:])
        raise TaskError(f"the command ended with {process.returncode}: {told}", hint="make it run to its end first")
    if not state.is_dir() or not _files(state):
        raise TaskError(f"the command left nothing in {state}", hint="name the folder that holds all it keeps with --state")
    return Pace(time.monotonic() - started_s, first_s - started_s, num_changes)


def _look(state: Path) -> tuple[tuple[str, int, int], ...]:
    """What can be seen of a folder from outside: which files, how long, when written."""
    found = []
    for path in state.rglob("*"):
        with contextlib.suppress(OSError):  # gone since
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def _run_killed(words: list[str], state: Path, pace: Pace, kills: int, draws: random.Random, tell: Tell) -> tuple[int, ...]:
    """Kill the process group once it has changed the folder so often, a random time later, and start again; at last let it end.

    Changes are counted, not seconds: a busy machine is slower in both. Together the attempts make fewer than a whole run.
    """
    done: list[int] = []
    most, longest_s = max(1, pace.num_changes // (kills + 1)), (pace.took_s - pace.first_s) / max(1, pace.num_changes)
    for _ in range(MAX_TRIES):
        if len(done) == kills:
            break
        wanted = draws.randint(1, most)
        process = _start(words)
        if _kill_after(process, state, wanted, draws.uniform(0.0, longest_s)):
            done.append(wanted)
            tell(f"kill {len(done)} of {kills}: after {wanted} of {pace.num_changes} changes in {state}")
            continue
        said = process.communicate()[1]
        if process.returncode:
            raise TaskError(
                f"the restarted command ended with {process.returncode}: {said.strip()[-500:]}",
                hint="it must go on, or begin anew",
            )
        if done:
            return tuple(done)
        tell("it was over before the kill came: again, and earlier")
        shutil.rmtree(state)
        most, longest_s = max(1, most // 2), longest_s / 2
    if not done:
        raise TaskError("the command is over before it can be killed", hint="make its run longer, or let it save more often")
    tell("the last start, to the end")
    _run_whole(words, state)
    return tuple(done)


def _kill_after(process: subprocess.Popen[str], state: Path, changes: int, later_s: float) -> bool:
    """Kill the group so many seconds after the folder has changed so often; False where the process ended by itself."""
    look, kill_s = _look(state), math.inf
    while process.poll() is None and time.monotonic() < kill_s:
        if changes and (now := _look(state)) != look:
            look, changes = now, changes - 1
            kill_s = kill_s if changes else time.monotonic() + later_s
        time.sleep(min(LOOK_S, max(0.0, kill_s - time.monotonic())))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def _keep(state: Path, where: Path) -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(state, where)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _is_timed(name: str) -> bool:
    return Path(name).name in TIMED or Path(name).name.startswith(TIMED_PREFIXES)


def _compare(one: Path, two: Path) -> tuple[str | None, tuple[str, ...]]:
    """The first difference in words, and the files that could only be compared as a whole."""
    names, others = ([name for name in _files(folder) if not _is_timed(name)] for folder in (one, two))
    if names != others:
        name = next(iter(sorted(set(names) ^ set(others))))
        return f"{name} is left by one of them alone", ()
    by_digest: list[str] = []
    for name in names:
        apart = _difference(one / name, two / name, name, by_digest)
        if apart is not None:
            return apart, tuple(by_digest)
    return None, tuple(by_digest)


def _difference(one: Path, two: Path, name: str, by_digest: list[str]) -> str | None:
    if digest.of_file(one) == digest.of_file(two):
        return None
    try:
        first, second = _tensors(one), _tensors(two)
    except SurefootError:
        first = second = None
    if one.name == "state.json":  # of our own commits
        texts = [_without_random(json.loads(path.read_text(encoding="utf-8"))) for path in (one, two)]
        return None if texts[0] == texts[1] else f"{name} differs"
    if first is None or second is None:
        by_digest.append(name)
        return f"{name} differs"
    if first.keys() != second.keys():
        return f"{name}: {next(iter(sorted(first.keys() ^ second.keys())))} is in one of them alone"
    for key in sorted(key for key in first if not set(RANDOM) & set(key.split("/"))):
        if first[key].shape != second[key].shape or first[key].tobytes() != second[key].tobytes():
            return f"{name}: {key} differs{_by_how_much(first[key], second[key])}"
    return None  # other bytes around the same tensors


def _without_random(tree: Any) -> Any:
    return {key: _without_random(value) for key, value in tree.items() if key not in RANDOM} if isinstance(tree, dict) else tree


def _tensors(path: Path) -> dict[str, np.ndarray] | None:
    """The tensors of a file by name; None for a file of another kind."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return {name: _as_array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
    if path.suffix in FOREIGN:
        return {name: _as_array(tensor) for name, tensor in read_foreign(path).items()}
    return None


def _as_array(tensor: object) -> np.ndarray:
    if isinstance(tensor, np.ndarray):
        return tensor
    found = tensor.detach().cpu().contiguous()  # type: ignore[attr-defined]
    return np.asarray(found.float().numpy() if str(found.dtype) == "torch.bfloat16" else found.numpy())


def _by_how_much(one: np.ndarray, two: np.ndarray) -> str:
    if one.shape != two.shape or one.dtype.kind != "f":
        return ""
    return f" by {np.nanmax(np.abs(one.astype(np.float64) - two.astype(np.float64))):.3g} at most"
