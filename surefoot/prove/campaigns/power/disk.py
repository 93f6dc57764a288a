"""A disk that lost power: from a trace of file operations, the states that it may be found in.

What POSIX promises and no more: `fsync` of a file makes its bytes and size last, `fsync` of a folder its entries. What was not synced
may be there whole, in part, as zeros, or not at all; entries may be there up to any point, or (`reordered`) in any selection.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from surefoot.contract import commits
from surefoot.prove.campaigns.power.trace import Call, unquote

SECTOR_BYTES = 512
BLOCKS = ("none", "all", "random", "size")
ENTRIES = ("prefix", "reordered")
ROOT = 0


@dataclass(frozen=True)
class Entry:
    """A change of a folder: `name` of `folder` becomes `node`, or is gone (None); for a move also what it was before."""

    folder: int
    name: str
    node: int | None
    origin: tuple[int, str] | None = None


@dataclass(frozen=True)
class Data:
    """Bytes of a file: written at `start`, or (None) the file cut or grown to `start`."""

    node: int
    start: int
    data: bytes | None


@dataclass(frozen=True)
class Sync:
    node: int


@dataclass(frozen=True)
class Note:
    """What a run said on the way: a step was committed, or its commit is being deleted."""

    word: str
    step: int


Op = Entry | Data | Sync | Note


@dataclass
class _Open:
    node: int
    place: int = 0
    appends: bool = False


@dataclass
class Recorder:
    """Turns the calls of a process into operations on what lies below `root`, which was empty when the trace began."""

    root: PurePosixPath
    ops: list[Op] = field(default_factory=list)
    folders: set[int] = field(default_factory=lambda: {ROOT})
    _tree: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    _open: dict[int, _Open] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def record(self, calls: Sequence[Call]) -> list[Op]:
        for call in calls:
            if not call.failed:
                getattr(self, f"_on_{call.name}", _ignore)(call)
        return self.ops

    # ---- names

    def _find(self, base: str, path: str) -> tuple[int, str] | None:
        """The folder's node and the name in it; None for what lies elsewhere."""
        parts = PurePosixPath(unquote(path).decode())
        if parts.is_absolute():
            if not parts.is_relative_to(self.root):
                return None
            at, names = ROOT, parts.relative_to(self.root).parts
        elif base.isdigit() and int(base) in self._open:
            at, names = self._open[int(base)].node, parts.parts
        else:
            return None
        for name in names[:-1]:
            if name not in self._tree.get(at, {}):
                return None
            at = self._tree[at][name]
        return (at, names[-1]) if names else (ROOT, "")

    def _node(self, where: tuple[int, str]) -> int | None:
        return where[0] if not where[1] else self._tree.get(where[0], {}).get(where[1])

    def _make(self, where: tuple[int, str], *, is_folder: bool) -> int:
        node = 1 + len(self.folders) + len(self._sizes)
        if is_folder:
            self.folders.add(node)
            self._tree[node] = {}
        else:
            self._sizes[node] = 0
        self._enter(Entry(*where, node))
        return node

    def _enter(self, change: Entry) -> None:
        if change.origin is not None:
            self._tree[change.origin[0]].pop(change.origin[1], None)
        if change.node is None:
            self._tree[change.folder].pop(change.name, None)
        else:
            self._tree[change.folder][change.name] = change.node
        self.ops.append(change)

    # ---- calls

    def _on_openat(self, call: Call) -> None:
        where, flags = self._find(*call.arguments[:2]), call.arguments[2].split("|")
        self._open.pop(call.result, None)
        if where is None:
            return
        node = self._node(where)
        if node is None and "O_CREAT" in flags:
            node = self._make(where, is_folder=False)
        if node is None:
            return
        if "O_TRUNC" in flags and self._sizes.get(node):
            self._resize(node, 0)
        self._open[call.result] = _Open(node, appends="O_APPEND" in flags)

    def _on_close(self, call: Call) -> None:
        self._open.pop(int(call.arguments[0]), None)

    def _on_write(self, call: Call) -> None:
        held = self._open.get(int(call.arguments[0]))
        if held is None or not call.result:
            return
        start = self._sizes[held.node] if held.appends else held.place
        self._write(held.node, start, unquote(call.arguments[1].removesuffix("..."))[: call.result])
        held.place = start + call.result

    def _on_pwrite64(self, call: Call) -> None:
        held = self._open.get(int(call.arguments[0]))
        if held is not None:
            self._write(held.node, int(call.arguments[3]), unquote(call.arguments[1])[: call.result])

    def _write(self, node: int, start: int, data: bytes) -> None:
        self.ops.append(Data(node, start, data))
        self._sizes[node] = max(self._sizes[node], start + len(data))
        for line in data.splitlines():
            if line.startswith(b"{") and b'"kind": "committed"' in line:
                self.ops.append(Note("committed", int(line.partition(b'"step": ')[2].partition(b",")[0])))

    def _on_lseek(self, call: Call) -> None:
        held = self._open.get(int(call.arguments[0]))
        if held is not None:
            held.place = call.result

    def _on_read(self, call: Call) -> None:
        held = self._open.get(int(call.arguments[0]))
        if held is not None:
            held.place += call.result

    def _on_ftruncate(self, call: Call) -> None:
        held = self._open.get(int(call.arguments[0]))
        if held is not None:
            self._resize(held.node, int(call.arguments[1]))

    def _resize(self, node: int, size: int) -> None:
        self.ops.append(Data(node, size, None))
        self._sizes[node] = size

    def _on_fsync(self, call: Call) -> None:
        held = self._open.get(int(call.arguments[0]))
        if held is not None:
            self.ops.append(Sync(held.node))

    _on_fdatasync = _on_fsync

    def _on_mkdir(self, call: Call) -> None:
        where = self._find("AT_FDCWD", call.arguments[0])
        if where is not None:
            self._make(where, is_folder=True)

    def _on_rename(self, call: Call) -> None:
        before, after = (self._find("AT_FDCWD", path) for path in call.arguments[:2])
        if before is None or after is None:
            return
        node = self._node(before)
        if before[1].startswith("step-") and after[1].startswith(commits.GONE):
            self.ops.append(Note("retired", int(before[1].removeprefix("step-"))))
        self._enter(Entry(*after, node, before))

    def _on_link(self, call: Call) -> None:
        one, other = (self._find("AT_FDCWD", path) for path in call.arguments[:2])
        if one is not None and other is not None:
            self._enter(Entry(*other, self._node(one)))

    def _on_linkat(self, call: Call) -> None:
        one, other = self._find(*call.arguments[:2]), self._find(*call.arguments[2:4])
        if one is not None and other is not None:
            self._enter(Entry(*other, self._node(one)))

    def _on_unlink(self, call: Call) -> None:
        self._gone(self._find("AT_FDCWD", call.arguments[0]))

    _on_rmdir = _on_unlink

    def _on_unlinkat(self, call: Call) -> None:
        self._gone(self._find(*call.arguments[:2]))

    def _gone(self, where: tuple[int, str] | None) -> None:
        if where is not None:
            self._enter(Entry(*where, None))


