"""Tests of climbs over planted rungs: what is measured, refused, rejected and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract import spec_file
from surefoot.core.errors import InputError, TaskError
from surefoot.prove.ladder import LadderSettings, child, find_rungs, gate, parse_rung, rungs
from surefoot.prove.ladder.climb import Climb, find_piece, order_rungs
from surefoot.prove.ladder.workbench import Workbench
from tests.prove.forked import programs_are_forked
from tests.prove.test_ladder import PLANTED, ROOT, SPEC
from tests.train.small import call

__all__ = ["programs_are_forked"]


def start_spec(folder: Path, task: str = "Honest") -> Path:
    path = folder / "start.toml"
    path.write_text(
        f'[task]\nuse = "{PLANTED}:{task}"\n[train]\nbatch = 64\nlength = "40 epochs"\n'
        "[observe]\ntensorboard = false\n"
    )
    return path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--rungs", "fusd"),
            (
                "there is no rung 'fusd'\nhint: did you mean 'fused'? there are: allocator, "
                "fused, channels last"
            ),
        ),
        (("--rung", "a: train.bacth=3"), "'bacth' is not a key in [train]"),
        (("--rung", "a: train.batch=64"), "the rung 'a' changes nothing"),
        (("--rung", "a: task.wast=3"), "wast"),
        (("--rung", "train.batch=32"), "is not name: table.key=value"),
        (("--rung", "a: train.batch=1", "--rung", "a: train.batch=2"), "two rungs are named 'a'"),
        (("--rungs", "fused", "--rung", "fused: train.batch=32"), "two rungs are named 'fused'"),
        (("--pairs", "0"), "--pairs is 0"),
        (("--out", "."), "is not an empty folder"),
        (
            ("--out", "/proc/ladder"),
            "--out /proc/ladder cannot be created: No such file or directory",
        ),
    ],
)
def test_a_ladder_that_cannot_be_is_refused_before_anything_runs(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = start_spec(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "ladder", str(spec), *words) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["start.toml"]


def climb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: Path, *words: str
) -> tuple[int, Any, str]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(spec.parent)
    code = call(monkeypatch, "ladder", str(spec), "--out", "out", "--json", *words)
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else None, said.err


@pytest.mark.slow
def test_a_start_that_does_not_run_ends_the_ladder_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, row, said = climb(
        monkeypatch, capsys, start_spec(tmp_path, "Crashes"), "--rungs", "fused"
    )
    assert (code, row) == (2, None)
    assert said.startswith("error: the start of the ladder does not run: step 3: ")
    assert "planted" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_climb_records_a_crash_a_refusal_and_a_wrong_gradient_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One pair a rung, so that nothing can be kept: what is thrown out for other reasons is."""
    words = [
        "--rung",
        f"crash: task.use={PLANTED}:Crashes",
        "--rung",
        f"wrong: task.use={PLANTED}:WrongGradient",
    ]
    words += [
        "--rung",
        "again: memory.activation_checkpointing='full'",
        "--pairs",
        "1",
        "--samples",
        "512",
    ]
    code, row, said = climb(monkeypatch, capsys, start_spec(tmp_path), *words)
    assert (code, said) == (0, "")
    crash, wrong, refused = row["rungs"]
    # by its numbers' check
    assert (crash["standing"], crash["time_ratio"], refused["standing"]) == (
        "rejected",
        None,
        "skipped",
    )
    assert refused["reason"].startswith(
        "it is refused here: no block repeats in this Sequential: which"
    )
    assert crash["reason"].startswith("it crashed: step 3: ")
    assert "planted" in crash["reason"]
    assert "Traceback" not in crash["reason"]
    assert "the gradient of 2.weight" in wrong["reason"]
    assert wrong["time_ratio"]["n"] == 1
    assert not any(rung["kept"] for rung in row["rungs"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "best.toml",
        "ladder.json",
        "ladder.md",
        "ladder.svg",
        "outcomes.jsonl",
    ]
    assert len((tmp_path / "out" / "outcomes.jsonl").read_text().splitlines()) == row["num_runs"]
    best = spec_file.read(str(tmp_path / "out" / "best.toml")).spec
    assert best.task.use == f"{PLANTED}:Honest"


@pytest.mark.slow
def test_a_rung_that_skips_work_is_thrown_out_and_one_that_its_first_run_refuses_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--rung",
        f"skips (algorithm): task.use={PLANTED}:HalfBatch",
        "--rung",
        "refused (algorithm): memory.activation_checkpointing='full'",
    ]
    _, row, _ = climb(
        monkeypatch, capsys, start_spec(tmp_path), "--pairs", "1", "--samples", "512", *words
    )
    skips, refused = row["rungs"]
    assert skips["reason"].startswith("it skips work: 0.5 times the items")
    assert (refused["standing"], "no block repeats" in refused["reason"]) == ("skipped", True)


