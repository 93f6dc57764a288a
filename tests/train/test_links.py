"""A run folder from a stranger: no file of it is read or written through a symbolic link.

The folder itself may be behind one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.components.observe.journal import Journal
from surefoot.components.observe.tensorboard import TensorBoard
from surefoot.contract import commits, events, ledger, loop_ledger, manifest, runlock, spec_file
from surefoot.contract.run_folder import files, retention
from surefoot.core.errors import RunFolderError, StorageError, SurefootError
from surefoot.train.record import windows
from surefoot.train.run import Run
from tests.train.small import FEW, Small, spec, write_task
from tests.train.small import call as call_with

SECRET = b'{"v": 1, "kind": "precious", "generation": 7}\n'


def call(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        return call_with(patch, *words)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfinished run with two commits, a profile, a roofline and a prediction."""
    place = tmp_path_factory.mktemp("sound")
    task = write_task(place)
    assert (
        call(
            "train",
            task,
            *FEW,
            "--steps",
            "6",
            "--set",
            "checkpoint.every=3 steps",
            "--run",
            str(place / "run"),
            "--quiet",
        )
        == 0
    )
    lines = (place / "run" / "events.jsonl").read_text().splitlines(keepends=True)
    (place / "run" / "events.jsonl").write_text("".join(lines[:-1]))
    return place / "run"


def copy_with_link(sound: Path, place: Path, name: str) -> tuple[Path, Path]:
    """A copy of the run in which `name` is a link, and what the link points at.

    That is a copy of what stood there, and a file beside it.
    """
    run, outside = place / "run", place / "outside"
    shutil.copytree(sound, run)
    if (run / name).is_dir():
        shutil.move(run / name, outside)
    else:
        outside.write_bytes(SECRET)
        (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(outside)
    return run, outside


def content_of(path: Path) -> dict[str, bytes]:
    """Everything that is in a folder, or a file."""
    every = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(each): each.read_bytes() for each in every if each.is_file()}


