"""Tests of `surefoot checkpoint check`: every kind of damage is found in the file that has it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from surefoot.cli.operate import stored
from surefoot.contract import manifest
from tests.cli.conftest import Command
from tests.cli.saved_commits import FIXTURE, RUN, flip, path_of, rewrite, run, save, saved
from tests.cli.test_a_run import documented

__all__ = ["run", "saved"]  # fixtures


def flipped(folder: Path) -> str:
    flip(folder / "model.safetensors", -5)
    return "model.safetensors"


def truncated(folder: Path) -> str:
    path = folder / "state.safetensors"
    rewrite(path, path.read_bytes()[:-1])
    return "state.safetensors"


def emptied(folder: Path) -> str:
    rewrite(folder / "state.json", b"")
    return "state.json"


def zeroed(folder: Path) -> str:
    path = folder / "model.safetensors"
    rewrite(path, path.read_bytes()[:-32] + bytes(32))
    return "model.safetensors"


def missing(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "model.safetensors"


def linked_away(folder: Path) -> str:
    path = folder / "state.json"
    elsewhere = folder.parent.parent.resolve() / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return "state.json"


def spliced(folder: Path) -> str:
    """The same file of another step: right in itself, wrong here."""
    other = manifest.step_folder(RUN, 2) / "state.safetensors"
    rewrite(folder / "state.safetensors", other.read_bytes())
    return "state.safetensors"


def without_manifest(folder: Path) -> str:
    (folder / manifest.FILE).unlink()
    return manifest.FILE


def of_another_step(folder: Path) -> str:
    rewrite(folder / manifest.FILE, (manifest.step_folder(RUN, 2) / manifest.FILE).read_bytes())
    return manifest.FILE


DAMAGE = (
    flipped,
    truncated,
    emptied,
    zeroed,
    missing,
    linked_away,
    spliced,
    without_manifest,
    of_another_step,
)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_every_kind_of_damage_is_named_and_only_that_commit(
    damage: Callable[[Path], str], run: Path, surefoot: Command
) -> None:
    save(run, 6, model=nn.Linear(3, 3), count=60)  # so that nothing of it is linked
    name = damage(path_of(6).parent)
    answer = surefoot("checkpoint", "check", run)
    assert answer.code == 1
    row = surefoot("checkpoint", "check", run, "--json").row
    assert [each["step"] for each in row["commits"] if not each["sound"]] == [6]
    assert row["commits"][-1]["files"] == [name]
    assert row["goes_on_after"] == 5
    assert {*row, *row["commits"][0]} == documented("checkpoint check")


def test_four_hundred_of_four_hundred_flipped_bits_are_found_in_the_file_that_holds_them(
    tmp_path: Path,
) -> None:
    """Flip bits over every file of a commit, in proportion to the files' sizes; seed 0.

    The commit has weights, average, optimizer and state.
    """
    folder = tmp_path / FIXTURE.name
    shutil.copytree(FIXTURE, folder)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    ends = np.cumsum([8 * size for size in sizes.values()])
    for bit in np.random.default_rng(0).integers(0, ends[-1], size=400):
        number = int(np.searchsorted(ends, bit, side="right"))
        name = list(sizes)[number]
        position = int(bit - (ends[number - 1] if number else 0))
        whole = (folder / name).read_bytes()
        spoiled = bytearray(whole)
        spoiled[position // 8] ^= 1 << (position % 8)
        (folder / name).write_bytes(spoiled)
        assert stored.check_commit(folder).names == (name,), f"bit {bit}"
        (folder / name).write_bytes(whole)
    assert stored.check_commit(folder).is_sound


def test_a_file_that_several_commits_share_is_damaged_in_each(surefoot: Command) -> None:
    run = RUN
    for step in range(1, 7):
        save(run, step, count=step)
    data = bytearray(path_of(4).read_bytes())
    data[-1] ^= 1
    path_of(4).write_bytes(data)  # in place: the block on disk
    row = surefoot("checkpoint", "check", run, "--json").row
    assert not any(each["sound"] for each in row["commits"])
    assert row["goes_on_after"] is None


def test_a_file_that_no_manifest_names_is_told_and_is_no_damage(
    run: Path, surefoot: Command
) -> None:
    path_of(6, "notes.txt").write_text("mine")
    answer = surefoot("checkpoint", "check", run)
    assert answer.code == 0
    assert "notes.txt is not in the manifest" in answer.out


def test_repair_sets_aside_what_is_damaged_deletes_nothing_and_leaves_the_rest(
    run: Path, surefoot: Command
) -> None:
    flip(path_of(5, "state.json"), 3)
    before = {path.name: path.read_bytes() for path in path_of(5).parent.iterdir()}
    answer = surefoot("checkpoint", "check", run, "--repair")
    assert answer.code == 1
    aside = run / "checkpoints" / ".bad-step-000000000005"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    assert manifest.steps(run) == [1, 2, 3, 4, 6]
    assert surefoot("checkpoint", "check", run).code == 0
