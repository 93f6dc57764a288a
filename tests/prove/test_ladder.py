"""Tests of the ladder: its rungs, its decisions out of paired outcomes, what it writes."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.contract import spec_file
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError
from surefoot.core.statistics import looks, sequential_ratio
from surefoot.prove.ladder import (
    PLAIN,
    Rung,
    as_markdown,
    as_row,
    as_svg,
    as_toml,
    find_rungs,
    parse_rung,
    rungs,
)
from surefoot.prove.ladder.climb import MEASURES, Ladder, RungResult, find_skipped_work, is_settled
from surefoot.prove.ladder.gate import GateVerdict
from surefoot.trial import Outcome, Trial

ROOT = Path(__file__).resolve().parents[2]
PLANTED = Path(__file__).with_name("planted.py")
SPEC = RunSpec(task={"use": "digits"}, train={"batch": 64})  # type: ignore[arg-type]

# ---- rungs


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("cores", [1, 2, 16])
def test_each_rung_that_is_here_changes_the_plain_start_and_can_be_written(
    device: str, cores: int
) -> None:
    start = rungs.make_plain_spec(SPEC)
    found = find_rungs(start, device=device, cores=cores)
    assert len({rung.name for rung in found}) == len(found)
    for rung in found:
        assert rung.is_here or rung.needs
        if rung.name == "update in backward":
            with pytest.raises(
                InputError, match=r"cannot be combined with this spec: optim\.clip = 1 "
            ):
                rung.on(start)
            rung.on(start.replace(optim={"clip": 0.0}, stability={"nonfinite": "stop"}))
        elif rung.is_here:
            assert spec_file.write(rung.on(start)) != spec_file.write(start)
    # a graph takes fused updates alone
    assert {rung.name: rung for rung in found}["whole step"].on(start).optim.fused
    large = next(rung for rung in found if rung.name == "large batch").on(start)
    assert (large.train.batch, large.optim.reference_batch) == (
        4 * start.train.batch,
        start.train.batch,
    )
    assert {rung.name: rung.is_here for rung in found}["kernels"] is (device == "cuda")
    assert {rung.name: rung.is_here for rung in found}["threads"] is (device == "cpu" and cores > 1)
    assert (
        [rung.name for rung in found if rung.takes_ranks] == [found[-1].name] == ["data parallel"]
    )
    assert found[-1].is_here is (device == "cpu" and cores > 1)


def test_the_parts_of_a_batch_that_grows_divide_all_its_sizes() -> None:
    start = rungs.make_plain_spec(
        SPEC.replace(train={"batch": 24, "ramp": ((0, 8), (100, 12), (200, 24))})
    )
    found = {rung.name: rung for rung in find_rungs(start, device="cpu", cores=1)}
    assert found["microbatch"].on(start).train.microbatch == 1
    assert not found["large batch"].is_here


def test_the_start_is_plain_whatever_the_spec_switched_on() -> None:
    start = rungs.make_plain_spec(
        SPEC.replace(precision={"compute": "bf16"}, train={"microbatch": 8, "threads": 2})
    )
    assert start == rungs.make_plain_spec(SPEC)
    memory = {"activation_checkpointing": "full", "blocks": ["a.*"], "update_in_backward": True}
    compiled = {"what": "blocks", "blocks": ["a.*"], "mode": "max-autotune"}
    tables = {
        "optim": {"clip": 0.0, "state": "8bit"},
        "stability": {"nonfinite": "stop"},
        "compile": compiled,
    }
    made = rungs.make_plain_spec(SPEC.replace(memory=memory, **tables))
    assert made.memory == start.memory
    assert (made.compile, made.optim.state) == (start.compile, "fp32")
    noisy = SPEC.replace(observe={"noise": True}, train={"microbatch": 8})
    assert not rungs.make_plain_spec(noisy).observe.noise
    (again,) = (
        rung
        for rung in rungs.find_rungs(start, device="cpu", cores=1, blocks=("a.*",))
        if rung.name == "recompute"
    )
    assert again.on(start).memory.blocks == ("a.*",)
    assert (
        start.optim.fused,
        start.precision.compute,
        start.train.microbatch,
        start.train.threads,
    ) == (False, "fp32", None, 1)
    assert all(rungs.change(start, {key: value}) == start for key, value in PLAIN.items())


def test_a_rung_of_the_command_line_has_a_name_a_kind_and_changes() -> None:
    one = parse_rung("half the batch (algorithm): train.batch=32, optim.lr=0.01")
    assert (one.name, one.kind, one.change) == (
        "half the batch",
        "algorithm",
        {"train.batch": 32, "optim.lr": 0.01},
    )
    listed = parse_rung('other: optim.no_decay=["a.*", "b"], precision.compute=bf16')
    assert listed.change == {"optim.no_decay": ["a.*", "b"], "precision.compute": "bf16"}
    assert listed.kind == "nothing"  # what is not stated is the strictest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a:",
        "a: b",
        "a: b=1",
        "a (loose): train.batch=1",
        ": train.batch=1",
        "a/b: train.batch=1",
    ],
)
def test_what_is_no_rung_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_rung(text)
    assert repr(text) in raised.value.message
    assert "train.batch=32" in str(raised.value.hint)


def test_a_rung_that_changes_nothing_and_one_with_an_unknown_key_are_told() -> None:
    start = rungs.make_plain_spec(SPEC)
    with pytest.raises(InputError, match=r"'idle' changes nothing: train\.batch=64"):
        parse_rung("idle: train.batch=64").on(start)
    with pytest.raises(SpecError, match=r"'bacth' is not a key in \[train\]"):
        parse_rung("typo: train.bacth=32").on(start)
    with pytest.raises(InputError, match="two rungs are named 'a'"):
        rungs.check_names([parse_rung("a: train.batch=1"), parse_rung("a: train.batch=2")])
    with pytest.raises(InputError, match="no rung can be named 'start'"):
        rungs.check_names([parse_rung("start: train.batch=1")])


# ---- decisions


def test_a_rung_is_settled_when_its_interval_is_clear_or_can_no_longer_be() -> None:
    gain, loss = 0.9, 1.1
    assert not is_settled([gain] * 6, 15)
    assert is_settled([gain] * 7, 15)
    assert is_settled([loss] * 7, 15)
    assert not is_settled([gain] * 5 + [loss] * 2, 15)
    assert is_settled([gain] * 4 + [loss] * 3, 15)  # of 15 pairs at most two may go against it
    assert is_settled([gain] * 5 + [loss] * 2, 7)
    assert is_settled([loss, *[gain] * 10], 15)


def test_of_rungs_that_change_nothing_at_most_1_in_20_is_called_a_gain_and_most_stop_early() -> (
    None
):
    """Two thousand ladders' worth of equal arms on a machine whose speed drifts.

    Each is stopped as the ladder stops it.
    """
    draw, gains, pairs, most = random.Random(3), 0, 0, 15
    for _ in range(2000):
        drift, mine, theirs = 1.0, list[float](), list[float]()
        while len(mine) < most and not is_settled(
            [a / b for a, b in zip(mine, theirs, strict=True)], most
        ):
            drift *= draw.lognormvariate(0, 0.03)
            mine.append(drift * (1 + draw.expovariate(30)))
            theirs.append(drift * (1 + draw.expovariate(30)))
        gains += sequential_ratio(mine, theirs, most=most).verdict == "lower"
        pairs += len(mine)
    assert gains / 2000 <= 0.02
    assert pairs / 2000 < 8.5
    assert looks(most)


def trial_of(below: Sequence[dict[str, float]], mine: Sequence[dict[str, float]]) -> Trial:
    outcomes = [
        Outcome(arm=arm, round=number, ended="done", measures=measures)
        for arm, rows in (("below", below), ("rung", mine))
        for number, measures in enumerate(rows)
    ]
    return Trial(
        title="t", arms=("below", "rung", "start"), rounds=7, seed=0, outcomes=tuple(outcomes)
    )


def test_work_that_is_left_out_shows_in_the_run_s_own_counts() -> None:
    whole = {"items_per_sample": 256.0, "applied_share": 1.0}
    assert find_skipped_work(trial_of([whole] * 3, [whole] * 3), "rung") is None
    halved = find_skipped_work(
        trial_of([whole] * 3, [{**whole, "items_per_sample": 128.0}] * 3), "rung"
    )
    assert (
        halved == "it skips work: 0.5 times the items that its losses count, for the same samples"
    )
    lazy = find_skipped_work(trial_of([whole] * 3, [{**whole, "applied_share": 0.75}] * 3), "rung")
    assert lazy == "it skips work: 0.75 times the updates, for the same samples"


# ---- what is written


def a_ladder(name: str = "fused") -> Ladder:
    start = rungs.make_plain_spec(SPEC)
    ratio = sequential_ratio([0.9, 0.91, 0.92, 0.93, 0.9, 0.91, 0.94], [1.0] * 7, most=15)
    passed = GateVerdict(verdict="passes", words="all of it", worst=0.1)
    kept = RungResult(
        rung=Rung(name=name, kind="nothing", change={"optim.fused": True}, expected={"time": 0.95}),
        standing="kept",
        reason="it gains",
        parity=passed,
        step=dict.fromkeys(MEASURES, ratio),
        total=dict.fromkeys(MEASURES, ratio),
    )
    wrong = replace(
        kept,
        rung=replace(kept.rung, name="wrong"),
        standing="rejected",
        reason="its numbers | differ",
        parity=GateVerdict(verdict="fails", words="a gradient", worst=float("inf")),
    )
    gone = replace(
        wrong,
        rung=replace(kept.rung, name="gone"),
        standing="skipped",
        step=dict.fromkeys(MEASURES),
        total=dict.fromkeys(MEASURES),
    )
    return Ladder(
        spec="digits",
        start=start,
        best=kept.rung.on(start),
        device="cpu",
        conditions={"cores": "2", "time": "CPU seconds"},
        num_samples=640,
        results=(kept, wrong, gone),
        left_out={name: ratio},
        num_runs=40,
    )


def test_a_ladder_as_json_holds_every_rung_with_its_ratios_and_null_for_what_was_not_measured() -> (
    None
):
    row = json.loads(json.dumps(as_row(a_ladder()), allow_nan=False))
    kept, wrong, gone = row["rungs"]
    assert kept["time_ratio"] == {"estimate": 0.91, "low": 0.9, "high": 0.94, "n": 7}
    assert kept["throughput_ratio"]["low"] == pytest.approx(1 / 0.94)
    assert (wrong["kept"], wrong["parity"]["verdict"], wrong["parity"]["worst"]) == (
        False,
        "fails",
        None,
    )
    assert (gone["standing"], gone["time_ratio"], gone["total_memory_ratio"]) == (
        "skipped",
        None,
        None,
    )
    assert row["baseline"]["plain"] == PLAIN
    assert row["leave_one_out"][0]["name"] == "fused"
    assert row["best"] == "best.toml"


def test_document_and_picture_show_kept_and_rejected_rungs_and_run_nothing_of_a_name() -> None:
    text = as_markdown(a_ladder())
    assert "| fused | kept | 0.91x (0.9 to 0.94) |" in text
    assert "| wrong | REJECTED |" in text
    assert "its numbers \\| differ" in text
    picture = as_svg(a_ladder("<script>alert(1)</script>"))
    root = ET.fromstring(picture)
    assert not [each for each in root.iter() if each.tag.endswith("script")]
    # the skipped one has no mark
    assert len([each for each in root.iter() if each.tag.endswith("circle")]) == 2


def test_the_best_is_a_spec_that_reads_with_its_evidence_above_it(tmp_path: Path) -> None:
    ladder = a_ladder()
    hostile = replace(ladder.results[1], reason="two\nlines, \x1b[31mred\x00")
    path = tmp_path / "best.toml"
    path.write_text(as_toml(replace(ladder, results=(ladder.results[0], hostile))))
    assert spec_file.read(str(path)).spec == ladder.best
    assert "# fused: optim.fused=True: time 0.91x (0.9 to 0.94)" in path.read_text()
    assert "# not kept: wrong: two lines, ?[31mred?" in path.read_text()
    assert "| two lines, ?[31mred? |\n" in as_markdown(replace(ladder, results=(hostile,)))


def test_a_change_that_json_has_no_value_for_is_told_as_text() -> None:
    kept = a_ladder().results[0]
    odd = parse_rung("odd: task.day=1979-05-27, task.most=inf, task.days=[1979-05-27, 2.5]")
    row = as_row(replace(a_ladder(), results=(replace(kept, rung=odd),)))["rungs"][0]
    assert json.loads(json.dumps(row, allow_nan=False))["change"] == {
        "task.day": "1979-05-27",
        "task.most": "inf",
        "task.days": ["1979-05-27", 2.5],
    }
