"""Ranks of a user-defined loop: one folder, written by rank 0, and one checkpoint of all ranks.

A tensor that is the same on all ranks is written once, by rank 0. Each rank writes its rows of a
sharded weight. The state in which a rank differs from rank 0 is written to files such as
`rank-00001.safetensors` and `rank-00001.json`: random states, position in the data, shards of the
optimizer state, buffers that are not shared.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.components.checkpoint import MODEL, Commit, Content, Stamp
from surefoot.components.observe.journal import Journal
from surefoot.contract import commits, digest, events
from surefoot.contract.loop_ledger import NO_BATCH, LoopGuarantee, LoopLedger
from surefoot.contract.manifest import Manifest, name_of_rank
from surefoot.contract.run_folder import files
from surefoot.contract.runlock import RunLock
from surefoot.core import place
from surefoot.core.errors import LostRank, RunFolderError, StorageError, TaskError, hint_unwritten
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.train import environment
from surefoot.train.resume import same
from surefoot.train.session import folder
from surefoot.train.session.folder import Chosen

IS_HELD = "is being written by process"
WAIT_S = 300.0  # for ranks that have not called `attach` yet
# limits of the delay of a save that is due by time: in seconds, and as share of the interval
LATE_S, SHARE = 10.0, 0.05
TOGETHER = "all ranks call batches(), step_done(), save() and close() alike, after the same steps"
Row = tuple[int, int, int, tuple[int, ...]]  # of the ledger: step, epoch, index in it, samples


def find_group(given: Path | None) -> Group:
    """Return the group of ranks of the loop, from torch.distributed.

    The group has one rank without torch.distributed, or if each rank passes a different folder.
    Every rank must call this. Raises LostRank if not all of them do within five minutes, and
    RunFolderError if only some ranks pass the same folder.
    """
    if not environment.has_process_group() or dist.get_world_size() == 1:
        return ALONE
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        meeting = Group(
            rank, size, channel=dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        )
        wanted = meeting.exchange("" if given is None else str(given.absolute()))
    except (RuntimeError, LostRank) as error:
        raise LostRank(
            f"rank {rank} of {size} called surefoot.attach, but another rank did not "
            f"call it within {WAIT_S:g} s",
            hint=(
                "call attach on every rank, after init_process_group: rank 0 writes the folder, "
                "and each rank saves its own state"
            ),
        ) from error
    dist.destroy_process_group(meeting.channel)
    if len(set(wanted)) == size:
        return ALONE
    if len(set(wanted)) > 1:
        told = ", ".join(f"{text or 'none'} (rank {number})" for number, text in enumerate(wanted))
        raise RunFolderError(
            f"the ranks give different folders: {told}",
            hint="give all ranks one folder, or each rank a separate folder",
        )
    return Group(rank, size, channel=dist.new_group(backend="gloo"), roll=lambda: f"; {TOGETHER}")


def unwrap_ddp(model: nn.Module, group: Group) -> nn.Module:
    """Return the model inside DistributedDataParallel, whose weight names a checkpoint uses."""
    inner: Any = (
        model.module
        if not group.is_alone and isinstance(model, nn.parallel.DistributedDataParallel)
        else model
    )
    return inner  # type: ignore[no-any-return]


def describe(group: Group) -> tuple[str, ...]:
    """Return a note on which rank the log covers; empty for one rank."""
    if group.is_alone:
        return ()
    return (
        (
            f"rank {group.rank} of {group.size}: losses and samples are this rank's; the other "
            f"ranks log in {files.RANKS}/"
        ),
    )


def describe_buckets(group: Group, model: nn.Module) -> tuple[str, ...]:
    """Return a note for a resumed loop if DDP rearranges its buckets after the first step.

    The rounding of a sum of three or more gradients depends on their order in a bucket.
    """
    if group.size < 3 or not isinstance(model, nn.parallel.DistributedDataParallel):
        return ()
    if model.find_unused_parameters and not model.static_graph:
        return ()
    why = "DistributedDataParallel rearranges its buckets after the first backward pass"
    what = (
        "the gradients of the first step may be summed in a different order than in an "
        "uninterrupted loop"
    )
    return (f"{why}, so {what}: find_unused_parameters=True keeps the buckets as they are",)


@contextlib.contextmanager
def acquire_folder(group: Group, choice: Callable[[], Chosen]) -> Iterator[tuple[Chosen, RunLock]]:
    """Return a context in which rank 0 holds the loop's folder; all ranks raise if it cannot."""
    with contextlib.ExitStack() as stack:
        mine = group.settle(
            lambda: (
                stack.enter_context(_acquire_on_first(group, choice)) if group.is_first else None
            )
        )
        row: dict[str, Any] = {}
        if mine is not None:
            row = {
                "folder": str(mine[0].folder.absolute()),
                "is_again": mine[0].is_again,
                "generation": mine[1].generation,
            }
        if group.is_alone and mine is not None:
            yield mine
            return
        row = json.loads(group.from_first(json.dumps(row)))
        if mine is None:
            mine = (
                Chosen(Path(row["folder"]), row["is_again"]),
                RunLock.following(Path(row["folder"]), row["generation"]),
            )
        yield mine