def _ignore(call: Call) -> None:
    """Changes no file."""


TRACED = (
    "openat,close,write,pwrite64,lseek,read,ftruncate,fsync,fdatasync,mkdir,rename,link,linkat,unlink,rmdir,unlinkat"  # all of them
    ",creat,open,writev,pwritev,pwritev2,renameat,renameat2,mkdirat,symlink,symlinkat,truncate,fallocate,copy_file_range,sendfile,dup,dup2,dup3"
)
UNKNOWN = TRACED.partition(",creat")[2].replace(",", " ").split()  # a trace that has one of these on our files is not understood


@dataclass(frozen=True)
class PowerCut:
    """The power goes before operation `moment`; `entries` and `blocks` say what of the unsynced is on the disk."""

    moment: int
    entries: str
    blocks: str
    seed: int

    def __str__(self) -> str:
        return f"power cut before operation {self.moment}, entries: {self.entries}, unsynced blocks: {self.blocks}"


def find_entries(ops: Sequence[Op], cut: PowerCut, draws: random.Random) -> Iterator[Entry]:
    """The changes of folders that are on the disk."""
    changes = [(place, op) for place, op in enumerate(ops[: cut.moment]) if isinstance(op, Entry)]
    synced: dict[int, int] = {}
    for place, op in enumerate(ops[: cut.moment]):
        if isinstance(op, Sync):
            synced[op.node] = place
    forced = [synced.get(op.folder, -1) > place for place, op in changes]
    least = max((number for number, is_forced in enumerate(forced, start=1) if is_forced), default=0)
    length = draws.randint(least, len(changes))
    for number, (_, op) in enumerate(changes):
        if (number < length) if cut.entries == "prefix" else (forced[number] or draws.random() < 0.5):
            yield op


