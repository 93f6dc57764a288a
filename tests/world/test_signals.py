"""SIGTERM to the supervisor, to one rank, to all of them, with a SIGKILL behind it.

Ranks agree on the step after which they save, and whatever was sent when, a commit is there that
goes on to the bits of the unbroken run. SIGUSR1 to any of them saves and goes on.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from surefoot.components.data import consumed
from surefoot.contract import commits, events, manifest
from surefoot.train.run import Run
from tests.world.launched import Supervised, forked
from tests.world.test_run import spec
from tests.world.test_shard import AVERAGED, Stacked

STEPS, PAUSE_S = 25, 0.01
LAYOUTS: list[dict[str, Any]] = [{}, {"shard": 2, "zero_stage": 1}, {"shard": 2, "zero_stage": 3}]
BEGUN = "begun"
WHOM = ("supervisor", "rank 0", "rank 1", "ranks, then supervisor", "supervisor, then ranks")
LARGE_SEED = 20_000
GRACES_S = (0.0, 0.0, 0.05, 0.2, 1.0)


def take_steps(run: Path, layout: dict[str, Any], every: str = "5 steps") -> int:
    """Slowly enough for a signal to find it at work.

    The first step is marked in the folder of the run.
    """
    given = spec(
        layout=layout,
        train={"length": f"{STEPS} steps"},
        evaluate={"every": "9 epochs"},
        checkpoint={"every": every, "keep": 30},
        **AVERAGED,
    )
    with Run(given, Stacked(), folder=run, quiet=True) as running:
        for _ in running.steps():
            (run.parent / BEGUN).touch()
            time.sleep(PAUSE_S)
    return running.exit_code


def digests(run: Path) -> dict[str, str]:
    files = manifest.read(manifest.step_folder(run, STEPS)).files
    return {each.name: each.sha256 for each in files if each.name.endswith(".safetensors")}


def supervised(
    folder: Path, layout: dict[str, Any], name: str = "ranks", every: str = "5 steps"
) -> Supervised:
    return Supervised(
        lambda rank: take_steps(folder / "run", layout, every),
        2,
        folder / name,
        stall_s=20,
        run=folder / "run",
        max_restarts=3,
    )


def golden(folder: Path, layout: dict[str, Any]) -> dict[str, str]:
    """The tensors of the unbroken run."""
    own = folder / str(layout.get("zero_stage", 0))
    if not manifest.steps(own / "run"):
        assert supervised(own, layout).wait() == 0
    return digests(own / "run")


def wait_for(condition: Any, told: str, within_s: float = 30.0) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, told
        time.sleep(0.005)


def send(whom: str, number: int, over: Supervised) -> None:
    """To each of those named, a moment apart."""
    for each in whom.split(", then "):
        ranks = (
            over.pids
            if each == "ranks"
            else {int(each[-1]): over.pids[int(each[-1])]}
            if each.startswith("rank ")
            else {}
        )
        for pid in ranks.values() or [over.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.02)


def ends(run: Path) -> list[events.Ended]:
    """How each rank's attempt ended."""
    homes = [run, *((run / "ranks").iterdir() if (run / "ranks").is_dir() else [])]
    return [each for home in homes for each in events.read(home) if isinstance(each, events.Ended)]


