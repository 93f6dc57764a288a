"""The Python corpus: which files are read, which are held out, what its digest covers.

And that the transformer learns from them.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import pytest

from surefoot import Run
from surefoot.contract import spec_file
from surefoot.core.errors import DataError
from surefoot.core.units import Duration
from surefoot.tasks.pycorpus import PyCorpus, find_files, is_held_out


@pytest.fixture(scope="module")
def task() -> PyCorpus:
    return PyCorpus(layers=1, width=32, heads=2, length=64)


def write(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    return folder


def test_the_standard_library_is_read_without_tests_packages_and_the_manual(task: PyCorpus) -> None:
    names = find_files(task.folder)
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py", "typing.py"} <= set(names)
    assert not [
        name
        for name in names
        if {"test", "tests", "site-packages", "pydoc_data"} & set(name.split("/"))
    ]


def test_about_a_tenth_of_the_files_is_held_out_by_name_and_no_file_is_on_both_sides(
    task: PyCorpus,
) -> None:
    names = find_files(task.folder)
    held_out = [name for name in names if is_held_out(name)]
    assert 0.07 < len(held_out) / len(names) < 0.14
    # fixed: the same names for every Python
    assert {"enum.py", "subprocess.py", "traceback.py"} <= set(held_out)
    kept = {name for name in names if name not in held_out}
    train, heldout = task.data("train"), task.data("heldout")
    assert (train.names, heldout.names) == (sorted(kept), held_out)


def test_every_byte_but_the_first_is_predicted_once_and_is_the_file_s_own(task: PyCorpus) -> None:
    source = task.data("heldout")
    batch = source.read(np.arange(len(source)))
    targets = batch["targets"][batch["targets"] != -100].numpy().astype(np.uint8).tobytes()
    contents = b"".join((task.folder / name).read_bytes() for name in source.names)
    assert targets == contents[1:]


def test_the_digest_changes_with_a_name_a_byte_and_the_version_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, ["one.py", "two.py", "deep/three.py"])
    first = PyCorpus(str(folder), length=8).data("train")
    assert f"Python {platform.python_version()}" in first.describe()
    assert first.listing[:12] in first.describe()
    (folder / "one.py").write_text("# 0ne.py\n")
    assert PyCorpus(str(folder), length=8).data("train").digest != first.digest
    (folder / "one.py").write_text("# one.py\n")
    assert PyCorpus(str(folder), length=8).data("train").digest == first.digest
    (folder / "one.py").rename(folder / "One.py")
    assert PyCorpus(str(folder), length=8).data("train").digest != first.digest
    (folder / "One.py").rename(folder / "one.py")
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert PyCorpus(str(folder), length=8).data("train").digest != first.digest


def test_a_folder_that_is_missing_or_has_no_source_and_an_unknown_split_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        PyCorpus(str(tmp_path / "nowhere")).data("train")
    write(tmp_path, ["tests/one.py", "__pycache__/two.py", "notes.txt"])
    with pytest.raises(DataError, match="holds no Python source"):
        PyCorpus(str(tmp_path)).data("train")
    with pytest.raises(DataError, match='use "train" or "heldout"'):
        PyCorpus(str(tmp_path)).data("test")


def test_its_recipe_sees_at_most_8_million_bytes() -> None:
    spec = spec_file.read("pycorpus").spec
    source_bytes = spec.train.batch * int(spec.task.parameters["length"])
    steps = Duration.parse(spec.train.length).to_steps(10**6, spec.train.batch, source_bytes)
    assert steps * source_bytes <= 8_000_000


@pytest.mark.slow
def test_a_small_transformer_needs_under_4_and_a_half_bits_a_byte_after_30000_of_them(
    tmp_path: Path,
) -> None:
    """A byte of this text has 4.6 bits by its frequency alone, 8 without any knowledge."""
    changes = [
        (f"task.{name}", value, "")
        for name, value in {"layers": 1, "width": 32, "heads": 2, "length": 64}.items()
    ]
    changes += [
        ("data.folder", str(Path(json.__file__).parent), ""),
        ("train.length", "60 steps", ""),
        ("train.batch", 8, ""),
    ]
    changes += [("schedule.warmup", "5 steps", ""), ("evaluate.batch", 64, "")]
    with Run(spec_file.read("pycorpus", changes).spec, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
        assert run.evaluate("train").metrics["bits_per_byte"] < 4.5
