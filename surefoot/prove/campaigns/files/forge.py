"""Hostile commits, made: every digest is right, and what they say is meant to do harm to whoever opens them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.contract import commits, digest, manifest

SPARSE_BYTES = 3 << 29  # a file that is as long as it says, takes no room on the disk, and does not fit into memory
MANY = 2_000_000
SLOTS = ("model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json", "clock.json")
STATED = ("optimizer", "average", "random", "buffers", "task", "guard", "num_samples")
Row = dict[str, Any]


@dataclass(frozen=True)
class Commit:
    """The newest commit of a run in the hands of a stranger: its folder, its manifest as an object, what it wants to reach."""

    folder: Path
    row: Row
    outside: Path
    draws: random.Random

    def entry(self, *, tensors: bool) -> Row:
        row: Row = self.draws.choice([each for each in self.row["files"] if (each["tensors"] is not None) == tensors])
        return row

    def piece(self) -> Row:
        row: Row = self.draws.choice(list(self.entry(tensors=True)["tensors"].values()))
        return row

    def write(self, entry: Row, data: bytes) -> None:
        """Give a file other bytes, with the digest of these bytes."""
        path = self.folder / entry["name"]
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        entry |= {"num_bytes": len(data), "sha256": digest.of_bytes(data), "tensors": None}

    def rewrite_header(self, entry: Row, change: Callable[[bytes], bytes]) -> None:
        """Give a file of tensors another header of JSON, and the digest that goes with it."""
        path = self.folder / entry["name"]
        data = path.read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        text = change(data[8:size])
        header = len(text).to_bytes(8, "little") + text
        path.unlink()
        path.write_bytes(header + data[size:])
        pieces = {name: manifest.Piece(**piece) for name, piece in entry["tensors"].items()}
        entry["num_bytes"] += len(header) - size
        entry["sha256"] = commits.digest_of(header, {name: piece.sha256 for name, piece in pieces.items()}, pieces)

    def sign(self) -> None:
        own = hashlib.sha256(json.dumps(self.row, sort_keys=True).encode()).hexdigest()
        (self.folder / manifest.FILE).write_text(json.dumps({**self.row, "sha256": own}))


def gadget(canary: Path) -> bytes:
    """A pickle that touches a file as soon as it is loaded."""
    return b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."


# ---- what a manifest may say


def _name(text: str) -> Callable[[Commit], None]:
    return lambda one: one.entry(tensors=one.draws.random() < 0.5).update(name=text)


def _of_entry(key: str, value: Any) -> Callable[[Commit], None]:
    return lambda one: one.entry(tensors=True).update({key: value})


def _of_piece(key: str, value: Any) -> Callable[[Commit], None]:
    return lambda one: one.piece().update({key: value})


def _of_all(key: str, value: Any) -> Callable[[Commit], None]:
    return lambda one: one.row.update({key: value})


def _shape(*sizes: int) -> Callable[[Commit], None]:
    return lambda one: one.piece().update(shape=list(sizes), whole=list(sizes), offset=[0] * len(sizes))


def _reach_out(one: Commit) -> None:
    """A file outside, named with its right size and digest."""
    data = (one.outside / "secret").read_bytes()
    one.entry(tensors=False).update(name="../../../outside/secret", num_bytes=len(data), sha256=digest.of_bytes(data))


def _reach_by_path(one: Commit) -> None:
    data = (one.outside / "secret").read_bytes()
    one.entry(tensors=False).update(name=str(one.outside / "secret"), num_bytes=len(data), sha256=digest.of_bytes(data))


def _reach_by_link(one: Commit) -> None:
    entry, data = one.entry(tensors=False), (one.outside / "secret").read_bytes()
    one.write(entry, data)
    (one.folder / entry["name"]).unlink()
    (one.folder / entry["name"]).symlink_to(one.outside / "secret")


def _link_the_manifest(one: Commit) -> None:
    one.sign()
    shutil.move(one.folder / manifest.FILE, one.outside / manifest.FILE)
    (one.folder / manifest.FILE).symlink_to(one.outside / manifest.FILE)


def _link_the_folder(one: Commit) -> None:
    one.sign()
    shutil.move(one.folder, one.outside / "folder")
    one.folder.symlink_to(one.outside / "folder")


def _pipe(one: Commit) -> None:
    path = one.folder / one.entry(tensors=one.draws.random() < 0.5)["name"]
    path.unlink()
    os.mkfifo(path)


def _claim(one: Commit) -> None:
    """A tensor far larger than the file that is to hold it."""
    entry = one.entry(tensors=True)
    piece = max(entry["tensors"].values(), key=lambda each: int(each["start"]))
    piece.update(dtype="U8", shape=[2**44], whole=[2**44], offset=[0])
    entry["num_bytes"] = piece["start"] + 2**44 + 1000


def _sparse_tensor(one: Commit) -> None:
    """As large as it says, and all of it a hole: nothing of the file's size is allocated before it is known to be of use."""
    entry = next(each for each in one.row["files"] if each["name"] == "state.safetensors")
    name, piece = max(entry["tensors"].items(), key=lambda pair: pair[1]["start"])
    more = SPARSE_BYTES - piece["shape"][0]
    entry["tensors"][name] = {**piece, "dtype": "U8", "shape": [SPARSE_BYTES], "whole": [SPARSE_BYTES], "offset": [0]}
    entry["num_bytes"] += more
    piece = entry["tensors"][name]

    def grow(header: bytes) -> bytes:
        rows = json.loads(header)
        rows[name] = {"dtype": "U8", "shape": piece["shape"], "data_offsets": [piece["start"], piece["start"] + SPARSE_BYTES]}
        return json.dumps(rows).encode()

    one.rewrite_header(entry, grow)
    os.truncate(one.folder / entry["name"], entry["num_bytes"])


