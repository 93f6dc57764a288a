"""Source of an iterable of whole batches, which is read sequentially and replayed to resume."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from surefoot.components.data.feed import count_batches, size_of
from surefoot.components.data.sources.batch_digest import (
    PassDigest,
    ReadingDifference,
    digest_of_content,
)
from surefoot.components.data.sources.loader_parts import EpochState, describe_draws
from surefoot.contract.task import Batch, Guarantee
from surefoot.core.errors import DataError, EndOfStream, OtherDataError
from surefoot.runtime.attributes.generators import sign_state

KEPT_STATES, KEPT_SIZES = 16, 1024
UNKNOWN = 2**40  # batches of an iterable without a length; more than any run reads
NOTHING: Any = object()
Streams = Callable[[int], AbstractContextManager[None]]


class BatchRead(NamedTuple):
    """Position of a batch and its sample indices (if unknown: a digest as four 32-bit numbers)."""

    epoch: int
    number: int
    ids: tuple[int, ...]


class Iterated:
    """Source of the batches of an iterable or a DataLoader; sample i is batch i.

    It is therefore trained with `batch = 1`, unshuffled. It can only be read sequentially. To
    resume at batch k, the first k batches are read again (*replayed*), with the random states of
    the first reading, and compared with its digests. Different samples raise OtherDataError. The
    states of the generators of the loader and its dataset are saved, and those of samplers and
    datasets with a state_dict; the global random states are computed from the seed, the epoch and
    the index of the batch.

    An iterable with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) is restored
    instead. `set_epoch` of a loader, its samplers and its datasets is called before each epoch.

    An iterable without a length is read until it ends. In training it then begins again, and the
    whole run is one epoch (`repeat`).

    Args:
        iterable: Iterable that restarts each time it is iterated.
        num_batches: Batches per epoch; None for the length of the iterable, if it has one. In this
            case, a notice reports any batch beyond the length.

    Raises:
        DataError: For an iterator or no batches; on reading, if the iterable ends too early.
    """

    guarantee: Guarantee = "replayed"
    thread_safe = False
    _keeps_ids = True  # reading does not change them
    draws_by_sample = False  # random draws of the dataset depend on the sample, not on its batch
    step_size = 1
    is_sharded = False  # it is a ShardedStream
    is_divided = False  # a step can have fewer batches than `step_size`; see count_step

    def __init__(self, iterable: Iterable[Batch], num_batches: int | None = None) -> None:
        from surefoot.components.data.sources.watched import ObservedLoader

        length = num_batches if num_batches is not None else count_batches(iterable)
        if isinstance(iterable, Iterator):
            raise DataError(
                f"a {type(iterable).__name__} can be read only once",
                hint="give an iterable that restarts each time it is iterated",
            )
        if length == 0:
            raise DataError(
                f"the {type(iterable).__name__} returns no batch: its length is 0",
                hint="give 1 batch or more",
            )
        self._watched, self.given = ObservedLoader(iterable), iterable
        self.parts = self._watched.parts  # samplers and datasets whose state_dict is saved
        self.content_digest = digest_of_content(iterable)
        self._iterable = self._watched.data
        self.has_length, self.repeats = length is not None, False
        self.num_batches = UNKNOWN if length is None else length
        self.is_cut = num_batches is not None or length is None
        self._num_passes = 0  # of an iterable that repeats, in this epoch
        self._iterator: Iterator[Batch] | None = None
        self._next = 0
        self._pass: EpochState | None = None
        self._has_state = all(
            callable(getattr(iterable, part, None)) for part in ("state_dict", "load_state_dict")
        )
        # (epoch, batches drawn, the state after them)
        self._states: deque[tuple[int | None, int, Any]] = deque(maxlen=KEPT_STATES)
        # (epoch, batch) -> number of samples, for the last batches that were read
        self._sizes: dict[tuple[int, int], int] = {}
        # a copy of batch 0, until another batch is read
        self._first: tuple[BatchRead, Batch] | None = None
        self._expected: EpochState | None = (
            None  # the epoch that is resumed, as a checkpoint holds it
        )
        # the epoch whose batch 0 a check read before a state was loaded
        self._begun: tuple[int, PassDigest] | None = None
        self._is_loaded = False  # the iterable is not at the position of `_states`
        self._has_told = False  # that the batches are not what their number says
        self.notices: list[tuple[str, str]] = []
        # called with each batch that is read
        self.on_read: Callable[[BatchRead], None] = lambda row: None
        self._row = BatchRead(0, 0, ())
        known = f"{type(iterable).__qualname__} {length}"
        self.digest = hashlib.sha256(known.encode()).hexdigest()

    def __len__(self) -> int:
        return self.num_batches

    @property
    def loader(self) -> Any:
        """The DataLoader, if the samples of its batches are known; otherwise None."""
        return self._watched.given if self._watched.knows_samples else None

    @property
    def has_lasting_workers(self) -> bool:
        """True for a DataLoader with `persistent_workers`."""
        return self._watched.has_lasting_workers

    @property
    def digest_of_first(self) -> str:
        """Digest of the first batch of the epoch, once a batch has been read."""
        return "" if self._pass is None else self._pass.seen.first.hex()

    def batches_of(self, numbers: list[int]) -> list[int]:
        """Return the numbers of the batches that the given samples of this source are."""
        return numbers

    @property
    def promise(self) -> Any:
        """Guarantees about the samples of an epoch, a `contract.loop_ledger.LoopGuarantee`."""
        return self._watched.promise

    def read(self, ids: np.ndarray) -> Batch:
        """Read the requested batch of the current epoch, or of the next one if it has ended."""
        number, epoch = _single_id(ids), 0 if self._pass is None else self._pass.epoch
        epoch += self._next >= len(self) and number < self._next
        return self._read(epoch, ids, _as_they_are, keep=True)

    def at(self, epoch: int, streams: Streams, *, keep: bool = False) -> _EpochSource:
        """Return a reader of an epoch; `streams(k)` is a context with the random states of batch k.

        The caller enters the context of the batch that it reads; the reader enters those of earlier
        batches that are replayed. With `keep`, reading batch 0 does not consume it, as a check
        before a run requires: the next read returns batch 0 again.
        """
        return _EpochSource(self, epoch, streams, keep)

    def count_samples(self, epoch: int, number: int, batch: Batch) -> int | None:
        """Return the number of samples in a batch that was read; None if it is unknown.

        It is the number of indices that the DataLoader drew, or else what `size_of(batch)` returns.
        """
        return self._sizes.get((epoch, number)) or size_of(batch)

    def repeat(self, num_batches: int | None) -> None:
        """Let an iterable without a length begin again each time it ends.

        An epoch then has `num_batches` batches, the whole run; None if its number is not known.
        """
        self.repeats, self.num_batches = True, num_batches or UNKNOWN

    def describe(self) -> str:
        name = type(self._iterable).__name__
        if not self.has_length:
            again = ", which begins again when it ends" if self.repeats else ""
            return f"batches of a {name} without a length{again}, replayed to resume"
        return f"{self.num_batches:,} batches of {name}, replayed to resume"

    def close(self) -> None:
        """End the workers of a DataLoader, if it has any.

        The next read starts new workers and continues at the same batch.
        """
        if getattr(self._iterable, "num_workers", 0):
            self._iterator = None
            self._watched.close()

    # ---- reading

    def _read(self, epoch: int, ids: np.ndarray, streams: Streams, *, keep: bool) -> Batch:
        number = _single_id(ids)
        if number == 0 and self._first is not None and self._first[0].epoch == epoch:
            self._row, batch = self._first
        else:
            self._advance_to(epoch, number, streams)
            batch = self._draw()
            if self._next == len(self) and not self.is_cut:
                self._finish()
            elif self.is_cut and not self._has_told:
                self._tell(self._watched.find_repeats(self._next, len(self)))
        self._first = (self._row, copy_of(batch)) if keep and number == 0 else None
        self.on_read(self._row)
        return batch

    def _advance_to(self, epoch: int, number: int, streams: Streams) -> None:
        """Advance to batch `number` of an epoch; restart the epoch if the batch was read before."""
        if (
            self._iterator is None
            or self._pass is None
            or self._pass.epoch != epoch
            or number < self._next
        ):
            self._begin(epoch, number)
        while self._next < number:
            with streams(self._next):
                self._draw()

    def _begin(self, epoch: int, number: int) -> None:
        """Start an epoch at the last saved state up to batch `number`, or else at batch 0.

        An epoch that is started again begins with the random states of its first start.
        """
        self._iterator, self._first, self._num_passes = None, None, 0
        self._watched.begin_pass()
        self._next, known = self._iterate_from_known_state(epoch, number)
        if self._pass is not None and self._pass.epoch == epoch:
            self._watched.restore_generators(self._pass.generators)
            self._pass.seen = self._pass.seen if self._next else PassDigest()
        else:
            self._pass = EpochState(epoch, self._watched.pass_states())
        if self.repeats and known is not NOTHING:
            self._num_passes, known = known["passes"], known["state"]
        self._watched.set_epoch(epoch + self._num_passes)
        if known is not NOTHING:
            self._iterable.load_state_dict(copy.deepcopy(known))  # type: ignore[attr-defined]

    def _iterate_from_known_state(self, epoch: int, number: int) -> tuple[int, Any]:
        """Return the number of batches before the last saved state up to `number`, and the state.

        The state is NOTHING if the epoch starts without one.
        """
        if not self._has_state:
            return 0, NOTHING
        # the iterable has just ended the epoch before
        is_next = bool(self._states) and self._states[-1][:2] == (epoch, 0)
        if number == 0 and is_next and not self._is_loaded:
            return 0, NOTHING
        self._is_loaded = False
        found = [
            (drawn, state)
            for of, drawn, state in self._states
            if of in (epoch, None) and drawn <= number
        ]
        begun = self._pass
        if not found and begun is not None and begun.epoch == epoch and begun.state is not None:
            found = [(0, begun.state)]
        return max(found, key=lambda each: each[0], default=(0, NOTHING))

    def _draw(self) -> Batch:
        assert self._pass is not None
        if self._iterator is None:
            if self._has_state and self._next == 0:
                self._pass.state = self._take_state()
            self._iterator = self._watched.iterate(starts_workers=self._pass.starts_workers)
            self._pass.starts_workers = self._watched.starts_workers
        batch = next(self._iterator, NOTHING)
        if batch is NOTHING and self.repeats:
            self._num_passes += 1
            self._watched.set_epoch(self._pass.epoch + self._num_passes)
            self._iterator = self._watched.iterate()
            batch = next(self._iterator, NOTHING)
        if batch is NOTHING:
            self._iterator = None
            raise self._ended_early(self._next)
        self._row = BatchRead(
            self._pass.epoch, self._next, self._watched.record(batch, self._pass.seen)
        )
        if self._watched.num_drawn is not None:
            self._sizes[self._row[:2]] = self._watched.num_drawn
            if len(self._sizes) > KEPT_SIZES:
                del self._sizes[next(iter(self._sizes))]
        self._next += 1
        if self._has_state:
            self._states.append((self._pass.epoch, self._next, self._take_state()))
        return batch

    def _ended_early(self, count: int) -> DataError:
        if not self.has_length:
            what = "returned no batch" if self.repeats or not count else f"ended after {count}"
            kind = DataError if self.repeats or not count else EndOfStream
            return kind(
                f"the {type(self._iterable).__name__} {what}",
                hint="give an iterable that returns its batches each time it is iterated",
            )
        hint = (
            "give the right num_batches"
            if self.is_cut
            else f"len() of the {type(self._iterable).__name__} must be its number of batches; "
            "or give Iterated(iterable, num_batches=...)"
        )
        return DataError(
            f"the iterable ended after {count} batches of {self.num_batches}", hint=hint
        )

    def _take_state(self) -> Any:
        state = copy.deepcopy(self._iterable.state_dict())  # type: ignore[attr-defined]
        return {"passes": self._num_passes, "state": state} if self.repeats else state

    def _finish(self) -> None:
        """Run the iterable to its end, as a `for` loop would, and report surplus batches, once."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and not self._has_told:
            self._tell(self._watched.run_to_end(iterator, self.num_batches))
        if self._has_state and self._pass is not None:
            self._states.append((self._pass.epoch + 1, 0, self._take_state()))

    def _tell(self, notice: tuple[str, str] | None) -> None:
        if notice is not None:
            self._has_told = True
            self.notices.append(notice)

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        It has the start of this epoch, digests of its batches, and recent states of the iterable.
        """
        current = {} if self._pass is None else {"pass": self._pass.as_state()}
        is_inside = self._iterator is not None and self._next < len(self)
        now = self._watched.generator_states() if is_inside else self._watched.pass_states()
        return {
            "states": [list(each) for each in self._states],
            "generators": now,
            "worker_seed": self._watched.worker_seed,
            **current,
        }

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        from surefoot.components.data.sources.watched import name_states

        current = held.get("pass")
        self.notices += describe_draws(held, by_sample=self.draws_by_sample)
        self._watched.worker_seed = held.get("worker_seed", self._watched.worker_seed)
        is_new = self._first is not None and current is None and not held["states"]
        mine = {} if self._pass is None else self._pass.as_state()
        # the same epoch, with the same digests of its batches
        is_same = all(
            current is not None and mine.get(key) == current[key] for key in ("epoch", "seen")
        )
        if is_new or is_same:
            return  # only batch 0 was read, and the next read returns it again
        if (
            current is not None
            and not held["states"]
            and self._is_beginning_of(EpochState.from_state(current))
        ):
            self._expected = EpochState.from_state(current)
            return
        self._watched.restore_generators(name_states(held.get("generators", ())))
        self._begun = (
            None
            if self._first is None or self._pass is None
            else (self._pass.epoch, self._pass.seen)
        )
        self._iterator, self._first, self._next, self._is_loaded = None, None, 0, True
        # (drawn, state), as version 0.1 wrote them
        rows = [each if len(each) == 3 else (None, *each) for each in held["states"]]
        self._states = deque(
            ((of, int(drawn), state) for of, drawn, state in rows), maxlen=KEPT_STATES
        )
        if current is None:
            if self._pass is not None and self._pass.state is not None and not self._states:
                self._states.append((self._pass.epoch, 0, self._pass.state))
            self._pass = None
            return
        self._pass = EpochState.from_state(current)
        self._expected = EpochState.from_state(current)

    def _is_beginning_of(self, saved: EpochState) -> bool:
        """Return whether the epoch that a check started is the epoch `saved` in a checkpoint.

        If so, reading continues in it, since a restarted epoch may have a different order.
        """
        mine = self._pass
        is_over = (
            saved.seen.count == self.num_batches
        )  # a sampler can draw again at the end of an epoch
        if mine is None or self._first is None or mine.epoch != saved.epoch or is_over:
            return False
        return sign_state(mine.generators) == sign_state(saved.generators)

    def forget_states(self) -> None:
        """Stop saving the iterable's state, which no checkpoint can store; replay it to resume."""
        self._has_state = False
        self._states.clear()
        if self._pass is not None:
            self._pass.state = None
        name = type(self._iterable).__name__
        what = f"state_dict() of the {name} returns values that a checkpoint cannot store"
        self.notices.append((what, "a resumed run reads the batches again"))

    @contextlib.contextmanager
    def keep_generators(self) -> Iterator[None]:
        """Restore the states of the loader's generators at the end of the block.

        A different loader may draw from the same generators.
        """
        states = self._watched.pass_states()
        try:
            yield
        finally:
            self._watched.restore_generators(states)

    def seek(self, epoch: int, number: int, streams_of: Callable[[int], Streams]) -> None:
        """Advance to batch `number` of `epoch`; compare replayed batches with the first reading.

        Raises OtherDataError for different samples; if only their values differ, adds a notice.
        """
        expected, self._expected = self._expected, None
        if expected is None or self._has_state:
            return
        found: ReadingDifference | None = None
        if number and expected.epoch == epoch:
            self._advance_to(epoch, number, streams_of(epoch))
            if self._pass is not None and self._pass.seen.count == expected.seen.count:
                found = self._pass.seen.compare(
                    expected.seen, knows_samples=self._watched.knows_samples
                )
        elif number == 0 and expected.epoch == epoch - 1 and expected.seen.count:
            found = self._compare_first(expected, streams_of(expected.epoch))
        found = self._watched.explain(found)
        if found is None:
            return
        if not found.same_samples:
            raise OtherDataError(found.what, hint=found.hint)
        self.notices.append((found.what, found.hint))

    def _compare_first(self, expected: EpochState, streams: Streams) -> ReadingDifference | None:
        """Read the first batch of a finished epoch again, and compare it with the first reading.

        The comparison shows whether the epoch can be reproduced.
        """
        current = self._pass if self._first is not None else None
        first = self._begun if current is None else (current.epoch, current.seen)
        # otherwise a check has read that batch already
        if first is None or first[0] != expected.epoch:
            self._watched.begin_pass()
            with streams(0), self.keep_generators():
                self._watched.restore_generators(expected.generators)
                self._watched.set_epoch(expected.epoch)
                batches = self._watched.iterate(starts_workers=expected.starts_workers)
                batch = next(batches, NOTHING)
            if batch is NOTHING:
                return None
            seen = PassDigest()
            self._watched.record(batch, seen)
            first = expected.epoch, seen
        return first[1].compare_first(expected.seen)


class _EpochSource(NamedTuple):
    """Source that reads one epoch of an iterable."""

    source: Iterated
    epoch: int
    streams: Streams
    keep: bool

    def read(self, ids: np.ndarray) -> Batch:
        return self.source._read(self.epoch, ids, self.streams, keep=self.keep)


def _single_id(ids: np.ndarray) -> int:
    if len(ids) != 1:
        raise DataError(
            f"an iterable returns whole batches, but {len(ids)} were requested at once",
            hint="set train.batch = 1",
        )
    return int(ids[0])


def copy_of(batch: Batch) -> Batch:
    """Return a deep copy of a batch; the batch itself if it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # noqa: BLE001 - a part can raise anything
        return batch


def _as_they_are(number: int) -> AbstractContextManager[None]:
    return contextlib.nullcontext()
