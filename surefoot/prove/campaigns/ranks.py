"""Campaigns with runs of several ranks under surefoot's supervisor.

Ranks are killed, stopped, or get non-finite values, and runs resume with fewer or more ranks. Each
trial runs the command that a user types, with its real processes.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from surefoot.components.checkpoint import Commit
from surefoot.contract import manifest
from surefoot.control.launch.decide import IN_VAIN
from surefoot.core.errors import EXIT_OK
from surefoot.prove.campaigns.outcome import TrialResult
from surefoot.prove.campaigns.probe import BATCH, SAMPLES, TASK, ProbedRun
from surefoot.prove.campaigns.workshop import (
    KILLED,
    PATIENCE_S,
    Child,
    Workshop,
    find_wrong_end,
    read_faults,
)

STEPS, EVERY = 40, 4
PIECES = 4  # pieces of each batch, summed in one order: bitwise identical on 1, 2 and 4 ranks
SIZES = (1, 2, 4)
STALL_S, GONE_S = 1.0, 10.0
NAMED_S = 60.0  # the timeout is ten times as long in the first step, and a machine may be busy
PATIENT_S = 60.0  # hang timeout of a run with a different fault: a busy machine is no stall
LATER_S = 0.1  # longest wait after a checkpoint
RESTARTS = 3
RANK = "surefoot:"  # prefix of the process name of a rank, before its number
KINDS = ("loss", "gradient", "buffer")
NO_FAULT: Mapping[str, Any] = {}


def run_on(
    folder: Path,
    ranks: int,
    fault: Mapping[str, Any] = NO_FAULT,
    *,
    restarts: int = RESTARTS,
    stall_s: float = PATIENT_S,
    is_exact: bool = True,
) -> ProbedRun:
    """Return a run on `ranks` ranks; `fault` contains arguments of its task.

    With `is_exact` the results are bitwise identical on any number of ranks.
    """
    return ProbedRun(
        folder=folder / "run",
        steps=STEPS,
        every=EVERY,
        background=False,
        ranks=ranks,
        restarts=restarts,
        task={"use": TASK, **fault},
        tables={
            "data": {"last_batch": "drop"},
            "train": {"microbatch": BATCH // PIECES, "threads": 1},
            "layout": {"hang_timeout": stall_s, **({"virtual_ranks": PIECES} if is_exact else {})},
            "stability": {"max_skips": STEPS},
            "evaluate": {"every": "9 epochs"},
        },
    )


def find_ranks(child: Child, ranks: int) -> dict[int, psutil.Process]:
    """Return the processes of the ranks that have started, by rank.

    With a single rank, the process is that of the command itself.
    """
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor = psutil.Process(child.pid)
        if ranks == 1:
            return {0: supervisor}
        for each in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.name().startswith(RANK):
                    found[int(each.name().removeprefix(RANK))] = each
    return found


def wait_for_step(child: Child, attempt: ProbedRun, step: int, draws: random.Random) -> bool:
    """Wait for the checkpoint of `step` (0: the start of all ranks), and then a short random time.

    Returns False if the command ended before.
    """
    came = child.wait_until(
        lambda: (
            len(find_ranks(child, attempt.ranks)) == attempt.ranks
            if step == 0
            else max(manifest.steps(attempt.folder), default=0) >= step
        ),
        PATIENCE_S,
    )
    return came and not child.ends_within(draws.uniform(0.0, LATER_S))


def _draw_steps(draws: random.Random, number: int) -> list[int]:
    """Return random steps with a checkpoint, after which a fault is injected.

    The first may be 0, the start of the run.
    """
    return sorted(draws.sample(range(0, STEPS - EVERY, EVERY), number))


def change_size(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Interrupt a run three times, and resume it on a different number of ranks each time.

    Each attempt has 1, 2 or 4 ranks. The first three are interrupted by killing a rank or the
    supervisor, and the fourth trains to the end.
    """
    draws = random.Random(seed)
    golden, sizes, fell = workshop.golden(run_on(folder, 1)), list[int](), 0
    for step in _draw_steps(draws, 3):
        sizes.append(draws.choice([each for each in SIZES if each not in sizes[-1:]]))
        attempt = run_on(folder, sizes[-1], restarts=0)
        child = workshop.train(attempt)
        if wait_for_step(child, attempt, step, draws):
            there = find_ranks(child, attempt.ranks)
            if there and draws.random() < 0.5:
                there[draws.choice(sorted(there))].kill()
            else:
                child.send(signal.SIGKILL)
            fell += 1
        child.wait()
    sizes.append(draws.choice([each for each in SIZES if each != sizes[-1]]))
    attempt = run_on(folder, sizes[-1])
    wrong = find_wrong_end(workshop.train(attempt), attempt, golden)
    return TrialResult(
        wrong and f"ranks {sizes}: {wrong}",
        (f"{fell} kills", f"at last {sizes[-1]}"),
        fell=fell > 0,
    )


