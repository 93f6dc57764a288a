"""The throughput that a fork ends with is that of its own folder, as `surefoot show` tells it."""

from __future__ import annotations

import pytest

from surefoot.train.resume.start import Start
from tests.cli.conftest import Command
from tests.cli.resumed_runs import SPEC, train
from tests.train.small import write_task


@pytest.mark.slow
def test_the_throughput_that_a_fork_ends_with_is_the_one_that_show_prints(
    tmp_path_factory: pytest.TempPathFactory, surefoot: Command
) -> None:
    folder = tmp_path_factory.mktemp("forks")
    spec = folder / "mine.toml"
    spec.write_text(SPEC.format(use=write_task(folder)))
    train(str(folder / "whole"), spec)
    train(str(folder / "killed"), spec, leave_at=9, start=Start(folder / "whole", 6))
    ways = {
        "fork": ("whole", "--fork", str(folder / "fork"), "--from", "6"),
        "weights": ("whole", "--fork", str(folder / "weights"), "--from", "6", "--weights-only"),
        "newer": ("fork", "--fork", str(folder / "newer"), "--from", "9"),
        "killed": ("killed",),
    }
    for name, (run, *words) in ways.items():
        answer = surefoot("resume", str(folder / run), *words, "--quiet", "--json")
        assert answer.code == 0, answer.err
        shown = surefoot("show", str(folder / name), "--json").row
        for key in ("samples_per_s", "items_per_s"):
            assert answer.row[key] == pytest.approx(shown[key], rel=0.01), (name, key)