def find_tree(entries: Iterator[Entry]) -> dict[int, dict[str, int]]:
    """Folder -> its entries. A move whose origin never was, or a removal of what is not there, changes nothing."""
    tree: dict[int, dict[str, int]] = {ROOT: {}}
    for op in entries:
        inside = tree.setdefault(op.folder, {})
        if op.origin is not None and tree.setdefault(op.origin[0], {}).pop(op.origin[1], None) is None:
            continue
        if op.node is None:
            inside.pop(op.name, None)
        else:
            inside[op.name] = op.node
    return tree


def find_bytes(ops: Sequence[Op], node: int, cut: PowerCut, draws: random.Random) -> bytes:
    """What a file holds: all that was synced, and of the rest what `cut.blocks` says."""
    moment = max((place for place, op in enumerate(ops[: cut.moment]) if isinstance(op, Sync) and op.node == node), default=0)
    kept, whole = (replay(op for op in ops[:end] if isinstance(op, Data) and op.node == node) for end in (moment, cut.moment))
    if cut.blocks == "none" or kept == whole:
        return bytes(kept)
    if cut.blocks == "all":
        return bytes(whole)
    found = bytearray(kept[: len(whole)].ljust(len(whole), b"\0"))
    if cut.blocks == "random":
        for start in range(0, len(whole), SECTOR_BYTES):
            if draws.random() < 0.5:
                found[start : start + SECTOR_BYTES] = whole[start : start + SECTOR_BYTES]
        if len(whole) > len(kept) and draws.random() < 0.5:  # the file may have grown only in part
            del found[draws.randint(len(kept), len(whole)) :]
    return bytes(found)


def replay(ops: Iterator[Data]) -> bytearray:
    """The bytes of a file after these writes."""
    data = bytearray()
    for op in ops:
        if op.data is None:
            data = data[: op.start].ljust(op.start, b"\0")
        else:
            data = data.ljust(op.start, b"\0")
            data[op.start : op.start + len(op.data)] = op.data
    return data


def write_state(ops: Sequence[Op], folders: set[int], cut: PowerCut, into: Path) -> None:
    """Write the state of the disk below `into`; a file with two names stays one file."""
    draws = random.Random(cut.seed)
    tree = find_tree(find_entries(ops, cut, draws))
    written: dict[int, Path] = {}
    todo = [(ROOT, into)]
    while todo:
        node, path = todo.pop()
        path.mkdir(exist_ok=True)
        for name, inner in tree.get(node, {}).items():
            if inner in folders:
                todo.append((inner, path / name))
            elif inner in written:
                (path / name).hardlink_to(written[inner])
            else:
                (path / name).write_bytes(find_bytes(ops, inner, cut, draws))
                written[inner] = path / name


def acknowledged(ops: Sequence[Op], moment: int) -> list[int]:
    """The steps that the log called committed before `moment` and that were not being deleted by then."""
    noted = [op for op in ops[:moment] if isinstance(op, Note)]
    gone = {op.step for op in noted if op.word == "retired"}
    return sorted({op.step for op in noted if op.word == "committed"} - gone)
