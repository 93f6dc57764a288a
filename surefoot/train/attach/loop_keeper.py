"""Checkpoints of a user-defined loop: its objects, its position in the data, its random states."""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.components import checkpoint
from surefoot.components.checkpoint import Stamp
from surefoot.components.data.sources.batch_digest import (
    PassDigest,
    ReadingDifference,
    compare_content,
    digest_of_content,
)
from surefoot.components.data.sources.watched import OF_LOADER, ObservedLoader, name_states
from surefoot.components.stability.guard import GuardFault
from surefoot.contract.manifest import Manifest
from surefoot.contract.run_folder.attached import SPEC_ID
from surefoot.contract.run_folder.gone import describe_lost, find_gone
from surefoot.contract.runlock import RunLock
from surefoot.core.errors import TaskError
from surefoot.core.units import Duration, name_some
from surefoot.runtime.attributes.generators import (
    find_generators,
    generator_state,
    restore_generator,
)
from surefoot.runtime.attributes.tracker import AttributeTracker
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.train import environment
from surefoot.train.attach import loop_ranks
from surefoot.train.attach.arguments import can_save_position, check_kinds
from surefoot.train.attach.loop_ranks import SaveTimer
from surefoot.train.attach.read_ahead import PendingBatches, make_resume_fault
from surefoot.train.attach.read_states import ReadStates, describe_too_many
from surefoot.train.quiet import read_streams
from surefoot.train.record.noticed.attribute_notes import AttributeNotes
from surefoot.train.record.noticed.inner_optimizers import InnerOptimizers
from surefoot.train.resume.disk_trouble import RoomMaker, SaveRhythm, SlowSave, list_steps

KEEP, MAX_NAMED = 3, 4


