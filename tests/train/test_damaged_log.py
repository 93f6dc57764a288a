"""Damage in a run's log costs the lines that it touches.

The run goes on, to the same weights, and says which line it left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import surefoot
from surefoot.contract import commits, manifest
from surefoot.contract.events import Ended, Started
from tests.train.small import FEW, call, faults_of, records, write_task

Lines = list[bytes]


def index_of(lines: Lines, kind: str, which: int = 0) -> int:
    return [number for number, line in enumerate(lines) if json.loads(line)["kind"] == kind][which]


def flip(lines: Lines, number: int, place: int) -> None:
    line = bytearray(lines[number])
    line[place] ^= 0x80
    lines[number] = bytes(line)


def spoil(kind: str, which: int = 0, place: int = 25) -> Callable[[Lines], None]:
    return lambda lines: flip(lines, index_of(lines, kind, which), place)


def join_two(lines: Lines) -> None:
    number = index_of(lines, "step")
    lines[number] = lines[number].rstrip(b"\n") + b"x"


def claim_newer_format(lines: Lines) -> None:
    number = index_of(lines, "step")
    lines[number] = lines[number].replace(b'"v": 1', b'"v": 3')


SPOILED: dict[str, Callable[[Lines], None]] = {
    "a step": spoil("step"),
    "a commit": spoil("committed"),
    "the start": spoil("started"),
    "the last line": lambda lines: flip(lines, -1, 30),
    "the head of a line": spoil("step", place=11),
    "a newline": join_two,
    "a version": claim_newer_format,
}


@pytest.mark.quick("a commit", "a newline")
@pytest.mark.parametrize("what", ["a step", "a commit", "the last line", "a newline"])
def test_an_attached_loop_names_a_damaged_line_as_a_run_does(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for passes in (1, 2):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = surefoot.attach(
            model=model,
            optimizer=optimizer,
            data=[torch.ones(2, 2)] * 4,
            folder=tmp_path,
            every=1,
            save="2 steps",
        )
        for _ in range(loop.first_pass, passes):
            for batch in loop.batches():
                loop.step_done(model(batch).mean())
        loop.save()
        loop.session.telling.close()  # as a kill leaves it
        if passes == 1:
            lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
            SPOILED[what](lines)
            (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
            capfd.readouterr()
    assert [fault.fault for fault in faults_of(tmp_path)] == ["damaged-log"]
    assert capfd.readouterr().err.count("without these records") == 1


@pytest.mark.quick("a step", "the head of a line")
@pytest.mark.parametrize("what", SPOILED)
def test_a_run_goes_on_in_spite_of_a_damaged_line_and_names_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    task, run = write_task(tmp_path), tmp_path / "run"
    assert (
        call(
            monkeypatch,
            "train",
            task,
            *FEW,
            "--set",
            "checkpoint.every=3 steps",
            "--run",
            str(run),
            "--quiet",
        )
        == 0
    )
    whole = commits.check(manifest.step_folder(run, 8)).files
    # a kill leaves no end
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)[:-1]
    SPOILED[what](lines)
    (run / "events.jsonl").write_bytes(b"".join(lines))
    capfd.readouterr()
    if what != "the start":
        for verb in ("show", "why", "report"):
            assert call(monkeypatch, verb, str(run)) == 0
            assert "warning: " in capfd.readouterr().err
    else:
        assert call(monkeypatch, "show", str(run)) == 2
        assert f"surefoot resume {run}" in capfd.readouterr().err
    assert call(monkeypatch, "resume", str(run), "--quiet") == 0
    assert "events.jsonl:" in capfd.readouterr().err
    after = records(run)
    assert isinstance(after[-1], Ended)
    assert after[-1].outcome == "finished"
    assert {each.fault for each in faults_of(run)} == {"damaged-log"}
    assert {
        entry.name: entry.sha256
        for entry in commits.check(manifest.step_folder(run, 8)).files
        if entry.tensors
    } == {entry.name: entry.sha256 for entry in whole if entry.tensors}
    assert call(monkeypatch, "show", str(run)) == 0
    assert call(monkeypatch, "evaluate", str(run)) == 0


def test_a_spec_of_another_run_is_refused_although_the_start_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    task, run = write_task(tmp_path), tmp_path / "run"
    assert call(monkeypatch, "train", task, *FEW, "--run", str(run), "--quiet") == 0
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)[:-1]
    flip(lines, 0, 25)
    (run / "events.jsonl").write_bytes(b"".join(lines))
    assert call(monkeypatch, "train", task, *FEW, "--seed", "5", "--run", str(run), "--quiet") == 2
    assert "a different spec" in capfd.readouterr().err
    assert not [each for each in records(run) if isinstance(each, Started)]
