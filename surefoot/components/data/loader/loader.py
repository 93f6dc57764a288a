"""Batches of a run, read ahead of its steps by any number of workers, in a fixed order.

The samples of a step depend only on its number, so that a loader can start at any step. A worker
that dies or hangs is replaced. The samples that it was reading, or for which a worker raised an
exception, are read again.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.bad import BadRecords, ReadResult
from surefoot.components.data.loader.batches import (
    Kind,
    LoaderNotice,
    LoaderSettings,
    StepBatches,
    bytes_of,
)
from surefoot.components.data.loader.jobs import Job, Reader, describe_samples, number_bad
from surefoot.components.data.loader.pilot import (
    STARVES,
    STARVES_AFTER_S,
    STARVES_AFTER_STEPS,
    StepTimings,
    WorkerTiming,
    WorkerTuner,
)
from surefoot.components.data.loader.streams import streams_of_epoch
from surefoot.components.data.sources.batch_digest import check_content
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract.task import Batch, Source
from surefoot.core.errors import BadRecordError, DataError
from surefoot.core.hardware import count_cores

if TYPE_CHECKING:
    from surefoot.components.data.loader.crew import Message, WorkerPool

MAX_TRIES = 3  # workers that may fail on one microbatch before its samples are the cause
BUSY_SHARE = 0.05  # of a core: a worker that uses more is computing
BUSY = 8.0  # timeout of a worker that is computing, relative to one that is not
WORTH = 1.5  # minimum speedup of two threads over one: below it, the GIL limits them
MAX_SAMPLES_TRIED = 64  # for measuring the speedup of threads
LOOKS = 8  # liveness checks of a worker within its timeout
PATIENCE = 1.5  # minimum timeout, relative to the slowest batch so far
MAX_WORKER_ONLY_FAILURES = 8  # consecutive batches that raise in a worker, but not in this process

NOTHING = ReadResult(None)


@dataclass(eq=False)
class _SentJob:
    """Job that was sent to a worker, and its result."""

    serial: int
    job: Job
    place: int
    read: ReadResult = NOTHING
    is_there: bool = False
    problem: str | None = None
    is_unsendable: bool = False
    tries: int = 1


class Loader:
    """Loader whose `take(n)` returns the batches of step n, from 1; it reads later steps ahead."""

    def __init__(
        self,
        feed: Feed,
        reader: Reader,
        settings: LoaderSettings | None = None,
        *,
        last: int | None = None,
    ) -> None:
        """Create a loader for steps up to `last`; without `settings`, it has no workers."""
        self._feed, self._reader, self._last = feed, reader, last
        self.bad = BadRecords(len(feed.source), 0.0)
        self._content_before = getattr(feed.source, "content_digest", None)
        self.tell: Callable[[LoaderNotice], None] = lambda told: None
        self._pilot: WorkerTuner | None = None
        self._last_take = 0, 0.0, 0.0
        self._crew: WorkerPool | None = None
        self._tickets: deque[_SentJob] = deque()  # in the order of the run
        self._given: dict[int, _SentJob] = {}  # serial -> job that a worker still has
        self._jobs: Iterator[Job] = iter(())
        self._next = self._serial = self._in_vain = 0
        self._slowest_s = 0.0  # slowest batch so far
        self.use(settings or LoaderSettings())

    def take(self, number: int) -> StepBatches:
        """Return the batches of step `number`.

        Raises what reading raises, and BadRecordError if 3 workers die or hang with the same
        samples.
        """
        begun_s = time.perf_counter()
        taken = self._take(number) if self.settings.workers else self.read(number)
        if taken.bad:
            self._leave_out(taken)
        notices = getattr(self._reader.source, "notices", None)
        while notices:  # of a sequential source about its iterable
            self.tell(LoaderNotice("data", number, *notices.pop(0)))
        self._watch(number, begun_s, time.perf_counter())
        return taken

    def _take(self, number: int) -> StepBatches:
        if number != self._next:
            self._begin_at(number)
        self._next = number + 1
        tickets: list[_SentJob] = []
        self._submit_next_jobs()
        while self._tickets and self._tickets[0].job.number == number:
            ticket = self._tickets[0]
            self._wait_for(ticket)
            self._tickets.popleft()
            self._submit_next_jobs()
            tickets.append(ticket)
        if not tickets:
            return self.read(number)
        self._bound_depth(tickets[0].read.batch)
        if self._in_vain >= MAX_WORKER_ONLY_FAILURES:
            self._continue_without_workers(number)
        return _step_batches(number, tickets)

    def peek(self, number: int) -> StepBatches | None:
        """Return the batches of step `number` if they have been read already, else None."""
        found = list(itertools.takewhile(lambda each: each.job.number <= number, self._tickets))
        if (
            not found
            or len(found) == len(self._tickets)
            or not all(each.is_there and each.problem is None for each in found)
        ):
            return None
        return _step_batches(number, found)

    def read(self, number: int) -> StepBatches:
        """Read the batches of step `number` in this process, without workers."""
        window = self._feed.window(number - 1)
        first, cut = self._feed.mine(window)
        batches = [self._reader(window.epoch, ids) for ids in cut]
        return StepBatches.of(number, window, cut, batches, first)

    def _leave_out(self, taken: StepBatches) -> None:
        for each in self.bad.add(number_bad(self.source, taken.bad)):
            what = f"sample {each.sample} cannot be read: {each.reason}"
            counts = f"number {len(self.bad.found):,} of at most {self.bad.limit:,}"
            then = f"the sample is left out, {counts}"
            self.tell(LoaderNotice("bad-record", taken.number, what, then))

    def close(self) -> None:
        """End the workers and release their resources. The loader can be used again."""
        self._tickets.clear()
        self._given.clear()
        self._next = 0
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def end(self) -> None:
        """End the workers of the loader, and those of a sequential source, after the last read."""
        self.close()
        if isinstance(self.source, Iterated):
            self.source.close()

    def use(self, settings: LoaderSettings, *, last: int | None = None) -> None:
        """Continue with different settings, up to step `last`. The samples do not change."""
        self.close()
        self._last = last or self._last
        self.settings = settings
        self.batch_bytes = 0  # of the largest microbatch so far
        self.__dict__.pop("kind", None)
        self._depth = settings.workers * settings.prefetch
        self._steps, self._is_starving = StepTimings(), False
        if not settings.most:
            self._pilot = None
        elif self._pilot is None:
            self._pilot = WorkerTuner(settings.most)

    @property
    def source(self) -> Source:
        """Source that the loader reads."""
        return self._reader.source

    @functools.cached_property
    def kind(self) -> Kind:
        """Worker type; "auto" is threads if two are 1.5 times as fast as one, else processes."""
        if self.settings.kind != "auto":
            return self.settings.kind
        if not getattr(self._reader.source, "thread_safe", False):
            return "process"
        from surefoot.components.data.loader.crew import gain_of_threads

        window = self._feed.window(max(self._next - 2, 0))
        gain = gain_of_threads(self._reader, window.epoch, window.ids[:MAX_SAMPLES_TRIED])
        return "thread" if gain >= WORTH else "process"

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: unreadable samples, and the state of the source."""
        source = {"source": self.source.state_dict()} if isinstance(self.source, Iterated) else {}
        digest = getattr(self.source, "content_digest", None)
        return {
            **({"bad_records": self.bad.state()} if self.bad.found else {}),
            **source,
            **({} if digest is None else {"content": digest}),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self.bad.restore(saved.get("bad_records", ()))
        self._content_before = saved.get("content")
        if isinstance(self.source, Iterated) and "source" in saved:
            self.source.load_state_dict(saved["source"])

    def seek(self, number: int) -> None:
        """Advance a sequential source to the samples of step `number`.

        Raises OtherDataError if the data, or batches read again, differ from those before the
        checkpoint.
        """
        if isinstance(self.source, Iterated):
            window = self._feed.window(number - 1)
            streams_of = functools.partial(streams_of_epoch, self._reader.seed)
            self.source.seek(window.epoch, int(window.ids[0]), streams_of)
        check_content(self.source, self._content_before)

    def skip_bad(self, share: float) -> None:
        """Leave out unreadable samples, up to the given share of the data set."""
        self.close()
        self._reader = replace(self._reader, skips=True)
        self.bad = BadRecords(len(self._feed.source), share)

    @property
    def depth(self) -> int:
        """Maximum number of microbatches that are being read, or wait to be used."""
        return self._depth

    def _begin_at(self, number: int) -> None:
        """Discard what was read ahead, and start reading at step `number`."""
        self.close()
        self._jobs = self._jobs_from(number)

    def _jobs_from(self, number: int) -> Iterator[Job]:
        while self._last is None or number <= self._last:
            window = self._feed.window(number - 1)
            first, cut = self._feed.mine(window)
            for ids in cut:
                yield Job(number, window, ids, first)
            number += 1

    def _submit_next_jobs(self) -> None:
        crew = self._crew or self._make_crew()
        while len(self._tickets) < self._depth:
            loads = self._worker_loads(crew)
            place = min(
                (place for place in range(crew.size) if crew.has_room(place)),
                key=loads.__getitem__,
                default=None,
            )
            job = next(self._jobs, None) if place is not None else None
            if job is None or place is None:
                return
            self._serial += 1
            ticket = _SentJob(self._serial, job, place)
            self._tickets.append(ticket)
            self._submit(crew, ticket)

    def _worker_loads(self, crew: WorkerPool) -> list[tuple[int, int]]:
        """Return for each worker the number of jobs not read yet, and of all jobs not used yet."""
        reads = Counter(each.place for each in self._given.values())
        holds = Counter(each.place for each in self._tickets)
        return [(reads[place], holds[place]) for place in range(crew.size)]

    def _make_crew(self) -> WorkerPool:
        from surefoot.components.data.loader.crew import Processes, Threads

        settings = self.settings
        if self.kind == "thread":
            self._crew = Threads(settings.workers, self._reader)
        else:
            num_slots = 2 * settings.prefetch + 2
            self._crew = Processes(
                settings.workers, self._reader, num_slots=num_slots, start=settings.start
            )
        return self._crew

    def _submit(self, crew: WorkerPool, ticket: _SentJob) -> None:
        self._given[ticket.serial] = ticket
        crew.give(ticket.place, ticket.serial, ticket.job)

    def _wait_for(self, ticket: _SentJob) -> None:
        crew = self._crew or self._make_crew()
        looked_s, waited_s, used_s = time.monotonic(), 0.0, None
        # many workers on few cores get little CPU time each
        share = BUSY_SHARE * min(1.0, count_cores() / crew.size)
        while not ticket.is_there:
            allowed_s = max(self.settings.timeout_s, PATIENCE * self._slowest_s) * 2 ** (
                ticket.tries - 1
            )
            messages = crew.receive(allowed_s / LOOKS)
            before_s, looked_s = looked_s, time.monotonic()
            # a check that took longer: this process was stopped, too
            waited_s += min(looked_s - before_s, 2 * allowed_s / LOOKS)
            for message in messages:
                self._sort_in(crew, message)
            if any(message.place == ticket.place for message in messages):
                waited_s, used_s = 0.0, None
            if messages:
                continue
            now_s = crew.cpu_s(ticket.place)
            used_s = now_s if used_s is None else used_s
            is_busy = now_s - used_s > share * waited_s
            if waited_s >= allowed_s * (BUSY if is_busy else 1.0):
                self._replace(crew, ticket.place, f"returned nothing for {waited_s:.1f} s", ticket)
                waited_s, used_s = 0.0, None
        if ticket.problem is not None:
            self._read_again(ticket)
        else:
            self._in_vain = 0

    def _sort_in(self, crew: WorkerPool, message: Message) -> None:
        self._slowest_s = max(self._slowest_s, message.took_s)
        if message.serial is None:
            waiting = [each for each in self._given.values() if each.place == message.place]
            self._replace(
                crew,
                message.place,
                message.problem or "ended",
                min(waiting, key=lambda each: each.serial, default=None),
            )
            return
        ticket = self._given.pop(message.serial, None)
        if ticket is not None:  # else the ticket was discarded meanwhile
            ticket.read, ticket.problem, ticket.is_there = message.read, message.problem, True
            ticket.is_unsendable = message.is_unsendable

    def _replace(self, crew: WorkerPool, place: int, how: str, guilty: _SentJob | None) -> None:
        """Replace a failed worker, and send its jobs to the new worker, in the same order.

        `guilty` is the job that the worker was reading. Raises BadRecordError if too many workers
        have failed with this job.
        """
        name = crew.name(place)
        lost = sorted(
            (each for each in self._given.values() if each.place == place),
            key=lambda each: each.serial,
        )
        step = self._next - 1 if guilty is None else guilty.job.number
        what = f"{name} {how}"
        if guilty is not None:
            samples = describe_samples(self.source, guilty.job.ids)
            what += f" while it read {samples} of step {guilty.job.number:,}"
            guilty.tries += 1
            if guilty.tries > MAX_TRIES:
                self.close()
                raise BadRecordError(
                    f"{what}; so did {MAX_TRIES - 1} workers before it",
                    hint="read these samples in this process: source.read(ids); "
                    "raise loader.timeout for a slow sample; for code that hangs only in forked "
                    'workers, such as a thread pool, set loader.start = "spawn"',
                )
        crew.replace(place)
        for ticket in lost:
            self._submit(crew, ticket)
        then = "the worker was restarted, and the same samples are read again"
        self.tell(LoaderNotice("worker", step, what, then))

    def _read_again(self, ticket: _SentJob) -> None:
        """Read a microbatch again in this process, after a worker raised an exception.

        If the exception recurs, it is raised with its traceback; otherwise it is reported as a
        notice. Raises DataError for a batch that cannot be sent to this process.
        """
        job = ticket.job
        raised = (ticket.problem or "").strip().splitlines()[-1]
        if ticket.is_unsendable:
            self.close()
            raise DataError(
                (
                    f"the batch of step {job.number:,} cannot be sent from a worker process to "
                    f"the run: {raised}"
                ),
                hint=(
                    'return batches of types that can be pickled; or set loader.kind = "thread", '
                    "or loader.workers = 0"
                ),
            )
        ticket.read = self._reader(job.window.epoch, job.ids)
        self._in_vain += 1
        crew = self._crew or self._make_crew()
        what = (
            f"{crew.name(ticket.place)} raised {raised} while it read "
            f"{describe_samples(self.source, job.ids)} of step {job.number:,}"
        )
        then = "the same samples were read again, without an error"
        self.tell(LoaderNotice("worker", job.number, what, then))

    def _continue_without_workers(self, number: int) -> None:
        """Continue without workers, because reading has failed in them many times in a row."""
        self.use(replace(self.settings, workers=0))
        what = (
            f"{self._in_vain} batches in a row raised an error in a worker, and none in "
            "the main process"
        )
        self._in_vain = 0
        then = "the workers are stopped, and each step reads its samples in the main process"
        self.tell(LoaderNotice("worker", number, what, then))

    def _bound_depth(self, batch: Batch) -> None:
        """Limit the read-ahead to the allowed memory, but not below a microbatch per worker."""
        settings, held = self.settings, bytes_of(batch)
        if self.batch_bytes and held <= self.batch_bytes:
            return
        self.batch_bytes = max(1, held)
        self._depth = min(
            self._depth, max(settings.workers, settings.memory_bytes // self.batch_bytes)
        )

    def _watch(self, number: int, begun_s: float, done_s: float) -> None:
        """Record the duration of the previous step; it ends when the read of this step starts."""
        before, before_s, waiting_s = self._last_take
        self._last_take = number, begun_s, done_s - begun_s
        if before + 1 != number:
            return
        step_s = begun_s - before_s
        if self._pilot is not None and not self._pilot.is_done:
            changed = self._pilot.add(step_s, waiting_s)
            if changed is not None:
                self.use(replace(self.settings, workers=changed))
            if self._pilot.is_done:
                self.tell(LoaderNotice("tuned", number, self._pilot.describe(), ""))
            return
        if self._is_starving:
            return  # already reported
        self._steps.add(step_s, waiting_s)
        if self._steps.is_enough(STARVES_AFTER_STEPS, STARVES_AFTER_S):
            seen, self._steps = self._steps.seen(self.settings.workers), StepTimings()
            if seen.waiting > STARVES:
                self._is_starving = True
                self._tell_starving(number, seen)

    def _tell_starving(self, number: int, seen: WorkerTiming) -> None:
        window = self._feed.window(number - 1)
        _, cut = self._feed.mine(window)
        ids = (cut or [window.ids])[0]
        costs = self._reader.explain(window.epoch, ids)
        what = seen.describe_waiting(costs, len(ids))
        then = (
            'loader.workers = "auto" finds the number of workers; '
            "surefoot tune-loader SPEC measures each number"
        )
        self.tell(LoaderNotice("starving", number, what, then))

    def describe(self) -> str:
        """Return a description of the workers and the read-ahead."""
        settings = self.settings
        if not settings.workers:
            return "each step reads its samples in the main process: no worker"
        many = {"thread": "threads", "process": "processes"}
        workers = (
            f"{settings.workers} worker {many[self.kind] if settings.workers > 1 else self.kind}"
        )
        ahead_mib = math.ceil(self._depth * self.batch_bytes / 2**20)
        held = f", {ahead_mib:,} MiB" if self.batch_bytes else ""
        return f"{workers} read {self._depth} microbatches ahead{held}"

    def __del__(self) -> None:
        if self.__dict__.get("_crew") is not None:
            self.close()


def _step_batches(number: int, tickets: list[_SentJob]) -> StepBatches:
    job = tickets[0].job
    return StepBatches.of(
        number,
        job.window,
        [each.job.ids for each in tickets],
        [each.read for each in tickets],
        job.first,
    )
