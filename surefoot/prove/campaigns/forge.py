"""Campaign with hostile checkpoints: all digests are valid, but the contents do harm.

A child process with limited memory opens each checkpoint. Everything that it does outside of the
run is recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.contract import commits, digest, manifest
from surefoot.contract.events import Fault
from surefoot.core.errors import EXIT_OK, InputError
from surefoot.prove.campaigns import jobs
from surefoot.prove.campaigns.damage import copy_run, find_left
from surefoot.prove.campaigns.outcome import TrialResult
from surefoot.prove.campaigns.probe import VARIANTS
from surefoot.prove.campaigns.workshop import Child, Workshop, read_events

MEMORY_BYTES = 1 << 30  # beyond what the child holds before it opens the run
BESIDE = ("events.jsonl", "ledger.bin", "spec.toml", "run.lock")
# a sparse file of this size takes no space on the disk, and does not fit into memory
SPARSE_BYTES = 3 << 29
MANY = 2_000_000
SLOTS = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.safetensors",
    "state.json",
    "clock.json",
)
STATED = ("optimizer", "average", "random", "buffers", "task", "guard", "num_samples")
Row = dict[str, Any]


@dataclass(frozen=True)
class ForgedCommit:
    """Newest checkpoint of a run, which a trial makes hostile.

    Args:
        folder: Folder of the checkpoint.
        row: Contents of its manifest.
        outside: Folder outside of the run, which the checkpoint tries to reach.
        draws: Random generator with the seed of the trial.
    """

    folder: Path
    row: Row
    outside: Path
    draws: random.Random

    def file(self, *, tensors: bool | None = None) -> Row:
        """Return the manifest entry of a random file.

        `tensors` selects a file with tensors (True) or without (False); None selects either.
        """
        kind = self.draws.random() < 0.5 if tensors is None else tensors
        row: Row = self.draws.choice(
            [each for each in self.row["files"] if (each["tensors"] is not None) == kind]
        )
        return row

    def named(self, name: str) -> Row:
        row: Row = next(each for each in self.row["files"] if each["name"] == name)
        return row

    def piece(self) -> Row:
        row: Row = self.draws.choice(list(self.file(tensors=True)["tensors"].values()))
        return row

    def write(self, entry: Row, data: bytes) -> None:
        """Write `data` to a file of the checkpoint, and its size and digest to the manifest."""
        self.put(entry, data)
        entry |= {"num_bytes": len(data), "sha256": digest.digest_of_bytes(data), "tensors": None}

    def put(self, entry: Row, data: bytes) -> None:
        path = self.folder / entry["name"]
        path.unlink(missing_ok=True)  # it may be a hard link to a file of another checkpoint
        path.write_bytes(data)
        os.truncate(
            path, max(len(data), entry["num_bytes"] if entry["num_bytes"] == SPARSE_BYTES else 0)
        )

    def rewrite_header(self, entry: Row, change: Callable[[bytes], bytes]) -> None:
        """Change the JSON header of a safetensors file, and set the digest of the changed file."""
        data = (self.folder / entry["name"]).read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        text = change(data[8:size])
        header = len(text).to_bytes(8, "little") + text
        self.put(entry, header + data[size:])
        pieces = {name: manifest.Piece(**piece) for name, piece in entry["tensors"].items()}
        entry["num_bytes"] += len(header) - size
        entry["sha256"] = commits.digest_of(
            header, {name: piece.sha256 for name, piece in pieces.items()}, pieces
        )

    def sign(self) -> None:
        own = hashlib.sha256(json.dumps(self.row, sort_keys=True).encode()).hexdigest()
        (self.folder / manifest.FILE).write_text(json.dumps({**self.row, "sha256": own}))


Forge = Callable[[ForgedCommit], object]


def forge(change: Forge, folder: Path, outside: Path, draws: random.Random) -> None:
    """Make the checkpoint in `folder` hostile with `change`, and update its manifest's digest.

    The digest is not updated if `change` replaced the manifest by a link or by other bytes.
    """
    row = json.loads((folder / manifest.FILE).read_text())
    one = ForgedCommit(
        folder, {key: value for key, value in row.items() if key != "sha256"}, outside, draws
    )
    change(one)
    if one.row and not folder.is_symlink() and not (folder / manifest.FILE).is_symlink():
        one.sign()


def gadget(canary: Path) -> bytes:
    """Return a pickle that creates the file `canary` as soon as it is loaded."""
    return b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."


# ---- what a manifest may say


def _set(row: Callable[[ForgedCommit], Row], values: Row) -> Forge:
    """Return a function that updates an object in the manifest, which `row` selects."""
    return lambda one: row(one).update(values)


def _whole(one: ForgedCommit) -> Row:
    return one.row


def _tensor_file(one: ForgedCommit) -> Row:
    return one.file(tensors=True)


def _shape(*sizes: int) -> Forge:
    return _set(
        ForgedCommit.piece,
        {"shape": list(sizes), "whole": list(sizes), "offset": [0] * len(sizes)},
    )


def _reach_out(one: ForgedCommit, name: str) -> None:
    """Make the manifest name a file outside of the run, with the correct size and digest."""
    data = (one.outside / "secret").read_bytes()
    one.file(tensors=False).update(
        name=name, num_bytes=len(data), sha256=digest.digest_of_bytes(data)
    )


def _reach_by_link(one: ForgedCommit) -> None:
    entry = one.file(tensors=False)
    one.write(entry, (one.outside / "secret").read_bytes())
    (one.folder / entry["name"]).unlink()
    (one.folder / entry["name"]).symlink_to(one.outside / "secret")


def _link(one: ForgedCommit, path: Path) -> None:
    """Move the manifest or the checkpoint folder away, and leave a symbolic link to it.

    The digest of the manifest is updated first.
    """
    one.sign()
    path.symlink_to(path.rename(one.outside / "elsewhere"))


def _pipe(one: ForgedCommit) -> None:
    path = one.folder / one.file()["name"]
    path.unlink()
    os.mkfifo(path)


def _claim(one: ForgedCommit) -> None:
    """Make the manifest declare a tensor that is far larger than its file."""
    entry = _tensor_file(one)
    piece = max(entry["tensors"].values(), key=lambda each: int(each["start"]))
    piece.update(dtype="U8", shape=[2**44], whole=[2**44], offset=[0])
    entry["num_bytes"] = piece["start"] + 2**44 + 1000


def _sparse_tensor(one: ForgedCommit) -> None:
    """Make a huge tensor that is a hole in a sparse file.

    A reader must not allocate the size of the file before it knows that it needs the tensor.
    """
    entry = one.named("state.safetensors")
    name, piece = max(entry["tensors"].items(), key=lambda pair: pair[1]["start"])
    entry["num_bytes"] += SPARSE_BYTES - piece["shape"][0]
    piece.update(dtype="U8", shape=[SPARSE_BYTES], whole=[SPARSE_BYTES], offset=[0])
    row = {
        "dtype": "U8",
        "shape": [SPARSE_BYTES],
        "data_offsets": [piece["start"], piece["start"] + SPARSE_BYTES],
    }
    one.rewrite_header(entry, lambda header: json.dumps({**json.loads(header), name: row}).encode())
    os.truncate(one.folder / entry["name"], entry["num_bytes"])


def _sparse_file(one: ForgedCommit, entry: Row, tensors: Row | None, head: bytes = b"") -> None:
    entry.update(tensors=tensors, num_bytes=SPARSE_BYTES)
    one.put(entry, head)


def _state(change: Callable[[Row], Any]) -> Forge:
    """Return a function that changes the object in state.json, or replaces it by other bytes."""

    def do(one: ForgedCommit) -> None:
        changed = change(json.loads((one.folder / "state.json").read_text()))
        one.write(
            one.named("state.json"),
            changed if isinstance(changed, bytes) else json.dumps(changed).encode(),
        )

    return do


def _without(key: str) -> Forge:
    return _state(lambda tree: {name: value for name, value in tree.items() if name != key})


def _clock(text: bytes) -> Forge:
    return lambda one: one.write(one.named("clock.json"), text)


def _pickle(one: ForgedCommit, name: str) -> None:
    """Replace the file `name` by a pickle, or a safetensors file if the checkpoint lacks it."""
    own = [each for each in one.row["files"] if each["name"] == name]
    one.write(own[0] if own else _tensor_file(one), gadget(one.outside / "canary"))


def _raw(one: ForgedCommit, data: bytes) -> None:
    """Write the bytes `data` as the manifest."""
    (one.folder / manifest.FILE).write_bytes(data)
    one.row.clear()


def _twice(one: ForgedCommit) -> bytes:
    one.sign()
    return (one.folder / manifest.FILE).read_bytes().replace(b'{"', b'{"step": 3, "', 1)


SCORE = {"name": "a", "value": 0.5, "better": "higher"}
HOSTILE: Mapping[str, Forge] = {
    # names and links that lead out of the folder
    "a file outside": lambda one: _reach_out(one, "../../../outside/secret"),
    "a file by its path": lambda one: _reach_out(one, str(one.outside / "secret")),
    "a link outside": _reach_by_link,
    "a linked manifest": lambda one: _link(one, one.folder / manifest.FILE),
    "a linked folder": lambda one: _link(one, one.folder),
    "a pipe": _pipe,
    "an endless device": lambda one: one.file(tensors=False).update(
        name="../../../../../../../../dev/zero"
    ),
    **{
        f"the name {text[:12]!r}": _set(ForgedCommit.file, {"name": text})
        for text in ("..", "a/../b", "/dev/zero", "x" * 300, "a\0b", "-rf", "manifest.json", "")
    },
    # sizes
    **{
        f"a size of {size}": _set(_tensor_file, {"num_bytes": size})
        for size in (2**63, 2**48, -1, 1e300, True, "9")
    },
    "a sparse tensor": _sparse_tensor,
    "a sparse header": lambda one: _sparse_file(
        one, _tensor_file(one), {}, (SPARSE_BYTES - 8).to_bytes(8, "little")
    ),
    "a sparse text": lambda one: _sparse_file(one, one.named("state.json"), None),
    "a tensor larger than its file": _claim,
    # tensors
    "dimensions of 2^63": _shape(2**63, 2),
    "of 2^48 and 0": _shape(0, 2**48, 2**48),
    "65 dimensions": _shape(*[1] * 65),
    "a negative dimension": _shape(-1, -1),
    "an offset outside": _set(ForgedCommit.piece, {"offset": [2**40]}),
    "an owner": _set(ForgedCommit.piece, {"owner": -1}),
    "a negative offset": _set(ForgedCommit.piece, {"offset": [-1]}),
    "a stride": _set(ForgedCommit.piece, {"stride": [0]}),
    "a negative start": _set(ForgedCommit.piece, {"start": -8}),
    "a start of NaN": _set(ForgedCommit.piece, {"start": float("nan")}),
    "a dtype that is a list": _set(ForgedCommit.piece, {"dtype": ["F32"]}),
    "a dtype of Python": _set(ForgedCommit.piece, {"dtype": "O"}),
    # the manifest's fields
    "a step of NaN": _set(_whole, {"step": float("nan")}),
    "a step of infinity": _set(_whole, {"step": float("inf")}),
    "a huge step": _set(_whole, {"step": 10**4000}),
    "a huge generation": _set(_whole, {"generation": 10**4000}),
    "no format": _set(_whole, {"format": -1}),
    "a huge score": _set(_whole, {"score": {"name": "a", "value": 10**400, "better": "higher"}}),
    "a score of objects": _set(_whole, {"score": {"name": [], "value": {}, "better": 3}}),
    **{
        f"a score of {value}": _set(_whole, {"score": {**SCORE, "value": value}})
        for value in (True, float("nan"), float("-inf"))
    },
    "a score where up is better": _set(_whole, {"score": {**SCORE, "better": "up"}}),
    "two ranks": _set(_whole, {"layout": {"world_size": 2}}),
    "no ranks": _set(_whole, {"layout": {}}),
    "deep parents": _set(_whole, {"parent": {"a": json.loads("[" * 900 + "]" * 900)}}),
    "a key twice": lambda one: _raw(one, _twice(one)),
    "deep nesting": lambda one: _raw(one, b"[" * 10**6),
    "no text": lambda one: _raw(one, bytes(range(128, 256))),
    "many entries": lambda one: _raw(one, b'{"files": [' + b"{}," * MANY + b"{}]}"),
    "many lists": lambda one: _raw(one, b"[" + b"[]," * (10 * MANY) + b"1]"),
    "long digits": lambda one: _raw(one, b'{"step": ' + b"9" * 10**6 + b"}"),
    "a pickle as the manifest": lambda one: _raw(one, gadget(one.outside / "canary")),
    # headers of safetensors files
    "a long header": lambda one: one.rewrite_header(
        _tensor_file(one), lambda header: header + b" " * (1 << 20)
    ),
    "a deep header": lambda one: one.rewrite_header(_tensor_file(one), lambda header: b"[" * 10**6),
    # files of a different kind, and invalid states
    **{f"a pickle as {name}": partial(_pickle, name=name) for name in SLOTS},
    **{f"a state without {key}": _without(key) for key in STATED},
    "a state that is a list": _state(lambda tree: [tree]),
    "a deep state": _state(lambda tree: b"[" * 10**6),
    "a state of a different kind": _state(
        lambda tree: {**tree, "random": {"$": "os.system", "value": "touch canary"}}
    ),
    "random states of none": _state(
        lambda tree: {**tree, "random": {"torch": 1, "cuda": 2, "numpy": 3, "python": 4}}
    ),
    "a state of a dtype": _state(
        lambda tree: {**tree, "plateau": {"$": "dtype", "value": "__import__('os')"}}
    ),
    "a state of another step": _state(lambda tree: {**tree, "step": 1}),
    "counters of no number": _state(lambda tree: {**tree, "num_samples": "many", "guard": None}),
    "a clock that is a list": _clock(b"[]"),
    "a clock of a different kind": _clock(b'{"training_s": "soon"}'),
    "a clock of nothing": _clock(b""),
}


# ---- trials


def open_a_hostile_commit(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Open a hostile checkpoint in a child process.

    None of its code may run, nothing outside of the run may be touched, and the checkpoint must be
    refused with a message or set aside.
    """
    draws = random.Random(seed)
    kinds = [*HOSTILE, *(f"a pickle beside: {name}" for name in BESIDE)]
    kind, left = kinds[seed % len(kinds)], find_left(workshop, draws.choice(list(VARIANTS)))
    run, outside = folder / "run", folder / "outside"
    outside.mkdir()
    (outside / "secret").write_text("this is for nobody")
    copy_run(left.folder, run)
    step = max(manifest.steps(run))
    newest, state = manifest.step_folder(run, step), workshop.golden(left).marks[step]
    if kind in HOSTILE:
        forge(HOSTILE[kind], newest, outside, draws)
    else:
        (run / kind.rpartition(" ")[2]).write_bytes(gadget(outside / "canary"))
    child = workshop.fork(jobs.open_run, replace(left, folder=run, memory_bytes=MEMORY_BYTES))
    status = child.wait()
    wrong = (
        "code of it ran"
        if (outside / "canary").exists()
        else _find_wrong(newest, state, status, child)
    )
    return TrialResult(wrong and f"{kind}: {wrong}", ("refused" if status else "set aside",))


def _find_wrong(newest: Path, state: str, status: int, child: Child) -> str | None:
    run, said = newest.parents[1], child.said
    if touched := [mark for mark in child.marks if mark.startswith("outside")]:
        return f"something outside of the run was touched: {touched[0]}"
    if status not in (EXIT_OK, InputError.exit_code) or "Traceback" in said:
        return f"the child ended with {status}: {said[-600:]}"
    if status == InputError.exit_code:
        return (
            None
            if str(run) in said or f"step {int(newest.name.removeprefix('step-'))}" in said
            else f"it was refused, and not named: {said}"
        )
    told = [event.detail for event in read_events(run, Fault)]
    is_aside = not newest.exists() and len(told) == 1 and str(newest) in told[0]
    # any other output is harmless if the state is that of the run
    return (
        None
        if is_aside or state in child.marks
        else f"a different state was loaded, and the events tell of {told}"
    )
