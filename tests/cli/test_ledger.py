"""`surefoot ledger` finds every row that is not what the plan says, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from surefoot.components.data import consumed
from surefoot.contract import ledger
from surefoot.contract.ledger import HEADER_BYTES, ROW, Ledger, Plan
from surefoot.contract.loop_ledger import LoopGuarantee, LoopLedger
from surefoot.core.errors import InputError, RunFolderError
from tests.cli import past_runs
from tests.cli.conftest import Command
from tests.cli.test_a_run import documented
from tests.conftest import ROOT

# 7 steps an epoch, the last of 2 samples
PLAN = Plan(samples=50, seed=3, shuffle=True, batch=8, drop_last=False)
STEPS = 30


def write(run: Path, *attempts: tuple[int, int], plan: Plan = PLAN) -> Path:
    """A ledger as attempts write it: each does the steps from its first to its last."""
    run.mkdir()
    feed = consumed.make_feed_of_plan(plan)
    for generation, (first, last) in enumerate(attempts, start=1):
        book = Ledger(run, plan, generation)
        for step in range(first, last + 1):
            book.add(step, feed.window(step - 1).ids)
        book.sync()
        book.close()
    (run / "run.lock").write_text(json.dumps({"generation": len(attempts), "process": 1}))
    return run


def rewrite(run: Path, change: object) -> None:
    """Change the rows as numbers: (step, generation, checksum)."""
    path = run / ledger.FILE
    data = path.read_bytes()
    rows = [list(each) for each in ROW.iter_unpack(data[HEADER_BYTES:])]
    change(rows)  # type: ignore[operator]
    path.write_bytes(data[:HEADER_BYTES] + b"".join(ROW.pack(*each) for each in rows))


def test_an_unbroken_run_and_one_of_three_attempts_consumed_every_sample_once_an_epoch(
    tmp_path: Path,
) -> None:
    whole = consumed.check(write(tmp_path / "whole", (1, STEPS)))
    killed = consumed.check(write(tmp_path / "killed", (1, 13), (11, 19), (16, STEPS)))
    for found in (whole, killed):
        assert found.holds
        assert found.last == STEPS
        assert found.num_samples == 4 * 50 + 2 * 8
    assert (whole.attempts, whole.num_overruled) == ((1,), 0)
    assert (killed.attempts, killed.num_overruled) == ((1, 2, 3), 7)
    counts = np.zeros(50, dtype=int)
    for sample in range(50):
        uses = consumed.find_sample(tmp_path / "killed", sample)
        assert [use.epoch for use in uses][:4] == [1, 2, 3, 4]
        counts[sample] = len(uses)
    assert counts.sum() == whole.num_samples
    assert set(counts) == {4, 5}


def twice(rows: list[list[int]]) -> None:
    rows.insert(12, list(rows[11]))


def lost(rows: list[list[int]]) -> None:
    del rows[14:16]


def first_lost(rows: list[list[int]]) -> None:
    del rows[0]


def swapped(rows: list[list[int]]) -> None:
    rows[8], rows[9] = rows[9], rows[8]


def other_samples(rows: list[list[int]]) -> None:
    rows[20][2] = rows[21][2]


def renumbered(rows: list[list[int]]) -> None:
    # an epoch later: as if the samples had been read in the order of another epoch
    rows[20][0] += 7


def older_attempt(rows: list[list[int]]) -> None:
    rows[5][1] += 4


PLANTED = {
    twice: "twice",
    lost: "lost",
    first_lost: "lost",
    swapped: "lost",
    other_samples: "other samples",
    renumbered: "lost",
    older_attempt: "damaged",
}


@pytest.mark.parametrize("change", PLANTED, ids=lambda change: change.__name__)
def test_a_planted_fault_is_found_and_named(
    change: object, tmp_path: Path, surefoot: Command
) -> None:
    run = write(tmp_path / "run", (1, STEPS))
    rewrite(run, change)
    found = consumed.check(run)
    assert PLANTED[change] in {each.kind for each in found.faults}  # type: ignore[index]
    answer = surefoot("ledger", run)
    assert answer.code == 1
    assert "NOT exactly once" in answer.out


def test_every_flipped_bit_of_a_ledger_is_found(tmp_path: Path) -> None:
    run = write(tmp_path / "run", (1, 9), (7, 12))
    path = run / ledger.FILE
    data = path.read_bytes()
    for position in np.random.default_rng(0).choice(len(data) * 8, size=400, replace=False):
        spoiled = bytearray(data)
        spoiled[position // 8] ^= 1 << (position % 8)
        path.write_bytes(bytes(spoiled))
        with contextlib.suppress(InputError):  # a damaged header is refused in words
            assert not consumed.check(run).holds, f"bit {position}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", 14e7),
        ("batch", 1e8),
        ("batch", True),
        ("seed", 3.0),
        ("seed", 2**70),
        ("shuffle", 1),
        ("drop_last", None),
        ("after", 1.5),
        ("after", "1"),
        ("ramp", [[0, 4.0], [16, 8]]),
    ],
)
def test_a_header_whose_numbers_are_of_another_type_is_told(
    name: str, value: object, tmp_path: Path, surefoot: Command
) -> None:
    run = write(tmp_path / "run", (1, STEPS))
    path = run / ledger.FILE
    data = path.read_bytes()
    header = json.dumps(
        {**json.loads(data[:HEADER_BYTES]), name: value}, separators=(",", ":")
    ).encode()
    path.write_bytes(header.ljust(HEADER_BYTES - 1) + b"\n" + data[HEADER_BYTES:])
    for words in ((), ("--sample", "7")):
        answer = surefoot("ledger", run, *words)
        assert (answer.code, answer.out) == (2, "")
        assert f"ledger.bin is not a ledger: {name}" in answer.err


def test_half_a_row_at_the_end_is_told_and_is_no_fault(tmp_path: Path, surefoot: Command) -> None:
    run = write(tmp_path / "run", (1, STEPS))
    with (run / ledger.FILE).open("ab") as file:
        file.write(b"\1\0\0\0\7")
    answer = surefoot("ledger", run)
    assert answer.code == 0
    assert "an incomplete row" in answer.out
    assert surefoot("ledger", run, "--json").row["torn_bytes"] == 5


def test_rows_that_a_commit_presupposes_must_be_there(tmp_path: Path) -> None:
    run = write(tmp_path / "run", (1, 12))
    (run / "checkpoints" / "step-000000000015").mkdir(parents=True)
    (run / "checkpoints" / "step-000000000015" / "manifest.json").write_text("{}")
    (fault,) = consumed.check(run).faults
    assert fault.told == "steps 13 to 15 are missing, but there is a checkpoint of step 15"


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        Plan(samples=50, seed=3, shuffle=False, batch=8, drop_last=False),
        Plan(samples=50, seed=3, shuffle=True, batch=8, drop_last=True),
        Plan(samples=9000, seed=1, shuffle=True, batch=1000, drop_last=False),
        Plan(samples=5, seed=0, shuffle=True, batch=9, drop_last=False),
    ],
)
def test_the_search_for_a_sample_agrees_with_reading_every_step(plan: Plan, tmp_path: Path) -> None:
    run, sample = write(tmp_path / "run", (1, STEPS), plan=plan), plan.samples // 2
    feed = consumed.make_feed_of_plan(plan)
    wanted = [step for step in range(1, STEPS + 1) if sample in feed.window(step - 1).ids]
    assert [use.step for use in consumed.find_sample(run, sample)] == wanted
    assert consumed.check(run).num_samples == sum(
        len(feed.window(step - 1).ids) for step in range(1, STEPS + 1)
    )


def test_the_verb_tells_the_plan_the_attempts_and_a_sample(
    tmp_path: Path, surefoot: Command
) -> None:
    run = write(tmp_path / "run", (1, 13), (11, STEPS))
    answer = surefoot("ledger", run, "--sample", "7")
    assert answer.code == 0
    assert "50 samples, shuffled each epoch with seed 3, in batches of 8" in answer.out
    assert "steps 1 to 30: 216 samples" in answer.out
    assert "2; 3 steps were repeated" in answer.out
    assert "sample 7: step " in answer.out
    row = surefoot("ledger", run, "--sample", "7", "--json").row
    assert {
        *row,
        *row["plan"],
        *row["sample"],
        *row["sample"]["uses"][0],
        "kind",
        "told",
    } == documented("ledger")
    assert row["ok"] is True


def test_a_folder_without_a_ledger_and_a_sample_that_is_none_are_refused(
    tmp_path: Path, surefoot: Command
) -> None:
    answer = surefoot("ledger", tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert "is not a run: it holds no events.jsonl" in answer.err
    answer = surefoot("ledger", write(tmp_path / "run", (1, 3)), "--sample", "50")
    assert answer.code == 2
    assert "the data set has no sample 50" in answer.err


def test_of_a_loop_the_samples_themselves_are_told(tmp_path: Path, surefoot: Command) -> None:
    book = LoopLedger(tmp_path, LoopGuarantee(samples=6, once=True, all=True), 1)
    for step, ids in enumerate([(4, 1, 0), (2, 5, 3), (1, 3, 3)]):
        book.add(step + 1, step // 2, step % 2, ids)
        book.sync()
        answer = surefoot("ledger", tmp_path, "--sample", "3")
        assert answer.code == (step == 2)
    assert "steps 1 to 3: 3 batches, 9 samples, 2 epochs of 6" in answer.out
    assert "twice: epoch 2 consumed sample 3 2 times" in answer.out
    assert "sample 3: step 2 (epoch 1), step 3 (epoch 2)" in answer.out
    row = surefoot("ledger", tmp_path, "--sample", "3", "--json").row
    told = (
        (ROOT / "docs" / "reference" / "cli.md")
        .read_text()
        .split("Of a loop with `surefoot.attach`")[1]
        .split("\n\n")[0]
    )
    assert {*row, *row["promise"]} - {"id", "version", "uses"} <= set(
        re.findall(r"`([a-z_]+)`", told)
    )
    assert row["sample"]["uses"] == [
        {"step": 2, "pass": 1, "place": 2},
        {"step": 3, "pass": 2, "place": 1},
    ]
    book.close()
    assert surefoot("ledger", tmp_path, "--sample", "6").code == 2


def test_a_resume_with_other_data_is_a_fault_of_the_ledger(
    tmp_path: Path, surefoot: Command
) -> None:
    told = replace(
        past_runs.fault(2, 2),
        fault="other-data",
        detail="the 2 batches that are read again are not those trained on",
    )
    loop = past_runs.write(tmp_path / "loop", [past_runs.started(), past_runs.fault(1)])
    book = LoopLedger(loop, LoopGuarantee(samples=6, once=True, all=True), 1)
    for step, ids in enumerate([(4, 1, 0), (2, 5, 3)]):
        book.add(step + 1, 0, step, ids)
    book.sync()
    book.close()
    run = write(tmp_path / "run", (1, 3))
    past_runs.write(tmp_path / "log", [past_runs.started(), past_runs.fault(1)])
    for folder, log in ((loop, loop / "events.jsonl"), (run, tmp_path / "log" / "events.jsonl")):
        text = log.read_text()
        (folder / "events.jsonl").write_text(text)
        assert surefoot("ledger", folder).code == 0
        (folder / "events.jsonl").write_text(text + told.as_line())
        answer = surefoot("ledger", folder)
        assert answer.code == 1
        assert (
            "other data: attempt 2 resumed after step 2: the 2 batches that are read again"
            in " ".join(answer.out.split())
        )
        checked = surefoot("check", folder, "--json")
        (part,) = (each for each in checked.row["parts"] if each.get("part") == "ledger")
        assert checked.code == 1
        assert part["state"] == "damaged"
        assert any("other data: attempt 2 resumed" in each for each in part["problems"])
    assert surefoot("ledger", loop, "--json").row["ok"] is False


def test_a_pipe_in_place_of_the_ledger_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ledger.bin")
    with pytest.raises(RunFolderError, match="it is a pipe"):
        ledger.read_plan(tmp_path)


NOTHING = {
    "of a run without a row": lambda folder: ledger.Ledger(folder, PLAN, 1).close(),
    "of a loop without a batch": lambda folder: LoopLedger(
        folder, LoopGuarantee(samples=8, once=True, all=True), 1
    ).close(),
}


@pytest.mark.parametrize("words", [(), ("--json",), ("--sample", "3")])
@pytest.mark.parametrize("what", NOTHING)
def test_there_is_no_verdict_over_a_ledger_without_a_step(
    what: str, words: tuple[str, ...], surefoot: Command, tmp_path: Path
) -> None:
    NOTHING[what](tmp_path)
    answer = surefoot("ledger", tmp_path, *words)
    assert answer.code == 2
    assert "has no steps, so there is nothing to check" in answer.err
    assert "exactly once" not in answer.out + answer.err


def test_a_verdict_says_where_it_ends(surefoot: Command, tmp_path: Path) -> None:
    """A run that failed after step 10 and had saved after step 4."""
    run = write(tmp_path / "run", (1, 4))
    log = [past_runs.started(), past_runs.step(10, 1.0)]
    (run / "events.jsonl").write_text("".join(each.as_line() for each in log))
    answer = surefoot("ledger", run)
    assert answer.code == 0
    assert "the verdict ends at step 4: the log continues to step 10" in answer.err


def test_a_check_of_no_commit_is_no_verdict(surefoot: Command, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    answer = surefoot("checkpoint", "check", "run")
    assert answer.code == 2
    assert "has no checkpoint, so there is nothing to check" in answer.err
