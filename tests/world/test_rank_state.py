"""What a task's `state()` is on several ranks, by its word.

The same everywhere, compared at each save, or each rank's own, saved and restored for each.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.cli.operate.difference import compare
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract import manifest
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss, resolve
from surefoot.core import place
from surefoot.core.errors import SpecError, TaskError
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_launch import environment

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

# steps of the whole run, of the part after which it is left, and of its last commit
WHOLE, PART, SAVED = 9, 5, 4


class Env:
    """An environment that remembers a walk, longer on some ranks than on others."""

    def __init__(self, seed: int | None = None) -> None:
        self.rng, self.walk = np.random.default_rng(surefoot.rank_seed(seed)), [0]

    def draw(self) -> float:
        self.walk += [
            int(each) for each in self.rng.integers(1, 9, size=int(self.rng.integers(1, 4)))
        ]
        return float(sum(self.walk)) / 100

    def state_dict(self) -> dict[str, Any]:
        return {
            "rng": self.rng.bit_generator.state,
            "walk": tuple(self.walk),
            "visits": np.bincount(self.walk),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rng.bit_generator.state, self.walk = state["rng"], list(state["walk"])


def count_up(counter: Any) -> float:
    counter += 1 + place.here().rank
    return float(counter.sum()) / 10


def bernoulli(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


MEMBERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "numpy generator": (
        lambda: np.random.default_rng(surefoot.rank_seed()),
        lambda each: float(each.random()),
    ),
    "legacy bit generator": (
        lambda: np.random.Generator(np.random.MT19937(surefoot.rank_seed())),
        lambda each: float(each.random()),
    ),
    "torch generator": (lambda: torch.Generator().manual_seed(surefoot.rank_seed()), bernoulli),
    "counter": (lambda: torch.zeros((), dtype=torch.float64), count_up),
    "array": (lambda: np.zeros(3, dtype=np.int64), count_up),
    "environment": (Env, lambda each: each.draw()),
}


class Plays:
    """One weight; each microbatch adds what the entry of `state()` draws."""

    def __init__(
        self, make: Callable[[], Any], draw: Callable[[Any], float], word: str | None
    ) -> None:
        self.entry, self.draw, self.drawn = make(), draw, list[float]()
        if word is not None:
            self.state_on_ranks = {"entry": word}

    def state(self) -> dict[str, Any]:
        return {"entry": self.entry}

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        return Arrays(x=torch.ones(64, 1))

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        made: Tensor = model(batch["x"])
        return made

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        weight = 1.0
        if output.requires_grad:
            weight = self.draw(self.entry)
            self.drawn.append(weight)
        return Loss.sum((output * weight).sum(), count=len(output))


def spec(**layout: Any) -> RunSpec:
    return RunSpec(
        train={"length": f"{WHOLE} steps", "batch": 8, "microbatch": 2, "threads": 1},
        optim={"name": "sgd", "clip": 0.0},
        checkpoint={"every": f"{SAVED} steps"},
        evaluate={"every": "99 epochs"},
        observe={"tensorboard": False},
        layout=layout,
    )


def play(folder: Path, task: Plays, *, steps: int = WHOLE, **layout: Any) -> dict[str, Any]:
    """Train; up to `steps`, where that is not the end, and left there without a save."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Run(spec(**layout), task, folder=folder, quiet=True) as run,
    ):
        first = run.step
        task.drawn.clear()  # of the checks before the run
        for report in run.steps():
            if report.step == steps < WHOLE:
                raise KeyboardInterrupt
    return {"drawn": task.drawn, "first": first, "told": list(run.assembly.told)}


def job(
    folder: Path, member: str, word: str | None = "per_rank", **more: Any
) -> Callable[[int], Any]:
    make, draw = MEMBERS[member]
    return lambda rank: play(folder, Plays(make, draw, word), **more)


