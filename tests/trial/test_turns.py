"""One arm computes at a time, and what it waits is no part of its wall time.

None outlives the harness or its own time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from surefoot.core.errors import InputError
from surefoot.trial import Arm, run_arm, run_rounds, spec_arm
from surefoot.trial.turns import run_in_turns
from tests.train.small import spec as small_spec
from tests.train.small import write_task
from tests.trial.arms import code_arm, telling_arm
from tests.trial.test_process import ROOT, linux_only, wait_until_gone

PLAYER = """
import json, sys, threading, time
from surefoot.trial.report import Clock, write_report
from surefoot.trial.turns import Turns
turns, steps, ticks, clock = Turns(int(sys.argv[2])), [], [], Clock()
def tick():
    while True:
        ticks.append(time.perf_counter())
        time.sleep(0.005)
threading.Thread(target=tick, daemon=True).start()
turns.after_step(int)
with clock:
    for number in range(30):
        {at_each}
        begun_s = time.perf_counter()
        while time.perf_counter() - begun_s < 0.02:
            pass
        steps.append((begun_s, time.perf_counter()))
        clock.leave_out(turns.after_step(int))
json.dump([steps, ticks], open({file!r}, "w"))
write_report(sys.argv[1], {{"wall_s": clock.wall_s}})
"""


def player(name: str, file: Path, *, at_each: str = "pass", timeout_s: float = 60.0) -> Arm:
    """An arm of 30 steps of 20 ms whose time a thread counts; it writes when each step was."""
    code = PLAYER.format(at_each=at_each, file=str(file))
    return Arm(
        name=name,
        command=(sys.executable, "-c", code, "{report}", "{turns}"),
        folder=ROOT,
        timeout_s=timeout_s,
    )


def test_one_arm_computes_at_a_time_and_its_waits_are_left_out(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    outcomes = run_in_turns(
        [player(name, tmp_path / name) for name in names], tmp_path / "work", number=4
    )
    assert [(each.arm, each.ended, each.round) for each in outcomes] == [
        (name, "done", 4) for name in names
    ]
    told = {name: json.loads((tmp_path / name).read_text()) for name in names}
    steps = sorted((begun, ended, name) for name in names for begun, ended in told[name][0])
    assert all(before[1] <= after[0] for before, after in pairwise(steps))  # no two at once
    changes = sum(before[2] != after[2] for before, after in pairwise(steps))
    assert changes > 9  # each in several turns, not one after the other
    for outcome in outcomes:
        mine, ticks = told[outcome.arm]
        others = [(begun, ended) for begun, ended, name in steps if name != outcome.arm]
        # its threads stand still too
        assert not any(begun < tick < ended - 0.01 for tick in ticks for begun, ended in others)
        whole_s, theirs_s = (
            mine[-1][1] - mine[0][0],
            sum(ended - begun for begun, ended in others if begun < mine[-1][1]),
        )
        assert outcome.measures["wall_s"] < whole_s - 0.5 * theirs_s


def test_an_arm_that_crashes_or_hangs_leaves_the_turns_to_the_others(tmp_path: Path) -> None:
    crashing = player("crashing", tmp_path / "x", at_each="assert number < 8, 'the reason'")
    hanging = player(
        "hanging", tmp_path / "y", at_each="time.sleep(0 if number < 8 else 600)", timeout_s=4.0
    )
    arms = [crashing, hanging, player("sound", tmp_path / "z")]
    outcomes = {each.arm: each for each in run_in_turns(arms, tmp_path / "work")}
    assert {name: each.ended for name, each in outcomes.items()} == {
        "crashing": "crashed",
        "hanging": "timed out",
        "sound": "done",
    }
    assert "the reason" in (outcomes["crashing"].error or "")
    assert "still running after 4 s" in (outcomes["hanging"].error or "")


def test_an_arm_that_knows_of_no_turns_runs_alone_and_one_of_several_ranks_is_refused(
    tmp_path: Path,
) -> None:
    outcomes = list(
        run_rounds(
            [telling_arm("a", "{'x': 1.0}"), telling_arm("b", "{'x': 2.0}")],
            rounds=2,
            warmup_rounds=0,
            in_turns=True,
        )
    )
    assert [(each.arm, each.round, each.measures["x"]) for each in outcomes] == [
        ("a", 0, 1.0),
        ("b", 0, 2.0),
        ("b", 1, 2.0),
        ("a", 1, 1.0),
    ]
    with pytest.raises(InputError, match="'both' has several ranks"):
        run_in_turns([code_arm("both", "pass", ranks=2)], tmp_path / "work")


@pytest.mark.slow
def test_a_spec_trains_the_same_in_turns_as_alone(tmp_path: Path) -> None:
    spec = small_spec(2000, task={"use": write_task(tmp_path)})
    arm = spec_arm("a", spec, steps=30, warmup=2, folder=tmp_path)
    alone = run_arm(arm, tmp_path / "alone")
    both = run_in_turns([arm, replace(arm, name="b")], tmp_path / "both")
    assert {each.ended for each in (alone, *both)} == {"done"}, [
        each.error for each in (alone, *both)
    ]
    assert alone.measures["loss"] == both[0].measures["loss"] == both[1].measures["loss"]
    assert alone.measures.keys() == both[0].measures.keys()


@pytest.mark.slow
@linux_only
def test_arms_that_are_stopped_do_not_outlive_a_killed_harness(tmp_path: Path) -> None:
    at_each = "number == 3 and print(__import__('os').getpid(), flush=True)"
    code = (
        "from pathlib import Path\nfrom surefoot.trial.turns import run_in_turns\n"
        "from tests.trial.test_turns import player\n"
        f"where = Path({str(tmp_path)!r})\n"
        f"each = {at_each + ' or number == 9 and time.sleep(600)'!r}\n"
        "run_in_turns([player(name, where / name, at_each=each) for name in 'ab'], where / 'work')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    outputs = [tmp_path / "work" / str(index) / "stdout" for index in (0, 1)]
    while not all(output.exists() and output.read_text().strip() for output in outputs):
        assert process.poll() is None
    process.kill()
    process.wait()
    assert all(wait_until_gone(int(output.read_text())) for output in outputs)