@contextlib.contextmanager
def _acquire_on_first(
    group: Group, choice: Callable[[], Chosen]
) -> Iterator[tuple[Chosen, RunLock]]:
    try:
        with folder.acquire_run_folder(choice, None) as mine:
            yield mine
    except RunFolderError as error:
        if not (
            IS_HELD in error.message
            and group.is_alone
            and not environment.has_process_group()
            and place.has_other_ranks()
        ):
            raise
        hint = (
            "call torch.distributed.init_process_group() before surefoot.attach: then all ranks "
            "share the folder"
        )
        raise RunFolderError(error.message, hint=hint) from error


def begin_journal(group: Group, root: Path, started: Callable[[], events.Started]) -> Journal:
    """Open this rank's log and write the Started record.

    The log of rank 0 is in the run folder, that of each other rank in a folder inside it.
    """

    def begin() -> Journal:
        try:
            home = (
                root if group.is_first else files.make_folder(root, f"{files.RANKS}/{group.rank}")
            )
        except OSError as error:
            words = f"{error.filename or root} cannot be written: {error.strerror}"
            raise StorageError(words, hint=hint_unwritten(error)) from error
        journal = Journal(home)
        journal.begin(started())
        return journal

    # the other ranks write only after rank 0 has created the log
    first = group.settle(lambda: begin() if group.is_first else None)
    other = group.settle(lambda: begin() if first is None else None)
    made = first or other
    assert made is not None, "one of them began it"
    return made


# ---- saving together


@final
class SaveTimer:
    """Timer that decides by the clock of rank 0 whether a save is due.

    The ranks communicate only every few steps, so that most steps do not wait for it.
    """

    def __init__(self, group: Group, every_s: float) -> None:
        self._group, self._every_s = group, every_s
        self._last_s, self._last_step, self._next = time.monotonic(), 0, 0

    def is_due(self, step: int, since_s: float) -> bool:
        """Return whether the time since the last save, `since_s`, exceeds the interval on rank 0.

        All ranks must call this after the same steps. Raises TaskError if they do not.
        """
        if self._group.is_alone:
            return since_s >= self._every_s
        if step < self._next:
            return False
        now_s, done = time.monotonic(), max(1, step - self._last_step)
        ahead = min(LATE_S, SHARE * self._every_s) / max(1e-6, (now_s - self._last_s) / done)
        self._last_s, self._last_step = now_s, step
        rows = self._group.exchange(
            json.dumps([step, since_s >= self._every_s, max(1, int(min(ahead, 10 * done)))])
        )
        told = [json.loads(row) for row in rows]
        check_same_step(self._group, [row[0] for row in told])
        self._next = step + told[0][2]
        return bool(told[0][1])