def _sparse_header(one: Commit) -> None:
    entry = one.entry(tensors=True)
    entry.update(tensors={}, num_bytes=SPARSE_BYTES)
    _open_up(one.folder / entry["name"])
    with (one.folder / entry["name"]).open("r+b") as file:
        file.write((SPARSE_BYTES - 8).to_bytes(8, "little"))


def _sparse_text(one: Commit) -> None:
    entry = next(each for each in one.row["files"] if each["name"] == "state.json")
    entry["num_bytes"] = SPARSE_BYTES
    _open_up(one.folder / entry["name"])


def _open_up(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()  # it may be a link to what another commit holds
    path.write_bytes(data)
    os.truncate(path, SPARSE_BYTES)


def _overlap(one: Commit) -> None:
    for piece in one.entry(tensors=True)["tensors"].values():
        piece["start"] = 0


def _part(one: Commit) -> None:
    """The first row of the last tensor, said to be a part of one as the model has it: it must not be spread over the others."""
    entry = next(each for each in one.row["files"] if each["name"].startswith("model") and each["tensors"])
    name, piece = max(entry["tensors"].items(), key=lambda pair: int(pair[1]["start"]))
    path = one.folder / entry["name"]
    row_bytes = manifest.Piece(**{**piece, "shape": (1, *piece["shape"][1:])}).num_bytes
    data = path.read_bytes()
    rest = data[-row_bytes * piece["shape"][0] :]
    path.unlink()
    path.write_bytes(data[: len(data) - len(rest) + row_bytes])
    piece.update(shape=[1, *piece["shape"][1:]], sha256=digest.of_bytes(rest[:row_bytes]))
    entry["num_bytes"] += row_bytes - len(rest)

    def shrink(header: bytes) -> bytes:
        rows = json.loads(header)
        rows[name].update(shape=piece["shape"], data_offsets=[piece["start"], piece["start"] + row_bytes])
        return json.dumps(rows).encode()

    one.rewrite_header(entry, shrink)


def _state(change: Callable[[Row], Any]) -> Callable[[Commit], None]:
    """Another tree in state.json."""

    def do(one: Commit) -> None:
        entry = next(each for each in one.row["files"] if each["name"] == "state.json")
        tree = json.loads((one.folder / "state.json").read_text())
        changed = change(tree)
        one.write(entry, changed if isinstance(changed, bytes) else json.dumps(changed).encode())

    return do


def _without(key: str) -> Callable[[Commit], None]:
    return _state(lambda tree: {name: value for name, value in tree.items() if name != key})


def _clock(text: bytes) -> Callable[[Commit], None]:
    return lambda one: one.write(next(each for each in one.row["files"] if each["name"] == "clock.json"), text)


def _pickled(name: str) -> Callable[[Commit], None]:
    """The gadget in the place of a file."""

    def do(one: Commit) -> None:
        entry = next((each for each in one.row["files"] if each["name"] == name), None) or one.entry(tensors=True)
        one.write(entry, gadget(one.outside / "canary"))

    return do


def _raw(make: Callable[[Commit], bytes]) -> Callable[[Commit], None]:
    """These bytes as the manifest, whatever they are."""

    def do(one: Commit) -> None:
        data = make(one)
        (one.folder / manifest.FILE).write_bytes(data)
        one.row.clear()

    return do


def _twice(one: Commit) -> bytes:
    one.sign()
    return (one.folder / manifest.FILE).read_bytes().replace(b'{"', b'{"step": 3, "', 1)


def _header_twice(header: bytes) -> bytes:
    rows = json.loads(header)
    name, piece = next((name, row) for name, row in rows.items() if name != "__metadata__")
    return header.rstrip().replace(b"{", b"{" + json.dumps({name: {**piece, "shape": [1]}})[1:-1].encode() + b",", 1)


SCORE = {"name": "a", "value": 0.5, "better": "higher"}
HOSTILE: Mapping[str, Callable[[Commit], None]] = {
    # names and links that lead out of the folder
    "a file outside": _reach_out, "a file by its path": _reach_by_path, "a link outside": _reach_by_link,
    "a linked manifest": _link_the_manifest, "a linked folder": _link_the_folder, "a pipe": _pipe,
    "an endless device": lambda one: one.entry(tensors=False).update(name="../../../../../../../../dev/zero"),
    **{f"the name {text[:12]!r}": _name(text) for text in ("..", "a/../b", "/dev/zero", "x" * 300, "a\0b", "-rf", "manifest.json", "")},
    # sizes
    **{f"a size of {size}": _of_entry("num_bytes", size) for size in (2**63, 2**48, -1, 1e300, True, "9")},
    "a sparse tensor": _sparse_tensor, "a sparse header": _sparse_header, "a sparse text": _sparse_text, "a part": _part,
    "a tensor larger than its file": _claim,
    # tensors
    "dimensions of 2^63": _shape(2**63, 2), "of 2^48 and 0": _shape(0, 2**48, 2**48), "65 dimensions": _shape(*[1] * 65),
    "a negative dimension": _shape(-1, -1), "an offset outside": _of_piece("offset", [2**40]), "an owner": _of_piece("owner", -1),
    "a negative offset": _of_piece("offset", [-1]), "a stride": _of_piece("stride", [0]), "a negative start": _of_piece("start", -8),
    "a start of NaN": _of_piece("start", float("nan")), "overlapping pieces": _overlap,
    "a dtype that is a list": _of_piece("dtype", ["F32"]), "a dtype of Python": _of_piece("dtype", "O"),
    # what a manifest says of itself
    "a step of NaN": _of_all("step", float("nan")), "a step of infinity": _of_all("step", float("inf")),
    "a huge step": _of_all("step", 10**4000), "a huge generation": _of_all("generation", 10**4000), "no format": _of_all("format", -1),
    "a huge score": _of_all("score", {"name": "a", "value": 10**400, "better": "higher"}),
    "a score of objects": _of_all("score", {"name": [], "value": {}, "better": 3}),
    **{f"a score of {value}": _of_all("score", {**SCORE, "value": value}) for value in (True, float("nan"), float("-inf"))},
    "a score where up is better": _of_all("score", {**SCORE, "better": "up"}),
    "two ranks": _of_all("layout", {"world_size": 2}), "no ranks": _of_all("layout", {}),
    "deep parents": _of_all("parent", {"a": json.loads("[" * 900 + "]" * 900)}),
    "a key twice": _raw(_twice), "deep nesting": _raw(lambda one: b"[" * 10**6), "no text": _raw(lambda one: bytes(range(128, 256))),
    "many entries": _raw(lambda one: b'{"files": [' + b"{}," * MANY + b"{}]}"),
    "many lists": _raw(lambda one: b"[" + b"[]," * (10 * MANY) + b"1]"),
    "long digits": _raw(lambda one: b'{"step": ' + b"9" * 10**6 + b"}"),
    "a pickle as the manifest": _raw(lambda one: gadget(one.outside / "canary")),
    # headers of files of tensors
    "a long header": lambda one: one.rewrite_header(one.entry(tensors=True), lambda header: header + b" " * (1 << 20)),
    "a header that says a key twice": lambda one: one.rewrite_header(one.entry(tensors=True), _header_twice),
    "a deep header": lambda one: one.rewrite_header(one.entry(tensors=True), lambda header: b"[" * 10**6),
    # files of another kind, and states that make no sense
    **{f"a pickle as {name}": _pickled(name) for name in SLOTS}, **{f"a state without {key}": _without(key) for key in STATED},
    "a state that is a list": _state(lambda tree: [tree]), "a deep state": _state(lambda tree: b"[" * 10**6),
    "a state of another kind": _state(lambda tree: {**tree, "random": {"$": "os.system", "value": "touch canary"}}),
    "random states of none": _state(lambda tree: {**tree, "random": {"torch": 1, "cuda": 2, "numpy": 3, "python": 4}}),
    "a state of a dtype": _state(lambda tree: {**tree, "plateau": {"$": "dtype", "value": "__import__('os')"}}),
    "a state of another step": _state(lambda tree: {**tree, "step": 1}),
    "counters of no number": _state(lambda tree: {**tree, "num_samples": "many", "guard": None}),
    "a clock that is a list": _clock(b"[]"), "a clock of another kind": _clock(b'{"training_s": "soon"}'),
    "a clock of nothing": _clock(b""),
}  # fmt: skip
