"""The same question to any training command: does it leave after a kill and a restart what it leaves when it is not broken off?

Every trial begins without the state folder. The files that are there at the end are compared: tensors by name where they can be
read, others by SHA-256; what holds times by its nature is left out, by name, and said so.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    "state/random/"  # of streams that a script does not seed, which differ between any two processes; what they decided does not
)
POLL_S = 0.01
MAX_TRIES = 20
TOLD_LINES = 12
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CommandVerdict:
    """What was tried and what came of it; `kills` are shares of an unbroken run's time, `repeat` and `resume` name the first difference."""

    seed: int
    num_files: int
    elapsed_s: float
    kills: tuple[float, ...] = ()
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
    first_s = took_s = 0.0
    for name in ("first", "second"):
        tell(f"{name} unbroken run")
        first_s, took_s = _run_whole(words, state)
        _keep(state, folder / name)
    files = _files(folder / "first")
    left_out = tuple(name for name in files if _is_timed(name))
    repeat, by_digest = _compare(folder / "first", folder / "second")
    if repeat is not None:
        return CommandVerdict(
            seed=seed, num_files=len(files), elapsed_s=took_s, repeat=repeat, by_digest=by_digest, left_out=left_out
        )
    done = _run_killed(words, state, (first_s, took_s), kills, random.Random(seed), tell)
    _keep(state, folder / "killed")
    resume, by_digest = _compare(folder / "first", folder / "killed")
    return CommandVerdict(
        seed=seed, num_files=len(files), elapsed_s=took_s, kills=done, resume=resume, by_digest=by_digest, left_out=left_out
    )


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


def _run_whole(words: list[str], state: Path) -> tuple[float, float]:
    """The seconds after which a run had saved something, and to its end. Raises TaskError when it fails or leaves nothing."""
    started_s = time.monotonic()
    process = _start(words)
    while process.poll() is None and not _is_begun(state):
        time.sleep(POLL_S)
    first_s = time.monotonic() - started_s
    _, said = process.communicate()
    if process.returncode:
        told = "\n".join(said.strip().splitlines()[-TOLD_LINES:])
        raise TaskError(f"the command ended with {process.returncode}: {told}", hint="make it run to its end first")
    if not state.is_dir() or not _files(state):
        raise TaskError(f"the command left nothing in {state}", hint="name the folder that holds all it keeps with --state")
    return first_s, time.monotonic() - started_s


def _is_begun(state: Path) -> bool:
    return state.is_dir() and any(state.iterdir())


def _run_killed(
    words: list[str], state: Path, span_s: tuple[float, float], kills: int, draws: random.Random, tell: Tell
) -> tuple[float, ...]:
    """Kill the process group at random times, once something was saved, and start again; at last let it end."""
    done: list[float] = []
    first_s, took_s = span_s
    for _ in range(MAX_TRIES):
        if len(done) == kills:
            break
        share = draws.uniform(0.1, 0.8)  # of the time from the first save to the end: before it there is nothing to go on from
        process = _start(words)
        if _kill_after(process, state, first_s + share * (took_s - first_s)):
            done.append(share)
            tell(f"kill {len(done)} of {kills}: at {share:.0%} of the time of a run")
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
        first_s, took_s = first_s / 2, took_s / 2
    if not done:
        raise TaskError("the command is over before it can be killed", hint="make its run longer")
    tell("the last start, to the end")
    _run_whole(words, state)
    return tuple(done)


def _kill_after(process: subprocess.Popen[str], state: Path, after_s: float) -> bool:
    """Kill the group after a time, but not before something lies in the state folder; False where the process ended by itself."""
    began_s = time.monotonic()
    while process.poll() is None:
        if _is_begun(state) and time.monotonic() - began_s >= after_s:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return process.returncode == -signal.SIGKILL
        time.sleep(POLL_S)
    return False


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
    for key in sorted(key for key in first if not key.startswith(RANDOM)):
        if first[key].shape != second[key].shape or first[key].tobytes() != second[key].tobytes():
            return f"{name}: {key} differs{_by_how_much(first[key], second[key])}"
    return None  # other bytes around the same tensors


def _without_random(tree: Any) -> Any:
    return {key: value for key, value in tree.items() if key != "random"} if isinstance(tree, dict) else tree


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
