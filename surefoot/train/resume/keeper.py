"""Checkpoints of a run: when to save, on which rank, reports on saves, and loading."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit, Content, SaveResult, Stamp
from surefoot.components.profiler.phases.clock import CHECKPOINT
from surefoot.components.stability.guard import GuardFault
from surefoot.contract import commits, digest, events, manifest
from surefoot.contract.manifest import Manifest
from surefoot.contract.runlock import RunLock
from surefoot.core.errors import RunFolderError, StorageError
from surefoot.core.units import Duration, format_bytes, parse_bytes
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.train import environment
from surefoot.train.assemble import Assembly
from surefoot.train.record.noticed.attribute_notes import AttributeNotes
from surefoot.train.resume import same
from surefoot.train.resume.disk_trouble import Patience, RoomMaker, SaveRhythm, list_steps
from surefoot.train.resume.state import LiveState
from surefoot.train.resume.state_files import CLOCK

if TYPE_CHECKING:
    from surefoot.train.record.telling import Telling


class CheckpointManager:
    """Manager of the checkpoints of one run: saves them into its folder, and loads them."""

    def __init__(
        self,
        folder: Path,
        lock: RunLock,
        assembly: Assembly,
        parent: Mapping[str, Any] | None = None,
        group: Group = ALONE,
    ) -> None:
        """Set up saving by rank 0, or by every rank if state is sharded; all ranks load."""
        self._folder, self._lock, self._assembly, self.parent, self._group = (
            folder,
            lock,
            assembly,
            parent,
            group,
        )
        self._table = table = assembly.spec.checkpoint
        every = None if table.every == "never" else assembly.course.duration(table.every)
        self._every_s = every.value if every is not None and every.unit == "s" else None
        self._rhythm = (
            None
            if every is None or self._every_s is not None
            else assembly.course.rhythm(str(table.every))
        )
        self._keep_every, self._keep_every_s = _milestones(assembly, table.keep_every)
        self._state = LiveState(assembly)
        self._is_copying = False  # weights and optimizer state, for a save in the background
        assembly.engine.steps.observers.before_update.append(self._before_update)
        ranks = assembly.engine.steps.collectives.ranks
        self._all_save = ranks is not None and ranks.sharded is not None  # each its rows
        self._store = None if table.store is None else checkpoint.Store(table.store)
        self._store_troubles: list[StorageError] = []
        self._room = RoomMaker(
            folder,
            every=self._keep_every,
            every_s=self._keep_every_s,
            keep_best=table.keep_best,
            group=group if self._all_save else ALONE,
        )
        self._patience = Patience(
            None if table.max_unsaved == "never" else float(Duration.parse(table.max_unsaved).value)
        )
        self._pace = SaveRhythm(self._every_s)
        self._took: tuple[int, float] | None = None
        self._saver = checkpoint.Saver(self._write)
        self._stamp = Stamp()
        self._last_s = time.monotonic()
        self.is_asked = self.has_saved = False
        self.saved_step = 0
        self.lost_commits = ""  # text on checkpoints that `resume` did not find
        self._attribute_notes = AttributeNotes(group.size)

    # ---- when

    def is_due(self, step: int) -> bool:
        """Return whether the spec or a call of `ask` requires a save after this step.

        If all ranks take part in saves, the result is true on all ranks if one rank requires a
        save.
        """
        if not self._state.is_shared:
            if self._group.is_first:
                return self._is_due(step)
            # rank 0 saves, and learns of the requests on this rank in `together.is_over`
            return self._rhythm is not None and self._rhythm(step)
        # clocks differ between ranks, so the clock of rank 0 decides
        wants = self._is_due(step) and (
            self.is_asked or self._every_s is None or self._group.is_first
        )
        return self._group.most([float(wants)])[0] > 0

    def _is_due(self, step: int) -> bool:
        if self.is_asked:
            return True
        if self._rhythm is not None:
            return self._rhythm(step)
        return (
            self._every_s is not None
            and time.monotonic() - self._last_s >= self._every_s
            and not self._saver.is_busy
        )

    def ask(self) -> None:
        """Request a save after the current step, whatever the spec says."""
        self.is_asked = True

    def disk_note(self) -> tuple[str, ...]:
        """Return a warning if the checkpoints that retention keeps do not fit on the disk."""
        one = self._state.num_bytes()
        count = self._table.keep + self._table.keep_best + 1  # and the one being written
        free = shutil.disk_usage(self._folder).free
        if one * count <= free:
            return ()
        need = f"{count} checkpoints of about {format_bytes(one)} need {format_bytes(one * count)}"
        return (
            (
                f"{need}, and {format_bytes(free)} are free: saves may fail, or delete older "
                "ones; see checkpoint.keep and checkpoint.budget"
            ),
        )

    @property
    def _layout(self) -> dict[str, int]:
        """Layout of the ranks that write a checkpoint, for its manifest."""
        if not self._all_save:
            return {"world_size": 1}
        table = self._assembly.spec.layout
        return {
            "world_size": self._group.size,
            "replicate": self._group.size // table.shard,
            "shard": table.shard,
            "stage": table.zero_stage,
        }

    # ---- saving

    @contextlib.contextmanager
    def write_alike(self) -> Iterator[None]:
        """Return a context for the writes that precede a save.

        If all ranks take part in the save and one rank raises StorageError in the context, all
        ranks raise one.
        """
        problem: StorageError | None = None
        try:
            yield
        except StorageError as error:
            problem = error
        if self._state.is_shared and self._group.most([float(problem is not None)])[0]:
            raise problem or StorageError(
                "another rank could not write the files that come before its part"
            )
        if problem is not None:
            raise problem

    def save(
        self,
        step: int,
        more: Mapping[str, Any],
        clock: Mapping[str, float],
        score: Mapping[str, Any] | None,
        tell: Callable[[SaveResult], None],
        *,
        last: bool = False,
        asked: bool = False,
        copied: bool = False,
    ) -> None:
        """Save the state after `step`; `tell` is called with the result, now or later.

        If ranks hold different parts of the state (`LiveState.is_shared`), every rank must call
        this; otherwise at least rank 0. A step that has been saved is saved again only if something
        has changed.

        Args:
            step: the step after which this is called.
            more: values to store beside the state.
            clock: times to store in a separate file.
            score: the score of the step for the manifest, if it was evaluated.
            tell: called with the result of the save.
            last: whether this is the last save of the run; it is written before this returns.
            asked: whether a user has requested the save; any change then counts, otherwise only
                changes of tensors.
            copied: whether the state may change as soon as this returns, even through writes that
                torch does not record (`Tensor.data`).
        """
        with contextlib.nullcontext() if self._group.flight is None else self._group.flight.busy():
            self._save(step, more, clock, score, tell, last=last, asked=asked, copied=copied)

    def _save(
        self,
        step: int,
        more: Mapping[str, Any],
        clock: Mapping[str, float],
        score: Mapping[str, Any] | None,
        tell: Callable[[SaveResult], None],
        *,
        last: bool,
        asked: bool,
        copied: bool,
    ) -> None:
        is_regular = not (last or asked or copied)
        period_s = self._pace.measure(is_regular=is_regular)
        self.settle(tell, wait=True)
        if self._took is not None and period_s is not None:
            self._pace.compare(*self._took, period_s)
        self._took = None
        of_ranks = self._state.gather()
        if not (self._group.is_first or self._all_save):
            self.saved_step, self.is_asked = step, False
            return
        if step == self.saved_step == 0 and not asked:
            return
        self.is_asked, self.has_saved, self._last_s = False, True, time.monotonic()
        self._stamp = Stamp(
            generation=self._lock.generation,
            spec_id=self._assembly.spec.id,
            environment=environment.versions(),
            score=score,
            parent=self.parent,
            layout=self._layout,
        )
        content, moving = self._state.take(step, more, clock, of_ranks)
        if step == self.saved_step and self._are_on_disk(
            _join_content(content, moving), texts=asked
        ):
            return
        if (
            self._table.background
            and not last
            and not self._all_save
            and self._saver.begin(content, moving)
        ):
            self._is_copying = True
            if copied:
                self.before_update()
        else:
            tell(self._on_save_result(self._saver.save_now(_join_content(content, moving))))
        self._pace.start_training_time(is_regular=is_regular)

    def _are_on_disk(self, content: Content, *, texts: bool) -> bool:
        is_there = self._is_on_disk(content, texts=texts)
        return not self._group.most([float(not is_there)])[0] if self._all_save else is_there

    def _is_on_disk(self, content: Content, *, texts: bool) -> bool:
        """Return whether the checkpoint of this step holds all tensors of `content`.

        With `texts`, all other files except the clock are compared too.
        """
        try:
            held = {
                entry.name: entry
                for entry in manifest.read(manifest.step_folder(self._folder, content.step)).files
            }
        except RunFolderError:
            return False
        if texts and any(
            name not in held or held[name].sha256 != digest.digest_of_bytes(text)
            for name, text in content.texts.items()
            if name != CLOCK
        ):
            return False
        with commits.hashing() as pool:
            return all(
                name in held
                and checkpoint.find_unchanged(tensors, held[name], pool, content.parts)[0]
                for name, tensors in content.tensors.items()
            )

    def _write(self, content: Content, may_commit: Callable[[], bool]) -> Manifest:
        def may() -> bool:
            return may_commit() and self._lock.is_still_held()

        def write() -> Manifest:
            if self._all_save:
                return checkpoint.commit_together(
                    self._folder, content, self._stamp, self._group, may_commit=may
                )
            return checkpoint.commit(self._folder, content, self._stamp, may_commit=may)

        made = self._room.write(write)
        if not self._group.is_first:
            return made
        self._retain()
        if self._store is not None:
            try:
                self._store.push(self._folder, content.step)
                self._store.retain(self._folder)
            except StorageError as error:  # the checkpoint itself is saved
                self._store_troubles.append(error)
        return made

    def _retain(self) -> None:
        checkpoint.retain(
            self._folder,
            keep=self._table.keep,
            every=self._keep_every,
            every_s=self._keep_every_s,
            keep_best=self._table.keep_best,
            budget_bytes=None if self._table.budget is None else parse_bytes(self._table.budget),
        )

    def report(self, telling: Telling, step: int) -> None:
        """Record effects of saves: deleted checkpoints, unsaved attributes, delays, errors."""
        if deleted := self._room.take_deleted():
            telling.room_made(list_steps(deleted), step)
        if self._group.is_first:
            for words, action in self._attribute_notes.take(
                self._state.attributes, self._state.unsaved_attributes
            ):
                telling.fault(GuardFault(step, "attributes", action, words))
        if (slow := self._pace.take()) is not None:
            telling.slow_save(slow.step, slow.words)
        troubles, self._store_troubles = self._store_troubles, []
        for trouble in troubles:
            telling.give_up("its copy in the store", trouble, step)

    def on_failed_save(self, telling: Telling, error: StorageError, step: int) -> None:
        """Record a failed save. Raises StorageError after `checkpoint.max_unsaved` without one."""
        if not self._patience.is_over(error):
            telling.give_up("this commit", error, step)
        self._patience.on_failed(error, step, self.saved_step)

    def before_update(self) -> None:
        """Wait until weights and optimizer state are copied; called before the optimizer step."""
        self._saver.before_update()
        self._is_copying = False

    def _before_update(self) -> None:
        """Wait for the copies of a save; an observer of each step."""
        if self._is_copying:
            self._assembly.engine.steps.clock.switch(CHECKPOINT)
            self.before_update()

    def settle(self, tell: Callable[[SaveResult], None], *, wait: bool = False) -> None:
        """Report the result of the background save if it is done; with `wait`, wait for it."""
        if wait:
            self.before_update()
        done = self._saver.finish(wait=wait)
        if done is not None:
            tell(self._on_save_result(done))

    def _on_save_result(self, saved: SaveResult) -> SaveResult:
        if saved.manifest is not None:
            self.saved_step = saved.step
            self._patience.on_saved()
        self._took = (saved.step, saved.elapsed_s)
        self._pace.compare(saved.step, saved.elapsed_s, None)
        return saved

    def check_saved(self, step: int) -> None:
        """Raise StorageError unless the final state of the run, after `step`, is on disk.

        A failed save in the middle of a run costs only that checkpoint.
        """
        if step != self.saved_step:
            raise StorageError(
                f"the state after step {step:,} was not saved",
                hint=self._patience.hint_restart(self.saved_step),
            )

    def abandon(self) -> None:
        """Let a save in the background finish without reporting its result."""
        self._saver.abandon()

    def digests(self, more: Mapping[str, Any]) -> dict[str, str]:
        """Return a digest of each component of the current state."""
        return self._state.digests(more)

    # ---- loading

    def resume(self) -> tuple[dict[str, Any] | None, int, list[str]]:
        """Load the newest undamaged checkpoint.

        Returns the values that were saved beside the state (None without a checkpoint), the step of
        the checkpoint (0 without one), and the damage found.
        """
        found: dict[str, Any] = {}
        lost, forget = (
            self._fetch() if self._group.is_first else [],
            self._assembly.spec.fault.forget,
        )
        gone = None
        if self._group.is_first and (self._folder / events.FILE).is_file():
            from surefoot.contract.run_folder.gone import describe_lost, find_gone

            gone = find_gone(self._folder)
        adapt = self._state.keep_current(forget) if forget else None

        def restore(commit: Commit) -> None:
            self._check_own(commit)
            found.update(self._state.restore(commit, adapt))
            self.parent = commit.manifest.parent

        def load(step: int | None) -> None:
            if step is None:
                same.check_none(self._group, self._folder)
                return
            commit = same.open_same(self._group, self._folder, step)
            same.load_together(self._group, self._state, step, functools.partial(restore, commit))

        if self._group.is_first:

            def tell_and_load(commit: Commit | None) -> None:
                # all ranks load at the same time, since they exchange rows
                step = None if commit is None else commit.manifest.step
                self._group.from_first(json.dumps(step))
                load(step)

            step, troubles = checkpoint.newest_loadable(self._folder, tell_and_load)
            # deletes what a killed attempt left: at the end of a run no save follows that would
            self._retain()
            if step is None:
                tell_and_load(None)
        else:
            step, troubles = json.loads(self._group.from_first("")), []
            load(step)
        self.saved_step = step or 0
        if gone is not None:
            self.lost_commits = describe_lost(gone, self.saved_step)
        return (None if step is None else found), step or 0, [*lost, *troubles]

    def _check_own(self, commit: Commit) -> None:
        """Raise RunFolderError for a checkpoint of a different spec, copied into the run folder."""
        theirs, ours = commit.manifest.spec_id, self._assembly.spec.id
        if theirs != ours:
            raise RunFolderError(
                f"{commit.folder} is a checkpoint of a different spec ({theirs}, now {ours})",
                hint="move it away, or give another --run folder",
            )

    def _fetch(self) -> list[str]:
        """Copy the newest checkpoint of the store if it is newer; return damage in the store."""
        if self._store is None:
            return []
        _, troubles = self._store.pull_newest(self._folder, self._assembly.spec.id)
        return troubles


def _join_content(content: Content, moving: Mapping[str, Mapping[str, Any]]) -> Content:
    files = {file: dict(tensors) for file, tensors in content.tensors.items()}
    for file, tensors in moving.items():
        files.setdefault(file, {}).update(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        )
    return replace(content, tensors=files)


def _milestones(assembly: Assembly, text: str | None) -> tuple[int | None, float | None]:
    """Return `checkpoint.keep_every` as (steps, None), or as (None, seconds of training)."""
    if text is None:
        return None, None
    duration = assembly.course.duration(text)
    return (
        (None, duration.value)
        if duration.unit == "s"
        else (max(1, assembly.course.to_steps(text) or 1), None)
    )
