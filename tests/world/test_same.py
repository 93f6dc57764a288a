"""Ranks that go on hold the same.

A rank whose folder has an older, another or a newer commit is named, and so is one that holds
a different state than was loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.components.data import consumed
from surefoot.contract import manifest
from surefoot.train.resume import together
from surefoot.train.resume.start import Start
from surefoot.train.resume.state import LiveState
from surefoot.train.run import Run
from surefoot.train.session.folder import Chosen
from tests.world.ranks import run_ranks
from tests.world.test_run import Sentences, spec, train
from tests.world.test_shard import AVERAGED, Stacked

Layout = dict[str, Any]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that was left after step 7; its commits are of steps 5 and 6."""
    folder = tmp_path_factory.mktemp("left") / "run"
    run_ranks(2, lambda rank: train(folder, most=7), folder.parent / "ranks")
    assert manifest.steps(folder) == [5, 6]
    return folder


def on_a_disk_of_its_own(run: Path) -> Callable[[int], Any]:
    """Rank 1 sees a folder of its own where the others see `run`, as without the shared disk."""

    def job(rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(
                    together,
                    "Chosen",
                    lambda folder, is_again, done: Chosen(
                        run.with_name("own"), is_again, done=done
                    ),
                )
            return train(run)

    return job


def drop_newest(run: Path) -> None:
    shutil.rmtree(manifest.step_folder(run, 6))


def drop_all(run: Path) -> None:
    shutil.rmtree(run / manifest.FOLDER)


@pytest.mark.quick("1-drop_newest-words0", "starts anew")
@pytest.mark.parametrize(
    ("of_rank", "spoil", "words"),
    [
        (
            1,
            drop_newest,
            (
                "resumes after step 6, and rank 1 of 2 on {host} has no checkpoint of that step "
                "in {own}: its newest checkpoint is of step 5"
            ),
        ),
        (
            1,
            drop_all,
            "and rank 1 of 2 on {host} has no checkpoint of that step in {own}",
        ),
        (
            0,
            drop_newest,
            (
                "resumes after step 5, "
                "and rank 1 of 2 on {host} has a newer checkpoint in {own}, of step 6"
            ),
        ),
        pytest.param(
            0,
            drop_all,
            (
                "starts from step 0, "
                "and rank 1 of 2 on {host} has a newer checkpoint in {own}, of step 6"
            ),
            id="starts anew",
        ),
    ],
)
def test_a_rank_whose_disk_has_other_commits_is_named_with_its_host_on_all_ranks(
    of_rank: int, spoil: Callable[[Path], None], words: str, left: Path, tmp_path: Path
) -> None:
    for name in ("run", "own"):
        shutil.copytree(left, tmp_path / name)
    spoil(tmp_path / ("own" if of_rank else "run"))
    found = run_ranks(2, on_a_disk_of_its_own(tmp_path / "run"), tmp_path / "ranks")
    told = words.format(host=_host(), own=tmp_path / "own")
    assert all(each["kind"] == "RunFolderError" and told in each["error"] for each in found), found


def test_a_rank_with_a_whole_commit_of_another_run_is_named(left: Path, tmp_path: Path) -> None:
    # the same spec, begun anew
    run_ranks(2, lambda rank: train(tmp_path / "own", given=None, most=7), tmp_path / "other")
    shutil.copytree(left, tmp_path / "run")
    found = run_ranks(2, on_a_disk_of_its_own(tmp_path / "run"), tmp_path / "ranks")
    told = f"rank 1 of 2 on {_host()} has another checkpoint of that step in {tmp_path / 'own'}"
    assert all(each["kind"] == "RunFolderError" and told in each["error"] for each in found), found


def test_a_copy_of_the_same_bytes_goes_on_and_one_that_is_damaged_ends_all_ranks(
    left: Path, tmp_path: Path
) -> None:
    for name in ("run", "own"):
        shutil.copytree(left, tmp_path / name)
    file = manifest.step_folder(tmp_path / "own", 6) / "optimizer.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    found = run_ranks(2, on_a_disk_of_its_own(tmp_path / "run"), tmp_path / "damaged")
    assert [each["kind"] for each in found] == ["LostRank", "RunFolderError"], found
    assert "rank 1 of 2 did not start" in found[0]["error"]
    file.write_bytes(sound)
    found = run_ranks(2, on_a_disk_of_its_own(tmp_path / "run"), tmp_path / "sound")
    assert [each.get("step") for each in found] == [13, 13], found
    assert consumed.check(tmp_path / "run").holds


PLACES = {
    "weights/": lambda parts: next(iter(parts.model.parameters())),
    "state/optimizer/": lambda parts: next(
        each for each in parts.updates[0].guarded.optimizers[0].state.values()
    )["exp_avg_sq"],
    "buffers/": lambda parts: next(iter(parts.model.buffers())),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_bit_that_flips_while_a_rank_loads_is_named_before_step_1(
    name: str, left: Path, tmp_path: Path
) -> None:
    shutil.copytree(left, tmp_path / "run")

    def job(rank: int) -> Any:
        restore = LiveState.restore

        def spoiled(self: LiveState, *given: Any, **more: Any) -> Any:
            made = restore(self, *given, **more)
            if rank == 1:
                PLACES[name](self._assembly).data.view(torch.int64).flatten()[0] ^= 1
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LiveState, "restore", spoiled)
            with Run(spec(), Sentences(), folder=tmp_path / "run", quiet=True):
                raise AssertionError("it began")

    found = run_ranks(2, job, tmp_path / "ranks")
    told = f"after loading step 6 rank 1 of 2 on {_host()} differs from rank 0: {name}"
    assert all(each["kind"] == "NumbersError" and told in each["error"] for each in found), found


def test_copies_of_a_split_state_are_held_against_each_other_too(tmp_path: Path) -> None:
    given = spec(
        layout={"shard": 2, "zero_stage": 1},
        train={"length": "2 steps"},
        evaluate={"every": "9 epochs"},
        **AVERAGED,
    )

    def begun(rank: int) -> Any:
        with Run(given, Stacked(), folder=tmp_path / "run", quiet=True) as run:
            for _ in run.steps():
                pass
        return run.step

    assert run_ranks(4, begun, tmp_path / "begun") == [2] * 4
    longer = given.replace(train={"length": "3 steps"})

    def job(rank: int) -> Any:
        restore = LiveState.restore

        def spoiled(self: LiveState, *more: Any, **named: Any) -> Any:
            made = restore(self, *more, **named)
            if rank == 3:
                moments = self._assembly.updates[0].guarded.optimizers[0].state.values()
                next(each["exp_avg"] for each in moments if each["exp_avg"].numel()).flatten()[
                    0
                ] += 1
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LiveState, "restore", spoiled)
            with Run(
                longer,
                Stacked(),
                folder=tmp_path / "new",
                quiet=True,
                start=Start(tmp_path / "run", 2),
            ):
                raise AssertionError("it began")

    found = run_ranks(4, job, tmp_path / "ranks")
    told = f"after loading step 2 rank 3 of 4 on {_host()} differs from rank 1: state/optimizer/"
    assert all(each["kind"] == "NumbersError" and told in each["error"] for each in found), found


def test_a_run_that_began_with_weights_and_was_killed_before_its_first_step_goes_on_alike(
    left: Path, tmp_path: Path
) -> None:
    """Its only commit is that of step 0: all ranks load it."""

    def begin(rank: int) -> Any:
        start = Start(left, 6, weights_only=True)
        short = spec(train={"length": "4 steps"})
        with Run(short, Sentences(), folder=tmp_path / "run", quiet=True, start=start):
            raise KeyboardInterrupt

    run_ranks(2, begin, tmp_path / "begun")
    assert manifest.steps(tmp_path / "run") == [0]
    given = spec(layout={"check_every": "1 steps"}, train={"length": "4 steps"})
    found = run_ranks(2, lambda rank: train(tmp_path / "run", given=given), tmp_path / "ranks")
    assert [each.get("step") for each in found] == [4, 4], found


def _host() -> str:
    return together.place.here().host
