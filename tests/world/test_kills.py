"""kill -9 of a rank, of rank 0, of the supervisor, at any time.

Recovered to the bits of the unbroken run; no process is left, none hangs.

And of all ranks between attempts with a different number of them: each sample once, and the numbers
of one process.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.components import checkpoint
from surefoot.components.data import consumed
from surefoot.contract import events, manifest
from surefoot.train.run import Run
from tests.world.launched import GONE_S, Supervised, forked
from tests.world.test_run import spec
from tests.world.test_shard import AVERAGED, Stacked

STEPS, FEW, LARGE_SEED = 12, 3, 10_000
VICTIMS = ("rank 0", "rank 1", "supervisor")
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"shard": 2, "zero_stage": 1},
    {"shard": 2, "zero_stage": 2},
    {"shard": 2, "zero_stage": 3},
]
MAX_S = 1.0  # after which a kill comes at the latest: so long takes a run of these
TRIES = 6


def take_steps(run: Path, layout: dict[str, Any], die_after: int | None = None) -> int:
    given = spec(
        layout=layout,
        train={"length": f"{STEPS} steps"},
        evaluate={"every": "9 epochs"},
        **AVERAGED,
    )
    with Run(given, Stacked(), folder=run, quiet=True) as running:
        for report in running.steps():
            if report.step == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return running.exit_code


def digests(run: Path) -> dict[str, str]:
    """Those of the last commit's tensors."""
    files = manifest.read(manifest.step_folder(run, STEPS)).files
    return {each.name: each.sha256 for each in files if each.name.endswith(".safetensors")}


def unbroken(folder: Path, layout: dict[str, Any]) -> dict[str, str]:
    if not manifest.steps(folder / "run"):
        assert (
            Supervised(
                lambda rank: take_steps(folder / "run", layout), 2, folder / "ranks", stall_s=20
            ).wait()
            == 0
        )
    return digests(folder / "run")


