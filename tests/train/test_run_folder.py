"""Run folders: which one is chosen, what is refused, and that a refusal leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.components import checkpoint
from surefoot.components.observe.journal import Journal
from surefoot.contract import manifest, spec_file
from surefoot.contract.events import Ended, Started
from surefoot.contract.runlock import RunLock
from surefoot.core.errors import InputError, RunFolderError
from surefoot.train.run import Run
from tests.train.small import (
    FEW,
    Small,
    call,
    end_of,
    entries,
    faults_of,
    records,
    spec,
    write_task,
)
from tests.world.launched import forked


def train(folder: Path | None, steps: int = 6, **tables: dict[str, object]) -> Run:
    """A whole small run."""
    with Run(spec(steps, **tables), Small(), folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    return run


def leave_unfinished(folder: Path, steps: int = 6) -> None:
    """A run that a kill cut short: its end and half of its last record are missing."""
    train(folder, steps)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(lines[:-1]) + lines[-1][:40])


# ---- which folder


def test_without_a_folder_every_run_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [train(None, 2).folder for _ in range(3)] == [
        Path("runs") / f"small-{number}" for number in (1, 2, 3)
    ]


def test_a_finished_folder_is_left_alone_and_a_run_that_begins_anew_goes_to_a_new_one(
    tmp_path: Path,
) -> None:
    train(tmp_path / "a")
    before = (tmp_path / "a" / "events.jsonl").read_bytes()
    with Run(spec(6), Small(), folder=tmp_path / "a", fresh=True, quiet=True) as again:
        for _ in again.steps():
            pass
    assert again.folder == tmp_path / "a-1"
    assert (tmp_path / "a" / "events.jsonl").read_bytes() == before
    started = records(again.folder)[0]
    assert isinstance(started, Started)
    assert f"{tmp_path / 'a'} stays unchanged" in started.notes


def test_an_unfinished_folder_without_a_commit_is_gone_on_in_from_the_start_and_that_is_said_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path)
    words = ("train", task, *FEW, "--run", str(tmp_path / "a"))
    assert call(monkeypatch, *words) == 0
    lines = (tmp_path / "a" / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a" / "events.jsonl").write_text("".join(lines[:-1]) + '{"v": 1, "kind": "en')
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    capsys.readouterr()
    assert call(monkeypatch, *words) == 0
    said = capsys.readouterr().err
    assert "is unfinished: resuming it" in said
    assert "starts from step 0" in said
    starts = [event for event in records(tmp_path / "a") if isinstance(event, Started)]
    assert [start.generation for start in starts] == [1, 2]
    assert any("starts from step 0" in note for note in starts[1].notes)
    assert end_of(tmp_path / "a").generation == 2


def test_a_damaged_commit_is_set_aside_and_the_run_goes_on_from_the_one_before(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a"
    train(folder, 12, checkpoint={"every": "4 steps"})
    whole = (manifest.step_folder(folder, 12) / "model.safetensors").read_bytes()
    (folder / "events.jsonl").write_text(
        "".join((folder / "events.jsonl").read_text().splitlines(keepends=True)[:-1])
    )
    (manifest.step_folder(folder, 12) / "model.safetensors").write_bytes(
        whole[:-1] + bytes([whole[-1] ^ 1])
    )
    with Run(spec(12), Small(), folder=folder, quiet=True) as run:
        assert run.step == 8
        for _ in run.steps():
            pass
    assert (folder / "checkpoints" / ".bad-step-000000000012").is_dir()
    assert [event.fault for event in faults_of(folder)] == ["damaged-commit"]
    assert (manifest.step_folder(folder, 12) / "model.safetensors").read_bytes() == whole


def test_drafts_of_a_killed_attempt_are_cleared_away(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    leave_unfinished(folder)
    (folder / "checkpoints" / ".draft-step-000000000003").mkdir()
    (folder / "checkpoints" / ".draft-step-000000000003" / "model.safetensors").write_bytes(b"half")
    (folder / "checkpoints" / ".gone-step-000000000002").mkdir()
    (folder / "checkpoints" / "mine").mkdir()
    train(folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "mine",
        "step-000000000006",
    ]


@pytest.mark.parametrize("word", ["--accept-code-change", "--fresh", None])
def test_changed_task_code_is_refused_unless_it_is_accepted_or_the_run_begins_anew(
    word: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = write_task(tmp_path, change=("# FORWARD", "if STEP == 3: raise ValueError('not now')"))
    words = ["train", task, *FEW, "--run", str(tmp_path / "a")]
    assert call(monkeypatch, *words) == 3
    write_task(tmp_path)
    before = entries(tmp_path)
    capsys.readouterr()
    code = call(monkeypatch, *words, *([word] if word else []))
    if word is None:
        assert code == 2
        assert entries(tmp_path) == before
        said = capsys.readouterr().err
        assert "code has changed" in said
        assert "--accept-code-change" in said
        assert "--fresh" in said
        return
    assert code == 0
    assert (
        end_of(tmp_path / ("a" if word == "--accept-code-change" else "a-1")).outcome == "finished"
    )
    # nothing is deleted
    assert end_of(tmp_path / "a").outcome == (
        "finished" if word == "--accept-code-change" else "failed"
    )


# ---- what is refused, leaving nothing


def test_the_run_of_another_spec_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task, folder = write_task(tmp_path), tmp_path / "a"
    assert call(monkeypatch, "train", task, *FEW, "--run", str(folder)) == 0
    before = {
        name: (folder / name).read_bytes() for name in entries(folder) if (folder / name).is_file()
    }
    assert (
        call(monkeypatch, "train", task, *FEW, "--run", str(folder), "--set", "optim.lr=0.5") == 2
    )
    assert "is the run of a different spec" in capsys.readouterr().err
    assert {
        name: (folder / name).read_bytes() for name in entries(folder) if (folder / name).is_file()
    } == before


@pytest.mark.parametrize("what", ["a file", "a file in the way", "foreign files"])
def test_a_path_that_can_be_no_run_folder_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task, wanted = write_task(tmp_path), tmp_path / "a"
    if what == "foreign files":
        wanted.mkdir()
        (wanted / "thesis.tex").write_text("years of work")
    else:
        wanted.write_text("a file")
    before = entries(tmp_path)
    folder = wanted / "b" if what == "a file in the way" else wanted
    assert call(monkeypatch, "train", task, *FEW, "--run", str(folder)) == 2
    said = capsys.readouterr().err
    assert "--run" in said
    assert str(wanted) in said
    assert "Traceback" not in said
    assert entries(tmp_path) == before


def test_two_launchers_in_one_folder_one_trains_and_the_other_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"
    with Run(spec(6), Small(), folder=folder, quiet=True) as first:
        for report in first.steps():
            if report.step == 2:
                before = {
                    name: (folder / name).read_bytes()
                    for name in entries(folder)
                    if (folder / name).is_file()
                }
                with pytest.raises(RunFolderError, match=f"process {os.getpid()}"):
                    train(folder)
                assert {name: (folder / name).read_bytes() for name in before} == before
                assert entries(folder) == sorted({*before, *entries(folder)})
    assert end_of(folder).outcome == "finished"
    assert len([event for event in records(folder) if isinstance(event, Started)]) == 1


def test_launchers_without_a_folder_never_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Run(spec(2), Small(), quiet=True) as one, Run(spec(2), Small(), quiet=True) as two:
        assert one.folder != two.folder
        for run in (one, two):
            for _ in run.steps():
                pass
    assert end_of(one.folder).outcome == end_of(two.folder).outcome == "finished"


def test_a_folder_that_another_launcher_finished_meanwhile_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock = tmp_path / "a", RunLock.__init__

    def be_late(self: RunLock, where: Path, *, after: int = 0) -> None:
        monkeypatch.setattr(RunLock, "__init__", lock)
        train(folder)  # another launcher begins and finishes between our choice and our lock
        lock(self, where, after=after)

    monkeypatch.setattr(RunLock, "__init__", be_late)
    late = train(folder)
    assert (late.folder, late.outcome) == (folder, "finished")
    assert [type(event) for event in records(folder)].count(Started) == 1


# ---- a kill


def be_killed(folder: Path) -> int:
    """A run whose process is killed while it writes a line of the log."""
    with Run(spec(40, observe={"every": "1 step"}), Small(), folder=folder, quiet=True) as run:
        for report in run.steps():
            if report.step == 6:
                run.save()
            if report.step == 9:
                journal = run.session.telling.journal
                assert isinstance(journal, Journal)
                os.write(journal._descriptor, b'{"v": 1, "kind": "step", "generation": 1, "time')
                os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_a_kill_leaves_a_log_that_readers_accept_and_the_next_attempt_mends(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a"
    _, status = os.waitpid(forked(lambda: be_killed(folder)), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert records(folder)[-1].kind == "step"
    assert not (folder / "events.jsonl").read_bytes().endswith(b"\n")
    surefoot.load(folder)
    with Run(spec(40, observe={"every": "1 step"}), Small(), folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    assert all(
        json.loads(line)["v"] == 1 for line in (folder / "events.jsonl").read_text().splitlines()
    )
    assert [
        event.generation for event in records(folder) if isinstance(event, Started | Ended)
    ] == [1, 2, 2]


# ---- weights


def test_a_commit_that_falls_together_with_an_evaluation_carries_its_score(tmp_path: Path) -> None:
    with Run(
        spec(8, checkpoint={"every": "4 steps", "keep": 5}),
        Small(),
        folder=tmp_path / "a",
        quiet=True,
    ) as run:
        for report in run.steps():
            if report.step % 4 == 0:
                run.evaluate()
    best = checkpoint.find_step(tmp_path / "a", "best")
    scores = [manifest.read(manifest.step_folder(tmp_path / "a", step)).score for step in (4, 8)]
    assert all(score is not None and score["name"] == "accuracy" for score in scores)
    assert best == (4 if scores[0]["value"] >= scores[1]["value"] else 8)  # type: ignore[index]


def test_weights_that_are_not_finite_are_never_committed(tmp_path: Path) -> None:
    with (
        pytest.raises(surefoot.SurefootError),
        Run(spec(12), Small(poison=tuple(range(24))), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    assert manifest.steps(tmp_path / "a") == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_never_the_best(value: float, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for step, score in ((1, value), (2, 0.5), (3, 0.4)):
        row = {"name": "accuracy", "value": score, "better": "higher", "split": "test"}
        checkpoint.save(tmp_path, step, {"model": model}, checkpoint.Stamp(score=row))
    assert checkpoint.find_step(tmp_path, "best") == 2
    assert "NaN" not in (manifest.step_folder(tmp_path, 1) / manifest.FILE).read_text()


def test_a_folder_that_another_process_is_making_is_told_to_be_written_by_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "tensorboard").mkdir()  # the log is not there yet
    with (
        RunLock(tmp_path),
        pytest.raises(RunFolderError, match=f"is being written by process {os.getpid()}"),
    ):
        train(tmp_path)
    with pytest.raises(RunFolderError, match="is not empty and is not a run folder"):
        train(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 100, 256, 257])
def test_what_a_power_cut_left_of_a_run_without_a_log_is_begun_again(
    num_bytes: int, tmp_path: Path
) -> None:
    train(tmp_path / "whole")
    left = tmp_path / "left"
    left.mkdir()
    for name in ("spec.toml", "run.lock"):
        shutil.copy(tmp_path / "whole" / name, left)
    (left / "ledger.bin").write_bytes((tmp_path / "whole" / "ledger.bin").read_bytes()[:num_bytes])
    if num_bytes > 256:  # it has trained: with its log something is lost
        with pytest.raises(RunFolderError, match="is not empty and is not a run folder"):
            train(left)
        return
    train(left)
    assert end_of(left).outcome == "finished"
    assert len((left / "ledger.bin").read_bytes()) == len(
        (tmp_path / "whole" / "ledger.bin").read_bytes()
    )


def test_the_log_is_on_the_disk_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, sync, synced = tmp_path / "run" / "events.jsonl", os.fsync, []

    def noted(descriptor: int) -> None:
        if log.exists():
            synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with Run(spec(6), Small(), folder=tmp_path / "run", quiet=True) as run:
        assert synced == [log.stat().st_ino, run.folder.stat().st_ino]  # the text, then its name
        assert sorted(path.name for path in run.folder.iterdir()) == [
            "events.jsonl",
            "ledger.bin",
            "run.lock",
            "spec.toml",
        ]


# ---- how the spec is given


def test_a_spec_may_be_given_in_each_form_that_a_script_has(tmp_path: Path) -> None:
    given = spec(2)
    file = tmp_path / "small.toml"
    file.write_text(spec_file.write(given))
    forms = {
        "spec": given,
        "file": file,
        "name": str(file),
        "read": surefoot.read_spec(str(file)),
        "tables": given.as_tables(),
    }
    ids = set()
    for name, form in forms.items():
        with Run(form, Small(), folder=tmp_path / name, quiet=True) as run:
            assert [report.step for report in run.steps()] == [1, 2], name
        ids.add(run.spec.id)
    assert len(ids) == 1


@pytest.mark.parametrize("given", [None, 3, ["digits"], b"digits"])
def test_what_is_no_spec_is_refused_with_the_forms_that_are(given: Any) -> None:
    with pytest.raises(InputError) as caught:
        Run(given, Small())
    assert caught.value.message == f"the spec is {given!r}"
    assert "a TOML file" in str(caught.value.hint)


# ---- stopped before the first step


def stop_at_once(folder: Path) -> Run:
    with Run(spec(6), Small(), folder=folder, quiet=True) as run:
        run.stop("enough")
        assert list(run.steps()) == []
    return run


def test_a_run_that_was_stopped_before_its_first_step_is_opened_as_it_ended(tmp_path: Path) -> None:
    first = stop_at_once(tmp_path / "run")
    weights = {name: each.clone() for name, each in first.model.state_dict().items()}
    again = stop_at_once(tmp_path / "run")
    assert (again.outcome, again.step, again.cause) == ("stopped", 0, "enough")
    torch.testing.assert_close(dict(again.model.state_dict()), weights, rtol=0, atol=0)
