"""Names and files in other encodings, and screens that show ASCII alone.

Every command ends as it would in UTF-8.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.contract import spec_file
from surefoot.control.report.files import read_measured
from surefoot.core.errors import SpecError
from tests.cli.conftest import Command
from tests.train.small import FEW, call, write_task

ROOT = Path(__file__).resolve().parents[2]
ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NAME = "läufe-é-日本"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, both with names that are not ASCII."""
    folder = tmp_path_factory.mktemp("encodings")
    run = folder / NAME / "größe"
    with pytest.MonkeyPatch.context() as patch:
        assert call(patch, "train", write_task(folder), *FEW, "--run", str(run), "--quiet") == 0
    return run


def test_every_looking_verb_ends_as_it_would_on_a_screen_of_ascii(trained: Path) -> None:
    verbs = [
        ["show", trained],
        ["runs", trained.parent],
        ["why", trained],
        ["ledger", trained],
        ["compare", trained, trained],
        ["check", trained],
        ["checkpoint", "list", trained],
        ["report", trained],
        ["show", trained.parent / "nichts-ü"],
        ["spec", "show", trained.parent / "ü.toml"],
        ["ü"],
    ]
    program = (
        "import sys\nfrom surefoot.cli.main import main\n"
        f"for words in {[list(map(str, words)) for words in verbs]!a}:\n"
        "    sys.argv = ['surefoot', *(word.encode().decode('ascii', 'surrogateescape') "
        "for word in words)]\n"
        "    try:\n        main()\n    except SystemExit as left:\n"
        "        print('code', left.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **ASCII},
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=300,
    )
    codes = [
        line.split()[1]
        for line in done.stdout.decode("ascii").splitlines()
        if line.startswith("code ")
    ]
    assert codes == ["0"] * 8 + ["2"] * 3, done.stderr.decode(errors="replace")


def test_a_name_that_is_no_text_is_printed_as_an_escape(trained: Path, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/run-\xff"
    os.symlink(trained, odd)
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "checkpoint", "list", odd, "--json"],
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "show", odd + b"-none"],
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 2, done.stderr


TEXT = '[task]\nuse = "digits"\n[train]\nlength = "2 steps"\n'


def test_a_spec_with_a_byte_order_mark_is_read_and_its_lines_are_counted_as_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert str(spec_file.read(str(path)).spec.train.length) == "2 steps"
    path.write_bytes(b"\xef\xbb\xbf" + (TEXT + "bacth = 3\n").encode())
    with pytest.raises(SpecError, match=r"a\.toml:5: .*bacth"):
        spec_file.read(str(path))
    path.write_text('base = "b.toml"\n[optim]\nlr = 0.5\n', encoding="utf-8-sig")
    (tmp_path / "b.toml").write_text(TEXT, encoding="utf-8-sig")
    assert spec_file.read(str(path)).spec.task.use == "digits"
    path.write_text(TEXT, encoding="utf-16")
    with pytest.raises(SpecError, match="is not UTF-8 text") as refused:
        spec_file.read(str(path))
    assert "save the spec as UTF-8" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("encoding", "first"),
    [
        ("utf-8-sig", ""),
        ("latin-1", "# coding: latin-1\n"),
        ("cp1252", "# -*- coding: cp1252 -*-\n"),
    ],
)
def test_a_task_file_is_read_in_the_encoding_that_python_reads_it_in(
    encoding: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_task(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(first + '"""Größe."""\n' + path.read_text(), encoding=encoding)
    assert call(monkeypatch, "train", task, *FEW, "--run", str(tmp_path / "run"), "--quiet") == 0


def test_a_task_whose_folder_is_no_text_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"task\.use is .* which is not UTF-8 text") as refused:
        spec_file.read(f"{tmp_path}/\udcff/mine.py:Mine")
    assert "LC_ALL=C.UTF-8" in str(refused.value.hint)


def test_names_that_no_disk_takes_are_bad_input(surefoot: Command, tmp_path: Path) -> None:
    long, (file, text) = "a" * 300, (tmp_path / "file", "x")
    file.write_text(text)
    for words in (
        ["train", "digits", "--run", long],
        ["show", long],
        ["train", f"{long}.toml"],
        ["resume", long],
        ["check", file / "below"],
        ["train", "digits", "--run", file / "below"],
        ["report", long],
    ):
        answer = surefoot(*words)
        assert answer.code == 2, (words, answer.err)
        assert "hint: " in answer.err


def test_a_table_of_batches_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "batch,microbatch,peak_bytes\n64,32,1000\n", encoding="utf-8-sig"
    )
    assert [each.split for each in read_measured(tmp_path / "a.csv")] == [(64, 32)]


def test_a_stream_that_was_a_file_and_is_a_pipe_now_is_written_to_all_the_same(
    tmp_path: Path,
) -> None:
    """As the ranks of a launcher have it, which were forked from one process."""
    program = (
        "import os, sys\n"
        "read, write = os.pipe()\nos.dup2(write, 1)\nsys.argv = ['surefoot', '--help']\n"
        "from surefoot.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as left:\n"
        "    print(os.read(read, 99), left.code, file=sys.stderr)\n"
    )
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("b'")
    assert done.stderr.endswith(" 0\n")
