"""Files in another format, empty or missing: the error names the format and the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.data import Arrays, Table

FILES = {
    "a.csv": (
        b"x,y\n1,2\n",
        "is a text file, not Parquet or Arrow",
        "pyarrow.csv.read_csv('a.csv')",
    ),
    "a.jsonl": (b'{"x": 1}\n', "is a text file", "pyarrow.json.read_json('a.jsonl')"),
    "long.txt": ("ä,b\n".encode() * 999, "is a text file", "'long.parquet'"),
    "empty.parquet": (b"", "is empty", "write it again"),
    "cut.parquet": (b"PAR1\x15\x04", "cannot be read as Parquet or Arrow", "copy it again"),
    "image.parquet": (b"\x89PNG\r\n\x1a\n\0", "cannot be read as Parquet", "write it as Parquet"),
    "missing.parquet": (None, "No such file or directory", "check the name"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_table_names_the_format_of_a_file_that_it_cannot_read(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    content, message, hint = FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        Table(str(tmp_path / name), x="x")
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


def test_the_command_of_the_hint_writes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("x,y\n1,2\n3,4\n")
    with pytest.raises(DataError) as caught:
        Table("a.csv", x="x")
    command = str(caught.value.hint).removeprefix("convert it once: ")
    # in a process of its own: the threads of the reader abort a fork of this one
    script = f"import pyarrow, pyarrow.csv, pyarrow.parquet\n{command}"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert Table("a.parquet", x="x").read(np.arange(2))["x"].tolist() == [1, 3]


def test_an_npz_leads_to_its_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2)))
    with pytest.raises(DataError) as caught:
        Arrays.of_files(x=tmp_path / "a.npz")
    assert f'Arrays(**numpy.load("{tmp_path / "a.npz"}"))' in str(caught.value.hint)


def test_samples_of_a_tensor_with_a_gradient_have_none() -> None:
    leaf = torch.ones(4, requires_grad=True)
    for given in (leaf, leaf * 2, torch.nn.Parameter(torch.ones(4)), leaf.view(2, 2)):
        (rows,) = Arrays(given).read(np.array([0, 1]))
        assert not rows.requires_grad
        assert torch.equal(rows, given[:2])
