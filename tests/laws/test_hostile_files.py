"""Reading a stranger's spec or run runs none of its code.

Damaged or hostile weights are refused by name.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from surefoot.contract import commits, digest, manifest, spec_file
from surefoot.core.errors import InputError, RunFolderError, SpecError
from tests.cli.forked_commands import run_forked

TASK = """
from pathlib import Path
Path({canary!r}).write_text("this code ran")
class Mine:
    def __init__(self, width: int = 3) -> None: ...
"""
SPEC = '[task]\nuse = "mine.py:Mine"\nwidth = 4\n'


def commit(folder: Path, *names: str) -> None:
    """A whole commit of small files, as a run would leave it."""
    folder.mkdir(parents=True)
    entries = []
    for name in names:
        if "/" not in name:
            (folder / name).write_bytes(b"weights")
        entries.append(
            manifest.Entry(name=name, num_bytes=7, sha256=digest.digest_of_bytes(b"weights"))
        )
    made = manifest.Manifest(
        step=1, generation=1, spec_id="x", files=tuple(entries), environment={}
    )
    (folder / manifest.FILE).write_text(made.as_text())


@pytest.mark.parametrize(
    "words",
    [
        ("spec", "check", "mine.toml"),
        ("spec", "show", "mine.toml"),
        ("runs", "."),
        ("show", "run"),
        ("compare", "run", "run"),
        ("ledger", "run"),
        ("checkpoint", "check", "run"),
        ("checkpoint", "prune", "run"),
    ],
)
def test_reading_a_stranger_s_spec_or_run_runs_none_of_its_code(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "mine.py").write_text(TASK.format(canary=str(canary)))
    (tmp_path / "mine.toml").write_text(SPEC)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.toml").write_text(SPEC.replace("mine.py", "../mine.py"))
    (tmp_path / "run" / "events.jsonl").write_text("")
    (tmp_path / "run" / "checkpoints").mkdir()
    done = run_forked(*words, folder=tmp_path)
    assert not canary.exists()
    assert "Traceback" not in done.stderr
    if words[0] == "spec":
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["../weights", "/etc/passwd", "a/b", ".hidden", "-rf", "a b", "", "x" * 129, "a\x00b"]
)
def test_a_manifest_that_names_anything_but_a_plain_file_is_refused(
    name: str, tmp_path: Path
) -> None:
    commit(tmp_path / "step", "model.safetensors")
    path = tmp_path / "step" / manifest.FILE
    row = json.loads(path.read_text())
    row.pop("sha256")
    row["files"][0]["name"] = name
    # a hostile writer gives the right digest
    own = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**row, "sha256": own}))
    with pytest.raises(RunFolderError, match="not a plain file name"):
        commits.check(tmp_path / "step")


def test_every_flipped_bit_of_a_commit_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    commit(folder, "model.safetensors")
    commits.check(folder)
    for path in (folder / "model.safetensors", folder / manifest.FILE):
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(
                whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :]
            )
            with pytest.raises(RunFolderError, match=path.name):
                commits.check(folder)
        path.write_bytes(whole)
    commits.check(folder)


def test_weights_that_are_a_symbolic_link_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    commit(folder, "model.safetensors")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=r"model\.safetensors"):
        commits.check(folder)


HOSTILE = {
    "an unknown table": "[task]\nuse = 'digits'\n[__class__]\nx = 1\n",
    "an unknown key": "[task]\nuse = 'digits'\n[train]\n__init__ = 1\n",
    "not a number": "[task]\nuse = 'digits'\n[optim]\nlr = nan\n",
    "infinity": "[task]\nuse = 'digits'\n[optim]\nlr = inf\n",
    "a giant integer": f"[task]\nuse = 'digits'\n[train]\nbatch = {'9' * 5000}\n",
    "another type": "[task]\nuse = 'digits'\n[train]\nbatch = '128'\n",
    "deep nesting": "[task]\nuse = 'digits'\nx = " + "[" * 20_000 + "]" * 20_000 + "\n",
    "a base that is its own": "base = 'hostile.toml'\n",
    "more than a spec has": "# " + "x" * (1 << 20) + "\n[task]\nuse = 'digits'\n",
    "bytes that are no text": "[task]\nuse = '\udcff'\n",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_spec_is_refused_with_words(what: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.toml"
    path.write_bytes(HOSTILE[what].encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as caught:
        spec_file.read(str(path))
    assert isinstance(caught.value, SpecError)
    assert len(str(caught.value)) < 2_000


def test_nothing_in_a_spec_is_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the machine")
    path = tmp_path / "a.toml"
    path.write_text("[task]\nuse = 'digits'\n[data]\nfolder = '$SECRET/${SECRET}/$(id)'\n")
    folder = spec_file.read(str(path)).spec.data.folder
    assert folder is not None
    assert folder.endswith("$SECRET/${SECRET}/$(id)")
