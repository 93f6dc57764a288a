"""A run's peak is judged by the memory that there is.

Each remedy comes with its effect and with who says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract.events import Event
from surefoot.control.diagnose import MeasuredMemory, MemoryUse, Shape, find_memory_use
from surefoot.core.units import format_bytes
from tests.cli.conftest import Command, surefoot
from tests.cli.past_runs import SPEC, ended, started, step, write

__all__ = ["surefoot"]

MIB = 1 << 20
PEAK = 500 * MIB  # of the records below
SHAPE = Shape(activation_bytes=80.0 * MIB, parameter_bytes=16.0)
BATCH_64 = {**SPEC, "train": {"batch": 64}}


def run(spec: Any = BATCH_64, **changes: Any) -> list[Event]:
    return [started(spec=spec, precision={"compute": "fp32"}, **changes), step(10, 1.0), ended(10)]


def use(limit_mib: float, **known: Any) -> MemoryUse:
    found = find_memory_use(run(), limit_bytes=limit_mib * MIB, **known)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("limit_mib", "verdict"),
    [
        (550, "tight"),
        (555, "tight"),
        (556, "fits"),
        (1000, "fits"),
        (1001, "roomy"),
        (9000, "roomy"),
    ],
)
def test_a_peak_above_nine_tenths_is_tight_and_one_below_the_half_leaves_room(
    limit_mib: int, verdict: str
) -> None:
    found = use(limit_mib)
    assert (found.peak_bytes, found.verdict, bool(found.remedies)) == (
        PEAK,
        verdict,
        verdict != "fits",
    )


def test_the_memory_is_that_of_the_host_or_of_the_gpu_and_the_newest_attempt_is_judged() -> None:
    on_host = find_memory_use(run())
    assert on_host is not None
    assert (on_host.peak_bytes, on_host.limit_bytes, on_host.place, on_host.verdict) == (
        PEAK,
        2**34,
        "this host",
        "roomy",
    )
    memory = {"peak_bytes": 75, "total_bytes": 80}
    on_gpu = find_memory_use(
        [
            *run(),
            started(2),
            replace(step(20, 1.0, 2), device_memory=memory),
            ended(20, generation=2),
        ]
    )
    assert on_gpu is not None
    assert (on_gpu.peak_bytes, on_gpu.limit_bytes, on_gpu.place, on_gpu.verdict) == (
        75,
        80,
        "the GPU",
        "tight",
    )
    again = find_memory_use([*run(), started(2), step(20, 1.0, 2)])
    assert again is not None
    assert again.peak_bytes == 400 * MIB
    for unknown in (
        [],
        [started(machine={})],
        run(machine={"memory_bytes": "much"}),
        run()[1:],
        run()[:1],
    ):
        assert find_memory_use(unknown) is None


def test_what_is_tight_is_told_three_remedies_with_what_was_predicted_of_them() -> None:
    saved = {each.change: each.saved_bytes for each in use(520, shape=SHAPE).remedies}
    assert saved == {
        "memory.activation_checkpointing=full": 80 * MIB,
        "train.microbatch=32": 40 * MIB,
        "precision.compute=bf16": 40 * MIB,
    }
    unknown = use(520).remedies
    assert [each.change for each in unknown] == list(saved)
    assert all(
        each.saved_bytes is None and f"--set {each.change} predicts it" in each.effect
        for each in unknown
    )


WHOLE_BATCHES = {
    "describe": "27 batches of DataLoader",
    "digest": "d" * 64,
    "guarantee": "replayed",
}


@pytest.mark.parametrize(
    ("limit_mib", "words"),
    [
        (520, "half the batch_size of the task's DataLoader"),
        (1200, "twice the batch_size of the task's DataLoader"),
    ],
)
def test_a_task_that_brings_whole_batches_is_told_of_its_loader_and_of_no_key_that_it_refuses(
    limit_mib: float, words: str
) -> None:
    for known in ({}, {"shape": SHAPE}):
        found = find_memory_use(
            run(data=WHOLE_BATCHES),
            limit_bytes=limit_mib * MIB,
            spec_file="'my run/spec.toml'",
            **known,
        )
        assert found is not None
        told = " ".join(f"{each.change} {each.effect}" for each in found.remedies)
        assert words in told
        assert "train.batch" not in told
        assert "train.microbatch" not in told
        assert "SPEC" not in told
        assert known or "surefoot memory 'my run/spec.toml'" in told


@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ({}, "the run has no spec to predict it from"),
        ({"task": {}, "train": {"batch": 64}}, "the task was built in a script"),
    ],
    ids=["a loop of one's own", "a task of a script"],
)
def test_a_run_that_no_command_can_predict_is_told_of_none(spec: Any, known: str) -> None:
    found = find_memory_use(run(spec), limit_bytes=520 * MIB)
    assert found is not None
    assert [
        known in each.effect and "surefoot memory" not in each.effect for each in found.remedies
    ] == [True] * 3


def test_what_a_run_does_already_is_no_remedy() -> None:
    spec = {
        **SPEC,
        "train": {"batch": 64, "microbatch": 1},
        "memory": {"activation_checkpointing": "full"},
    }
    found = find_memory_use(
        [started(spec=spec, precision={"compute": "bf16"}), step(10, 1.0)], limit_bytes=400 * MIB
    )
    assert found is not None
    assert (found.verdict, found.remedies) == ("tight", ())


def test_what_was_measured_comes_first_and_takes_the_place_of_what_is_predicted() -> None:
    rung = MeasuredMemory(
        change="memory.activation_checkpointing=full", source="0.7 (0.6 to 0.8)", ratio=0.7
    )
    splits = [
        MeasuredMemory(
            change=f"train.microbatch={part}",
            source="b.csv",
            peak_bytes=size * MIB,
            split=(64, part),
        )
        for part, size in ((64, 480), (32, 460), (16, 490))
    ]
    # other numbers
    splits.append(
        MeasuredMemory(
            change="train.batch=16", source="b.csv", peak_bytes=100.0 * MIB, split=(16, 16)
        )
    )
    found = use(520, shape=SHAPE, measured=[*splits, rung]).remedies
    assert [each.change for each in found] == [
        "memory.activation_checkpointing=full",
        "train.microbatch=32",
        "precision.compute=bf16",
    ]
    assert [each.saved_bytes for each in found] == pytest.approx([0.3 * PEAK, 20 * MIB, 40 * MIB])
    assert [each.known.partition(":")[0] for each in found[:2]] == ["as measured"] * 2
    assert found[1].effect == "20 MiB less, as measured: b.csv"


def changes(
    spec: Any, limit_mib: float = 520, measured: Sequence[MeasuredMemory] = ()
) -> list[str]:
    found = find_memory_use(run(spec), limit_bytes=limit_mib * MIB, shape=SHAPE, measured=measured)
    assert found is not None
    return [each.change for each in found.remedies]


def test_a_remedy_is_one_that_the_spec_takes_with_numbers_of_its_own() -> None:
    # of the default batch
    assert changes(SPEC) == [
        "memory.activation_checkpointing=full",
        "train.microbatch=64",
        "precision.compute=bf16",
    ]
    assert changes({**SPEC, "train": {"batch": 100, "microbatch": 25}})[1] == "train.microbatch=10"
    assert changes({**SPEC, "compile": {"what": "step"}}) == ["precision.compute=bf16"]
    assert changes({**SPEC, "train": {"batch": 64, "ramp": [[0, 32], [640, 64]]}}, 2000) == [
        "a larger model"
    ]


def test_a_loop_of_ones_own_is_told_what_helps_without_keys_that_it_does_not_have() -> None:
    assert changes({}) == [
        "blocks computed again in the backward pass",
        "half the samples at a time",
        "bf16",
    ]
    assert changes({}, 2000) == ["twice the batch", "a larger model"]


def test_what_was_measured_to_help_nothing_is_not_predicted_to_help() -> None:
    same = [
        MeasuredMemory(
            change=f"train.batch=64 train.microbatch={part}",
            source="b.csv",
            peak_bytes=PEAK,
            split=(64, part),
        )
        for part in (64, 16)
    ]
    no_less = MeasuredMemory(
        change="memory.activation_checkpointing=full", source="1.1 (1 to 1.2)", ratio=1.1
    )
    assert changes(BATCH_64, measured=[*same, no_less]) == ["precision.compute=bf16"]
    too_much = MeasuredMemory(
        change="train.batch=128 train.microbatch=64",
        source="b.csv",
        peak_bytes=1100.0 * MIB,
        split=(128, 64),
    )
    assert changes(BATCH_64, 1200, [too_much]) == ["a larger model"]


def test_what_is_above_the_limit_is_told_by_how_much() -> None:
    assert use(400).words.endswith("125 % of 400 MiB (the limit): 100 MiB too much")


def test_room_is_for_the_largest_batch_that_was_measured_and_fits_or_for_twice_the_batch() -> None:
    measured = [
        MeasuredMemory(
            change=f"train.batch={batch}",
            source="b.csv",
            peak_bytes=size * MIB,
            split=(batch, batch),
        )
        for batch, size in ((64, 500), (128, 700), (256, 1000), (512, 1900))
    ]
    batch, model = use(1200, shape=SHAPE, measured=measured).remedies
    assert (batch.change, batch.saved_bytes) == ("train.batch=256", -500 * MIB)
    assert "16 B a parameter" in model.effect
    assert use(1200, shape=SHAPE).remedies[0].effect.startswith("80 MiB more, at most")
    assert [each.change for each in use(1200).remedies] == ["train.batch=128", "a larger model"]


def test_why_reads_what_lies_beside_the_run_and_what_it_is_given(
    tmp_path: Path, surefoot: Command
) -> None:
    folder = write(tmp_path / "run", run())
    terms = {
        "parameters": 8,
        "gradients": 8,
        "optimizer": 16,
        "activations of 0": 30 * MIB,
        "activations": 10 * MIB,
        "batches": 7,
    }
    (folder / "shape.json").write_text(
        json.dumps({"version": 1, "terms": terms, "num_parameters": 2})
    )
    (tmp_path / "b.csv").write_text(
        f"batch,microbatch,peak_bytes\n64,64,{PEAK}\n64,16,{PEAK - 30 * MIB}\n128,64,\n"
    )
    ladder = {
        "version": 1,
        "rungs": [
            {
                "name": name,
                "standing": "rejected",
                "change": {key: value},
                "memory_ratio": {
                    "estimate": ratio,
                    "low": ratio - 0.1,
                    "high": ratio + 0.1,
                    "n": 7,
                },
            }
            for name, key, value, ratio in (
                ("recompute", "memory.activation_checkpointing", "full", 0.5),
                ("bf16", "precision.compute", "bf16", 0.95),
            )
        ],
    }
    (tmp_path / "ladder.json").write_text(json.dumps(ladder))
    answer = surefoot("why", "run", "--limit", "520 MiB", "--measured", "b.csv", "--measured", ".")
    told = [" ".join(line.split()) for line in answer.out.partition("Memory\n")[2].splitlines()]
    assert told == [
        f"peak 500 MiB, 96.15 % of {format_bytes(520 * MIB)} (the limit): little is left",
        (
            "memory.activation_checkpointing=full 250 MiB less, as measured: 0.5 (0.4 to 0.6), "
            "rejected by ."
        ),
        "train.batch=64 train.microbatch=16 30 MiB less, as measured: b.csv",
        "precision.compute=bf16 20 MiB less, at most, as predicted of its activations",
    ]
    row = surefoot("why", "run", "--json").row["memory"]
    assert (row["verdict"], row["share"], len(row["remedies"])) == ("roomy", PEAK / 2**34, 2)
    for words in (
        ("--limit", "12"),
        ("--limit", "0 B"),
        ("--measured", "nothing"),
        ("--measured", "run"),
        ("--measured", "run/shape.json"),
    ):
        refused = surefoot("why", "run", *words)
        assert (refused.code, refused.out) == (2, "")
        assert "error: " in refused.err


@pytest.mark.parametrize(
    "junk", [None, "x", -1, 0, True, 1e308, 10**400, "nan", [], {}, {"a": {"b": []}}, [[]]]
)
def test_values_of_any_type_break_neither_the_judgement_nor_the_page(
    junk: Any, tmp_path: Path, surefoot: Command
) -> None:
    spec = {"train": {"batch": junk, "microbatch": junk}, "memory": junk}
    folder = write(
        tmp_path / "run", [started(spec=spec, precision={"compute": junk}), step(10, 1.0)]
    )
    for shape in (
        {"version": 1, "terms": junk, "num_parameters": junk},
        {"version": 1, "terms": {"activations": junk}},
        junk,
    ):
        (folder / "shape.json").write_text(json.dumps(shape))
        assert surefoot("why", "run", "--limit", "400 MiB").code == 0
    assert find_memory_use(run(machine={"memory_bytes": junk})) is None
    (tmp_path / "b.csv").write_text(f"batch,microbatch,peak_bytes\n64,64,{junk}\n")
    assert surefoot("why", "run", "--measured", "b.csv").code in (0, 2)
    assert surefoot("report", "run").code == 0


def test_a_run_that_ran_out_of_memory_has_no_room_for_a_larger_batch() -> None:
    *records, end = run()
    found = find_memory_use([*records, replace(end, exit_code=7)], limit_bytes=9000.0 * MIB)
    assert found is not None
    assert (found.verdict, "larger" in found.words) == ("exhausted", False)
    assert all("larger" not in each.change for each in found.remedies)