@pytest.mark.quick("environment")
@pytest.mark.parametrize("member", MEMBERS)
def test_each_rank_goes_on_with_its_own_state(member: str, tmp_path: Path) -> None:
    """A generator of numpy and of torch, a counter, an array, an environment.

    A resumed rank draws what the unbroken one did.
    """
    whole = run_ranks(2, job(tmp_path / "whole", member), tmp_path / "a")
    assert all("drawn" in each for each in whole), whole
    assert whole[0]["drawn"] != whole[1]["drawn"]
    run_ranks(2, job(tmp_path / "run", member, steps=PART), tmp_path / "b")
    again = run_ranks(2, job(tmp_path / "run", member), tmp_path / "c")
    assert all("drawn" in each for each in again), again
    for one, other in zip(again, whole, strict=True):
        assert 0 < one["first"] < WHOLE
        assert one["drawn"] == other["drawn"][-len(one["drawn"]) :]
    folders = [manifest.step_folder(tmp_path / each, WHOLE) for each in ("whole", "run")]
    found, same = compare(*folders)
    assert [each for each in found if each.file != "clock.json"] == []
    assert same > 0


@pytest.mark.quick("stage 2")
@pytest.mark.parametrize(
    "layout",
    [{"shard": 2, "zero_stage": 1}, {"shard": 2, "zero_stage": 2}],
    ids=["stage 1", "stage 2"],
)
def test_each_rank_goes_on_with_its_own_state_where_ranks_hold_parts(
    layout: dict[str, int], tmp_path: Path
) -> None:
    whole = run_ranks(2, job(tmp_path / "whole", "environment", **layout), tmp_path / "a")
    run_ranks(2, job(tmp_path / "run", "environment", steps=PART, **layout), tmp_path / "b")
    again = run_ranks(2, job(tmp_path / "run", "environment", **layout), tmp_path / "c")
    assert all("drawn" in each for each in (*whole, *again)), (whole, again)
    assert all(
        one["drawn"] == other["drawn"][-len(one["drawn"]) :]
        for one, other in zip(again, whole, strict=True)
    )
    assert whole[0]["drawn"] != whole[1]["drawn"]


