"""`surefoot runs`, `show` and `compare` on what runs leave behind, whole or broken off."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.cli import table
from surefoot.cli.look import side_by_side, story
from surefoot.cli.look.past import read
from surefoot.contract import events
from surefoot.core.errors import RunFolderError
from surefoot.core.units import format_percent
from tests.cli import past_runs as past
from tests.cli.conftest import Command

STATES = ("finished", "stopped", "failed", "interrupted")


def columns(line: str) -> list[str]:
    return [cell for cell in line.split("  ") if cell.strip()]


@pytest.mark.parametrize("state", STATES)
def test_a_run_is_listed_with_the_state_that_its_end_says(state: str, surefoot: Command) -> None:
    past.write(
        Path("runs/a-1"),
        [past.started(), past.step(10, 1.0), past.evaluated(10, 0.994), past.ended(10, state)],
    )
    answer = surefoot("runs")
    assert (answer.code, answer.err) == (0, "")
    header, line = answer.out.splitlines()
    assert header.split() == ["run", "task", "state", "steps", "score", "time", "when"]
    cells = [cell.strip() for cell in columns(line)]
    assert cells[:6] == ["runs/a-1", "digits", state, "10/40", "accuracy 99.4 %", "50 s"]


def test_a_run_without_an_end_is_none_of_those_even_when_an_earlier_attempt_ended(
    surefoot: Command,
) -> None:
    past.write(
        Path("runs/a-1"),
        [
            past.started(),
            past.step(10, 1.0),
            past.ended(10, "failed"),
            past.started(2),
            past.step(10, 0.9, 2),
        ],
    )
    past.write(
        Path("runs/a-2"),
        [past.started(place={"rank": 0, "world_size": 1, "host": socket.gethostname()})],
    )
    rows = surefoot("runs", "--json").row["runs"]
    assert [(row["state"], row["steps"], row["attempts"], row["value"]) for row in rows] == [
        ("unknown", 10, 2, None),
        ("dead", 0, 1, None),
    ]


def test_runs_are_found_at_any_depth_in_order_of_their_numbers(surefoot: Command) -> None:
    for name in ("deep/er/x-1", "x-10", "x-9", ".hidden/x-1", "x-9/inside/x-1"):
        past.write_finished(Path("runs") / name)
    found = [row["run"] for row in surefoot("runs", "--json").row["runs"]]
    assert found == ["runs/deep/er/x-1", "runs/x-9", "runs/x-10"]
    below = surefoot("runs", "runs/x-9", "--json").row["runs"]
    assert [row["run"] for row in below] == ["runs/x-9"]


def test_a_damaged_run_does_not_hide_the_others(surefoot: Command) -> None:
    past.write_finished(Path("runs/a-1"))
    past.write(Path("runs/a-2"), [], torn="{half\n")
    answer = surefoot("runs")
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines()[1:]] == ["runs/a-1", "runs/a-2"]
    assert "unreadable" in answer.out
    assert "runs/a-2 cannot be read: runs/a-2/events.jsonl:1 is not an event" in answer.err
    assert surefoot("show", "runs/a-2").code == 2


def test_no_runs_are_no_error_but_a_folder_that_is_not_there_is(surefoot: Command) -> None:
    answer = surefoot("runs")
    assert (answer.code, answer.out) == (0, "")
    assert "no runs below runs" in answer.err
    assert surefoot("runs", "--json").row == {"folder": "runs", "runs": []}
    assert surefoot("runs", "nowhere").code == 2


def test_a_run_is_told_from_where_it_ran_to_how_to_repeat_it(surefoot: Command) -> None:
    run = past.write_finished(Path("runs/a 1"))
    (run / "spec.toml").touch()
    answer = surefoot("show", run)
    assert (answer.code, answer.err) == (0, "")
    for part in (
        "runs/a 1: digits, finished, accuracy 99.4 %",
        "0123456789ab, seed 0",
        "a processor, 2 cores, 16 GiB",
        "cpu, 1 thread\n",
        "python 3.11.7, torch 2.13.0",
        "1,437 samples",
        "proven, digest dddddddddddd...",
        "58,474 parameters",
        "rate x 1",
        "Training loss: 0.5 at step 1, 0.0125 at step 40",
        "└",
        "Evaluations of the test split, 360 samples",
        "finished: the length",
        "40 (2 epochs)",
        "1.28 k samples/s",
        "500 MiB",
        "surefoot train 'runs/a 1/spec.toml'",
        "none saved",
    ):
        assert part in answer.out, part


def test_the_evaluations_are_a_table_with_the_best_marked(surefoot: Command) -> None:
    records = [past.evaluated(20, 0.994), past.evaluated(40, 0.9, best=False)]
    run = past.write(Path("a"), [past.started(), *records, past.ended(40)])
    lines = surefoot("show", run).out.splitlines()
    at = lines.index("Evaluations of the test split, 360 samples")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["step", "epoch", "accuracy", "loss"],
        ["20", "1", "99.4", "%", "0.25", "best"],
        ["40", "2", "90", "%", "0.25"],
    ]
    assert "score        accuracy 90 % (best 99.4 %)" in "\n".join(lines)


def test_of_hundreds_of_evaluations_a_few_are_shown_and_json_has_all(surefoot: Command) -> None:
    records = [
        past.evaluated(number, number / 1000, best=number <= 123) for number in range(1, 501)
    ]
    run = past.write(Path("a"), [past.started(), *records])
    out = surefoot("show", run).out
    assert "487 more evaluations are not shown; --json has all of them" in out
    assert sum(line.rstrip().endswith("best") for line in out.splitlines()) == 1
    assert len(surefoot("show", run, "--json").row["evaluations"]) == 500


def test_another_split_is_told_apart_and_does_not_count(surefoot: Command) -> None:
    records = [past.evaluated(20, 0.9), past.evaluated(20, 1.0, best=False, split="train")]
    run = past.write(Path("a"), [past.started(), *records])
    assert surefoot("show", run, "--json").row["value"] == 0.9
    assert "Evaluations of each split" in surefoot("show", run).out


def test_faults_are_told_with_what_was_done(surefoot: Command) -> None:
    run = past.write(
        Path("a"), [past.started(), past.fault(7), past.ended(8, "failed", cause="numbers")]
    )
    out = surefoot("show", run).out
    assert [line.split()[:2] for line in out.splitlines() if "no weight changed" in line] == [
        ["7", "nonfinite"]
    ]


@pytest.mark.parametrize("torn", ['{"v": 1, "kind": "ended", "gen', "{", '{"v": 1}'[:-1]])
def test_a_torn_last_line_is_left_out(torn: str, surefoot: Command) -> None:
    run = past.write(Path("a"), [past.started(), past.step(10, 1.0), past.step(20, 0.5)], torn=torn)
    row = surefoot("show", run, "--json").row
    assert (row["state"], [each["step"] for each in row["curve"]]) == ("unknown", [10, 20])


def test_of_each_step_the_newest_attempt_counts(surefoot: Command) -> None:
    first = [
        past.started(),
        past.step(10, 4.0),
        past.step(20, 3.0),
        past.evaluated(20, 0.5),
        past.fault(15),
        past.ended(20, "failed"),
    ]
    second = [
        past.started(2, first_step=11),
        past.step(20, 2.0, 2),
        past.step(30, 1.0, 2),
        past.ended(30, "stopped", 2),
    ]
    run = past.write(Path("a"), [*first, *second])
    row = surefoot("show", run, "--json").row
    assert [(each["step"], each["loss"]) for each in row["curve"]] == [
        (10, 4.0),
        (20, 2.0),
        (30, 1.0),
    ]
    assert (row["state"], row["attempts"], row["evaluations"]) == ("stopped", 2, [])
    assert len(row["faults"]) == 1
    told = surefoot("show", run).out
    assert "2; 10 steps repeated; values of a step are those of its newest attempt" in told
    assert row["goodput"] is not None
    assert f"{format_percent(row['goodput'])} of" in next(
        line for line in told.splitlines() if line.split()[:1] == ["goodput"]
    )


def test_numbers_that_are_not_finite_are_null_in_json_and_named_in_words(surefoot: Command) -> None:
    nothing = float("nan")
    run = past.write(
        Path("a"),
        [
            past.started(),
            past.step(10, 1.0),
            past.step(20, nothing),
            past.evaluated(20, nothing, best=False),
        ],
    )
    row = surefoot("show", run, "--json").row
    assert (row["curve"][1]["loss"], row["value"]) == (None, None)
    assert "accuracy nan %" in surefoot("runs", "a").out


def test_later_kinds_and_fields_are_left_aside(surefoot: Command) -> None:
    run = past.write_finished(Path("a"))
    file = run / "events.jsonl"
    row = json.loads(past.step(50, 0.1).as_line())
    file.write_text(
        file.read_text()
        + json.dumps({**row, "color": "red"})
        + '\n{"v": 1, "kind": "later", "x": 1}\n'
    )
    assert surefoot("show", run, "--json").row["curve"][-1]["step"] == 50


def test_folders_of_runs_are_compared_side_against_side_with_intervals(surefoot: Command) -> None:
    for side, scores in {
        "a": (0.990, 0.994, 0.992),
        "b": (0.950, 0.954, 0.949),
        "c": (0.991, 0.993),
    }.items():
        for number, score in enumerate(scores):
            past.write_finished(Path(side) / str(number), accuracy=score)
    row = surefoot("compare", "a", "b", "c", "--json").row
    assert [(side["side"], len(side["runs"])) for side in row["sides"]] == [
        ("a", 3),
        ("b", 3),
        ("c", 2),
    ]
    found = {(each["measure"], each["side"]): each for each in row["effects"]}
    assert (found["score", "b"]["verdict"], found["score", "c"]["verdict"]) == (
        "lower",
        "no effect",
    )
    assert found["score", "b"]["difference"]["high"] < 0
    assert found["score", "c"]["difference"]["n"] == 2
    assert found["peak_bytes", "b"]["verdict"] == "no effect"  # the same in every run
    out = surefoot("compare", "a", "b").out
    assert "Runs on each side: a: 3, b: 3" in out
    assert (
        next(line for line in out.splitlines() if line.startswith("score")).split()[-1] == "lower"
    )


def test_a_run_that_never_began_has_no_time_and_one_that_did_not_finish_is_named(
    surefoot: Command,
) -> None:
    for side in ("a", "b"):
        past.write_finished(Path(side) / "1")
        past.write_finished(Path(side) / "2")
    past.write(Path("b/3"), [past.started()])
    out = surefoot("compare", "a", "b").out
    assert "not finished, included in the means up to its last step: b/3, unknown, 0 steps" in out
    elapsed = next(
        each
        for each in surefoot("compare", "a", "b", "--json").row["effects"]
        if each["measure"] == "elapsed_s"
    )
    assert elapsed["mean"] == elapsed["baseline_mean"]
    assert "not finished" not in surefoot("compare", "a", "a").out


def test_one_run_against_a_folder_of_runs_has_a_difference_and_no_verdict(
    surefoot: Command,
) -> None:
    past.write_finished(Path("one"))
    for number in range(3):
        past.write_finished(Path("many") / str(number))
    effects = surefoot("compare", "one", "many", "--json").row["effects"]
    assert {each["verdict"] for each in effects} == {"too few"}
    assert surefoot("compare", "many", "nowhere").code == 2


NO_RUNS = {
    "an empty folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
    "a file": lambda path: path.write_text("text"),
    "an empty events.jsonl": lambda path: past.write(path, []),
    "events of a newer format": lambda path: past.write(
        path, [], torn='{"v": 99, "kind": "started"}\n'
    ),
    "a binary file": lambda path: (
        path.mkdir(),
        (path / "events.jsonl").write_bytes(bytes(range(256)) * 9 + b"\n"),
    ),
}


@pytest.mark.parametrize("what", NO_RUNS)
def test_what_is_no_run_is_refused_and_nothing_is_written(
    what: str, surefoot: Command, tmp_path: Path
) -> None:
    path = tmp_path / "thing"
    NO_RUNS[what](path)
    before = sorted(tmp_path.rglob("*"))
    for words in (("show", "thing"), ("show", "thing", "--json"), ("compare", "thing", "thing")):
        answer = surefoot(*words)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("error: thing")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_stranger_s_run_cannot_steer_the_terminal(surefoot: Command) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J"
    records = [past.started(notes=(evil,), task=evil), past.ended(1, cause=evil)]
    run = past.write(Path("runs/a"), [*records])
    past.write(Path("runs/b"), [past.started(versions={"torch": evil}), past.ended(1)])
    for words in (("show", run), ("runs",), ("compare", run, "runs/b"), ("show", run, "--json")):
        assert not set(surefoot(*words).out) & {"\x1b", "\x07"}


def test_runs_lie_side_by_side_with_what_differs(surefoot: Command) -> None:
    past.write_finished(Path("a"))
    versions = {"python": "3.11.7", "torch": "2.11.0"}
    place = {"rank": 0, "world_size": 2, "host": "here"}
    past.write_finished(Path("b"), lr=0.01, accuracy=0.95, versions=versions, seed=1, place=place)
    answer = surefoot("compare", "a", "b")
    assert (answer.code, answer.err) == (0, "")
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    for line in (
        "optim.lr 0.005 0.01",
        "score accuracy 99.4 % accuracy 95 %",
        "loss at step 1 0.5 1",
        "loss at step 40 0.0125 0.025",
        "throughput 1.28 k samples/s 1.28 k samples/s",
        "time 50 s 50 s",
        "torch 2.13.0 2.11.0",
        "ranks 1 2",
    ):
        assert line in lines, line
    assert not any(line.startswith(("optim.weight_decay", "python", "code")) for line in lines)


def test_a_comparison_in_json_has_a_value_for_each_run(surefoot: Command) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2), ("c", 0.1)):
        past.write_finished(Path(name), lr=lr)
    row = surefoot("compare", "a", "b", "c", "--json").row
    assert row["spec"] == [{"key": "optim.lr", "values": [0.1, 0.2, 0.1]}]
    assert row["circumstances"] == []
    assert [each["step"] for each in row["losses"]] == [1, 10, 20, 30, 40]
    assert row["losses"][-1]["values"] == pytest.approx([0.25, 0.5, 0.25])
    assert [each["state"] for each in row["runs"]] == ["finished"] * 3


def test_losses_are_compared_only_at_steps_that_every_run_recorded(surefoot: Command) -> None:
    for name, steps in (("a", (1, 10, 20, 40)), ("b", (1, 15, 20, 30, 40))):
        past.write(Path(name), [past.started(), *(past.step(each, 1.0) for each in steps)])
    assert [each["step"] for each in surefoot("compare", "a", "b", "--json").row["losses"]] == [
        1,
        20,
        40,
    ]


def test_means_over_different_numbers_of_steps_are_not_compared(surefoot: Command) -> None:
    whole, short = past.step(26, 1.0), replace(past.step(26, 2.0), num_steps=6)
    past.write(Path("a"), [past.started(), past.step(20, 1.0), whole])
    past.write(Path("b"), [past.started(), past.step(20, 1.0), short])
    past.write(Path("c"), [past.started(), short])
    assert [each["step"] for each in surefoot("compare", "a", "b", "--json").row["losses"]] == [20]
    assert (
        "different numbers of steps (in brackets): step 26 (10, 6)"
        in surefoot("compare", "a", "b").out
    )
    answer = surefoot("compare", "a", "c").out
    assert "step 26 (10, 6)" in answer
    assert "no step in common" not in answer


def test_a_default_that_one_run_states_is_no_difference(surefoot: Command) -> None:
    past.write(Path("a"), [past.started(spec={"task": {"use": "digits"}, "optim": {"lr": 0.001}})])
    past.write(
        Path("b"),
        [
            past.started(
                spec={"task": {"use": "digits"}, "schedule": {"name": "cosine", "floor": 0.0}}
            )
        ],
    )
    answer = surefoot("compare", "a", "b")
    assert "the specs are equal" in answer.out
    assert "no step in common" in answer.out


def test_a_comparison_of_one_run_is_bad_input(surefoot: Command) -> None:
    past.write_finished(Path("a"))
    answer = surefoot("compare", "a")
    assert answer.code == 2
    assert "compare needs at least two runs" in answer.err


def test_at_a_terminal_rows_are_folded_to_its_width(
    surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = past.write_finished(Path("a"), notes=("word " * 60,))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    # the headers are bold
    told = re.sub(r"\x1b\[[0-9]*m", "", surefoot("show", run).out.split("Again")[0])
    assert [line for line in told.splitlines() if len(line) > 60] == []
    assert surefoot("runs", ".").out


def test_a_command_to_copy_is_never_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    table.print_pairs([("repeat", "surefoot train " + "x " * 40)], whole=True)
    assert len(capsys.readouterr().out.splitlines()) == 1


JUNK = (
    None,
    "x",
    -1,
    0.5,
    True,
    [],
    {"a": {"b": []}},
    [[]],
    {"task": 1, "evaluate": "x", "optim": []},
)


@pytest.mark.quick("step", "ended", "started")
@pytest.mark.parametrize("kind", events.KINDS)
def test_a_record_of_other_types_is_left_out_or_told_but_never_breaks_a_verb(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [
        past.started(),
        past.step(1, 1.0),
        past.step(10, 0.5),
        past.evaluated(10, 0.5),
        past.fault(10),
        past.ended(10),
    ]
    committed = events.Committed(
        generation=1, time_s=0.0, step=10, folder="f", num_bytes=1, elapsed_s=0.1
    )
    dtypes = events.Dtypes(
        generation=1, time_s=0.0, step=1, parameters=({"names": ["a"]},), operators={"mm": "bf16"}
    )
    compiled = events.Compiled(
        generation=1,
        time_s=0.0,
        step=2,
        function="forward",
        file="a.py",
        line=1,
        elapsed_s=0.1,
        num_operators=2,
        is_backward=False,
        why_again=None,
        ended_early=None,
    )
    memory = events.Memory(
        generation=1, time_s=0.0, step=3, predicted_bytes=9, measured_bytes=10, error=-0.1
    )
    lines = [record.as_line() for record in (*whole, committed, dtypes, compiled, memory)]
    at = next(index for index, line in enumerate(lines) if json.loads(line)["kind"] == kind)
    left_out = 0
    for field in json.loads(lines[at]):
        for junk in JUNK:
            (tmp_path / events.FILE).write_text(
                "".join(
                    [
                        *lines[:at],
                        json.dumps({**json.loads(lines[at]), field: junk}) + "\n",
                        *lines[at + 1 :],
                    ]
                )
            )
            try:
                found = read(tmp_path)
            except RunFolderError:
                left_out += 1
                continue
            left_out += "the line is ignored" in capsys.readouterr().err
            story.print_summary(found)
            side_by_side.print_comparison([found, found])
            json.dumps([story.as_row(found), side_by_side.as_row([found, found])], allow_nan=False)
    assert left_out > len(JUNK)
