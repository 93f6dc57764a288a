"""`surefoot whatif fit`: the largest microbatch that fits, by the peaks of real processes."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest

from surefoot.cli.prove.whatif import _remedy_hint
from surefoot.core.units import parse_bytes
from surefoot.prove.whatif.fit import (
    STEPS_OF_THE_ANSWER,
    FitSearch,
    MicrobatchTrial,
    PredictedFit,
    find_largest,
)
from tests.cli.conftest import Command, surefoot
from tests.prove.forked import programs_are_forked
from tests.train.small import WHOLE_BATCHES, write_task

__all__ = ["programs_are_forked", "surefoot"]

SIZES = [1, 2, 3, 4, 6, 8, 12, 24]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """More than 6 samples of training find no memory: a real allocation fails."""
    use = write_task(
        tmp_path,
        change=("# FORWARD", "torch.empty(1 << 48 if model.training and len(batch[0]) > 6 else 1)"),
    )
    path = tmp_path / "mine.toml"
    path.write_text(
        f'[task]\nuse = "{use}"\n[train]\nbatch = 12\nlength = "99 steps"\n[memory]\n'
        'on_oom = "halve"\n'
    )
    return path


@pytest.mark.parametrize("sizes", [SIZES, [1, 5, 25], [7]])
def test_from_wherever_the_search_begins_it_ends_at_the_largest_size_that_fits(
    sizes: list[int],
) -> None:
    for start, most in itertools.product(sizes, [0, *sizes]):
        tried: list[tuple[int, int]] = []

        def fits(
            size: int, steps: int, most: int = most, tried: list[tuple[int, int]] = tried
        ) -> bool:
            tried.append((size, steps))
            return size <= most

        assert find_largest(sizes, start, fits) == (most or None)
        assert len(tried) == len(set(tried)) <= len(sizes) + 1
        assert not most or tried[-1] == (most, STEPS_OF_THE_ANSWER)


def test_a_size_that_only_the_longer_run_shows_to_be_too_large_gives_way_to_the_next_one() -> None:
    assert find_largest(SIZES, 4, lambda size, steps: size * steps <= 8 * STEPS_OF_THE_ANSWER) == 8
    assert find_largest(SIZES, 4, lambda size, steps: steps < STEPS_OF_THE_ANSWER) is None


@pytest.mark.slow
def test_the_answer_has_run_for_fifty_steps_and_a_larger_microbatch_is_out_of_memory(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot("whatif", "fit", str(spec), "4 GiB", "--json")
    assert answer.code == 0, answer.err
    row = answer.row
    tries = [
        (each["microbatch"], each["num_steps"], each["fits"], each["failure"])
        for each in row["tries"]
    ]
    assert tries == [(6, 5, True, None), (12, None, False, "out of memory"), (6, 50, True, None)]
    assert (row["microbatch"], row["predicted"]["microbatch"], row["usable_bytes"]) == (
        6,
        6,
        0.9 * (4 << 30),
    )
    assert (
        0
        < row["predicted"]["peak_bytes"]
        < row["peak_bytes"]
        == row["tries"][-1]["peak_bytes"]
        < row["usable_bytes"]
    )


@pytest.mark.usefixtures("programs_are_forked")
def test_where_not_even_one_sample_fits_it_says_so_and_ends_with_7(
    spec: Path, surefoot: Command
) -> None:
    answer = surefoot("whatif", "fit", str(spec), "64 MiB")
    assert answer.code == 7
    assert "no microbatch fits into 90 % of 64 MiB" in answer.err
    assert "more than the limit for any model: give a larger limit" in " ".join(answer.err.split())
    header, (size, steps, peak, unit, share, percent, fits) = (
        answer.out.splitlines()[0],
        answer.out.splitlines()[1].split(),
    )
    assert header.split()[0] == "microbatch"
    assert (size, steps, percent, fits) == ("1", "5", "%", "no")
    told = parse_bytes(f"{peak} {unit}")  # of a fork, which holds what this process holds
    assert told > 64 << 20
    assert float(share.replace(",", "")) == pytest.approx(100 * told / (64 << 20), rel=0.01)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        pytest.param(
            "task.width=-1", 3, "a microbatch of 1 could not be measured", marks=pytest.mark.slow
        ),
        ("train.batch=25", 2, "there are 24 samples, fewer than"),
    ],
)
@pytest.mark.usefixtures("programs_are_forked")
def test_what_fails_for_another_reason_than_memory_is_an_error(
    change: str, code: int, words: str, spec: Path, surefoot: Command
) -> None:
    answer = surefoot("whatif", "fit", str(spec), "4 GiB", "--set", change)
    assert (answer.code, answer.out) == (code, "")
    assert words in answer.err
    assert "hint:" in answer.err


@pytest.mark.parametrize("words", ["whatif fit {} '4 GiB'", "memory {} --fit '4 GiB'"])
def test_whole_batches_of_a_loader_are_not_searched_for_a_microbatch(
    words: str, tmp_path: Path, surefoot: Command
) -> None:
    use = shlex.quote(write_task(tmp_path, change=WHOLE_BATCHES))
    answer = surefoot(*shlex.split(words.format(use)))
    assert (answer.code, answer.out) == (2, "")
    assert (
        "a fit looks for a train.microbatch, but the source gives whole batches: 3 batches of "
        "DataLoader" in answer.err
    )
    assert "another batch_size" in answer.err
    assert "train.batch" not in answer.err


@pytest.mark.slow
def test_a_microbatch_that_the_model_refuses_is_passed_over(
    tmp_path: Path, surefoot: Command
) -> None:
    """Planted: BatchNorm, which takes no single sample.

    Where the search begins with one, the answer is a larger one, or that none fits.
    """
    norm = ("nn.ReLU()", "nn.BatchNorm1d(self.width), nn.ReLU()")
    use = write_task(tmp_path, change=norm)
    path = tmp_path / "mine.toml"
    path.write_text(f'[task]\nuse = "{use}"\n[train]\nbatch = 12\nlength = "9 steps"\n')
    answer = surefoot("whatif", "fit", str(path), "64 MiB", "--json")
    assert answer.code == 7
    tries = [
        (each["microbatch"], each["is_refused"], each["peak_bytes"] is None)
        for each in answer.row["tries"]
    ]
    assert tries == [(1, True, True), (2, False, False)]
    assert (
        "cannot be trained on a batch of one sample, and every microbatch has one sample"
        in answer.row["tries"][0]["failure"]
    )


def test_what_does_not_fit_for_what_stands_beside_the_tensors_says_so_whatever_was_predicted() -> (
    None
):
    tries = tuple(
        MicrobatchTrial(microbatch=size, num_steps=5, peak_bytes=330e6) for size in (4, 2, 1)
    )
    fitted = FitSearch(
        batch=4,
        limit_bytes=300_000_000,
        tries=tries,
        microbatch=None,
        predicted=PredictedFit(4, 90_000, 30_000),
    )
    assert fitted.beside_bytes == 330e6 - 30_000
    assert "more than the limit for any model" in _remedy_hint("mine.toml", fitted)