def check_same_step(group: Group, steps: Sequence[int]) -> None:
    """Raise TaskError on all ranks if they have done different numbers of steps."""
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise TaskError(
                f"rank {rank} of {group.size} has done {step:,} steps, rank 0 "
                f"{steps[0]:,}: a save needs the same number on all ranks",
                hint=TOGETHER,
            )


@final
class RankedLedger:
    """Ledger of a loop, written by rank 0; a row holds the samples of all ranks, in rank order.

    Rank 0 receives the rows of the other ranks at each save, so that rows after the last save are
    missing.
    """

    def __init__(self, group: Group, root: Path, promise: LoopGuarantee, generation: int) -> None:
        self._group = group
        # the user's sampler decides which samples each rank reads
        promise = promise if group.is_alone else replace(promise, once=False, all=False)
        self._file = LoopLedger(root, promise, generation) if group.is_first else None
        self._rows: list[Row] = []

    def add(self, step: int, number_of_pass: int, place: int, ids: tuple[int, ...]) -> None:
        if self._group.is_alone and self._file is not None:
            self._file.add(step, number_of_pass, place, ids)
        else:
            self._rows.append((step, number_of_pass, place, ids))

    def add_step(
        self, step: int, number_of_pass: int, batches: Sequence[tuple[int, int, tuple[int, ...]]]
    ) -> None:
        """Add the batches of `step`, or a row which records that it had none.

        A step before the first epoch has no row.
        """
        for batch in batches:
            self.add(step, *batch)
        if not batches and number_of_pass >= 0:
            self.add(step, number_of_pass, NO_BATCH, ())

    def take_rows(self) -> list[Row]:
        """Return the rows of this rank since the last save, and remove them."""
        rows, self._rows = self._rows, []
        return rows

    def add_all(self, rows: Sequence[Sequence[Any]]) -> None:
        """Write the rows of all ranks, merged by position in the epoch."""
        joined: dict[tuple[int, int, int], list[int]] = {}
        for each in rows:
            for step, number_of_pass, position, ids in each:
                joined.setdefault((step, number_of_pass, position), []).extend(ids)
        if self._file is not None:
            for key, ids in sorted(joined.items()):
                self._file.add(*key, ids)

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def prepare_save(
    group: Group, step: int, ledger: RankedLedger, lock: RunLock, write: Callable[[], None]
) -> None:
    """Write the log and the ledger of all ranks to disk, before a checkpoint of `step` is saved.

    Raises StorageError on all ranks if one of them cannot write or the folder was taken over, and
    TaskError if ranks have done different numbers of steps.
    """
    problem: StorageError | None = None
    try:
        if group.is_first and not lock.is_still_held():
            raise StorageError(lock.describe_loss(), hint="this attempt ends here")
        write()
    except StorageError as error:
        problem = error
    if not group.is_alone:
        told = [
            json.loads(text)
            for text in group.exchange(
                json.dumps([step, ledger.take_rows(), problem and problem.message])
            )
        ]
        check_same_step(group, [row[0] for row in told])
        ledger.add_all([row[1] for row in told])
        refused = [(rank, row[2]) for rank, row in enumerate(told) if row[2]]
        if refused and problem is None:
            problem = StorageError(f"rank {refused[0][0]} of {group.size}: {refused[0][1]}")
    try:
        ledger.sync()
    except StorageError as error:
        problem = problem or error
    words = group.from_first("" if problem is None else problem.message)
    if problem is not None or words:
        raise problem or StorageError(f"rank 0 of {group.size}: {words}")


def save(
    run: Path,
    step: int,
    state: Mapping[str, Any],
    stamp: Stamp,
    group: Group,
    lock: RunLock,
    attributes: Mapping[str, Mapping[str, Any]],
) -> Manifest:
    """Save `state` as a checkpoint, to which every rank writes its part.

    Raises what `checkpoint.save` raises.
    """
    if group.is_alone:
        return checkpoint.save(run, step, state, stamp, attributes)
    stamp = replace(stamp, layout={"world_size": group.size})
    content = group.settle(
        lambda: _share_of(group, *checkpoint.content_of(step, state, attributes))
    )
    return checkpoint.commit_together(run, content(), stamp, group, may_commit=lock.is_still_held)