def poison_a_sample(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Make a value of one sample non-finite.

    All ranks must skip every step with that sample, as one process does.
    """
    draws = random.Random(seed)
    given = {"sample": draws.randrange(SAMPLES), "value": draws.choice(("nan", "inf", "-inf"))}
    attempt = run_on(folder, draws.choice(SIZES[1:]), given)
    golden = workshop.golden(attempt)
    wrong = find_wrong_end(workshop.train(attempt), attempt, golden) or find_poison(attempt.folder)
    if wrong is None and not read_faults(attempt.folder, "nonfinite"):
        wrong = "no step was skipped"
    return TrialResult(
        wrong and f"{given}, {attempt.ranks} ranks: {wrong}",
        (str(given["value"]), f"{attempt.ranks} ranks"),
    )


def poison_a_step(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Make a loss, a gradient or a buffer non-finite, once, on one rank.

    All ranks must skip that step. A buffer that stays non-finite must end the run with a message.
    """
    draws = random.Random(seed)
    kind, ranks = KINDS[seed % len(KINDS)], draws.choice(SIZES[1:])
    guilty, at = draws.randrange(ranks), draws.randint(16, STEPS - 2)
    fault = {"kind": kind, "guilty": guilty, "at": at}
    attempt = run_on(folder, ranks, fault, is_exact=False)
    child = workshop.train(attempt)
    code = child.wait()
    wrong, num_skipped = (
        find_poison(attempt.folder),
        len(read_faults(attempt.folder, "nonfinite")),
    )
    is_well = (
        code != EXIT_OK and "not finite" in child.said
        if kind == "buffer"
        else code == EXIT_OK and num_skipped == 1
    )
    if wrong is None and not is_well:
        wrong = f"it ended with {code} and skipped {num_skipped} steps: {child.said[-300:]}"
    return TrialResult(
        wrong and f"{kind} of rank {guilty} of {ranks}: {wrong}", (kind, f"{ranks} ranks")
    )


def find_poison(run: Path) -> str | None:
    """Return a message for a checkpoint that contains a non-finite value; None if there is none."""
    for step in manifest.steps(run):
        for name, tensor in Commit(run, step).read("").items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return f"{name} of the commit of step {step} is not finite"
    return None


def stop_a_rank(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Send SIGSTOP to a rank at a random time.

    The supervisor must name the rank within STALL_S + NAMED_S seconds. All ranks must then restart
    by themselves and end with the results of an uninterrupted run.
    """
    draws = random.Random(seed)
    ranks, (step,) = draws.choice(SIZES[1:]), _draw_steps(draws, 1)
    attempt = run_on(folder, ranks, stall_s=STALL_S)
    golden, child = workshop.golden(attempt), workshop.train(attempt)
    there = find_ranks(child, ranks) if wait_for_step(child, attempt, step, draws) else {}
    victim = draws.choice(sorted(there)) if there else 0
    with contextlib.suppress(psutil.NoSuchProcess, KeyError):
        there[victim].suspend()
    name = f"rank {victim} of {ranks}"
    is_named = child.wait_until(lambda: name in child.said, STALL_S + NAMED_S)
    if not is_named and manifest.steps(attempt.folder)[-1:] == [STEPS]:
        return TrialResult(fell=False)  # the run ended before the signal
    wrong = (
        find_wrong_end(child, attempt, golden)
        if is_named
        else f"it was not named in {STALL_S + NAMED_S:.0f} s: {child.said[-500:]}"
    )
    return TrialResult(
        wrong and f"{name} stopped after step {step}: {wrong}",
        (f"{ranks} ranks", "later" if step else "first steps"),
    )


def kill_the_supervisor(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Send SIGKILL to the supervisor.

    All ranks must end. The same command, run at once, must end with the results of an uninterrupted
    run.
    """
    draws = random.Random(seed)
    ranks, (step,) = draws.choice(SIZES[1:]), _draw_steps(draws, 1)
    attempt = run_on(folder, ranks)
    golden, child = workshop.golden(attempt), workshop.train(attempt)
    came = wait_for_step(child, attempt, step, draws)
    there = list(find_ranks(child, ranks).values())
    child.send(signal.SIGKILL)
    fell = child.wait() == KILLED and came
    again = workshop.train(attempt)
    again.wait_until(lambda: not _find_alive(there), GONE_S)
    for each in (left := _find_alive(there)):
        each.kill()
    wrong = (
        f"after {GONE_S:.0f} s {len(left)} ranks are left"
        if left
        else find_wrong_end(again, attempt, golden)
    )
    return TrialResult(
        wrong and f"{ranks} ranks, after step {step}: {wrong}", (f"{ranks} ranks",), fell=fell
    )


def _find_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ]


def kill_each_attempt(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Kill a rank in every attempt at a run, before its first checkpoint.

    After several restarts without a new checkpoint the run must end and name the reason.
    """
    draws = random.Random(seed)
    ranks = draws.choice((2, 3))
    guilty, at = draws.randrange(ranks), draws.randint(1, EVERY)
    fault = {"kind": "dead", "guilty": guilty, "at": at}
    attempt = run_on(folder, ranks, fault, is_exact=False)
    child = workshop.train(attempt)
    code, said = child.wait(), child.said
    anew = said.count(" ranks restart, ")
    is_well = code != EXIT_OK and anew == RESTARTS and IN_VAIN in said
    wrong = (
        f"rank {guilty} of {ranks}: it restarted {anew} times and ended with {code}: {said[-300:]}"
    )
    return TrialResult(None if is_well else wrong, (f"{ranks} ranks",))


def missing() -> str | None:
    """Return why ranks cannot be found by process name on this machine; None if they can."""
    if sys.platform.startswith("linux"):
        return None
    return "it needs Linux, where the process name contains the rank"
