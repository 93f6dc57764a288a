"""Execution of an arm: starts its processes, waits for them and returns the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from surefoot.core import place
from surefoot.core.errors import BadRecordError, InputError
from surefoot.trial.arm import REPORT, SHARED, STARTED, TURNS, WORK, Arm
from surefoot.trial.report import ProcessReport, read_report

LAUNCHER = Path(__file__).with_name("launcher.py")
TAIL_LINES, TAIL_CHARACTERS = 12, 1500
Ending = Literal["done", "crashed", "timed out"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one run of a variant (arm).

    `measures` has values by name, with the unit in the name: those that the arm reported, and
    `process_cpu_s` (summed over all processes), `process_wall_s` and `process_peak_bytes` (of the
    largest process). After a failure it is empty, `error` is the end of the error output, and
    `exit_code` is that of the first failed rank. `round` counts from 0. Warm-up rounds are marked
    by `is_warmup` and never compared.
    """

    arm: str
    round: int
    ended: Ending
    measures: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    is_warmup: bool = False
    exit_code: int | None = None


@dataclass(frozen=True)
class ArmProcess:
    """Process of a variant (arm) that has been started."""

    process: subprocess.Popen[bytes]
    result: int  # read end of the pipe that its launcher writes to
    folder: Path


def run_arm(arm: Arm, work: Path, *, number: int = 0, is_warmup: bool = False) -> Outcome:
    """Run `arm` once in fresh processes in the folder `work`, as part of the round `number`.

    No process outlives this call. A failure of the arm is returned in the Outcome and raises
    nothing. Must be called from the main thread: on Linux the processes are killed when the thread
    that started them ends.

    Raises:
        InputError: If the working folder of the arm does not exist.
    """
    if not arm.folder.is_dir():
        raise InputError(f"the working folder {arm.folder} of the arm {arm.name!r} does not exist")
    started_s = time.perf_counter()
    ranks: list[ArmProcess] = []
    with _rank_variables(arm) as variables:
        try:
            for rank in range(arm.ranks):
                folder = work / f"rank{rank}"
                # one by one, so that those that have started end even if one fails
                ranks.append(start_rank(arm, folder, variables[rank], started_s))
            results = _wait(ranks, started_s + arm.timeout_s)
        finally:
            for each in ranks:
                end_rank(each)
    wall_s = time.perf_counter() - started_s
    return judge_outcome(arm, ranks, results, wall_s, number, is_warmup)


@contextlib.contextmanager
def _rank_variables(arm: Arm) -> Iterator[list[dict[str, str]]]:
    """Return a context that yields the environment variables of torchrun for each rank.

    The rendezvous port is bound inside the context, so that no program but rank 0 can listen on it.
    """
    if arm.ranks == 1:
        yield [{}]
        return
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        shared = {
            "WORLD_SIZE": str(arm.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.getsockname()[1]),
        }
        yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(arm.ranks)]


def start_rank(
    arm: Arm,
    folder: Path,
    variables: Mapping[str, str],
    started_s: float,
    *,
    turns: int | None = None,
) -> ArmProcess:
    """Start one process of `arm` in the new folder `folder`.

    Args:
        arm: The arm.
        folder: Folder to create.
        variables: Additional variables of the environment.
        started_s: Value of `time.perf_counter()` that the process gets as `{started_s}`.
        turns: Descriptor through which arms take turns; None if the process runs alone.
    """
    folder.mkdir(parents=True)
    for name, text in arm.files.items():
        (folder / name).write_text(text)
    filled = {
        REPORT: str(folder / "report.json"),
        WORK: str(folder),
        STARTED: repr(started_s),
        SHARED: str(folder if arm.ranks == 1 else folder.parent),
        TURNS: "alone" if turns is None else str(turns),
    }
    command = [_fill(word, filled) for word in arm.command]
    environment = (
        place.child_environment(threads=arm.threads) | dict(arm.variables) | dict(variables)
    )
    read_end, write_end = os.pipe()
    passed = [write_end] if turns is None else [write_end, turns]
    try:
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(LAUNCHER),
                    str(write_end),
                    str(os.getpid()),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=arm.folder,
                env=environment,
                pass_fds=passed,
                start_new_session=True,
            )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return ArmProcess(process, read_end, folder)