def _share_of(group: Group, content: Content, own: Mapping[str, Tensor]) -> Callable[[], Content]:
    """Return a function that returns the part of `content` that this rank writes.

    Every rank must call the function: it broadcasts the digests of rank 0's tensors, and a tensor
    with the same digest is left out.
    """
    parts = content.parts
    rows = {
        name: tensor for name, tensor in content.tensors.get(MODEL, {}).items() if name in parts
    }
    whole = {
        f"{file}/{name}": tensor
        for file, held in content.tensors.items()
        for name, tensor in held.items()
        if not (file == MODEL and name in parts)
    }
    with commits.hashing() as pool:
        seen = digest.begin(
            pool, {name: checkpoint.as_buffer(tensor) for name, tensor in whole.items()}
        ).finish()
    facts = {
        name: f"{tensor.dtype} {list(tensor.shape)} {seen[name]}" for name, tensor in whole.items()
    }

    def finish() -> Content:
        first = json.loads(group.from_first(json.dumps(facts) if group.is_first else ""))
        stem, made = name_of(group.rank), dict[str, Mapping[str, Tensor]]()
        if group.is_first:
            made = {
                file: {
                    name: tensor
                    for name, tensor in held.items()
                    if not (file == MODEL and name in parts)
                }
                for file, held in content.tensors.items()
            }
            made = {
                file: held for file, held in made.items() if held or not (file == MODEL and rows)
            }
        mine = {
            **own,
            **{name: tensor for name, tensor in whole.items() if first.get(name) != facts[name]},
        }
        if mine:
            made[f"{stem}.safetensors"] = mine
        if rows:
            made[name_of_rank(MODEL, group.rank)] = rows
        texts = content.texts if group.is_first else {f"{stem}.json": content.texts["state.json"]}
        return replace(content, tensors=made, texts=texts)

    return finish


def name_of(rank: int) -> str:
    """Return the name, without suffix, of the files with the state of a single rank."""
    return f"rank-{rank:05d}"


# ---- loading together


def load(run: Path, state: Mapping[str, Any], group: Group) -> checkpoint.RestoreResult | None:
    """Load the newest undamaged checkpoint of `run` into the objects of `state`, on every rank.

    Returns None without a checkpoint. Raises RunFolderError if the checkpoint was saved by a
    different number of ranks.
    """
    found: list[tuple[int, Mapping[str, Any]]] = []

    def load_one(step: int) -> None:
        commit = same.open_same(group, run, step)
        check_num_ranks(run, commit.manifest, group.size)
        rank = "" if group.is_alone else name_of(group.rank)
        found.append((step, group.settle(lambda: checkpoint.restore(commit, state, rank))))

    def tell_and_load(commit: Commit) -> None:
        group.from_first(json.dumps(commit.manifest.step))
        load_one(commit.manifest.step)

    troubles: list[str] = []
    if group.is_first:
        _, troubles = checkpoint.newest_loadable(run, tell_and_load)
        if not found:
            group.from_first("null")
    elif (step := json.loads(group.from_first(""))) is not None:
        load_one(step)
    if not found:
        same.check_none(group, run)
        return None
    return checkpoint.RestoreResult(*found[-1], tuple(troubles))


def check_num_ranks(run: Path, made: Manifest, size: int) -> None:
    """Raise RunFolderError if the number of ranks differs from that of the checkpoint."""
    saved = made.layout["world_size"]
    if saved != size:
        raise RunFolderError(
            f"step {made.step:,} of {run} was saved by a loop on {_count(saved)}, but this loop "
            f"runs on {_count(size)}",
            hint=(
                f"start it on {_count(saved)} (torchrun --nproc-per-node={saved} on one host), or "
                "in another folder from step 0"
            ),
        )


def _count(ranks: int) -> str:
    return "one process" if ranks == 1 else f"{ranks} ranks"