class LoopKeeper:
    """Manager of the checkpoints of a user's training loop, saved between two of its steps."""

    def __init__(
        self,
        folder: Path,
        lock: RunLock,
        objects: Mapping[str, Any],
        data: ObservedLoader,
        every: str | None,
        group: Group = ALONE,
    ) -> None:
        self._folder, self._lock, self._objects = folder, lock, objects
        self._watched, self._group = data, group
        self._data = data.data
        self._modules = {
            name: each for name, each in objects.items() if isinstance(each, nn.Module)
        }
        self._beside = {
            name: each
            for name, each in objects.items()
            if not isinstance(each, torch.optim.Optimizer)
        }
        self._inner = InnerOptimizers(objects)
        self._trackers = {name: AttributeTracker(each) for name, each in self._modules.items()}
        self._attribute_notes = AttributeNotes(of_loop=True)
        self._unsaved: list[str] = []  # attributes that the last checkpoint could not hold
        duration = None if every is None else Duration.parse(every)
        if duration is not None and (duration.unit not in ("s", "steps") or duration.value == 0):
            raise TaskError(
                f"an attached loop cannot be saved every {every!r}",
                hint='give it in steps or time, such as "500 steps" or "10 min"',
            )
        self._every = duration
        self._timer = (
            SaveTimer(group, float(duration.value))
            if duration is not None and duration.unit == "s"
            else None
        )
        self._pace = SaveRhythm(
            None if self._timer is None or duration is None else float(duration.value)
        )
        self._is_regular = False  # whether the next save is due by `every`
        self._took: tuple[int, float] | None = None  # the step and seconds of the last save
        self._room = RoomMaker(folder, group=group)
        self._last_s = time.monotonic()
        self._content = digest_of_content(self._data)
        self._content_before: str | None = None  # from the resumed checkpoint
        self._pass_random: Mapping[str, Any] = {}
        self._last_random: Mapping[str, Any] = {}  # of the previous epoch
        self._starts_workers: bool | None = None  # of the resumed epoch, see ObservedLoader
        # the states of the loader's generators when the checkpoint was saved
        self._own_now: Mapping[str, Any] = {}
        self._before: PassDigest | None = None  # of the resumed epoch, as saved
        self.seen = PassDigest()  # the batches of this epoch
        self._stream_states, self._saved_reads, self._told_reads = ReadStates(), None, False
        self._draws_late = data.draws_late and not can_save_position(self._data)
        # random states to restore after the loader has reached the saved position
        self._wanted: Mapping[str, Any] | None = None
        self.position = 0  # batches read in the current epoch
        # index of the current epoch, from 0; an epoch that was left early counts
        self.pass_number = -1
        self._is_between = False  # between two epochs
        # the random states and the state of the data before each read ahead, newest last
        self._states_ahead: deque[Mapping[str, Any]] = deque(maxlen=0)
        self._before_read: Mapping[str, Any] = {}
        # after a resume: the batches that were read ahead and are yielded again, and their states
        self._to_yield_again: list[Mapping[str, Any]] = []
        self._again: deque[tuple[int, int, tuple[int, ...]]] = deque()
        self._again_states: deque[Mapping[str, Any]] = deque()
        self._excess = 0  # batches that the loop may have read ahead without declaring it

    # ---- resume

    def resume(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Load the newest undamaged checkpoint; return the loop's counters and messages on damage.

        The counters are None without a checkpoint.
        """
        if self._group.is_first:
            checkpoint.clear_drafts(self._folder)
        gone = find_gone(self._folder) if self._group.is_first else []
        found = loop_ranks.load(self._folder, self._objects, self._group)
        self.lost_commits = describe_lost(gone, 0 if found is None else found.step)
        if found is None:
            return None, ()
        self._retain()  # checkpoints that a killed attempt did not delete any more
        with checkpoint.as_run_folder_errors(f"the state after step {found.step:,}"):
            loop, data = dict(found.values["loop"]), found.values["data"]
            self.position, self._pass_random = int(loop["position"]), loop["pass_random"]
            self._is_between, self.pass_number = bool(loop["is_between"]), int(loop["pass_number"])
            where = f"step {found.step:,} of {self._folder}"
            check_kinds(self._objects, dict(loop.get("kinds", {})), where)
            self._inner.restore(loop.get("inner_optimizers", {}))
            self.unfrozen = self._set_trained(dict(loop.get("trains", {})))
            self._last_random = loop.get("last_random", {})
            self._starts_workers = loop.get("starts_workers", self.pass_number == 0)
            self._watched.worker_seed = loop.get("worker_seed", torch.Generator().get_state())
            self._own_now = name_states(loop.get("own_now", self._pass_random.get("own", ())))
            self._content_before, self._saved_reads = loop.get("content"), loop.get("reads")
            self._before = PassDigest.from_state(loop["seen"]) if "seen" in loop else None
            self._to_yield_again = list(loop.get("in_hand", ()))
            self._excess = int(loop.get("excess", 0))
            if self._is_between:  # before the loop calls `set_epoch`
                self._watched.restore_parts(self._own_now)
        self._wanted = checkpoint.random_states()
        if data is not None:
            self._data.load_state_dict(data)  # type: ignore[attr-defined]
            self._saves_itself = True
        return loop, found.troubles

    def _set_trained(self, saved: Mapping[str, Mapping[str, bool]]) -> tuple[str, ...]:
        """Set requires_grad of each parameter as saved; return a note on those that differed."""
        changed: list[str] = []
        for name, module in self._modules.items():
            trained = saved.get(name, {})
            for key, parameter in module.named_parameters():
                if trained.get(key, parameter.requires_grad) != parameter.requires_grad:
                    parameter.requires_grad_(trained[key])
                    changed.append(f"{key} {'trains' if trained[key] else 'is frozen'}")
        return (
            (f"as when the checkpoint was saved, {name_some(changed, MAX_NAMED)}",)
            if changed
            else ()
        )

    @property
    def first_pass(self) -> int:
        """Index, from 0, of the epoch in which the loop starts."""
        return max(0, self.pass_number + self._is_between)

    @property
    def first_batch(self) -> int:
        """Index in its epoch of the batch at which the loop resumes."""
        return 0 if self._is_between else self.position - len(self._to_yield_again)

    def describe_position(self) -> tuple[str, ...]:
        """Return a message on the batch at which the loop resumes in the middle of an epoch."""
        if not self.first_batch:
            return ()
        told = (
            f"epoch {self.pass_number} resumes at batch {self.first_batch}: a loop that counts the "
            "batches of an epoch uses enumerate(run.batches(), run.first_batch)"
        )
        return (told,)

    def find_read_ahead(self, step: int) -> list[GuardFault]:
        """Return a fault if the resumed loop may have read ahead without declaring it."""
        return [make_resume_fault(step, self._excess)] if self._excess else []

    _saves_itself = False
    lost_commits = ""  # text on checkpoints that `resume` did not find
    unfrozen: tuple[str, ...] = ()  # note on parameters that `resume` unfroze or froze

    def begin_pass(self) -> Iterator[Any]:
        """Return an iterator over one epoch; after a resume, from the saved position."""
        batches = self._begin_pass()
        before, self._content_before = self._content_before, None
        self.difference = self.difference or compare_content(self._content, before)
        return batches

    def _begin_pass(self) -> Iterator[Any]:
        wanted, self._wanted = self._wanted, None
        self._watched.begin_pass()
        self.difference = None
        if wanted is not None and self._is_between:
            now = self._watched.part_states()  # the loop may have called `set_epoch`
            self._compare_first()
            checkpoint.restore_random(wanted)
            self._restore_generators({**self._own_now, **now})
            wanted = None
        self._is_between = False
        in_hand, self._to_yield_again = self._to_yield_again, []
        if wanted is None:
            self.position, self.seen, self._stream_states = 0, PassDigest(), ReadStates()
            self.pass_number += 1
            self._pass_random = self._random(of_pass=True)
            return self._iterate()
        if self._saves_itself:
            checkpoint.restore_random(wanted)
            self.seen = self._before or PassDigest()
            batches = self._watched.iterate()
            own = {
                name: each for name, each in self._own_now.items() if not name.startswith(OF_LOADER)
            }
            self._restore_generators(own)
            held = [
                self._read_again(batches, state, self.position - len(in_hand) + number)
                for number, state in enumerate(in_hand)
            ]
            if held:
                checkpoint.restore_random(wanted)
                self._restore_generators(own)
            return itertools.chain(held, batches)
        self._restore(self._pass_random)
        self._stream_states = ReadStates(self._saved_reads, self.position)
        batches = self._iterate(starts_workers=self._starts_workers)
        self.seen, position = PassDigest(), self.position
        self.position, draws = 0, False
        # batches that steps have consumed are read again and dropped
        for number in range(position - len(in_hand)):
            before = read_streams()
            self.take(next(batches, None))
            draws |= number > 0 and before != read_streams()
        held = []
        for state in in_hand:
            before = read_streams()
            held.append(self._read_again(batches, state, self.position))
            draws |= before != read_streams()
        if self._before is not None and self._before.count == position:
            # data that draw from the global generators depend on the draws of the loop in between
            knows_draws = self._draws_late and self._stream_states.is_complete
            self.difference = self._watched.explain(
                self.seen.compare(
                    self._before,
                    knows_samples=self._watched.knows_samples,
                    values=knows_draws or not draws,
                )
            )
        if draws and self._stream_states.is_over_limit:
            self.difference = self.difference or describe_too_many()
        checkpoint.restore_random(wanted)
        self._restore_generators(self._own_now)
        return itertools.chain(held, batches)

    def _read_again(self, batches: Iterator[Any], state: Mapping[str, Any], place: int) -> Any:
        """Read a batch again that was read ahead before the save, with its random states."""
        states = state["random"]
        if self._saves_itself:
            own = {n: each for n, each in states["own"].items() if not n.startswith(OF_LOADER)}
            states = {**states, "own": own}
        self._restore(states)
        self._again_states.append({**state, "data": self._find_data_state()})
        batch = next(batches, None)
        if self._saves_itself:  # its position and digest are already counted
            ids = self._watched.record(batch, PassDigest())
        else:
            ids = self.take(batch)
        self._again.append((self.pass_number, place, ids))
        return batch

    # between the batches read again for the resume and those read before
    difference: ReadingDifference | None = None

    def _iterate(self, *, starts_workers: bool | None = None) -> Iterator[Any]:
        batches = self._watched.iterate(starts_workers=starts_workers)
        return self._stream_states.watch(batches) if self._draws_late else batches

    def take(self, batch: Any) -> tuple[int, ...]:
        """Count a batch that was read; return its sample ids, or its digest as four numbers."""
        self.position += 1
        return self._watched.record(batch, self.seen)

    def before_read(self, ahead: int) -> None:
        """Record the random states before the next read, if a checkpoint may need them."""
        if self._states_ahead.maxlen != ahead:
            self._states_ahead = deque(self._states_ahead, maxlen=ahead)
        if ahead and not self._again:
            self._before_read = {"random": self._random(), "data": self._find_data_state()}

    def _find_data_state(self) -> Any:
        """Return a copy of the data's state_dict; None if the data cannot save their position."""
        return (
            copy.deepcopy(self._data.state_dict())  # type: ignore[attr-defined]
            if can_save_position(self._data)
            else None
        )

    def take_next(self, batch: Any) -> tuple[int, int, tuple[int, ...]]:
        """Count a batch that the loop receives; return its epoch, its index there and its ids."""
        if self._again:
            self._states_ahead.append(self._again_states.popleft())
            read = self._again.popleft()
            self._watched.num_drawn = len(read[2]) or None if self._watched.knows_samples else None
            return read
        self._states_ahead.append(self._before_read)
        place = self.position
        return self.pass_number, place, self.take(batch)

    def _compare_first(self) -> None:
        """After a resume between epochs, compare two reads of the last epoch's first batch."""
        if (
            self._before is None
            or self._saves_itself
            or not self._last_random
            or not self._before.count
        ):
            return
        self._restore(self._last_random)
        for batch in self._watched.iterate(starts_workers=self._starts_workers):
            seen = PassDigest()
            self._watched.record(batch, seen)
            self.difference = self._watched.explain(seen.compare_first(self._before))
            self._watched.begin_pass()
            return

    def end_pass(self) -> bool:
        """Record the end of an epoch, once: a checkpoint saved now resumes with the next one.

        Returns whether the epoch had not been recorded before.
        """
        if self._is_between:
            return False
        self._last_random = self._pass_random
        self.position, self._is_between = 0, True
        self._pass_random = self._random(of_pass=True)
        return True

    def _random(self, *, of_pass: bool = False) -> dict[str, Any]:
        """Return the current random states; at the start of an epoch, all that determine it."""
        return {**checkpoint.random_states(), "own": self._generator_states(of_pass=of_pass)}

    def _restore(self, states: Mapping[str, Any]) -> None:
        checkpoint.restore_random(states)
        self._restore_generators(name_states(states["own"]))

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the data, the model and the loop's `state`, by name."""
        return {
            **self._watched.generators(),
            **find_generators((f"{name}", each) for name, each in self._beside.items()),
        }

    def _generator_states(self, *, of_pass: bool) -> dict[str, Any]:
        own = {name: generator_state(each) for name, each in self.generators().items()}
        return {**own, **self._watched.pass_states()} if of_pass else own

    def _restore_generators(self, states: Mapping[str, Any]) -> None:
        """Set the generators to saved states; those without a saved state stay unchanged."""
        with checkpoint.as_run_folder_errors("the saved state of a sampler or a dataset"):
            self._watched.restore_parts(states)
        for name, each in self.generators().items():
            if name in states:
                with checkpoint.as_run_folder_errors(
                    f"the saved state of the random generator {name}"
                ):
                    restore_generator(each, states[name])

    # ---- saving

    @property
    def saves_regularly(self) -> bool:
        return self._every is not None

    def is_due(self, step: int) -> bool:
        every = self._every
        if every is None:
            return False
        if self._timer is None:
            self._is_regular = step % int(every.value) == 0
        else:
            self._is_regular = self._timer.is_due(step, time.monotonic() - self._last_s)
        return self._is_regular

    def take_slow(self) -> SlowSave | None:
        """Return a save that took longer than the time to the next one, once; see `SaveRhythm`."""
        return self._pace.take()

    def take_deleted(self) -> str | None:
        """Return the steps whose checkpoints were deleted since the last call, or None."""
        deleted = self._room.take_deleted()
        return list_steps(deleted) if deleted else None

    def _attributes(self) -> dict[str, Any]:
        """Return the changed attributes of each module for a checkpoint, by object name."""
        found, self._unsaved = {}, []
        saved = {
            name: each for name, each in self._beside.items() if not isinstance(each, torch.Tensor)
        } | self.generators()
        for name, tracker in self._trackers.items():
            found[name], unsaved = checkpoint.encode_storable(
                self._objects[name], tracker.find_changed(saved)
            )
            self._unsaved += unsaved
        return found

    def take_unsaved(self) -> list[str]:
        """Return warnings, each once, on changes and draws that no checkpoint can hold."""
        told = [
            f"{words}; {action}" for words, action in self._attribute_notes.take((), self._unsaved)
        ]
        if self._stream_states.is_over_limit and not self._told_reads:
            self._told_reads, (what, hint, _) = True, describe_too_many()
            told.append(f"{what}; {hint}")
        return told

    def save(
        self, step: int, counters: Mapping[str, Any], pending: PendingBatches
    ) -> tuple[Manifest, float]:
        """Save a checkpoint of the loop after `step`; return its manifest and the seconds taken.

        No step has consumed the batches in `pending` yet. Raises StorageError.
        """
        started_s = self._last_s = time.monotonic()
        is_regular, self._is_regular = self._is_regular, False
        period_s = self._pace.measure(is_regular=is_regular)
        if self._took is not None and period_s is not None:
            self._pace.compare(*self._took, period_s)
        self._took = None
        stamp = Stamp(
            generation=self._lock.generation, spec_id=SPEC_ID, environment=environment.versions()
        )
        in_hand = list(self._states_ahead)[len(self._states_ahead) - pending.num_in_hand :]
        data_state = in_hand[0]["data"] if in_hand else self._find_data_state()
        loop = {
            **counters,
            "in_hand": [{"random": state["random"]} for state in in_hand],
            "excess": pending.find_excess() if self.first_batch else 0,
            "position": self.position,
            "pass_number": self.pass_number,
            "is_between": self._is_between,
            "pass_random": self._pass_random,
            "last_random": self._last_random,
            "starts_workers": self._watched.starts_workers,
            "worker_seed": self._watched.worker_seed,
            "seen": self.seen.as_state(),
            "reads": self._stream_states.as_state(),
            "content": self._content,
            "own_now": self._generator_states(of_pass=self._is_between),
            "inner_optimizers": self._inner.state(),
            "kinds": {
                name: type(each).__name__ for name, each in self._objects.items() if name != "model"
            },
            "trains": {name: _find_trained(module) for name, module in self._modules.items()},
        }
        state = {**self._objects, "loop": loop, "data": data_state}
        attributes = self._attributes()
        made = self._room.write(
            lambda: loop_ranks.save(
                self._folder, step, state, stamp, self._group, self._lock, attributes
            )
        )
        self._retain()
        self._took = (step, time.monotonic() - started_s)
        self._pace.compare(*self._took, None)
        self._pace.start_training_time(is_regular=is_regular)
        return made, self._took[1]

    def _retain(self) -> None:
        if self._group.is_first:
            checkpoint.retain(self._folder, keep=KEEP)


def _find_trained(module: nn.Module) -> dict[str, bool]:
    return {name: each.requires_grad for name, each in module.named_parameters()}
