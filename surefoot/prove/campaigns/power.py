"""Campaign with power cuts: the disk states that a cut can leave are derived from a trace of a run.

Only guarantees of POSIX are assumed: `fsync` of a file makes its bytes and size durable, and
`fsync` of a folder makes its entries durable. Data that was not synced may be on the disk
completely, in part, as zeros, or not at all. Entries that were not synced may be there up to any
point in time, or (`reordered`) in any selection.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.components import checkpoint
from surefoot.contract import commits, manifest, spec_file
from surefoot.core.errors import EXIT_OK, TaskError
from surefoot.prove.campaigns import strace
from surefoot.prove.campaigns.outcome import TrialResult
from surefoot.prove.campaigns.probe import ProbedRun
from surefoot.prove.campaigns.strace import SystemCall
from surefoot.prove.campaigns.workshop import Golden, Workshop, find_damage, restart_and_compare

GOES_ON_EVERY = 20  # one in 20 states is resumed to the end, which takes longest
WHOLE = ("frozen", "plain")  # traced variants: checkpoints with linked files, and without
SECTOR_BYTES = 512
BLOCKS = ("none", "all", "random", "size")
ENTRIES = ("prefix", "reordered")
ROOT = 0
COMMITTED = re.compile(rb'^\{.*"kind": "committed".*"step": (\d+),', re.MULTILINE)
OF_DESCRIPTORS = ("write", "pwrite64", "read", "lseek", "ftruncate", "fsync", "fdatasync")
OF_NAMES = ("openat", "mkdir", "rename", "link", "linkat", "unlink", "rmdir", "unlinkat")
# one of these on a file of the run ends the campaign
REFUSED = ("creat", "open", "renameat", "renameat2", "mkdirat", "symlink", "symlinkat", "truncate")
TRACED = (*OF_DESCRIPTORS, *OF_NAMES, *REFUSED)


@dataclass(frozen=True)
class FolderChange:
    """Change of one entry of a folder: `name` refers to the inode `node`, or is removed (None).

    `origin` is the old folder and name of a moved entry; None for other changes.
    """

    folder: int
    name: str
    node: int | None
    origin: tuple[int, str] | None = None


@dataclass(frozen=True)
class Data:
    """Write of `data` at the offset `start`; if `data` is None, the file size is set to `start`."""

    node: int
    start: int
    data: bytes | None


@dataclass(frozen=True)
class Sync:
    node: int


Op = FolderChange | Data | Sync


class Recorder:
    """Converter of the system calls of a process to operations on files below the folder `root`.

    `root` was empty when the trace began.
    """

    def __init__(self, root: Path) -> None:
        self._root = f"{root}/"
        self.ops: list[Op] = []
        self.folders = {ROOT}
        self._nodes: dict[str, int] = {str(root): ROOT}
        self._sizes: dict[int, int] = {}
        self._offsets: dict[int, int | None] = {}  # by descriptor; None for a file opened to append

    def record(self, calls: Iterable[SystemCall]) -> None:
        """Convert the calls and add the operations to `ops`.

        Raises:
            TaskError: If a call on these files is not supported.
        """
        for call in calls:
            if call.failed:
                continue
            if call.name in OF_DESCRIPTORS:
                node = self._nodes.get(strace.path_of_descriptor(call.arguments[0]))
                if node is not None:
                    self._use(call, int(call.arguments[0].partition("<")[0]), node)
            elif (names := strace.paths(call)) and all(
                name.startswith(self._root) for name in names
            ):
                self._change(call, names)

    def _use(self, call: SystemCall, descriptor: int, node: int) -> None:
        offset = self._offsets.get(descriptor, 0)
        match call.name:
            case "fsync" | "fdatasync":
                self.ops.append(Sync(node))
            case "ftruncate":
                self._put(node, int(call.arguments[1]), None)
            case "lseek" | "read" if offset is not None:
                self._offsets[descriptor] = (
                    call.result if call.name == "lseek" else offset + call.result
                )
            case "write" | "pwrite64":
                start = self._sizes[node] if offset is None else offset
                start = int(call.arguments[3]) if call.name == "pwrite64" else start
                self._put(node, start, strace.unquote(call.arguments[1])[: call.result])
                if call.name == "write" and offset is not None:
                    self._offsets[descriptor] = start + call.result

    def _put(self, node: int, start: int, data: bytes | None) -> None:
        self.ops.append(Data(node, start, data))
        self._sizes[node] = start if data is None else max(self._sizes[node], start + len(data))

    def _change(self, call: SystemCall, names: list[str]) -> None:
        path, to = names[0], names[-1]
        match call.name:
            case "openat":
                self._open(path, call.arguments[2].split("|"), call.result)
            case "mkdir":
                self.folders.add(self._make(path))
            case "rename":
                self._enter(to, self._nodes[path], self._where(path))
                below = [name for name in self._nodes if f"{name}/".startswith(f"{path}/")]
                self._nodes |= {
                    to + name.removeprefix(path): self._nodes.pop(name) for name in below
                }
            case "link" | "linkat":
                self._enter(to, self._nodes[path])
            case "unlink" | "rmdir" | "unlinkat":
                self._enter(path, None)
                self._nodes.pop(path, None)
            case _:
                raise TaskError(
                    f"the trace has {call.name}, which is not understood",
                    hint="teach the recorder this call",
                )

    def _open(self, path: str, flags: list[str], descriptor: int) -> None:
        if path not in self._nodes and "O_CREAT" in flags:
            self._make(path)
        node = self._nodes.get(path)
        if node is not None and "O_TRUNC" in flags and self._sizes[node]:
            self._put(node, 0, None)
        self._offsets[descriptor] = None if "O_APPEND" in flags else 0

    def _make(self, path: str) -> int:
        node = 1 + len(self._sizes)
        self._sizes[node] = 0
        self._enter(path, node)
        return node

    def _where(self, path: str) -> tuple[int, str]:
        return self._nodes[os.path.dirname(path)], os.path.basename(path)

    def _enter(self, path: str, node: int | None, origin: tuple[int, str] | None = None) -> None:
        if node is not None and origin is None:
            self._nodes[path] = node
        self.ops.append(FolderChange(*self._where(path), node, origin))


@dataclass(frozen=True)
class PowerCut:
    """Power cut before the operation with index `moment`.

    `entries` and `blocks` select which changes that were not synced are on the disk.
    """

    moment: int
    entries: str
    blocks: str
    seed: int

    def __str__(self) -> str:
        return (
            f"power cut before operation {self.moment}, entries: {self.entries}, unsynced blocks: "
            f"{self.blocks}"
        )


def find_tree(ops: Sequence[Op], cut: PowerCut, draws: random.Random) -> dict[int, dict[str, int]]:
    """Return the entries (name -> inode) of each folder after the power cut.

    Only changes that reached the disk are applied. The move or removal of an entry that does not
    exist then changes nothing.
    """
    before = ops[: cut.moment]
    synced = {op.node: place for place, op in enumerate(before) if isinstance(op, Sync)}
    changes = [
        (op, synced.get(op.folder, -1) > place)
        for place, op in enumerate(before)
        if isinstance(op, FolderChange)
    ]
    least = max(
        (number for number, (_, is_forced) in enumerate(changes, start=1) if is_forced), default=0
    )
    length = draws.randint(least, len(changes))
    tree: dict[int, dict[str, int]] = {ROOT: {}}
    for number, (op, is_forced) in enumerate(changes):
        if not (
            (number < length) if cut.entries == "prefix" else (is_forced or draws.random() < 0.5)
        ):
            continue
        inside = tree.setdefault(op.folder, {})
        if (
            op.origin is not None
            and tree.setdefault(op.origin[0], {}).pop(op.origin[1], None) is None
        ):
            continue
        inside.pop(op.name, None)
        if op.node is not None:
            inside[op.name] = op.node
    return tree


def find_bytes(ops: Sequence[Op], node: int, cut: PowerCut, draws: random.Random) -> bytes:
    """Return the bytes of a file after the power cut.

    All synced bytes are there; `cut.blocks` selects which of the others are.
    """
    moment = max(
        (place for place, op in enumerate(ops[: cut.moment]) if op == Sync(node)), default=0
    )
    kept, whole = (
        replay(op for op in ops[:end] if isinstance(op, Data) and op.node == node)
        for end in (moment, cut.moment)
    )
    if cut.blocks in ("none", "all"):
        return kept if cut.blocks == "none" else whole
    found = bytearray(kept[: len(whole)].ljust(len(whole), b"\0"))
    if cut.blocks == "random" and kept != whole:
        for start in range(0, len(whole), SECTOR_BYTES):
            if draws.random() < 0.5:
                found[start : start + SECTOR_BYTES] = whole[start : start + SECTOR_BYTES]
        if len(whole) > len(kept) and draws.random() < 0.5:  # the file may have grown only in part
            del found[draws.randint(len(kept), len(whole)) :]
    return bytes(found)


def replay(ops: Iterable[Data]) -> bytes:
    """Return the bytes of a file after the writes `ops`."""
    data = bytearray()
    for op in ops:
        data = (data if op.data is not None else data[: op.start]).ljust(op.start, b"\0")
        data[op.start : op.start + len(op.data or b"")] = op.data or b""
    return bytes(data)


def write_state(ops: Sequence[Op], folders: set[int], cut: PowerCut, into: Path) -> None:
    """Write the state of the disk after the power cut to `into`; hard links are preserved."""
    draws = random.Random(cut.seed)
    tree = find_tree(ops, cut, draws)
    written: dict[int, Path] = {}
    todo = [(ROOT, into)]
    while todo:
        node, path = todo.pop()
        if node in folders:
            path.mkdir(exist_ok=True)
            todo += [(inner, path / name) for name, inner in tree.get(node, {}).items()]
        elif node in written:
            path.hardlink_to(written[node])
        else:
            path.write_bytes(find_bytes(ops, node, cut, draws))
            written[node] = path


def find_acknowledged_steps(ops: Sequence[Op], moment: int) -> list[int]:
    """Return the steps whose checkpoints the log had reported before operation `moment`.

    Steps whose deletion had begun are left out.
    """
    committed, retired = set[int](), set[int]()
    for op in ops[:moment]:
        if isinstance(op, Data):
            committed.update(map(int, COMMITTED.findall(op.data or b"")))
        elif isinstance(op, FolderChange) and op.name.startswith(f"{commits.GONE}step-"):
            retired.add(int(op.name.rpartition("-")[2]))
    return sorted(committed - retired)


# ---- trials


def cut_power(workshop: Workshop, seed: int, folder: Path) -> TrialResult:
    """Write one disk state that a power cut can leave, and check the run in it.

    Every step that was logged as committed must load, and no visible checkpoint may be damaged.
    Some runs are resumed to the end.
    """
    variant = WHOLE[seed % len(WHOLE)]
    recorder, traced = workshop.cached(("recording", variant), lambda: _record(workshop, variant))
    golden = workshop.golden(traced)
    ops, draws = recorder.ops, random.Random(seed)
    cut = PowerCut(draws.randint(0, len(ops)), draws.choice(ENTRIES), draws.choice(BLOCKS), seed)
    goes_on = draws.randrange(GOES_ON_EVERY) == 0
    write_state(ops, recorder.folders, cut, folder)
    attempt = replace(traced, folder=folder / traced.folder.name, pauses=())
    wrong = _check_run(attempt.folder, find_acknowledged_steps(ops, cut.moment), golden)
    if wrong is None and goes_on:
        wrong = restart_and_compare(workshop, attempt, golden)
    return TrialResult(
        wrong and f"{cut}: {wrong}",
        (cut.blocks, cut.entries, *(["resumed to the end"] if goes_on else [])),
    )


def _record(workshop: Workshop, variant: str) -> tuple[Recorder, ProbedRun]:
    """Record the file operations of one run from its start to its end."""
    with workshop.scratch("traced") as folder:
        (root := folder / "disk").mkdir()
        attempt = ProbedRun(folder=root / "run", variant=variant, pauses=(0,))
        child = workshop.train(attempt)
        child.wait_for("paused 0")
        with strace.trace_child(child, folder / "trace", "-y", "-e", f"trace={','.join(TRACED)}"):
            child.go()
            child.end_with(EXIT_OK)
        recorder = Recorder(root)
        recorder.record(strace.read(folder / "trace"))
        return recorder, attempt


def _check_run(run: Path, acknowledged: list[int], golden: Golden) -> str | None:
    """Return the error of a run whose drafts were deleted, as at a start, or None.

    It is an error if a checkpoint of an acknowledged step is missing, or any checkpoint is damaged.
    """
    if run.is_dir():
        checkpoint.clear_drafts(run)
    steps = manifest.steps(run)
    if not set(acknowledged) <= set(steps):
        return f"steps {acknowledged} were committed, and {steps} are there"
    if acknowledged:
        spec_file.read(str(run / "spec.toml"))
    return find_damage(run, golden)
