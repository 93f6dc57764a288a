"""Code in a checkpoint of others never runs, and the process that reads one cannot do harm."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from surefoot.components.checkpoint import foreign
from surefoot.components.checkpoint.foreign import child
from surefoot.core.errors import InputError
from tests.components.test_foreign import ROOT
from tests.prove.forked import programs_are_forked

__all__ = ["programs_are_forked"]


class Hostile:
    """What a pickle may hold: a call that is made while it is opened."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (f"open({str(self.canary)!r}, 'w')",)


def as_zip(path: Path, hostile: Hostile) -> Path:
    torch.save({"weights": torch.ones(3), "more": hostile}, path)
    return path


def as_pickle(path: Path, hostile: Hostile) -> Path:
    path.write_bytes(pickle.dumps(hostile))
    return path


def as_metadata(path: Path, hostile: Hostile) -> Path:
    folder = path.with_suffix("")
    dcp.save({"weights": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(pickle.dumps(hostile))
    return folder


def as_piece(path: Path, hostile: Hostile) -> Path:
    """Metadata as they should be, and a tensor that is none."""
    folder = path.with_suffix("")
    dcp.save({"weights": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    (piece,) = folder.glob("*.distcp")
    size = piece.stat().st_size
    piece.write_bytes(pickle.dumps(hostile).ljust(size, b"\0"))
    return folder


@pytest.mark.parametrize("write", [as_zip, as_pickle, as_metadata, as_piece])
@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"
)
def test_a_hostile_pickle_runs_nothing_even_without_the_confinement(
    write: Callable[[Path, Hostile], Path], tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    path = write(tmp_path / "hostile.pt", Hostile(canary))
    with pytest.raises(InputError, match=path.name):
        child.read(path)
    assert not canary.exists()


@pytest.mark.quick("as_zip")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [as_zip, as_metadata])
@pytest.mark.usefixtures("programs_are_forked")
def test_a_hostile_pickle_is_refused_in_words(
    write: Callable[[Path, Hostile], Path], tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    path = write(tmp_path / "hostile.pt", Hostile(canary))
    with pytest.raises(InputError, match=path.name) as caught:
        foreign.open_foreign(path)
    assert not canary.exists()
    assert len(str(caught.value)) < 1_000


@pytest.mark.usefixtures("programs_are_forked")
def test_a_tensor_that_claims_terabytes_is_refused_by_the_bound_on_memory(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(1).expand(2**40)}, tmp_path / "bomb.pt")
    with pytest.raises(InputError, match=r"bomb\.pt"):
        foreign.open_foreign(tmp_path / "bomb.pt")


ATTEMPTS = {
    "to start a program": "import subprocess; subprocess.run(['true'])",
    "to start a shell": "import os; os.system('true')",
    "to fork": "import os; os.fork()",
    "to connect": "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)",
    "to write elsewhere": "open(elsewhere, 'w')",
    "to write elsewhere by a descriptor": "import os; os.open(elsewhere, os.O_WRONLY | os.O_CREAT)",
    "to delete": "import os; os.remove(victim)",
    "to move something away": "import os; os.rename(victim, folder + '/x')",
    "to call C": "import ctypes; ctypes.CDLL(None)",
    "to use memory": "x = bytearray(1 << 31)",
    "to write without end": "open(folder + '/much', 'wb').write(bytes(300 << 20))",
}
SCRIPT = """
import os, sys
from pathlib import Path
from surefoot.components.checkpoint.foreign import confinement
from surefoot.core.errors import InputError
folder, elsewhere, victim = sys.argv[1:4]
os.chdir(folder)
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
missing = confinement.confine(Path(folder), 256 << 20, 30)
open(folder + "/inside", "w").write("allowed")
print(missing)
for what, code in eval(sys.argv[4]).items():
    try:
        exec(code)
    except (InputError, OSError, MemoryError):
        print("refused", what)
with open("/proc/net/dev") as file:
    print("devices", sorted(line.split(":")[0].strip() for line in file if ":" in line))
"""


def test_the_process_that_reads_can_not_start_connect_write_elsewhere_or_grow(
    tmp_path: Path,
) -> None:
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("stays")
    words = [sys.executable, "-c", SCRIPT, folder, tmp_path / "elsewhere", victim, repr(ATTEMPTS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, words)), env=environment, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert [what for what in ATTEMPTS if f"refused {what}" not in lines] == [], done.stderr
    assert victim.read_text() == "stays"
    assert not (tmp_path / "elsewhere").exists()
    if lines[0] == "[]":  # this machine lets a process leave its network
        assert lines[-1] == "devices ['lo']"