@pytest.mark.parametrize(
    "name",
    [
        "ledger.bin",
        "run.lock",
        "events.jsonl",
        "spec.toml",
        "checkpoints",
        "checkpoints/step-000000000006",
    ],
)
@pytest.mark.parametrize(
    "verb", ["resume", "show", "ledger", "report", "checkpoint prune", "checkpoint check"]
)
def test_no_verb_reads_or_changes_what_a_link_in_a_run_folder_points_at(
    verb: str, name: str, sound: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, outside = copy_with_link(sound, tmp_path, name)
    before = content_of(outside)
    code = call(*verb.split(), str(run), *(["--keep", "1"] if verb.endswith("prune") else []))
    told = "".join(capfd.readouterr())
    assert code != 70, told
    assert content_of(outside) == before
    assert "precious" not in told


@pytest.mark.parametrize(
    "name", ["ledger.bin", "run.lock", "events.jsonl", "spec.toml", "checkpoints"]
)
def test_a_run_does_not_go_on_in_a_folder_with_a_link(
    name: str, sound: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = copy_with_link(sound, tmp_path, name)
    assert call("resume", str(run), "--quiet") == 2
    told = capfd.readouterr().err
    assert str(run / name) in told
    assert "symbolic link" in told
    assert "hint: " in told


READERS: dict[str, Callable[[Path], object]] = {
    "events.jsonl": lambda run: list(events.read(run)),
    "ledger.bin": ledger.read_plan,
    "ledger.bin ": loop_ledger.read_promise,
    "spec.toml": spec_file.read_of_run,
    "run.lock": runlock.RunLock,
    "events.jsonl ": Journal,
    "profile": lambda run: windows.ask(run, windows.Window(active=1), (), print),
    "profile/request.json": lambda run: files.read_bytes(run, "profile/request.json"),
    "checkpoints": lambda run: commits.check(manifest.step_folder(run, 6)),
    "checkpoints/step-000000000006": lambda run: commits.check(manifest.step_folder(run, 6)),
    "checkpoints/step-000000000006/manifest.json": lambda run: commits.check(
        manifest.step_folder(run, 6)
    ),
    "checkpoints/step-000000000006/state.json": lambda run: commits.check(
        manifest.step_folder(run, 6)
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_opens_a_file_of_a_run_refuses_a_link(
    name: str, sound: Path, tmp_path: Path
) -> None:
    run, outside = copy_with_link(sound, tmp_path, name.strip())
    before = content_of(outside)
    with pytest.raises((SurefootError, OSError), match=r"link|Too many levels"):
        READERS[name](run)
    assert content_of(outside) == before


def test_the_lock_and_the_times_of_a_link_are_not_known(sound: Path, tmp_path: Path) -> None:
    run, _ = copy_with_link(sound, tmp_path / "a", "run.lock")
    assert runlock.read_generation(run) == 0
    assert not runlock.is_held(run)
    run, _ = copy_with_link(sound, tmp_path / "b", "checkpoints/step-000000000006/clock.json")
    assert set(retention.read_times(run, [3, 6])) == {3}


@pytest.mark.parametrize(
    "name",
    ["report.html", ".report.html.draft", "shape.json", ".spec.toml.draft", "profile/facts.json"],
)
def test_what_is_written_whole_takes_the_place_of_a_link(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(SECRET)
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(outside)
    for given in (name, name.removeprefix(".").removesuffix(".draft")):
        files.write_whole(tmp_path / "run", given, b"ours")
        assert (tmp_path / "run" / given).read_bytes() == b"ours"
    assert outside.read_bytes() == SECRET


def test_a_folder_below_the_run_is_never_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(tmp_path / "elsewhere")
    for act in (files.write_whole, lambda *given: files.make_folder(*given[:2])):
        with pytest.raises(OSError, match="symbolic link"):
            act(tmp_path / "run", "profile/deep", b"")
    assert not any((tmp_path / "elsewhere").iterdir())


def test_tensorboard_does_not_write_into_a_linked_folder(tmp_path: Path, sound: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tensorboard").symlink_to(tmp_path / "elsewhere")
    board = TensorBoard(tmp_path / "tensorboard", wanted=True)
    for each in events.read(sound):
        board.write(each)
    with pytest.raises(StorageError, match="symbolic link"):
        board.close()
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "which", ["the run folder", "the folder of runs", "a name of one's own", "a link to a link"]
)
def test_a_run_folder_behind_a_link_is_a_run_folder(
    which: str, sound: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    shutil.copytree(sound, tmp_path / "disk" / "run")
    named = tmp_path / "latest"
    if which == "the folder of runs":
        (tmp_path / "runs").symlink_to(tmp_path / "disk")
        named = tmp_path / "runs" / "run"
    else:
        named.symlink_to(tmp_path / "disk" / "run")
    if which == "a link to a link":
        (tmp_path / "newest").symlink_to(named)
        named = tmp_path / "newest"
    if which == "a name of one's own":  # a link beside the commits, that nothing of ours opens
        (tmp_path / "disk" / "run" / "checkpoints" / "latest").symlink_to("step-000000000006")
    assert call("checkpoint", "check", str(named)) == 0
    assert call("resume", str(named), "--quiet") == 0
    assert call("ledger", str(named)) == 0
    assert call("report", str(named)) == 0


def test_a_new_run_is_begun_in_an_empty_folder_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with Run(spec(2), Small(), folder=tmp_path / "run", quiet=True) as run:
        list(run.steps())
    assert commits.check(manifest.step_folder(tmp_path / "disk", 2)).step == 2


def test_a_save_into_linked_checkpoints_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(RunFolderError, match="symbolic link"),
        Run(spec(2), Small(), folder=tmp_path / "run", quiet=True) as run,
    ):
        list(run.steps())
    assert not any((tmp_path / "elsewhere").iterdir())