@pytest.mark.slow
def test_a_commit_with_state_of_each_rank_is_refused_on_other_ranks_and_read_where_none_is_needed(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run_ranks(2, job(run, "environment", steps=PART), tmp_path / "a")
    for number in (1, 3):
        found = run_ranks(number, job(run, "environment"), tmp_path / f"b{number}")
        assert {each["kind"] for each in found} <= {"RunFolderError", "LostRank"}, found
        assert (
            "holds 'entry' of state() for 2 ranks, one for each, but the run has "
            in found[0]["error"]
        )
        assert f"has {number} rank" in found[0]["error"]
        assert "resume with 2 ranks: --ranks 2" in found[0]["error"]
    again = run_ranks(2, job(run, "environment"), tmp_path / "c")
    assert all("drawn" in each for each in again), again
    for words in (
        ["checkpoint", "check", str(run)],
        ["checkpoint", "list", str(run)],
        ["check", str(run)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "surefoot", *words],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr


def moved_alike(counter: Tensor) -> float:
    moved = torch.tensor(float(place.here().rank) + 1)
    torch.distributed.all_reduce(moved)
    counter += moved
    return float(counter)


def moved_apart_later(counter: Tensor) -> float:
    counter += 1 + (place.here().rank if counter > 2 * SAVED else 0)
    return float(counter)


def test_replicated_state_is_compared_at_each_save_and_a_difference_is_named(
    tmp_path: Path,
) -> None:
    def run(draw: Callable[[Any], float], name: str) -> list[Any]:
        make = MEMBERS["counter"][0]
        return run_ranks(
            2,
            lambda rank: play(tmp_path / name, Plays(make, draw, "replicated")),
            tmp_path / f"ranks {name}",
        )

    alike = run(moved_alike, "alike")
    assert all(len(each["drawn"]) == 2 * WHOLE for each in alike), alike
    assert alike[0]["drawn"] == alike[1]["drawn"]
    apart = run(moved_apart_later, "apart")
    assert {(each["kind"], each["code"]) for each in apart} == {("NumbersError", 4)}
    assert all(
        "'entry' is replicated, but its value on rank 1 of 2 differs from that on rank 0"
        in each["error"]
        for each in apart
    )
    assert manifest.steps(tmp_path / "apart") == [SAVED]  # there they still agreed


def test_replicated_state_that_differs_from_the_start_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    def start(rank: int) -> Any:
        return play(tmp_path / "run", Plays(lambda: torch.tensor(float(rank)), float, "replicated"))

    found = run_ranks(2, start, tmp_path / "ranks")
    assert {each["kind"] for each in found} == {"SpecError"}
    assert "'entry' of state(), replicated: rank 1 has " in found[0]["error"]


def test_state_is_named_at_the_start_with_its_word_or_the_words_to_write(tmp_path: Path) -> None:
    def told(name: str, member: str, word: str | None) -> str:
        found = run_ranks(
            2, job(tmp_path / name, member, word, steps=1), tmp_path / f"ranks {name}"
        )
        return "\n".join(found[0].get("told", [str(found[0])]))

    unsaid = told("a", "counter", None)
    assert "state() names 'entry': each of 2 ranks has a separate copy" in unsaid
    assert "state_on_ranks = {'entry': \"replicated\"}" in unsaid
    own = told("b", "counter", "per_rank")
    assert (
        "state() names 'entry', one for each of 2 ranks: "
        "the entry of each rank is saved and restored" in own
    )
    assert (
        "'entry' of state() starts equal on all ranks; "
        "surefoot.rank_seed() returns a different seed on each rank" in own
    )
    assert "starts equal" not in told("c", "environment", "per_rank")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"entry": "shared"}, "state_on_ranks is {'entry': 'shared'}"),
        ({"entry": ["per_rank"]}, "state_on_ranks is "),
        ("per_rank", "state_on_ranks is 'per_rank'"),
    ],
)
def test_a_word_that_is_none_is_refused(words: Any, said: str) -> None:
    task = Plays(*MEMBERS["counter"], word=None)
    task.state_on_ranks = words
    with pytest.raises(TaskError, match="state_on_ranks is ") as found:
        resolve(task)
    assert said in str(found.value)


def test_a_word_about_an_entry_that_is_not_there_and_per_rank_state_under_virtual_ranks_are_refused(
    tmp_path: Path,
) -> None:
    task = Plays(*MEMBERS["counter"], word="per_rank")
    task.state_on_ranks = {"other": "per_rank"}
    with pytest.raises(
        TaskError, match="state_on_ranks names 'other', and state\\(\\) names 'entry'"
    ):
        play(tmp_path / "a", task)
    with pytest.raises(SpecError, match=r"'entry' is per_rank, and layout\.virtual_ranks is 2"):
        play(tmp_path / "b", Plays(*MEMBERS["counter"], word="per_rank"), virtual_ranks=2)


def test_a_seed_of_each_rank_is_its_own_and_the_same_again(tmp_path: Path) -> None:
    def seeds(rank: int) -> list[int]:
        torch.manual_seed(7)
        return [surefoot.rank_seed(), surefoot.rank_seed(7), surefoot.rank_seed(8)]

    first, second = run_ranks(4, seeds, tmp_path / "a"), run_ranks(4, seeds, tmp_path / "b")
    assert first == second
    assert len({number for row in first for number in row[1:]}) == 8
    assert all(row[0] == row[1] for row in first)


def test_one_rank_keeps_its_state_with_either_word(tmp_path: Path) -> None:
    for word in ("per_rank", "replicated"):
        play_again = functools.partial(play, tmp_path / word)
        whole = play(
            tmp_path / f"{word} whole", Plays(lambda: Env(7), MEMBERS["environment"][1], word)
        )
        play_again(Plays(lambda: Env(7), MEMBERS["environment"][1], word), steps=PART)
        again = play_again(Plays(lambda: Env(8), MEMBERS["environment"][1], word))
        assert again["drawn"] == whole["drawn"][-len(again["drawn"]) :]
        assert not (manifest.step_folder(tmp_path / word, WHOLE) / "task-ranks.json").exists()