def killed(
    seed: int, victim: str, folder: Path, layouts: Sequence[dict[str, Any]] = LAYOUTS
) -> bool:
    """One trial; gives whether the kill came before the end of the run."""
    draws = random.Random(f"{seed} {victim}")
    layout, after_s = draws.choice(layouts), draws.uniform(0.0, MAX_S)
    golden = unbroken(folder.parent / f"unbroken-{layout.get('zero_stage', 0)}", layout)
    told = f"seed {seed}: {victim} is killed after {after_s:.3f} s, {layout}"
    job = lambda rank: take_steps(folder / "run", layout)  # noqa: E731
    supervised = Supervised(
        job, 2, folder / "ranks", stall_s=20, run=folder / "run", max_restarts=3
    )
    until_s = time.monotonic() + 60
    while len(supervised.pids) < 2:
        assert time.monotonic() < until_s, told
        time.sleep(0.002)
    time.sleep(after_s)
    if (
        is_late := os.waitid(os.P_PID, supervised.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        is not None
    ):
        assert supervised.wait() == 0, (told, supervised.said)
    elif victim == "supervisor":
        os.kill(supervised.pid, signal.SIGKILL)
        code = supervised.wait()
        is_late = code == 0  # it ended before the signal came
        assert is_late or code == -signal.SIGKILL
        assert supervised.left(GONE_S) == [], told
        again = Supervised(job, 2, folder / "again", stall_s=20, run=folder / "run", max_restarts=3)
        assert again.wait() == 0, (told, again.said)
        assert again.left() == [], told
    else:
        try:
            os.kill(supervised.pids[int(victim[-1])], signal.SIGKILL)
        except ProcessLookupError:
            is_late = True
        assert supervised.wait() == 0, (told, supervised.said)
        is_late = is_late or "was ended by SIGKILL" not in supervised.said
    assert supervised.left() == [], told
    assert "Traceback" not in supervised.said, (told, supervised.said)
    assert digests(folder / "run") == golden, told
    checked = consumed.check(folder / "run")
    assert checked.holds, (told, checked.faults)
    assert checked.last == STEPS, told
    return not is_late


def campaign(victim: str, trials: int, seed: int, folder: Path) -> int:
    """So many kills that fell, in a process that has loaded the modules of stages 2 and 3.

    Each rank would load these for two seconds.
    """
    importlib.import_module("torch._dynamo")
    fell, tried = 0, 0
    while fell < trials:
        tried += 1
        assert tried <= trials + TRIES + trials // 2, f"{fell} of {tried} kills came before the end"
        fell += killed(
            seed + tried, victim, folder / str(tried), LAYOUTS if trials > FEW else LAYOUTS[:2]
        )
        shutil.rmtree(folder / str(tried))
    print(f"{victim}: {fell} kills of {tried} fell, seeds {seed + 1} to {seed + tried}")
    return 0


def campaigns(victims: tuple[str, ...], trials: int, seed: int, folder: Path) -> int:
    return sum(campaign(victim, trials, seed, folder) for victim in victims)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "trials", "seed"),
    [
        (VICTIMS, FEW, 0),
        *(pytest.param((victim,), 100, LARGE_SEED, marks=pytest.mark.faults) for victim in VICTIMS),
    ],
    ids=lambda value: "-".join(value).replace(" ", "-") if isinstance(value, tuple) else str(value),
)
def test_a_kill_at_any_time_is_recovered_from_to_the_bits_of_the_unbroken_run(
    victims: tuple[str, ...], trials: int, seed: int, tmp_path: Path
) -> None:
    pid = forked(lambda: campaigns(victims, trials, seed, tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_rank_that_is_killed_when_the_run_is_over_brings_no_other_run(tmp_path: Path) -> None:
    """A supervisor starts no ranks again for a run that is finished."""

    def job(rank: int) -> int:
        code = take_steps(tmp_path / "run", {})
        if rank == 1:
            time.sleep(0.3)  # until rank 0 has written the end
            os.kill(os.getpid(), signal.SIGKILL)
        return code

    supervised = Supervised(
        job, 2, tmp_path / "ranks", stall_s=20, run=tmp_path / "run", max_restarts=3
    )
    assert supervised.wait() == 0, supervised.said
    assert "the run had finished before: nothing is lost" in supervised.said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks", "run"]


# ---- other numbers of ranks


def draw_layout(draws: random.Random) -> tuple[int, dict[str, Any]]:
    """A number of ranks and how they share a run."""
    num_ranks = draws.randrange(1, 5)
    shards = [0, *(count for count in (2, 3, 4) if num_ranks % count == 0)]
    shard = draws.choice(shards)
    return num_ranks, {"shard": shard, "zero_stage": draws.choice((1, 2, 3))} if shard else {}


def changed(seed: int, folder: Path, golden: dict[str, torch.Tensor], loss: float) -> None:
    """Attempts with other numbers of ranks, each but the last killed after a step or two."""
    draws = random.Random(seed)
    ends = [*sorted(draws.sample(range(2, STEPS), draws.randrange(1, 4))), None]
    plan = [(*draw_layout(draws), end) for end in ends]
    told = f"seed {seed}: {plan}"
    for number, (num_ranks, layout, end) in enumerate(plan):
        victim = draws.randrange(num_ranks)
        job = lambda rank: take_steps(folder / "run", layout, end if rank == victim else None)  # noqa: B023, E731
        supervised = Supervised(job, num_ranks, folder / f"ranks-{number}", stall_s=20)
        code = supervised.wait()
        assert code == (0 if end is None else 128 + signal.SIGKILL), (told, number, supervised.said)
        assert supervised.left() == [], (told, number)
    checked = consumed.check(folder / "run")
    assert checked.holds, (told, checked.faults)
    assert checked.last == STEPS, told
    held = checkpoint.Commit(folder / "run", STEPS).read(checkpoint.MODEL)
    worst = max(
        float((held[name].double() - each.double()).abs().max()) for name, each in golden.items()
    )
    assert worst < 1e-8, (told, worst)
    assert abs(last_loss(folder / "run") - loss) < 1e-8, told


def last_loss(run: Path) -> float:
    return [
        each.loss
        for each in events.read(run)
        if isinstance(each, events.Step) and each.loss is not None
    ][-1]


def changes(seeds: range, folder: Path) -> int:
    importlib.import_module("torch._dynamo")
    alone = folder / "alone"
    assert Supervised(lambda rank: take_steps(alone / "run", {}), 1, alone / "ranks").wait() == 0
    golden = checkpoint.Commit(alone / "run", STEPS).read(checkpoint.MODEL)
    for seed in seeds:
        changed(seed, folder / str(seed), golden, last_loss(alone / "run"))
        shutil.rmtree(folder / str(seed))
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(5), pytest.param(range(LARGE_SEED, LARGE_SEED + 50), marks=pytest.mark.faults)],
    ids=len,
)
def test_a_run_goes_on_with_other_numbers_of_ranks_after_kills_to_the_numbers_of_one_process(
    seeds: range, tmp_path: Path
) -> None:
    """One to four replicas or shards of any stage; each sample exactly once, in float64."""
    pid = forked(lambda: changes(seeds, tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
