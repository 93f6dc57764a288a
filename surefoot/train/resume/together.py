"""Start of a run on several ranks: one folder, which rank 0 writes, and equal settings on all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from surefoot.components import checkpoint
from surefoot.components.data.consumed import plan_of
from surefoot.components.data.feed import Feed
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract import ledger
from surefoot.contract.run_folder import files
from surefoot.contract.runlock import RunLock
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import master_of
from surefoot.core import place
from surefoot.core.errors import OtherDataError, SpecError, StorageError, TaskError, hint_unwritten
from surefoot.core.ranks import layout
from surefoot.core.ranks.pieces import check_virtual
from surefoot.core.units import Duration
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.runtime.comm.mesh import Mesh, lay_out
from surefoot.train.assemble import Assembly
from surefoot.train.environment import find_device
from surefoot.train.resume.per_rank import rank_state
from surefoot.train.resume.program import Program
from surefoot.train.session import folder
from surefoot.train.session.folder import Chosen

if TYPE_CHECKING:
    from surefoot.components.data.loader.loader import Loader

WAIT_S = 120.0  # for ranks that are still importing
UNWATCHED = (
    "layout.hang_timeout ({stall:g} s) has no effect: {why}; a rank that hangs ends "
    "the run after layout.timeout ({timeout:g} s), and the error names no line"
)


@contextlib.contextmanager
def join_ranks(spec: RunSpec, notes: list[str] | None = None) -> Iterator[Group]:
    """Return a context in which this process is connected to the other ranks of the run.

    Messages on the transport are added to `notes`. Raises InputError for a layout that does not fit
    the ranks, for features that do not work on several ranks, and for a rank that does not join.
    """
    place.check_launcher()
    here = place.here()
    layout.fit(here.world_size, spec.layout.replicate, spec.layout.shard, spec.layout.zero_stage)
    if here.world_size > 1 or spec.layout.virtual_ranks is not None:
        check_shared(spec)
    if spec.layout.virtual_ranks is not None:
        _check_exact(spec, spec.layout.virtual_ranks, here.world_size)
    device = find_device(spec.train.device)
    if device.type == "cuda" and spec.layout.transport != "auto":
        raise SpecError(
            f"layout.transport is {spec.layout.transport!r}, but GPUs use NCCL",
            hint="leave layout.transport out",
        )
    if here.world_size == 1 and "nccl" not in spec.model_fields_set:
        yield ALONE
        return
    from surefoot.runtime.comm import nccl
    from surefoot.runtime.comm.join import join
    from surefoot.runtime.comm.watched import watched

    with contextlib.ExitStack() as stack:
        said = stack.enter_context(
            nccl.set_variables(spec.nccl, num_ranks=here.world_size, on_gpu=device.type == "cuda")
        )
        table = spec.layout
        group = stack.enter_context(
            join(here, device, wait_s=WAIT_S, timeout_s=table.timeout, transport=table.transport)
        )
        why = stack.enter_context(watched(group, here, table.hang_timeout))
        unwatched = (
            [UNWATCHED.format(stall=table.hang_timeout, timeout=table.timeout, why=why)]
            if why
            else []
        )
        (notes if notes is not None else []).extend([*said, *unwatched])
        yield group


def make_mesh(group: Group, spec: RunSpec) -> Mesh:
    """Return the mesh of the ranks as the [layout] table configures it."""
    table = spec.layout
    return lay_out(
        group,
        layout.fit(group.size, table.replicate, table.shard, table.zero_stage),
        timeout_s=table.timeout,
    )


def check_shared(spec: RunSpec) -> None:
    """Raise SpecError for features that are not supported on several ranks."""
    table = spec.as_tables()
    refused = {
        "compile.what": (
            spec.compile.what == "step",
            "the gradients are summed between backward pass and update",
        ),
        "memory.update_in_backward": (
            spec.memory.update_in_backward,
            "a gradient is summed over ranks before it is used",
        ),
        "memory.offload": (
            spec.memory.offload == "optimizer" and spec.layout.shard == 1,
            (
                "GPUs sum what is in their own memory; with layout.shard a rank keeps its rows "
                "on the host"
            ),
        ),
        "memory.on_oom": (
            spec.memory.on_oom == "halve",
            "one rank would compute a different step than the other ranks",
        ),
        "observe.noise": (
            spec.observe.noise,
            "it compares a microbatch with its batch on one rank",
        ),
        "data.on_bad": (spec.data.on_bad == "skip", "each rank would leave out different samples"),
        "evaluate.every": (
            any(_is_time(spec, text) for text in spec.evaluate.intervals.values()),
            "clocks differ between ranks",
        ),
        "layout.check_every": (
            _is_time(spec, spec.layout.check_every),
            "clocks differ between ranks",
        ),
    }
    for key, (is_set, why) in refused.items():
        if is_set:
            room, name = key.split(".")
            raise SpecError(
                f"{key} is {table.get(room, {}).get(name)!r}, but there are several ranks: {why}",
                hint=f"leave {key} out, or train on one rank",
            )


def _check_exact(spec: RunSpec, size: int, world_size: int) -> None:
    """Raise SpecError for features that prevent equal results on every number of ranks.

    `size` is the number of virtual ranks.
    """
    check_virtual(size, world_size)
    refused = {
        "train.threads": (
            spec.train.threads is None,
            "kernels may sum in a different order with a different number of threads",
        ),
        "layout.shard": (
            spec.layout.shard > 1,
            (
                "the norm of sharded tensors is summed in a different order than the norm of whole "
                "tensors"
            ),
        ),
        "layout.compress": (
            spec.layout.compress != "none",
            "the compression error of a rank depends on the microbatches of that rank",
        ),
        "precision.weights": (
            spec.precision.weights != "fp32",
            "16 bits round the gradients before they are summed",
        ),
        "train.batchnorm": (
            spec.train.batchnorm == "sync",
            "its statistics combine the batches of the ranks",
        ),
    }
    for key, (is_set, why) in refused.items():
        if is_set:
            room, name = key.split(".")
            given = getattr(getattr(spec, room), name)
            raise SpecError(
                f"{key} is {given!r}, and layout.virtual_ranks is {size}: {why}",
                hint=f"set {key}, or leave layout.virtual_ranks out",
            )


def _is_time(spec: RunSpec, text: str) -> bool:
    """Return whether the duration `text` is a time, or a share of a run whose length is a time."""
    unit = None if text == "never" else Duration.parse(text).unit
    return unit == "s" or (unit == "%" and Duration.parse(spec.train.length).unit == "s")


def check_alike(group: Group, assembly: Assembly, program: Program, run: object = None) -> None:
    """Check that all ranks agree on everything that decides results; broadcast rank 0's weights.

    Raises SpecError, with the field and the rank, if a rank differs. `run` is the run folder that a
    rank was given, if any.
    """
    rank_state.check_words(assembly.task, assembly.spec)
    if group.is_alone:
        return
    source, feed, ranks = (
        assembly.feed.source,
        assembly.feed,
        assembly.engine.steps.collectives.ranks,
    )
    tried = assembly.tried
    splits = () if tried is None else assembly.spec.evaluate.splits
    judged = [assembly.evaluation(split) for split in splits]
    facts = {
        "spec": assembly.spec.id,
        "code of the task": program.digest[:16],
        "data": source.digest[:16],
        "number of samples": str(len(source)),
        "data of the evaluation": ", ".join(each.digest[:16] for each in judged),
        "samples of the evaluation": ", ".join(str(len(each)) for each in judged),
        "metrics": "" if tried is None else ", ".join(sorted(tried.metrics)),
        "run folder": "" if run is None else str(run),
        "steps of an epoch": str(feed.steps_per_epoch),
        "steps": str(assembly.course.total_steps),
        "parameters": str([list(each.shape) for each in assembly.model.parameters()]),
        "precision": assembly.engine.policy.compute,
        "device": assembly.engine.device.type,
        "version of torch": torch.__version__,
        "layout": f"shard {assembly.spec.layout.shard}, stage {assembly.spec.layout.zero_stage}",
        "weights at the start": ""
        if ranks is None or ranks.sharded is None
        else ranks.sharded.first_weights,
    }
    facts |= {
        f"{name!r} of state(), replicated": digest
        for name, digest in rank_state.digest_replicated(assembly.task).items()
    }
    modules = program.modules()
    common = set[str].intersection(
        *(set(json.loads(names)) for names in group.exchange(json.dumps(list(modules))))
    )
    # rank 0 may import more modules, for example to draw curves
    facts |= {f"code of module {name}": modules[name][:16] for name in sorted(common)}
    apart = group.check_equal(facts)
    if apart:
        name, rank, theirs, first = apart[0]
        raise SpecError(
            f"{name}: rank {rank} has {theirs[:80]}, rank 0 has {first[:80]}",
            hint=(
                "start every rank with the same spec, code, data, packages, replicated state and "
                "--run"
            ),
        )
    assembly.told.extend(rank_state.describe(group, assembly.task))
    if ranks is not None and ranks.sharded is not None:
        group.copy_from_first(list(assembly.model.buffers()))
        return
    parameters = list(assembly.model.parameters())
    masters = [master_of(each) for each in parameters if master_of(each) is not each]
    averages = [] if assembly.engine.average is None else assembly.engine.average.by_id().values()
    group.copy_from_first([*parameters, *masters, *averages, *assembly.model.buffers()])


@contextlib.contextmanager
def acquire_run_folder(
    group: Group, choice: Callable[[], Chosen], spec: RunSpec | None
) -> Iterator[tuple[Chosen, RunLock]]:
    """Return a context in which rank 0 holds the lock of the run folder.

    The other ranks get its path, and write only to the folder that `home_of` returns.
    """
    if group.is_first:
        with folder.acquire_run_folder(choice, spec) as (chosen, lock):
            row = {
                "folder": str(chosen.folder.resolve()),
                "is_again": chosen.is_again,
                "generation": lock.generation,
                "done": chosen.done,
            }
            group.from_first(json.dumps(row))
            if group.flight is not None:
                group.flight.run(chosen.folder.resolve(), lock.generation)
            yield chosen, lock
        return
    row = json.loads(group.from_first(""))
    done = None if row["done"] is None else (row["done"][0], row["done"][1])
    yield (
        Chosen(Path(row["folder"]), row["is_again"], done=done),
        RunLock.following(Path(row["folder"]), row["generation"]),
    )


def clear_drafts(group: Group, run: Path) -> None:
    """Remove unfinished checkpoints; rank 0 does so before any rank saves."""
    if group.is_first:
        checkpoint.clear_drafts(run)


def home_of(group: Group, run: Path) -> Path:
    """Return the folder for this rank's events: the run folder on rank 0, else a folder inside it.

    The other ranks create their folders after rank 0 has opened the run, so that a folder without a
    run can still be used for a new one.
    """
    if group.is_first:
        return run
    group.from_first("")
    try:
        return files.make_folder(run, f"{files.RANKS}/{group.rank}")
    except OSError as error:
        words = f"{error.filename or run} cannot be written: {error.strerror}"
        raise StorageError(words, hint=hint_unwritten(error)) from error


def release_other_ranks(group: Group, assembly: Assembly) -> Callable[[], None]:
    """Let the other ranks continue, on rank 0; return a function that removes gradient hooks.

    Rank 0 calls this after it has written its first record.
    """
    if group.is_first:
        group.from_first("begun")
    ranks = assembly.engine.steps.collectives.ranks
    return (lambda: None) if ranks is None else ranks.close


class NoLedger:
    """Ledger of ranks other than 0, which writes nothing: rank 0 records all samples."""

    def add(self, step: int, ids: np.ndarray) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...

    def count_lost(self, step: int) -> int:
        return 0


def open_ledger(group: Group, run: Path, assembly: Assembly, generation: int) -> Any:
    """Open the ledger of the run, which only rank 0 writes."""
    if not group.is_first:
        return NoLedger()
    if isinstance(assembly.feed.source, Iterated):
        from surefoot.train.resume.batch_ledger import BatchLedger, takes_batches

        if takes_batches(run):
            return BatchLedger(run, assembly.feed.source, assembly.feed, generation)
    return ledger.Ledger(run, plan_of(assembly.feed), generation)


def begin_fork(parent: Path, run: Path, feed: Feed, step: int) -> None:
    """Write the ledger of the fork `run` up to `step`, from that of `parent`.

    Raises StorageError if it cannot be written, and RunFolderError if the parent's ledger cannot be
    read.
    """
    from surefoot.contract import loop_ledger

    if isinstance(feed.source, Iterated) and loop_ledger.is_loop_run(parent):
        loop_ledger.begin_fork(parent, run, step)
    else:
        ledger.begin_fork(parent, run, plan_of(feed), step)


def find_data(assembly: Assembly, number: int, *, accept: bool) -> str:
    """Advance data that can only be read in sequence to step `number`.

    Returns text on how the data differ from those that were trained on, or "" if they do not.
    Raises OtherDataError if they differ and `accept` is false.
    """
    try:
        assembly.engine.steps.reader.loader.seek(number)
    except OtherDataError as error:
        if accept:
            return error.message
        raise OtherDataError(
            error.message,
            hint=(
                f"{error.hint}; --accept-data resumes with the changed data and records the change"
            ),
        ) from None
    return ""


def state_of(loader: Loader) -> dict[str, Any]:
    """Return the state of the loader for a checkpoint.

    If the state of the dataset cannot be saved, a resumed run reads the epoch again up to its
    position instead.
    """
    state = loader.state()
    try:
        checkpoint.split(state)
    except TaskError:
        loader.source.forget_states()  # type: ignore[attr-defined]
        return loader.state()
    return state


class SaveRequests(Protocol):
    """Requests to save: whether a signal has requested one, and whether a save was done since."""

    is_asked: bool
    has_saved: bool


def is_over(
    group: Group, stop: tuple[str, str] | None, code: int, is_time: bool, keeper: SaveRequests
) -> tuple[tuple[str, str] | None, int, bool]:
    """Return what all ranks do next: the reason to stop, the exit code, whether the time is over.

    All ranks stop if one rank has a reason to stop. If a save was requested on any rank, rank 0
    saves.
    """
    if group.is_alone:
        return stop, code, is_time
    kinds = {"stopped": 1.0, "interrupted": 2.0}
    wanted = 0.0 if stop is None else kinds.get(stop[0], 1.0)
    mine = keeper.is_asked
    kind, most, over, asked, saved = group.most(
        [
            wanted,
            float(code) if stop is not None else 0.0,
            float(is_time and group.is_first),
            mine,
            group.is_first and keeper.has_saved,
        ]
    )
    keeper.has_saved = False
    if mine or (asked and group.is_first):
        keeper.is_asked = group.is_first and not saved
    wants = "interrupted" if kind == kinds["interrupted"] else "stopped"
    # an interrupted rank does not evaluate any more, so no rank may
    if kind and (stop is None or kinds.get(stop[0], 1.0) != kind):
        stop = wants, "another rank ended the run"
    return stop, int(most) or code, bool(over)