@pytest.mark.quick("rank 1-{'shard': 2, 'zero_stage': 1}", "ranks, then supervisor-{}")
@pytest.mark.parametrize(
    ("whom", "layout"),
    [
        *((whom, LAYOUTS[0]) for whom in WHOM),
        *((whom, LAYOUTS[1]) for whom in ("rank 1", WHOM[-2])),
    ],
    ids=str,
)
def test_sigterm_to_any_of_them_ends_all_after_the_same_step_which_is_saved(
    whom: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    over, run = supervised(tmp_path, layout), tmp_path / "run"
    wait_for(lambda: manifest.steps(run), "no commit came")
    send(whom, signal.SIGTERM, over)
    assert over.wait() == 143, over.said
    assert over.left() == []
    assert "Traceback" not in over.said
    assert "ranks restart," not in over.said
    found = ends(run)
    last = manifest.steps(run)[-1]
    assert [(each.outcome, each.step, each.exit_code) for each in found] == [
        ("interrupted", last, 143)
    ] * 2, found
    assert last < STEPS
    commits.check(manifest.step_folder(run, last))
    assert consumed.check(run).last == last


@pytest.mark.quick("supervisor-12-140")
@pytest.mark.parametrize(
    ("whom", "number", "code"),
    [
        ("supervisor", signal.SIGUSR2, 140),
        ("rank 1", signal.SIGUSR2, 140),
        (WHOM[-1], signal.SIGXCPU, 152),
    ],
)
def test_other_signals_of_a_scheduler_end_all_ranks_saved(
    whom: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    over, run = supervised(tmp_path, {}), tmp_path / "run"
    wait_for(lambda: manifest.steps(run), "no commit came")
    send(whom, number, over)
    assert over.wait() == code, over.said
    found, last = ends(run), manifest.steps(run)[-1]
    assert [(each.outcome, each.step, each.exit_code) for each in found] == [
        ("interrupted", last, code)
    ] * 2, found
    commits.check(manifest.step_folder(run, last))


@pytest.mark.quick("supervisor")
@pytest.mark.parametrize("whom", ["rank 1", "supervisor"])
def test_sigusr1_to_any_of_them_saves_once_and_goes_on(whom: str, tmp_path: Path) -> None:
    over, run = supervised(tmp_path, {}, every="99 steps"), tmp_path / "run"
    wait_for((tmp_path / BEGUN).exists, "no step came")
    send(whom, signal.SIGUSR1, over)
    assert over.wait() == 0, over.said
    saved = [
        each.step
        for each in events.read(run)
        if isinstance(each, events.Committed) and each.step != STEPS
    ]
    assert len(saved) == 1, saved


def killed(seed: int, folder: Path, goldens: Path, layouts: list[dict[str, Any]]) -> None:
    """One trial: SIGTERM at any time to any of them, SIGKILL to all that is left after a while.

    Then the same command goes on.
    """
    draws = random.Random(seed)
    layout, whom, after_s, grace_s = (
        draws.choice(layouts),
        draws.choice(WHOM),
        draws.uniform(0.0, 0.9),
        draws.choice(GRACES_S),
    )
    told = (
        f"seed {seed}: {layout}, SIGTERM to {whom} after {after_s:.3f} s, SIGKILL {grace_s} s later"
    )
    expected, run = golden(goldens, layout), folder / "run"
    over = supervised(folder, layout)
    wait_for(lambda: len(over.pids) == 2, told)
    time.sleep(after_s)
    send(whom, signal.SIGTERM, over)
    time.sleep(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(over.pid, signal.SIGKILL)
    code = over.wait()
    assert code in (143, 0, -signal.SIGKILL, -signal.SIGTERM), (told, code, over.said)
    assert over.left() == [], told
    if grace_s == max(GRACES_S):  # time enough: what was begun is saved
        found = ends(run) if (run / events.FILE).is_file() else []
        assert all(each.exit_code in (143, 0) for each in found), (told, found)
        assert not found or max(manifest.steps(run), default=0) == found[0].step, (
            told,
            found,
            over.said,
        )
    if steps := manifest.steps(run):
        commits.check(manifest.step_folder(run, steps[-1]))
    again = supervised(folder, layout, "again")
    assert again.wait() == 0, (told, again.said)
    assert digests(run) == expected, told
    checked = consumed.check(run)
    assert checked.holds, (told, checked.faults)


def trials(seeds: range, folder: Path, layouts: list[dict[str, Any]]) -> int:
    for seed in seeds:
        killed(seed, folder / str(seed), folder / "unbroken", layouts)
        shutil.rmtree(folder / str(seed))
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(2), pytest.param(range(LARGE_SEED, LARGE_SEED + 60), marks=pytest.mark.faults)],
    ids=len,
)
def test_whatever_follows_sigterm_a_commit_is_left_that_goes_on_to_the_bits_of_the_unbroken_run(
    seeds: range, tmp_path: Path
) -> None:
    layouts = LAYOUTS if len(seeds) > 9 else LAYOUTS[:2]
    pid = forked(lambda: trials(seeds, tmp_path, layouts))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
