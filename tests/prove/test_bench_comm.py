"""Tests of `surefoot bench comm`.

What it prints, what it refuses before any rank is started, and which buckets it chooses.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.cli.main import main
from surefoot.components.parallel.replicate import Replicas
from surefoot.contract.spec import RunSpec
from surefoot.control.plan import COLLECTIVES, Link, bus_factor
from surefoot.core.statistics import median_interval, paired_ratio
from surefoot.prove.bench import buckets
from surefoot.prove.bench.buckets import BucketSizes, BucketTuning, LayoutDuel, tune
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.prove.bench.wanted import Buckets
from surefoot.train.step.ranks import Ranks
from tests.cli.conftest import Command, surefoot
from tests.train.small import TEXT
from tests.world.ranks import run_ranks

__all__ = ["surefoot"]


# gradients of 12, 48, 16 and 64 bytes, from the last layer on: the last bias, the last weight ...
OWN = BucketSizes(64, 16)
SPEC: dict[str, Any] = {
    "task": {"use": "mine.py:Mine"},
    "train": {"batch": 8, "length": "2 steps"},
    "layout": {"bucket_size": "64 B", "first_bucket_size": "16 B"},
}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--ranks 1", "--ranks must be at least 2; got 1"),
        ("--ranks 0", "--ranks must be at least 2; got 0"),
        ("--only sum", "there is no collective 'sum'"),
        ("--only send,send", "no collective is named, or one twice"),
        ("--largest 3", "'3' is not a size in bytes"),
        ("--smallest 2MiB --largest 1MiB", "sizes from 2,097,152 to 1,048,576 bytes are none"),
        ("--largest 9000GiB", "this host has"),
        ("--calls 0", "0 calls after 5 measure nothing"),
        ("--warmup -1", "20 calls after -1 measure nothing"),
        ("--device gpu", "--device is 'gpu'"),
        ("--buckets 1MiB", "--buckets needs a SPEC, but none is given"),
        ("--seed 1", "--seed needs a SPEC, but none is given"),
        ("digits --largest 1MiB", "--largest applies only without a SPEC, but a SPEC is given"),
        ("digits --device cpu", "--device applies only without a SPEC, but a SPEC is given"),
        ("digits --buckets 1MiB,1MiB", "--buckets names no size, or one twice"),
        ("digits --rounds 0", "--rounds is 0"),
        ("digits --set layout.bucket_size=0B", "0B is nothing"),
        (
            "digits --ranks 3 --set layout.replicate=2",
            "layout.replicate is 2, but there are 3 ranks",
        ),
        ("nothing", "'nothing' is not a spec"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_rank_is_started(
    words: str, says: str, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    answer = surefoot("bench", "comm", *words.split())
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err
    assert "\nhint: " in answer.err


def test_ranks_inside_of_ranks_are_refused(
    surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
    }.items():
        monkeypatch.setenv(name, value)
    answer = surefoot("bench", "comm", "--ranks", "2")
    assert answer.code == 2
    assert "--ranks was given to a process that is already a rank" in answer.err


def typed(words: str) -> list[str]:
    """What `surefoot WORDS` prints as rank 0, by stream, and what rank 1 prints at all."""
    sys.argv = ["surefoot", *words.split()]
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
    ):
        main()
    return [out.getvalue(), err.getvalue()]


def test_two_ranks_are_started_unless_told_otherwise(
    surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(
        "surefoot.control.launch.launch",
        lambda words, ranks, *more, **named: started.append(ranks) or 0,
    )
    for words in ("", "--ranks 3", "digits", "digits --ranks 4"):
        assert surefoot("bench", "comm", *words.split()).code == 0
    assert started == [2, 3, 2, 4]


def test_the_rows_of_the_verb_are_one_object_of_one_rank(tmp_path: Path) -> None:
    words = "bench comm --only all-reduce,send --largest 16KiB --calls 6 --warmup 1 --json"
    (out, err), other = run_ranks(2, lambda rank: typed(words), tmp_path / "ranks")
    assert [err, *other] == ["", "", ""]
    row = json.loads(out)
    assert (row["ranks"], row["backend"], row["transport"], row["device"], row["calls"]) == (
        2,
        "gloo",
        "shared_memory",
        "cpu",
        6,
    )
    assert [(each["collective"], each["bytes"]) for each in row["rows"]] == [
        (name, size) for name in ("all-reduce", "send") for size in (1 << 10, 1 << 12, 1 << 14)
    ]
    for each in row["rows"]:
        assert each["low_s"] <= each["median_s"] <= each["high_s"]
        assert each["n"] == 6
        assert each["bytes_per_s"] == pytest.approx(each["bytes"] / each["median_s"])
        assert each["bus_bytes_per_s"] == pytest.approx(
            bus_factor(each["collective"], 2) * each["bytes_per_s"]
        )
    assert set(row["links"]) == {"all-reduce", "send"}
    assert row["links"]["all-reduce"]["latency_s"] >= 0


def test_the_tables_have_a_line_for_each_size_and_each_collective_and_say_how_far_it_is(
    tmp_path: Path,
) -> None:
    (out, err), other = run_ranks(
        2, lambda rank: typed("bench comm --largest 4KiB --calls 2 --warmup 0"), tmp_path / "ranks"
    )
    assert other == ["", ""]
    lines = [line.split() for line in out.splitlines() if line]
    assert [line[1:3] for line in lines if line[0] == "all-to-all"][:2] == [
        ["1", "KiB"],
        ["4", "KiB"],
    ]
    assert sum(line[0] in COLLECTIVES for line in lines) == 3 * len(COLLECTIVES)
    assert [line for line in err.splitlines() if "broadcast" in line] == [
        "bench: broadcast, 2 sizes"
    ]
    assert "bit/s" in out


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(folder: Path, job: Any) -> Any:
    first, second = run_ranks(2, job, folder / "ranks")
    assert "error" not in first, first
    assert "error" not in second, second
    return first


def test_the_gradient_is_timed_in_its_buckets_without_growing_and_equal_layouts_are_tried_once(
    task: Path,
) -> None:
    def job(rank: int) -> Any:
        seen, finish = [], Replicas.finish

        def finish_and_look(replicas: Replicas) -> None:
            finish(replicas)
            seen.append(
                max(
                    float(each.grad.abs().max())
                    for each in replicas._parameters
                    if each.grad is not None
                )
            )

        Replicas.finish = finish_and_look  # type: ignore[method-assign]
        found = tune(
            RunSpec(**SPEC), Buckets(sizes=(16, 48, 64, 1 << 20), calls=150, warmup=2, rounds=1)
        )
        return {
            "gradient": found.gradient_bytes,
            "own": list(found.own_sizes),
            "n": found.alone.count,
            "largest": max(seen[:152]),
            "moved": max(seen[152:]),
            "tried": [[each.laid.bucket_bytes, list(each.bucket_sizes)] for each in found.tried],
            "predicted": found.predicted_s,
            "latency": found.link.latency_s,
            "advised": found.advised_bytes,
        }

    row = measured(task, job)
    assert row["gradient"] == 4 * (4 * 4 + 4 + 4 * 3 + 3)
    # the last layer, then the first: in the order in which a backward pass gives them
    assert row["own"] == [60, 80]
    assert (row["n"], row["largest"]) == (150, 0.0)  # 2^150 would be inf
    assert row["moved"] > 0  # and the steps after it have true gradients
    assert [size for size, _ in row["tried"]] == [64, 16]  # 48, 64 and 1 MiB come to the same two
    assert row["tried"][1][1] == [60, 16, 64]
    assert row["predicted"] >= 2 * row["latency"]
    assert row["advised"] is None or row["advised"] <= row["gradient"]


@pytest.mark.parametrize(("quick", "chosen"), [(16, BucketSizes(16, 16)), (None, OWN)])
def test_the_buckets_that_are_quicker_are_chosen_and_none_where_nothing_is(
    quick: int | None, chosen: BucketSizes, task: Path
) -> None:
    def job(rank: int) -> Any:
        use, state = Ranks.use_buckets, {"bucket": 0}

        def use_and_note(ranks: Ranks, bucket_bytes: int, first_bytes: int) -> None:
            state["bucket"] = bucket_bytes
            use(ranks, bucket_bytes, first_bytes)

        calls, now_s = iter(range(10_000)), [0.0]

        def take(rehearsal: Rehearsal, mode: str) -> None:
            varied_s = 0.003 + (next(calls) * 7 % 5) * 0.0005
            now_s[0] += 0.001 if state["bucket"] == quick else varied_s

        # of what the steps are said to take: a busy machine adds nothing
        def read_clock() -> float:
            now_s[0] += 1e-6
            return now_s[0]

        Ranks.use_buckets = use_and_note  # type: ignore[method-assign]
        Rehearsal.take = take  # type: ignore[method-assign,assignment]
        buckets.time = SimpleNamespace(perf_counter=read_clock)  # type: ignore[attr-defined]
        found = tune(RunSpec(**SPEC), Buckets(sizes=(16, 64), calls=1, warmup=0, rounds=7))
        best = None if found.best is None else found.best.ratio.estimate
        return [found.chosen.bucket_bytes, found.chosen.first_bytes, best]

    bucket_bytes, first_bytes, best = measured(task, job)
    assert BucketSizes(bucket_bytes, first_bytes) == chosen
    if quick is not None:
        assert best is not None
        assert best < 0.7


@pytest.mark.parametrize(
    ("ratios", "chosen"),
    [
        ([0.8] * 7, BucketSizes(16, 16)),
        ([0.8, 0.9, 0.95, 1.05, 1.1, 0.9, 1.2], OWN),
        ([0.8] * 3, OWN),
        ([1.3] * 7, OWN),
    ],
)
def test_what_won_the_sweep_is_set_only_where_its_own_rounds_confirm_it(
    ratios: list[float], chosen: BucketSizes
) -> None:
    against_own = LayoutDuel(
        laid=BucketSizes(16, 16), against=OWN, ratio=paired_ratio(ratios, [1.0] * len(ratios))
    )
    found = BucketTuning(
        ranks=2,
        device="cpu",
        transport="gloo",
        gradient_bytes=140,
        own=OWN,
        own_sizes=(60, 80),
        alone=median_interval([1e-3]),
        link=Link(latency_s=1e-4, bytes_per_s=1e9, off=0.0, num_left_out=0),
        tried=(),
        best=against_own,
        first=None,
    )
    assert found.chosen == chosen
    assert found.predicted_s == pytest.approx(2e-4 + 140e-9)
    assert found.bus_bytes_per_s == found.bytes_per_s == pytest.approx(140e3)


def test_the_verb_of_a_spec_says_what_to_set(task: Path) -> None:
    buckets = "--set layout.bucket_size=64B --set layout.first_bucket_size=16B --buckets 16B"
    words = f"bench comm mine.py:Mine --set train.batch=8 {buckets} --rounds 1 --calls 2"
    (out, _), other = run_ranks(2, lambda rank: typed(words), task / "ranks")
    assert other == ["", ""]
    assert "gradients        140 B in 2 buckets of 60 B to 80 B" in out
    assert [line.split()[:5] for line in out.splitlines() if line.split()[1:2] == ["B"]] == [
        ["16", "B", "16", "B", "3"],
        ["64", "B", "16", "B", "2"],
    ]
    assert "too few rounds to decide" in out or "as in the spec, are fastest" in out


def test_what_the_task_raises_is_told_as_its_own(task: Path) -> None:
    (task / "mine.py").write_text(
        TEXT.replace(
            "    def model(self):\n",
            "    def model(self):\n        raise ValueError('out of luck')\n",
        )
    )
    first, _ = run_ranks(2, lambda rank: tune(RunSpec(**SPEC), Buckets(rounds=1)), task / "ranks")
    assert first["kind"] == "UserCodeError"
    assert "rank 0 of 2, in bench comm: ValueError: out of luck" in first["error"]