def test_several_ranks_stand_last_and_are_held_against_the_same_pieces_on_one() -> None:
    found = {
        rung.name: rung for rung in find_rungs(rungs.make_plain_spec(SPEC), device="cpu", cores=3)
    }
    parallel, own = found["data parallel"], parse_rung("mine: layout.replicate=3")
    # 64 samples are shared evenly by 2 and not by 3
    assert parallel.on(rungs.make_plain_spec(SPEC)).layout.replicate == 2
    assert (own.purpose, own.takes_ranks) == ("wall time", True)
    chosen = [found["fused"], parallel]
    assert order_rungs(chosen, [parse_rung("other: optim.clip=0")])[-1] is parallel
    assert order_rungs([parallel, found["fused"]], [own]) == [parallel, found["fused"], own]
    assert find_piece(rungs.make_plain_spec(SPEC)) is None
    assert find_piece(parallel.on(rungs.make_plain_spec(SPEC))) == 32
    # as the ranks cut a batch that they do not share evenly
    assert find_piece(own.on(rungs.make_plain_spec(SPEC))) == 22
    assert (
        find_piece(
            parallel.on(
                rungs.make_plain_spec(SPEC.replace(train={"microbatch": 16})).replace(
                    train={"microbatch": 16}
                )
            )
        )
        == 16
    )


@pytest.mark.slow  # a dozen processes
def test_a_rung_of_several_ranks_is_checked_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--pairs",
        "1",
        "--samples",
        "256",
        "--rung",
        "ranks: layout.replicate=2",
        "--rung",
        f"wrong: layout.replicate=2, task.use={PLANTED}:WrongGradient",
    )
    code, row, _ = climb(monkeypatch, capsys, start_spec(tmp_path), *words)
    ranks, wrong = row["rungs"]
    assert code == 0
    assert (ranks["parity"]["verdict"], ranks["purpose"], ranks["wall_ratio"]["n"]) == (
        "passes",
        "wall time",
        1,
    )
    assert ranks["reason"].startswith("1 pairs are too few")
    assert ranks["time_ratio"]["estimate"] > 1.0  # CPU time is that of both
    assert "its results differ from those of the baseline" in wrong["reason"]


@pytest.mark.slow  # half a minute: the tests have ten
def test_no_run_is_spent_on_what_its_numbers_refuse_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--skip-refused",
        "--samples",
        "256",
        "--rung",
        f"wrong: task.use={PLANTED}:WrongGradient",
    )
    code, row, _ = climb(monkeypatch, capsys, start_spec(tmp_path), *words)
    (wrong,) = row["rungs"]
    assert (code, wrong["standing"], wrong["parity"]["verdict"], wrong["time_ratio"]) == (
        0,
        "rejected",
        "fails",
        None,
    )
    assert "its results differ from those of the baseline" in wrong["reason"]
    assert row["num_runs"] == 4  # the start, its gradients twice, and those of the rung


@pytest.mark.usefixtures("programs_are_forked")
def test_a_start_that_cannot_be_blurred_has_no_floor_and_the_ladder_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    start, said = (
        rungs.make_plain_spec(spec_file.read(str(start_spec(tmp_path, "Strict"))).spec),
        list[str](),
    )
    climb = Climb(start, Workbench(start, LadderSettings(), tmp_path / "out"), said.append)
    assert climb._floor(start, gate.UNITS["bf16"]) == {}
    assert "planted" in said[0]


