"""Runs that shrink and grow while they train.

Places that fail are left out and tried again, to the numbers of one process.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from surefoot.cli.options import find_judge
from surefoot.components import checkpoint
from surefoot.components.data import consumed
from surefoot.contract import events, manifest
from surefoot.control.launch import local
from surefoot.control.launch.decide import Rules
from surefoot.control.launch.elastic import Places
from surefoot.core import flight, place
from surefoot.core.errors import LostRank
from surefoot.core.flight import Kind, RankSnapshot, Record
from surefoot.train.environment import find_device
from surefoot.train.run import Run
from tests.world.launched import Supervised, forked
from tests.world.test_launch import command, environment, processes_of
from tests.world.test_run import spec
from tests.world.test_shard import AVERAGED, Stacked

STEPS, WAIT_S = 16, 30.0
# attempt -> what happens, at which place, after how many steps of the attempt
Plan = Mapping[int, tuple[str, int, int]]


def take_steps(run: Path, plan: Plan, die: Callable[[int], bool] = lambda step: False) -> int:
    """A rank: commits every step; `plan` has a place killed, or all wait until they are to grow."""
    saves = {"every": "1 step", "keep": STEPS}
    given = spec(
        train={"length": f"{STEPS} steps"},
        evaluate={"every": "9 epochs"},
        checkpoint=saves,
        **AVERAGED,
    )
    with Run(given, Stacked(), folder=run, quiet=True) as running:
        kind, where, after = plan.get(running.generation, ("", 0, 0))
        begun = running.step
        for report in running.steps():
            if kind and report.step == begun + after:
                wait_until(lambda: after == 1 or report.step - 1 in manifest.steps(run))  # noqa: B023 - called here
                if kind in ("grow", "wait"):
                    wait_until(lambda: running.is_stopping is not None)
                if kind == "wait":
                    time.sleep(0.3)  # for the second one
                elif kind == "grow":
                    assert flight.is_recalled(place.flight_file())
                elif place.here().local_rank == where:
                    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                elif kind == "kill":
                    os._exit(LostRank.exit_code)  # as they do soon, and before this step is saved
            if die(report.step):
                os.kill(os.getpid(), signal.SIGKILL)
    return running.exit_code


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.01)


def rows(run: Path) -> dict[int, tuple[int, Mapping[str, float]]]:
    """Samples and learning rates of each step."""
    found = events.newest(events.read(run))
    return {
        each.step: (each.num_samples, each.learning_rates)
        for each in found
        if isinstance(each, events.Step)
    }


def sizes(run: Path) -> list[int]:
    return [
        each.place["world_size"] for each in events.read(run) if isinstance(each, events.Started)
    ]


def check_as_alone(run: Path, golden: dict[str, torch.Tensor], alone: Path, told: object) -> None:
    checked = consumed.check(run)
    assert checked.holds, (told, checked.faults)
    assert checked.last == STEPS, told
    held = checkpoint.Commit(run, STEPS).read(checkpoint.MODEL)
    worst = max(
        float((held[name].double() - each.double()).abs().max()) for name, each in golden.items()
    )
    assert worst < 1e-8, (told, worst)
    assert rows(run) == rows(alone), told


def train_alone(folder: Path) -> dict[str, torch.Tensor]:
    assert Supervised(lambda rank: take_steps(folder / "run", {}), 1, folder / "ranks").wait() == 0
    return checkpoint.Commit(folder / "run", STEPS).read(checkpoint.MODEL)


PLAN: Plan = {  # what each attempt shows
    1: ("kill", 3, 3),
    2: ("kill", 3, 1),  # slot 3 fails twice, and is left out
    3: ("kill", 1, 3),
    4: ("kill", 1, 1),  # slot 1, with two commits: one is left until slot 3 is tried again
    5: ("grow", 0, 2),
    6: ("kill", 3, 1),  # 2 ranks become 3; slot 3 is on trial, and left out at once
    7: ("kill", 2, 1),
    8: ("kill", 2, 1),  # 2 become 1
    9: ("grow", 0, 2),
}


@pytest.mark.slow
def test_a_run_goes_from_four_ranks_to_two_to_three_to_one_and_back_to_the_numbers_of_one_process(
    tmp_path: Path,
) -> None:
    golden = train_alone(tmp_path / "alone")
    run = tmp_path / "run"
    supervised = Supervised(
        lambda rank: take_steps(run, PLAN),
        4,
        tmp_path / "ranks",
        stall_s=60,
        run=run,
        max_restarts=3,
        numbers=range(1, 5),
    )
    assert supervised.wait(120) == 0, supervised.said
    # and then more, if it lasts
    assert sizes(run)[:10] == [4, 4, 3, 3, 2, 3, 2, 2, 1, 2], supervised.said
    assert supervised.left() == []
    check_as_alone(run, golden, tmp_path / "alone/run", supervised.said)
    lines = [
        "slot 3 has failed 2 times in a row and is left out until 3 more checkpoints",
        "all 3 ranks restart, after step 2\n",
        "slot 1 has failed 2 times in a row and is left out until 3 more checkpoints",
        ", at slots 0 and 2\n",
        "slot 3 will be tried again: all ranks save and end, to restart as 3",
        ", at slots 0, 2 and 3\n",
        "slot 3 has failed again and is left out until 6 more checkpoints",
        "slot 2 has failed 2 times in a row",
        "one rank restarts",
        "slot 1 will be tried again",
        "all 2 ranks restart",
    ]
    said = supervised.said
    for line in lines:
        assert line in said, (line, supervised.said)
        said = said[said.index(line) :]
    ends = [each.cause for each in events.read(run) if isinstance(each, events.Ended)]
    assert set(ends[:-1]) == {"ended by the supervisor, to restart with more ranks"}
    assert len(ends) == len(sizes(run)) - 7, "seven were killed"
    assert ends[-1] == "the length of the run was reached"


def test_a_place_that_crashes_is_tried_once_more_and_two_that_do_are_the_code(
    tmp_path: Path,
) -> None:
    def job(rank: int) -> int:
        is_second = (tmp_path / f"once-{rank}").exists()
        (tmp_path / f"once-{rank}").touch()
        if rank == (0 if is_second else 1):
            os.kill(os.getpid(), signal.SIGSEGV)
        return LostRank.exit_code

    supervised = Supervised(
        job, 2, tmp_path / "ranks", run=tmp_path / "run", max_restarts=3, numbers=(1, 2)
    )
    assert supervised.wait() == 128 + signal.SIGSEGV
    assert supervised.said.count(" ranks restart, ") == 1
    assert (
        "error: slots 0 and 1 crashed without a new checkpoint between the crashes: "
        "the cause is the code, not a slot" in supervised.said
    )


def test_who_was_killed_is_named_and_not_who_was_ended_for_it(tmp_path: Path) -> None:
    def job(rank: int) -> int:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return 0

    supervised = Supervised(
        job, 2, tmp_path / "ranks", prepare=lambda: setattr(local, "GRACE_S", 0.2)
    )
    assert supervised.wait() == 128 + signal.SIGKILL
    assert "error: rank 1 of 2 was ended by SIGKILL" in supervised.said
    assert "rank 0 of 2" not in supervised.said


@pytest.mark.slow
def test_a_place_that_hangs_twice_is_left_out(tmp_path: Path) -> None:
    def job(rank: int) -> int:
        # where it is tried again before the end it does its part
        return take_steps(run, dict.fromkeys((1, 2), ("stop", 1, 2)))

    run = tmp_path / "run"
    supervised = Supervised(
        job, 2, tmp_path / "ranks", stall_s=1.5, run=run, max_restarts=3, numbers=(1, 2)
    )
    assert supervised.wait() == 0, supervised.said
    assert supervised.said.count("rank 1 of 2 has not come") == 2
    assert "slot 1 has failed 2 times in a row and is left out" in supervised.said
    assert supervised.left() == []
    assert consumed.check(run).last == STEPS


def test_ranks_that_do_not_do_the_same_are_the_code_and_a_late_one_is_its_place() -> None:
    def row(rank: int, waits_s: float | None, size: int) -> RankSnapshot:
        return RankSnapshot(
            rank, Record(3, 0, 7, Kind.SUM, size, waits_s, {7: (Kind.SUM, size)}), "S"
        )

    blame = find_judge(1.0).blame
    assert blame([row(0, 2.0, 8), row(1, 2.0, 8), row(2, 2.0, 80)]) is None
    late = RankSnapshot(1, Record(3, 0, 6, Kind.SUM, 8, None), "S")
    assert blame([row(0, 2.0, 8), late, row(2, 2.0, 8)]) == (1,)


@pytest.mark.parametrize(("local_rank", "device"), [(0, "cuda"), (1, "cuda:1"), (7, "cuda")])
def test_one_rank_that_is_left_keeps_the_gpu_of_its_place(
    local_rank: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(value))
    assert str(find_device("auto")) == device


def test_a_signal_to_a_rank_alone_and_its_supervisor_is_one_signal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    supervised = Supervised(
        lambda rank: take_steps(run, {1: ("wait", 0, 3)}),
        1,
        tmp_path / "ranks",
        run=run,
        max_restarts=3,
    )
    wait_until(lambda: 2 in manifest.steps(run))
    os.kill(supervised.pids[0], signal.SIGTERM)
    time.sleep(0.1)
    os.kill(supervised.pid, signal.SIGTERM)
    assert supervised.wait() == 143, supervised.said
    ended = [each for each in events.read(run) if isinstance(each, events.Ended)]
    assert [(each.cause, each.step) for each in ended] == [("ended by SIGTERM", 3)]
    assert manifest.steps(run)[-1] == 3


def test_a_run_that_has_finished_is_not_asked_to_restart_with_more_ranks(tmp_path: Path) -> None:
    """Its first rank may still be printing the result."""
    for name, grows in (("finished", False), ("left", True)):
        given = spec(train={"length": "2 steps"})
        with Run(given, Stacked(), folder=tmp_path / name, quiet=True) as run:
            for _ in run.steps():
                if grows:
                    break
        places = Places(Rules(places=2, numbers=(1, 2), max_restarts=3), tmp_path / name, print)
        places.now = (0,)  # the other slot was left out, for fewer checkpoints than there are
        assert places.can_grow() == grows, name


# ---- at the command line


def test_a_command_goes_on_with_the_rank_that_is_left(tmp_path: Path) -> None:
    words = command(tmp_path, "--steps", "10", "--json", "--set", 'task.fails="dies 1 early"')
    words[words.index("--ranks") + 1] = "1:2"
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 10
    assert (
        "slot 1 has failed 2 times in a row and is left out until 3 more checkpoints" in done.stderr
    )
    assert done.stderr.count("all 2 ranks restart, from the start") == 1
    assert done.stderr.count("one rank restarts, from the start") == 1
    # the other slot may have a rank again after the last checkpoint
    assert sizes(tmp_path / "run")[:3] == [2, 2, 1]
    assert consumed.check(tmp_path / "run").holds
    assert processes_of(tmp_path) == []


@pytest.mark.slow  # imports torch in eight processes
def test_a_command_that_grows_prints_one_result(tmp_path: Path) -> None:
    words = command(tmp_path, "--steps", "120", "--json", "--set", 'task.fails="dies 1 early"')
    words[words.index("--ranks") + 1] = "1:2"
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 120
    assert "slot 1 will be tried again: all ranks save and end, to restart as 2" in done.stderr
    assert "slot 1 has failed again and is left out until 6 more checkpoints" in done.stderr


# ---- a campaign


def shaken(seed: int, folder: Path, golden: dict[str, torch.Tensor], alone: Path) -> int:
    """Of one to four ranks any may be killed in any step, a bad place more often.

    Gives how many kills there were.
    """
    draws = random.Random(seed)
    bad, share = draws.sample(range(4), draws.randrange(0, 4)), draws.uniform(0.0, 0.15)
    told = f"seed {seed}: slots {bad} are bad, {share:.2f}"
    folder.mkdir(parents=True)

    def job(rank: int) -> int:
        where = place.here().local_rank
        own = random.Random(f"{seed} {where} {os.getpid()}")
        odds = 0.5 if where in bad else share

        def die(step: int) -> bool:
            time.sleep(0.02)
            return own.random() < odds and where != min(set(range(4)) - set(bad))

        return take_steps(folder / "run", {}, die)

    supervised = Supervised(
        job,
        4,
        folder / "ranks",
        stall_s=60,
        run=folder / "run",
        max_restarts=30,
        numbers=range(1, 5),
    )
    assert supervised.wait(240) == 0, (told, supervised.said)
    assert supervised.left() == [], told
    assert "Traceback" not in supervised.said, (told, supervised.said)
    check_as_alone(folder / "run", golden, alone, (told, supervised.said))
    print(told, sizes(folder / "run"), flush=True)
    return supervised.said.count("was ended by SIGKILL")


def shakes(seeds: range, folder: Path) -> int:
    importlib.import_module("torch._dynamo")
    golden, num_kills = train_alone(folder / "alone"), 0
    for seed in seeds:
        num_kills += shaken(seed, folder / str(seed), golden, folder / "alone/run")
        shutil.rmtree(folder / str(seed))
    assert num_kills > len(seeds)
    return 0


@pytest.mark.faults
@pytest.mark.parametrize("seeds", [range(50)], ids=len)
def test_ranks_that_are_killed_at_random_leave_each_sample_once_and_the_numbers_of_one_process(
    seeds: range, tmp_path: Path
) -> None:
    pid = forked(lambda: shakes(seeds, tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
