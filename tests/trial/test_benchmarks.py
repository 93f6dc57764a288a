"""Tests of the cost benchmarks' tables.

Bars out of raw outcomes, and documents that say what the raw data beside them says.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import measured
from benchmarks.by_hand import arm as by_hand_arm
from benchmarks.by_hand import hand as by_hand
from benchmarks.by_hand import run as by_hand_run
from benchmarks.by_hand.components import COMPONENTS, MODELS
from benchmarks.checkpoint.arms import WAYS, measure_way
from benchmarks.compile import lengths
from benchmarks.data import arms as data_arms
from benchmarks.data import run as data_run
from benchmarks.distributed import compress as compress_run
from benchmarks.distributed import run as distributed_run
from benchmarks.distributed import shard as shard_run
from benchmarks.input import run as input_run
from benchmarks.ladder import tasks as ladder_tasks
from benchmarks.large_batch import run as large_batch_run
from benchmarks.loaders import run as loaders_run
from benchmarks.memory import run as memory_run
from benchmarks.memory_components import arms as components_arms
from benchmarks.memory_components import run as components_run
from benchmarks.precision import run as precision_run
from benchmarks.roofline import run as roofline_run
from benchmarks.startup import run as startup_run
from benchmarks.step_cost import run as step_cost_run
from benchmarks.step_cost import tables
from benchmarks.step_cost.watch import Watch
from benchmarks.tokens import run as tokens_run
from surefoot.trial import Outcome, Trial, read_report, read_trial

RENDER: dict[Path, tuple[Callable[[Trial], str], ...]] = {
    step_cost_run.RESULTS: (tables.render_bars, tables.render_arms, measured.render_conditions),
    startup_run.RESULTS: (startup_run.render, measured.render_conditions),
    memory_run.RESULTS: (memory_run.render, measured.render_conditions),
    input_run.RESULTS: (input_run.render, measured.render_conditions),
    tokens_run.RESULTS: (tokens_run.render, measured.render_conditions),
    large_batch_run.RESULTS: (large_batch_run.render_step, measured.render_conditions),
    large_batch_run.SCORES: (large_batch_run.render_score, measured.render_conditions),
    roofline_run.RESULTS: (
        roofline_run.render_spreads,
        roofline_run.render_shares,
        measured.render_conditions,
    ),
    roofline_run.REPEATS: (roofline_run.render_spreads, measured.render_conditions),
    precision_run.RESULTS: (precision_run.render_cost, measured.render_conditions),
    precision_run.SCORES: (precision_run.render_score, measured.render_conditions),
    lengths.RESULTS: (lengths.render, measured.render_conditions),
    distributed_run.RESULTS: (distributed_run.render, measured.render_conditions),
    distributed_run.PAIR: (distributed_run.render_pair, measured.render_conditions),
    shard_run.RESULTS: (shard_run.render, measured.render_conditions),
    shard_run.BYTES: (shard_run.render_bytes, measured.render_conditions),
    shard_run.TRADE: (shard_run.render_trade, measured.render_conditions),
    compress_run.COST: (compress_run.render_cost, measured.render_conditions),
    compress_run.SCORE: (compress_run.render_score, measured.render_conditions),
    loaders_run.PHOTOS: (loaders_run.render_photos, measured.render_conditions),
    loaders_run.CEILING: (loaders_run.render_photos, measured.render_conditions),
    loaders_run.GOING_ON: (loaders_run.render_going_on, measured.render_conditions),
    loaders_run.WAITING: (loaders_run.render_waiting, measured.render_conditions),
    data_run.RESULTS: (data_run.render, measured.render_conditions),
    by_hand_run.RESULTS: (by_hand_run.render, measured.render_conditions),
    by_hand_run.AGAIN: (by_hand_run.render, measured.render_conditions),
    components_run.RESULTS: (components_run.render, measured.render_conditions),
    components_run.AGAIN: (components_run.render_again, measured.render_conditions),
    components_run.REFERENCE: (components_run.render_reference, measured.render_conditions),
    components_run.SCORES: (components_run.render_score, measured.render_conditions),
}


def trial_of(seconds: dict[str, float], measure: str = "mlp/cpu_s_per_step") -> Trial:
    """Eight rounds in which every arm takes its seconds, the machine being slower in some."""
    outcomes = [
        Outcome(arm=arm, round=number, ended="done", measures={measure: value * (1 + 0.1 * number)})
        for number in range(8)
        for arm, value in seconds.items()
    ]
    return Trial(title="t", arms=tuple(seconds), rounds=8, seed=0, outcomes=tuple(outcomes))


def test_the_bars_of_a_step_are_judged_on_paired_ratios_and_differences() -> None:
    text = tables.render_bars(
        trial_of(
            {
                "idiomatic": 400e-6,
                "fused": 300e-6,
                "bare": 200e-6,
                "surefoot": 216e-6,
                "fabric": 300e-6,
            }
        )
    )
    assert "| mlp | surefoot against idiomatic | 0.54 (0.54 to 0.54) | <= 0.55 | holds |" in text
    assert "| mlp | surefoot against fused | 0.72 (0.72 to 0.72) | <= 0.75 | holds |" in text
    assert "| mlp | surefoot against bare | 21.6 us (16 us to 27.2 us) | <= 40 us | holds |" in text
    assert (
        "| mlp | what surefoot adds, against what fabric adds "
        "| 0.16 (0.16 to 0.16) | <= 0.25 | holds |" in text
    )
    assert "| gpt | surefoot against bare | n/a | <= 1.02 | not measured |" in text


def test_a_step_that_costs_too_much_fails_its_bars() -> None:
    text = tables.render_bars(
        trial_of({"idiomatic": 400e-6, "bare": 200e-6, "surefoot": 260e-6, "fabric": 300e-6})
    )
    assert text.count("| fails |") == 3


def test_composer_is_held_against_the_floor_of_its_own_torch() -> None:
    arms = {"bare": 200e-6, "surefoot": 210e-6, "bare_for_composer": 300e-6, "composer": 1300e-6}
    row = next(
        line
        for line in tables.render_arms(trial_of(arms)).splitlines()
        if line.startswith("| composer")
    )
    assert "1.35 ms (1 ms to 1.7 ms)" in row


def test_every_arm_of_a_step_is_a_module_that_stands() -> None:
    folder = Path(step_cost_run.__file__).parent / "arms"
    named = {module for module, _ in step_cost_run.ARMS.values()} | set(
        step_cost_run.COMPOSER.values()
    )
    assert named == {path.stem for path in folder.glob("*.py")}


def peaks_of(mine: list[float], best: float) -> Trial:
    outcomes = [
        Outcome(
            arm=arm,
            round=number,
            ended="done",
            measures={"fp32_flops_per_s": value},
            facts={"fp32": "mm, 8 x 8 x 8"},
        )
        for number, own in enumerate(mine)
        for arm, value in (("surefoot 1", own), ("torch 1", best), ("numpy 1", best / 2))
    ]
    return Trial(
        title="roofline",
        arms=("surefoot 1", "torch 1", "numpy 1"),
        rounds=len(mine),
        seed=0,
        outcomes=tuple(outcomes),
    )


def test_peaks_are_judged_by_their_spread_and_against_the_best_call_found() -> None:
    good, bad = (
        peaks_of([100e9, 101e9, 104e9], best=110e9),
        peaks_of([100e9, 101e9, 107e9], best=130e9),
    )
    assert "| 1 | fp32_flops_per_s | 101 | 3 | 3.96 % | holds |" in roofline_run.render_spreads(
        good
    )
    assert (
        "| 1 | fp32_flops_per_s | 101 | 110 | torch: mm, 8 x 8 x 8 | 91.82 % | holds |"
        in roofline_run.render_shares(good)
    )
    assert "| fails |" in roofline_run.render_spreads(bad)
    assert "| fails |" in roofline_run.render_shares(bad)


def test_scores_at_a_large_batch_are_held_against_those_of_the_same_seeds() -> None:
    def scored(lars: list[float]) -> str:
        arms = {f"sgd 256 seed {seed}": 0.9 for seed in range(3)} | {
            f"lars 2048 seed {seed}": score for seed, score in enumerate(lars)
        }
        outcomes = [
            Outcome(arm=arm, round=0, ended="done", measures={"score": score})
            for arm, score in arms.items()
        ]
        return large_batch_run.render_score(
            Trial(title="t", arms=tuple(arms), rounds=1, seed=0, outcomes=tuple(outcomes))
        )

    assert "| lars 2048 | 89 | 3 | -1 (-1 to -1, n = 3) | holds |" in scored([0.89] * 3)
    assert scored([0.88] * 3).count("| fails |") == 1
    assert "| lamb 2048 | n/a | 0 |  | not measured |" in scored([0.88] * 3)


def test_every_run_of_the_large_batch_benchmark_is_a_spec() -> None:
    made = {kind: large_batch_run.make_spec(kind, 1, "somewhere") for kind in large_batch_run.KINDS}
    assert len(large_batch_run.score_arms(2, "somewhere")) == 2 * len(made)
    assert {
        kind: (each.train.batch, each.train.microbatch or each.train.batch)
        for kind, each in made.items()
    } == {"sgd 256": (256, 256), "lars 2048": (2048, 256), "lamb 2048": (2048, 256)}
    assert {(each.train.length, each.train.seed, each.task.use) for each in made.values()} == {
        ("4 epochs", 1, "cifar10")
    }


def test_the_reference_case_holds_less_where_blocks_are_computed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = components_arms.REFERENCE
    assert (size.layers, size.batch, size.length, size.width) == (12, 32, 512, 768)
    monkeypatch.setattr(components_arms, "REFERENCE", replace(size, batch=1, length=16, width=24))
    peaks = {}
    for name in components_run.REFERENCE_ARMS:
        monkeypatch.setattr("sys.argv", ["arms", name, str(tmp_path / name)])
        components_arms.main()
        peaks[name] = read_report(tmp_path / name).measures["peak_bytes"]
    assert peaks["reference full"] < 0.5 * peaks["reference none"]
    assert peaks["reference full"] < peaks["reference operators"] < peaks["reference none"]


@pytest.mark.quick("accumulate", "update in backward")
@pytest.mark.parametrize(
    "component", ["fp32", "bf16", "accumulate", "channels last", "update in backward", "recompute"]
)
def test_a_component_by_hand_is_the_training_that_surefoot_does(
    component: str, tmp_path: Path
) -> None:
    (name, *_) = COMPONENTS[component].models
    workload = replace(MODELS[name], warmup=0, steps=3)
    losses = {}
    for how, train in (
        ("hand", by_hand.train),
        ("surefoot", functools.partial(by_hand_arm.train, folder=str(tmp_path))),
    ):
        watch = Watch(workload, losses=[1, 3])
        train(component, workload, watch)
        losses[how] = [float(watch.arrays[f"{name}/loss/{step}"]) for step in (1, 3)]
    assert losses["surefoot"] == pytest.approx(
        losses["hand"], rel=1e-2 if component == "bf16" else 1e-4
    )
    # the third step has two updates behind it
    assert losses["hand"][0] != pytest.approx(losses["hand"][1], rel=1e-2)


def test_texts_that_are_padded_cut_or_in_buckets_have_one_loss() -> None:
    model = lengths.Texts().model().eval()
    source = lengths.Texts().data("train")
    found = []
    for how in ("padded", "cut", "bucketed"):
        task, batch = lengths.Texts(how), source.read(np.arange(2 * lengths.BATCH))
        (term,) = task.loss(task.forward(model, batch), batch).terms
        found.append((float(term.total), term.count))
    assert len({count for _, count in found}) == 1
    assert [total for total, _ in found] == pytest.approx([found[0][0]] * 3, rel=1e-5)


def test_a_benchmarks_table_stands_between_its_marks() -> None:
    text = "a\n<!-- bars -->\nold\n<!-- /bars -->\nb\n"
    assert (
        measured.replace_parts(text, {"bars": "new\n", "absent": "x"})
        == "a\n<!-- bars -->\nnew\n<!-- /bars -->\nb\n"
    )


@pytest.mark.parametrize("results", RENDER, ids=lambda path: path.stem)
def test_a_benchmarks_document_shows_what_its_raw_outcomes_say(results: Path) -> None:
    readme = (results.parents[1] / "README.md").read_text()
    assert "What makes it unfair" in readme
    if not results.is_file():
        pytest.skip(f"{results.parent.parent.name} has not been measured yet")
    trial = read_trial(results)
    assert [render.__name__ for render in RENDER[results] if render(trial) not in readme] == []


def test_the_parity_table_shows_what_its_raw_rows_say() -> None:
    path = tables.PARITY
    if not path.is_file():
        pytest.skip("parity has not been measured yet")
    assert (
        tables.render_parity(json.loads(path.read_text()))
        in (path.parents[1] / "README.md").read_text()
    )


@pytest.mark.parametrize("name", ladder_tasks.TASKS)
def test_the_ladder_of_a_real_task_stands_in_the_document_as_it_was_climbed(name: str) -> None:
    folder = ladder_tasks.RESULTS / name
    if not folder.is_dir():
        pytest.skip(f"the ladder of {name} has not been climbed yet")
    shown = ladder_tasks.render(name)
    assert shown in (ladder_tasks.FOLDER / "README.md").read_text()
    climbed = json.loads((folder / "ladder.json").read_text())
    assert all(f"\n| {rung['name']} | " in shown for rung in climbed["rungs"])
    assert len((folder / "outcomes.jsonl").read_text().splitlines()) > len(climbed["rungs"])


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_the_checkpoint_benchmark_loads_what_it_saved(way: str, tmp_path: Path) -> None:
    measured = measure_way(way, 1, tmp_path / "state")
    assert min(measured["save_s"], measured["load_s"]) > 0


def test_the_arms_of_the_index_of_tars_measure_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_arms, "LARGE_SHARDS", 3)
    monkeypatch.setattr(data_arms, "LARGE_SAMPLES", 1000)
    for name, write in (
        ("index", functools.partial(data_arms.write_set, shards=2, shard_bytes=1 << 19)),
        ("open", data_arms.write_large_index),
    ):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    data_arms.index(tmp_path / "index", str(tmp_path / "index.json"))
    data_arms.open_large(tmp_path / "open", str(tmp_path / "open.json"))
    indexed, opened = (read_report(tmp_path / f"{name}.json") for name in ("index", "open"))
    assert indexed.measures["samples"] > 10
    assert indexed.measures["bytes_per_s"] > 0
    assert opened.measures["samples"] == 3000
