"""Tests of the log of a run.

Every record reads back, whatever tore its end or whoever changed its middle.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.components.observe.journal import Journal
from surefoot.contract import events
from surefoot.contract.events import (
    Committed,
    Compiled,
    Dtypes,
    Ended,
    Evaluated,
    Event,
    Fault,
    Memory,
    Started,
    Step,
)
from surefoot.core.errors import RunFolderError, StorageError


def step(number: int, generation: int = 1, **more: Any) -> Step:
    given = {
        "generation": generation,
        "time_s": 1.5,
        "step": number,
        "epoch": 0.1,
        "num_steps": 1,
        "loss": 0.5,
        "terms": {"loss": 0.5},
        "gradient_norm": 1.0,
        "learning_rates": {"loss": 0.1},
        "num_applied": 1,
        "num_samples": 4,
        "num_items": 4.0,
        "elapsed_s": 0.1,
        "waiting_s": 0.0,
        "samples_per_s": 40.0,
        "items_per_s": None,
        "peak_bytes": None,
        **more,
    }
    return Step(**given)


def started(generation: int = 1, first_step: int = 1) -> Started:
    return Started(
        generation=generation,
        time_s=1.0,
        spec_id="x",
        spec={},
        task="small",
        code_digest="y",
        data={},
        versions={},
        machine={},
        place={},
        variables={},
        command=("surefoot",),
        commit=None,
        seed=0,
        num_parameters=3,
        total_steps=10,
        steps_per_epoch=5,
        first_step=first_step,
    )


def evaluated(number: int) -> Evaluated:
    return Evaluated(
        generation=1,
        time_s=2.0,
        step=number,
        split="test",
        num_samples=4,
        loss=0.5,
        metrics={"accuracy": 0.5},
        score="accuracy",
        better="higher",
        best=True,
        elapsed_s=0.1,
    )


ALL = (
    started(),
    step(1),
    evaluated(1),
    Committed(
        generation=1, time_s=2.0, step=1, folder="checkpoints/step-1", num_bytes=3, elapsed_s=0.1
    ),
    Fault(
        generation=1,
        time_s=2.0,
        step=1,
        fault="nonfinite",
        rank=0,
        host="here",
        action="skipped",
        detail="the loss is nan",
    ),
    Compiled(
        generation=1,
        time_s=1.7,
        step=1,
        function="forward",
        file="a.py",
        line=3,
        elapsed_s=0.5,
        num_operators=2,
        is_backward=False,
        why_again="a size",
        ended_early=None,
    ),
    Memory(generation=1, time_s=1.8, step=3, predicted_bytes=9, measured_bytes=10, error=-0.1),
    Dtypes(
        generation=1,
        time_s=1.5,
        step=1,
        parameters=({"names": ["a"], "state": None},),
        operators={"mm": "bf16"},
    ),
    Ended(
        generation=1,
        time_s=3.0,
        step=1,
        outcome="finished",
        cause="done",
        exit_code=0,
        elapsed_s=1.0,
        num_samples=4,
        samples_per_s=4.0,
        peak_bytes=1,
        summary={"value": 0.5},
    ),
)


def write(folder: Path, text: str) -> None:
    (folder / events.FILE).write_text(text)


def journal(folder: Path, *rows: Event) -> None:
    log = Journal(folder)
    for row in rows:
        log.write(row)
    log.close()


def as_plain(event: Event) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(event)))


def test_every_kind_of_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    journal(tmp_path, *ALL)
    assert {type(event) for event in ALL} == set(events.KINDS.values())
    assert [as_plain(event) for event in events.read(tmp_path)] == [
        as_plain(event) for event in ALL
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_written_as_json_and_read_back_as_a_number(
    value: float, tmp_path: Path
) -> None:
    row = step(1, loss=value, terms={"loss": value, "nan": 1.0}, gradient_norm=value)
    end = dataclasses.replace(
        ALL[-1], cause="nan", summary={"value": value, "best_value": None, "score": "nan"}
    )
    journal(tmp_path, row, end)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for line in (tmp_path / events.FILE).read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    back, ended = events.read(tmp_path)
    assert isinstance(back, Step)
    assert isinstance(ended, Ended)
    for number in (back.loss, back.terms["loss"], back.gradient_norm, ended.summary["value"]):
        assert str(number) == str(value)
        assert isinstance(number, float)
    assert (back.terms["nan"], ended.cause, ended.summary["score"]) == (1.0, "nan", "nan")


@given(st.integers(min_value=1))
def test_a_log_torn_at_any_byte_gives_the_whole_records_before_it(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole = "".join(event.as_line() for event in ALL).encode()
    cut %= len(whole)
    (folder / events.FILE).write_bytes(whole[:cut])
    # a record that lacks but its newline is whole
    num_whole = whole[:cut].count(b"\n") + (whole[cut : cut + 1] == b"\n")
    assert len(list(events.read(folder))) == num_whole
    journal(folder, step(9))
    again = list(events.read(folder))
    assert [event.kind for event in again][:-1] == [event.kind for event in ALL][
        : whole[:cut].count(b"\n")
    ]
    assert as_plain(again[-1]) == as_plain(step(9))


@pytest.mark.parametrize("length", [10, 70_000, 300_000])
def test_a_torn_line_of_any_length_is_taken_back(length: int, tmp_path: Path) -> None:
    write(tmp_path, step(1).as_line() + "x" * length)
    journal(tmp_path, step(2))
    assert (tmp_path / events.FILE).read_text() == step(1).as_line() + step(2).as_line()


def test_a_log_that_is_one_torn_line_is_begun_anew(tmp_path: Path) -> None:
    write(tmp_path, "x" * 200_000)
    journal(tmp_path, step(2))
    assert (tmp_path / events.FILE).read_text() == step(2).as_line()


def test_zeros_that_a_power_cut_leaves_at_the_end_are_a_torn_line(tmp_path: Path) -> None:
    write(tmp_path, step(1).as_line() + "\0" * 400)
    assert len(list(events.read(tmp_path))) == 1


def test_a_hole_that_a_power_cut_leaves_is_left_out_and_what_follows_is_read(
    tmp_path: Path,
) -> None:
    lines = "".join(step(number).as_line() for number in range(1, 9))
    length = len(step(1).as_line())
    write(tmp_path, lines[: 2 * length + 10] + "\0" * (3 * length) + lines[5 * length + 10 :])
    assert [event.step for event in events.read(tmp_path) if isinstance(event, events.Step)] == [
        1,
        2,
        7,
        8,
    ]
    journal(tmp_path, step(9))
    assert len(list(events.read(tmp_path))) == 5


DAMAGED = {
    "no json": "spam",
    "a list": "[1]",
    "a number": "3",
    "no kind": "{}",
    "a different kind of kind": '{"kind": []}',
    "a version of a different type": '{"kind": "step", "v": "1"}',
    "deep nesting": "[" * 100_000,
    "a field is missing": '{"v": 1, "kind": "step", "generation": 1}',
    "a step that is none": step(3, step="three").as_line().strip(),
    "a time that is none": step(3, time_s="now").as_line().strip(),
    "a generation that is none": step(3, generation=None).as_line().strip(),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_in_the_middle_is_named_with_its_line_and_costs_that_line(
    what: str, tmp_path: Path
) -> None:
    write(tmp_path, step(1).as_line() + DAMAGED[what] + "\n" + step(2).as_line())
    damaged: list[str] = []
    assert [
        event.step for event in events.read(tmp_path, damaged=damaged) if isinstance(event, Step)
    ] == [1, 2]
    (line,) = damaged
    assert "events.jsonl:2 is not an event" in line
    assert len(line) < 1000


def test_a_file_without_any_event_is_no_log(tmp_path: Path) -> None:
    write(tmp_path, "a line of somebody else\n" * 3)
    for only in ((), (Started,)):
        with pytest.raises(
            RunFolderError,
            match=r"events\.jsonl:1 is not an event.*no line of the file is an event",
        ):
            list(events.read(tmp_path, *only))


@given(st.integers(min_value=0), st.integers(min_value=0, max_value=7))
def test_one_flipped_bit_costs_two_records_at_most(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    """Two where it makes one line of them, and none of the others."""
    folder = tmp_path_factory.mktemp("run")
    whole = bytearray("".join(event.as_line() for event in ALL).encode())
    place %= len(whole)
    whole[place] ^= 1 << bit
    (folder / events.FILE).write_bytes(whole)
    damaged: list[str] = []
    found = [as_plain(event) for event in events.read(folder, damaged=damaged)]
    assert sum(as_plain(event) in found for event in ALL) >= len(ALL) - 2
    assert all("events.jsonl:" in line for line in damaged)


@pytest.mark.parametrize("only", [(), (Started,), (Step,)])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_format_that_one_line_of_an_attempt_has_is_damage(
    number: int, only: tuple[type[Event], ...], tmp_path: Path
) -> None:
    journal(tmp_path, started(), step(1), step(2), step(3))
    lines = (tmp_path / events.FILE).read_text().splitlines(keepends=True)
    lines[number] = lines[number].replace('"v": 1', '"v": 3')
    write(tmp_path, "".join(lines))
    damaged: list[str] = []
    found = list(events.read(tmp_path, *only, damaged=damaged))
    assert len(found) == {(): 3, (Started,): 1, (Step,): 2}[only]
    assert [f"events.jsonl:{number + 1} has format 3" in line for line in damaged] == [True]


def test_a_later_version_adds_kinds_and_fields_and_a_later_format_is_refused(
    tmp_path: Path,
) -> None:
    row = json.loads(step(1).as_line())
    write(tmp_path, json.dumps({**row, "novel": 3}) + "\n" + '{"v": 1, "kind": "rewound"}\n')
    assert [event.kind for event in events.read(tmp_path)] == ["step"]
    write(tmp_path, json.dumps({**row, "v": 2}) + "\n")
    with pytest.raises(RunFolderError, match="newer"):
        list(events.read(tmp_path))


def test_records_of_other_kinds_are_passed_over_without_a_look_into_them(tmp_path: Path) -> None:
    """A run that goes on asks for its beginnings and its end: it may have a million steps."""
    journal(tmp_path, started(), step(1), evaluated(1), step(2), started(2, first_step=3), step(3))
    rows = list(events.read(tmp_path))
    assert list(events.read(tmp_path, Started, Ended)) == [rows[0], rows[4]]
    assert list(events.read(tmp_path, Step)) == [rows[1], rows[3], rows[5]]
    text = (tmp_path / events.FILE).read_text()
    write(tmp_path, text.replace('"loss": ', '"loss": nothing '))
    assert list(events.read(tmp_path, Started)) == [rows[0], rows[4]]
    damaged: list[str] = []
    assert not [
        event for event in events.read(tmp_path, damaged=damaged) if isinstance(event, Step)
    ]
    assert len(damaged) == 4
    spaced = "".join(
        json.dumps(json.loads(line), separators=(",", ":")) + "\n" for line in text.splitlines()
    )
    # whoever wrote it so
    write(tmp_path, spaced + '{"v": 1, "kind": "st\n{"v": 1, "kind": "later}\n')
    damaged.clear()
    assert list(events.read(tmp_path, Started, damaged=damaged)) == [rows[0], rows[4]]
    assert len(damaged) == 2
    write(tmp_path, spaced)
    assert list(events.read(tmp_path, Started)) == [rows[0], rows[4]]


def test_a_folder_without_a_log_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run"):
        list(events.read(tmp_path))
    (tmp_path / events.FILE).mkdir()
    with pytest.raises(RunFolderError, match="is not a run"):
        list(events.read(tmp_path))
    with pytest.raises(StorageError):
        Journal(tmp_path)


def test_of_each_step_the_newest_generation_counts(tmp_path: Path) -> None:
    fault = ALL[4]
    rows = [
        started(1),
        step(1),
        step(2),
        fault,
        started(2),
        step(1, 2),
        started(3, first_step=2),
        step(2, 3),
    ]
    journal(tmp_path, *rows)
    kept = events.newest(events.read(tmp_path))
    assert [(event.step, event.generation) for event in kept if isinstance(event, Step)] == [
        (1, 2),
        (2, 3),
    ]
    assert [event.kind for event in kept].count("fault") == 1


def test_records_are_appended_and_never_rewritten(tmp_path: Path) -> None:
    journal(tmp_path, step(1))
    before = (tmp_path / events.FILE).read_bytes()
    journal(tmp_path, step(2))
    assert (tmp_path / events.FILE).read_bytes().startswith(before)