def _fill(word: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word


def _wait(ranks: Sequence[ArmProcess], until_s: float) -> list[dict[str, float] | None]:
    """Return the result line of each rank's launcher, or None if the rank still runs.

    The wait ends at `until_s` or once a rank fails.
    """
    results: list[dict[str, float] | None] = [None] * len(ranks)
    for index in _as_they_end(ranks, until_s):
        result = results[index] = read_result(ranks[index])
        if result["exit_code"] != 0:
            break
    return results


def read_result(rank: ArmProcess) -> dict[str, float]:
    """Return the launcher's result line.

    A launcher that was killed writes none; the result then has the exit code -SIGKILL.
    """
    text = os.read(rank.result, 4096)
    result: dict[str, float] = json.loads(text) if text else {"exit_code": -signal.SIGKILL}
    return result


def _as_they_end(ranks: Sequence[ArmProcess], until_s: float) -> Iterator[int]:
    waiting = {rank.result: index for index, rank in enumerate(ranks)}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, until_s - time.perf_counter()))
        if not ready:
            return
        for descriptor in ready:
            yield waiting.pop(descriptor)


def end_rank(rank: ArmProcess) -> None:
    """Kill the process group of a rank, wait for its leader and close the pipe.

    The group is killed before the leader is waited for, because the id of the group could be reused
    afterwards.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, signal.SIGKILL)
    rank.process.wait()
    os.close(rank.result)


def judge_outcome(
    arm: Arm,
    ranks: Sequence[ArmProcess],
    results: Sequence[dict[str, float] | None],
    wall_s: float,
    number: int,
    is_warmup: bool,
) -> Outcome:
    """Return the outcome of a run from the results of its launchers and the report of rank 0.

    A result is None if the process was still running.
    """
    done = [result for result in results if result is not None]
    problem = _problem(arm, ranks, results)
    report = ProcessReport()
    if problem is None and arm.reports:
        try:
            report = read_report(ranks[0].folder / "report.json")
        except BadRecordError as error:
            problem = "crashed", f"{error}\n{_tail(ranks[0].folder)}"
    if problem is not None:
        failed = next(
            (round(result["exit_code"]) for result in done if result["exit_code"] != 0), None
        )
        return Outcome(
            arm=arm.name,
            round=number,
            ended=problem[0],
            error=problem[1].strip(),
            is_warmup=is_warmup,
            exit_code=failed,
        )
    outside = {
        "process_cpu_s": sum(result["cpu_s"] for result in done),
        "process_wall_s": wall_s,
        "process_peak_bytes": max(result["peak_bytes"] for result in done),
    }
    return Outcome(
        arm=arm.name,
        round=number,
        ended="done",
        measures={**outside, **report.measures},
        facts=report.facts,
        is_warmup=is_warmup,
    )


def _problem(
    arm: Arm, ranks: Sequence[ArmProcess], results: Sequence[dict[str, float] | None]
) -> tuple[Ending, str] | None:
    """Return how a rank failed and its error: the first that crashed, else one that timed out.

    Returns None if all ranks ended with exit code 0.
    """
    for index, result in enumerate(results):
        if result is not None and result["exit_code"] != 0:
            return (
                "crashed",
                (
                    f"{_rank_folder(arm, index)}exit code {result['exit_code']}\n"
                    f"{_tail(ranks[index].folder)}"
                ),
            )
    if None in results:
        index = results.index(None)
        return (
            "timed out",
            (
                f"{_rank_folder(arm, index)}still running after {arm.timeout_s:g} s\n"
                f"{_tail(ranks[index].folder)}"
            ),
        )
    return None


def _rank_folder(arm: Arm, rank: int) -> str:
    return f"rank {rank} of {arm.ranks}: " if arm.ranks > 1 else ""


def _tail(folder: Path) -> str:
    """Return the last lines of the process's stderr, or of its stdout if stderr is empty."""
    for name in ("stderr", "stdout"):
        path = folder / name
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8 * TAIL_CHARACTERS))
            lines = file.read().decode(errors="replace").strip().splitlines()
        # torch prefixes the lines so while ranks are joined
        lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in lines]
        if lines:
            return "\n".join(lines[-TAIL_LINES:])[-TAIL_CHARACTERS:]
    return ""
