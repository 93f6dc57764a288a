"""Tests of `surefoot profile`.

Profiles of a spec, of a run that is over, of one that goes on; and what cannot be profiled.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.components.profiler.tracing import trace
from surefoot.components.profiler.tracing.window import Window
from surefoot.contract import events, runlock
from surefoot.contract.events import Ended, Step
from surefoot.contract.spec import RunSpec
from surefoot.train.record import profiling, windows
from surefoot.train.run import Run
from tests.cli.conftest import Command
from tests.cli.forked_commands import start_forked
from tests.train.small import TEXT

FILES = {
    "trace.json.gz",
    "facts.json",
    "operators.json",
    "flame_stack.svg",
    "flame_module.svg",
    "memory.json",
}


@pytest.fixture
def task(tmp_path: Path) -> str:
    """A task of twelve samples an epoch, as a user writes one."""
    (tmp_path / "mine.py").write_text(TEXT)
    (tmp_path / "mine.toml").write_text(
        '[task]\nuse = "mine.py:Mine"\n[train]\nlength = "60 steps"\nbatch = 4\ndevice = "cpu"\n'
    )
    return "mine.toml"


def test_a_spec_is_trained_up_to_its_window_and_all_is_drawn(
    surefoot: Command, task: str, tmp_path: Path
) -> None:
    row = surefoot("profile", task, "--steps", "5", "--run", "here", "--json").row
    assert {path.name for path in (tmp_path / "here" / "profile").iterdir()} == FILES
    assert row["num_steps"] == 5
    assert row["first_step"] == 21
    assert row["slowdown"] == pytest.approx(row["step_s"]["inside"] / row["step_s"]["before"])
    assert len(trace.read(tmp_path / "here" / "profile" / "trace.json.gz").steps) == 5
    assert {"calls", "self_s", "total_s", "self_bytes", "flops", "bytes"} <= row["rows"][0].keys()
    assert row["memory_peak"]["categories"]["parameters"] == 4 * (4 * 4 + 4 + 4 * 3 + 3)
    assert (
        "--output=here/profile/nsys surefoot profile mine.toml --steps 5 --nvtx"
        in row["commands"]["nsys"]
    )
    ended = [event for event in events.read(tmp_path / "here") if isinstance(event, Ended)]
    assert (ended[-1].outcome, ended[-1].step) == ("stopped", 25)


def test_phases_modules_steps_and_epochs_are_nested_ranges(
    surefoot: Command, task: str, tmp_path: Path
) -> None:
    surefoot("profile", task, "--steps", "3", "--run", "here", "--with", "")
    ranges = [
        each
        for each in trace.read(tmp_path / "here/profile/trace.json.gz").slices
        if each.category == trace.RANGE
    ]
    inner = next(
        each for each in ranges if each.name == "module 0" and "step 22" in _around(ranges, each)
    )
    assert _around(ranges, inner) == [
        "epoch 3",
        "step 22",
        "forward",
        "module Sequential",
        "module 0",
    ]
    assert {"data", "forward", "backward", "optimizer"} <= {each.name for each in ranges}


def _around(ranges: list[trace.Slice], inner: trace.Slice) -> list[str]:
    """The names of the ranges around one, and its own, from the outside."""
    names = [
        each.name
        for each in ranges
        if each.start_ns <= inner.start_ns and inner.end_ns <= each.end_ns
    ]
    return [name for name in names if not name.startswith(trace.STEP_PREFIX)]


def digests(run: Path) -> dict[str, str]:
    inside = (
        path
        for path in run.rglob("*")
        if path.is_file() and "profile" not in path.relative_to(run).parts
    )
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in inside
    }


def test_a_run_that_is_over_is_repeated_from_its_last_commit_and_stays_as_it_is(
    surefoot: Command, task: str, tmp_path: Path
) -> None:
    assert surefoot("train", task, "--run", "here", "--quiet").code == 0
    before = digests(tmp_path / "here")
    row = surefoot("profile", "here", "--steps", "4", "--json").row
    assert row["first_step"] == 60 + 21
    assert digests(tmp_path / "here") == before
    assert {path.name for path in (tmp_path / "here" / "profile").iterdir()} == FILES
    assert not (tmp_path / "runs").exists()
    assert surefoot("profile", "here", "--set", "train.batch=8").code == 2


def test_what_a_killed_repetition_left_goes_with_the_next_one_and_one_that_goes_on_stays(
    surefoot: Command, task: str, tmp_path: Path
) -> None:
    def find_places() -> set[Path]:
        return set((tmp_path / "here" / "profile").glob(".repeated-*"))

    assert surefoot("train", task, "--run", "here", "--quiet").code == 0
    words = ("profile", "here", "--steps", "1000000", "--with", "")
    process = start_forked(*words, folder=tmp_path)
    try:
        while not any((place / "run" / events.FILE).is_file() for place in find_places()):
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGSTOP)
        places = find_places()
        assert surefoot("profile", "here", "--steps", "1", "--with", "").code == 0
        assert find_places() == places
        assert len(places) == 1
    finally:
        process.kill()
        process.wait()
    assert find_places() == places
    assert surefoot("profile", "here", "--steps", "1", "--with", "").code == 0
    assert not find_places()


def test_a_short_run_is_recorded_with_a_shorter_window_and_that_is_said(
    surefoot: Command, task: str
) -> None:
    answer = surefoot(
        "profile", task, "--set", 'train.length="6 steps"', "--with", "shapes", "--run", "here"
    )
    assert answer.code == 0
    assert (
        "too few steps for 20 steps, after 10 that wait and 10 that warm up: recording 3 steps"
        in answer.err
    )
    assert "for 3 steps" in answer.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mine.toml", "--steps", "0"), "a window of 0 steps"),
        (("mine.toml", "--with", "stack"), "'stack' cannot be recorded"),
        (("mine.toml", "--nvtx"), "torch sees no GPU"),
        (("empty",), "holds no checkpoint"),
        (("cut.json.gz",), "truncated or damaged"),
        (("other.json",), "no list of traceEvents"),
        (("huge.json",), "was given a tensor of a negative size or of 2^63 elements or more"),
        (("nowhere.json.gz",), "cannot be read"),
    ],
)
def test_what_cannot_be_profiled_is_told_in_words(
    words: tuple[str, ...], said: str, surefoot: Command, task: str, tmp_path: Path
) -> None:
    import torch

    if "--nvtx" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    (tmp_path / "empty").mkdir()
    for name, file in (("spec.toml", task), ("mine.py", "mine.py")):
        (tmp_path / "empty" / name).write_text((tmp_path / file).read_text())
    (tmp_path / "cut.json.gz").write_bytes(b"\x1f\x8b\x08\x00 and no more")
    (tmp_path / "other.json").write_text('{"a": 1}')
    huge = {"Input Dims": [[10**300, 10**300], [10**300, 4]], "Input type": ["float", "float"]}
    product = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "args": huge}
    (tmp_path / "huge.json").write_text(json.dumps({"traceEvents": [product]}))
    answer = surefoot("profile", *words)
    assert answer.code == 2
    assert said in answer.err
    assert "hint: " in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_trace_is_read_again_and_drawn_where_asked(
    surefoot: Command, task: str, tmp_path: Path
) -> None:
    surefoot("profile", task, "--steps", "2", "--run", "here", "--with", "stacks")
    again = surefoot("profile", "here/profile/trace.json.gz", "--run", "there", "--json").row
    assert again["num_steps"] == 2
    assert {path.name for path in (tmp_path / "there" / "profile").iterdir()} == {
        "operators.json",
        "flame_stack.svg",
        "flame_module.svg",
    }


# ---- a run that goes on


@pytest.fixture
def live(task: str, tmp_path: Path) -> Iterator[Path]:
    """A run in another process that goes on until it is ended, and mostly sleeps."""
    (tmp_path / "mine.py").write_text(
        TEXT.replace("        # FORWARD", "        __import__('time').sleep(0.01)")
    )
    words = ("train", task, "--run", "live", "--quiet", "--set", 'train.length="10 M steps"')
    process = start_forked(*words, folder=tmp_path)
    try:
        while not any(isinstance(event, Step) for event in _events(tmp_path / "live")):
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        yield tmp_path / "live"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _events(run: Path) -> list[events.Event]:
    return list(events.read(run)) if (run / events.FILE).is_file() else []


def test_a_run_that_goes_on_is_asked_and_goes_on(surefoot: Command, live: Path) -> None:
    assert runlock.is_held(live)
    row = surefoot("profile", "live", "--steps", "3", "--json").row
    assert row["num_steps"] == 3
    assert row["first_step"] > 1
    assert {path.name for path in (live / "profile").iterdir()} == FILES
    first = row["first_step"]
    again = surefoot("profile", "live", "--steps", "2", "--with", "", "--json").row
    assert again["first_step"] > first
    assert {path.name for path in (live / "profile").iterdir()} == {
        "trace.json.gz",
        "facts.json",
        "operators.json",
        "flame_module.svg",
    }
    assert runlock.is_held(live)


@pytest.mark.slow  # two of what the test before it asks
def test_two_who_ask_one_run_are_told_apart(surefoot: Command, live: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "surefoot",
        "profile",
        "live",
        "--steps",
        "100",
        "--with",
        "",
        "--json",
    ]
    with subprocess.Popen(
        words, cwd=live.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as first:
        while not runlock.is_held(live / "profile" / windows.ASKING):
            assert first.poll() is None
            time.sleep(0.01)
        second = surefoot("profile", "live", "--steps", "2", "--with", "")
        assert (second.code, second.err.splitlines()[0]) == (
            2,
            "error: another `surefoot profile` is waiting for a profile of live",
        )
        assert json.loads(first.communicate()[0])["num_steps"] == 100
    assert surefoot("profile", "live", "--steps", "2", "--with", "", "--json").row["num_steps"] == 2
    assert not (live / "profile" / windows.ASKING).exists()


def small_run(tmp_path: Path, name: str) -> Run:
    spec = RunSpec(
        task={"use": f"{tmp_path / 'mine.py'}:Mine"},
        train={"length": "30 steps", "batch": 4, "device": "cpu"},
    )
    return Run(spec, folder=tmp_path / name, quiet=True)


def test_a_request_that_cannot_be_answered_ends_no_run_and_a_profile_changes_no_bit(
    task: str, tmp_path: Path
) -> None:
    ends = []
    for name, request in (
        ("plain", None),
        ("asked", {"id": "a", "active": 3, "levels": ["memory"]}),
        ("wrong", {"id": "b"}),
    ):
        with small_run(tmp_path, name) as run:
            if request is not None:
                (tmp_path / name / "profile").mkdir()
                (tmp_path / name / "profile" / profiling.REQUEST_FILE).write_text(
                    json.dumps(request)
                )
            for _ in run.steps():
                pass
            ends.append(run.state_digests())
    moved = {"clock"}  # of the wall
    assert [{key: value for key, value in each.items() if key not in moved} for each in ends] == [
        {key: value for key, value in ends[0].items() if key not in moved}
    ] * 3
    answer = json.loads((tmp_path / "asked" / "profile" / profiling.ANSWER_FILE).read_text())
    assert (answer["id"], answer["outcome"]) == ("a", "done")
    answer = json.loads((tmp_path / "wrong" / "profile" / profiling.ANSWER_FILE).read_text())
    assert (answer["outcome"], answer["words"]) == ("failed", "request.json is damaged")


def test_a_run_looks_for_a_request_at_most_once_a_second(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: looked.append(self) or exists(self))  # type: ignore[func-returns-value]
    started_s = time.monotonic()
    with small_run(tmp_path, "plain") as run:
        for _ in run.steps():
            pass
    passed_s = time.monotonic() - started_s
    assert (
        1
        <= len([path for path in looked if path.name == profiling.REQUEST_FILE])
        <= 1 + passed_s / profiling.LOOK_EVERY_S
    )


def test_a_window_that_a_run_opens_itself_tells_its_own_errors(task: str, tmp_path: Path) -> None:
    with small_run(tmp_path, "full") as run:
        (tmp_path / "full" / "profile").write_text("a file where the folder would be")
        run.session.profiling.begin(Window(wait=0, warmup=0, active=1), (), run.step)
        with pytest.raises(Exception, match="cannot be written"):
            for _ in run.steps():
                pass