@pytest.mark.slow  # a third of a minute
def test_a_rung_over_one_that_rounds_is_held_to_its_format_and_over_another_algorithm_to_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    start = rungs.make_plain_spec(spec_file.read(str(start_spec(tmp_path, "Honest"))).spec)
    climb = Climb(start, Workbench(start, LadderSettings(), tmp_path / "out"), lambda text: None)
    bf16, smaller = (
        parse_rung("bf16 (rounding): precision.compute='bf16'"),
        parse_rung("half (algorithm): train.batch=16"),
    )
    climb._keep(bf16, bf16.on(start))
    for text, verdict in (
        ("parts: train.microbatch=8", "passes"),
        (f"wrong: task.use={PLANTED}:WrongGradient", "fails"),
    ):
        rung = parse_rung(text)
        found = climb._check(rung, rung.on(climb.below))
        assert found.verdict == verdict, found.words
    climb._keep(smaller, smaller.on(start))
    assert (climb._ground, climb._describe_baseline, climb._tensors) == (
        climb.below,
        "the rung half",
        {},
    )


@pytest.mark.slow  # half a minute: the tests have ten
def test_a_run_shorter_than_the_warm_up_is_measured_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stated = spec_file.read(str(start_spec(tmp_path))).spec
    for length, fits in (("30 steps", True), ("15 steps", False)):
        start = rungs.make_plain_spec(stated.replace(train={"length": length}))
        bench = Workbench(start, LadderSettings(), tmp_path / length)
        if not fits:
            with pytest.raises(TaskError, match="over before its last measured step"):
                bench.begin()
            continue
        bench.begin()
        bench.extend_warmup_for_compilation()
        assert 8 <= bench.warmup_steps <= 22
        assert bench.num_samples == 64 * (30 - bench.warmup_steps)
        trial = bench.measure_all("short", {"start": start, "again": start}, 1)
        assert bench.ratio(trial, "again", "start", "time") is not None


@pytest.mark.slow
def test_of_planted_rungs_the_honest_gain_alone_is_kept_and_its_spec_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "idle: task.spare=1",
        "slower: task.waste=3",
        f"wrong: task.use={PLANTED}:WrongGradient",
        f"crash: task.use={PLANTED}:Crashes",
        f"skips (algorithm): task.use={PLANTED}:HalfBatch",
        f"hidden: task.use={PLANTED}:HalfBatch, task.admits=false",
        "honest: task.waste=0",
    )
    flags = [word for text in words for word in ("--rung", text)]
    code, row, _ = climb(monkeypatch, capsys, start_spec(tmp_path), "--samples", "6400", *flags)
    assert code == 0
    found = {rung["name"]: rung for rung in row["rungs"]}
    assert [name for name, rung in found.items() if rung["kept"]] == ["honest"]
    assert found["slower"]["reason"].startswith("it is slower")
    assert found["idle"]["reason"].startswith("no gain is shown")
    assert found["wrong"]["time_ratio"]["high"] < 1  # fast, and thrown out
    assert found["hidden"]["parity"]["verdict"] == "fails"
    assert found["honest"]["score"]["difference"]["estimate"] == 0
    settings = LadderSettings(pairs=7, samples=6400)
    assert settings.can_decide
    best = spec_file.read(str(tmp_path / "out" / "best.toml")).spec
    assert best.task.parameters["waste"] == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("channels last", "no tensor of four or five dimensions"),
        ("attention", "step 1 called no fused kernel"),
    ],
)
def test_a_rung_that_this_model_has_no_use_for_is_refused_with_the_reason(
    name: str, why: str, tmp_path: Path
) -> None:
    """By the process that checks it, so that it is skipped and not rejected."""
    start = rungs.make_plain_spec(spec_file.read(str(start_spec(tmp_path))).spec)
    (rung,) = (each for each in find_rungs(start, device="cpu", cores=1) if each.name == name)
    (tmp_path / "rung.toml").write_text(spec_file.write(rung.on(start)))
    words = [
        "tensors",
        str(tmp_path / "rung.toml"),
        "--report",
        str(tmp_path / "report"),
        "--run",
        str(tmp_path / "run"),
        "--steps",
        "2",
    ]
    with pytest.raises(InputError, match=f"it is refused here: .*{why}"):
        child.main([*words, "--seed", "0"])
