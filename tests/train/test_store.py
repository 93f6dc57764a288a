"""Commits in an object store.

A real S3-compatible server, half an upload that nobody sees, another machine that goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.components.checkpoint import Store
from surefoot.contract import commits, manifest
from surefoot.contract.events import Started
from surefoot.core.errors import MissingExtra, RunFolderError, SpecError
from tests.components.store_server import serving_store
from tests.train.small import Small, faults_of, records, spec
from tests.train.test_resume import STEPS, STOP, bits, train

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serving_store("runs") as url:
        yield url


def test_another_machine_goes_on_from_the_store_to_the_same_bits(
    bucket: str, tmp_path: Path
) -> None:
    how = spec(
        STEPS,
        checkpoint={"every": "5 steps", "store": f"{bucket}/goes-on"},
        evaluate={"every": "4 steps"},
    )
    train(
        tmp_path / "whole",
        spec(STEPS, checkpoint={"every": "5 steps"}, evaluate={"every": "4 steps"}),
        Small(dropout=0.2),
    )
    train(tmp_path / "left", how, Small(dropout=0.2), leave_at=STOP)
    assert max(Store(f"{bucket}/goes-on").steps()) in (10, 12)
    shutil.rmtree(tmp_path / "left")  # the machine is gone
    train(tmp_path / "other", how, Small(dropout=0.2))
    assert (
        next(
            event for event in records(tmp_path / "other") if isinstance(event, Started)
        ).first_step
        > 1
    )
    assert bits(tmp_path / "other") == bits(tmp_path / "whole")
    assert Store(f"{bucket}/goes-on").steps() == manifest.steps(tmp_path / "other")


def test_a_store_of_another_spec_is_refused(bucket: str, tmp_path: Path) -> None:
    train(tmp_path / "a", spec(6, checkpoint={"store": f"{bucket}/other"}), Small())
    with pytest.raises(RunFolderError, match="checkpoints of a different spec"):
        train(tmp_path / "b", spec(8, checkpoint={"store": f"{bucket}/other"}), Small())
    assert not (tmp_path / "b").exists()


def committed(run: Path) -> Path:
    train(run, spec(12, checkpoint={"every": "4 steps"}), Small())
    return run


def test_what_is_half_there_is_not_seen_and_what_is_damaged_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = committed(tmp_path / "a"), Store(f"file://{tmp_path}/store")
    store.push(run, 8)
    put = store._system.put_file

    def fail_late(source: str, target: str) -> None:
        if target.endswith(manifest.FILE):
            raise ConnectionError("cut off")
        put(source, target)

    monkeypatch.setattr(store._system, "put_file", fail_late)
    with pytest.raises(Exception, match="cut off"):
        store.push(run, 12)
    assert store.steps() == [8]
    monkeypatch.undo()
    store.push(run, 12)
    damaged = tmp_path / "store" / "checkpoints" / "step-000000000012" / "model.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tmp_path / "b").mkdir()
    step, troubles = store.pull_newest(
        tmp_path / "b", manifest.read(manifest.step_folder(run, 8)).spec_id
    )
    assert step == 8
    assert "model.safetensors is damaged" in troubles[0]
    assert manifest.steps(tmp_path / "b") == [8]
    assert not list((tmp_path / "b" / "checkpoints").glob(".*"))
    commits.check(manifest.step_folder(tmp_path / "b", 8))


def test_a_store_that_does_not_answer_costs_its_copy_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where a folder should be")
    how = spec(
        12,
        checkpoint={"every": "4 steps", "store": f"file://{tmp_path}/store", "background": False},
    )
    train(tmp_path / "a", how, Small())
    faults = faults_of(tmp_path / "a")
    assert [(fault.step, "its copy in the store" in fault.action) for fault in faults] == [
        (4, True),
        (8, True),
        (12, True),
    ]
    assert manifest.steps(tmp_path / "a") == [4, 8, 12]


@pytest.mark.parametrize(("url", "error"), [("nosuch://x", SpecError), ("adl://x", MissingExtra)])
def test_a_store_that_cannot_be_opened_is_refused_before_anything_is_written(
    url: str, error: type, tmp_path: Path
) -> None:
    with pytest.raises(error, match=r"checkpoint\.store"):
        train(tmp_path / "a", spec(4, checkpoint={"store": url}), Small())
    assert not (tmp_path / "a").exists()
