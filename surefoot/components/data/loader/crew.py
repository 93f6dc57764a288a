"""Pools of workers that read batches: threads of this process, or processes.

Each worker reads its jobs in the order in which it receives them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import os
import queue
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection, reduction
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import psutil
import torch

from surefoot.components.data.loader.bad import ReadResult
from surefoot.components.data.loader.jobs import Job, Reader
from surefoot.components.data.loader.ring import Slot, pack_ids, unpack
from surefoot.components.data.loader.worker import serve
from surefoot.contract.task import import_file, task_files
from surefoot.core.errors import DataError
from surefoot.core.process.forked import OwningProcess

Start = Literal["auto", "fork", "spawn"]
ENDS_WITHIN_S = 1.0
LONG_ENOUGH_S, MAX_TIMES, ROUNDS = 0.01, 256, 3  # for measuring the speedup of two threads


class Message(NamedTuple):
    """Message from worker `place`: the batch that it has read, or the text of an exception.

    `serial` identifies the job. If it is None, the worker has died, and `problem` says how.
    """

    place: int
    serial: int | None
    read: ReadResult = ReadResult(None)
    problem: str | None = None
    took_s: float = 0.0
    is_unsendable: bool = False  # it was read, but cannot be sent to another process


class WorkerPool(Protocol):
    """Pool of workers, each identified by its index, `place`.

    The replacement of a worker has the same index, but not the jobs of the replaced worker.
    """

    size: int

    def has_room(self, place: int) -> bool:
        """Return whether the worker with index `place` can accept one more job."""
        ...

    def give(self, place: int, serial: int, job: Job) -> None: ...

    def receive(self, timeout_s: float) -> list[Message]:
        """Wait up to `timeout_s` seconds for messages; return those that have arrived."""
        ...

    def name(self, place: int) -> str: ...

    def cpu_s(self, place: int) -> float:
        """Return the CPU time that a worker has used, in seconds.

        It does not increase while a worker hangs.
        """
        ...

    def replace(self, place: int) -> None: ...

    def close(self) -> None: ...


class Threads:
    """Pool of worker threads of this process, for thread-safe sources that release the GIL."""

    def __init__(self, size: int, reader: Reader) -> None:
        # all threads share the global random streams
        self.size, self._reader = size, replace(reader, seeds=False)
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._inboxes: list[queue.SimpleQueue[tuple[int, Job] | None]] = []
        self._threads: list[threading.Thread] = []
        for place in range(size):
            self._begin(place)

    def _begin(self, place: int) -> None:
        inbox: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._work, args=(place, inbox), name=f"surefoot-loader-{place}", daemon=True
        )
        self._inboxes[place : place + 1], self._threads[place : place + 1] = [inbox], [thread]
        thread.start()

    def _work(self, place: int, inbox: queue.SimpleQueue[tuple[int, Job] | None]) -> None:
        torch.set_num_threads(1)  # for this thread: the workers read in parallel
        while (given := inbox.get()) is not None:
            serial, job = given
            begun_s = time.monotonic()
            try:
                read = self._reader(job.window.epoch, job.ids)
                message = Message(place, serial, read, took_s=time.monotonic() - begun_s)
            except BaseException:  # noqa: BLE001 - the text is sent, and the batch is read again
                message = Message(place, serial, problem=traceback.format_exc())
            self._outbox.put(message)
            read = ReadResult(None)
            del given, job, message

    def has_room(self, place: int) -> bool:
        return True

    def give(self, place: int, serial: int, job: Job) -> None:
        self._inboxes[place].put((serial, job))

    def receive(self, timeout_s: float) -> list[Message]:
        try:
            return [self._outbox.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def name(self, place: int) -> str:
        return f"loader thread {place}"

    def cpu_s(self, place: int) -> float:
        wanted = self._threads[place].native_id
        return float(
            sum(
                each.user_time + each.system_time
                for each in psutil.Process().threads()
                if each.id == wanted
            )
        )

    def replace(self, place: int) -> None:
        self._inboxes[place].put(None)  # a thread cannot be killed; if it ever returns, it ends
        self._begin(place)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        until_s = time.monotonic() + ENDS_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))


def gain_of_threads(reader: Reader, epoch: int, ids: np.ndarray) -> float:
    """Measure the speedup of two threads over one: 1 if all work holds the GIL, 2 if none does."""

    def read() -> None:
        for _ in range(times):
            reader(epoch, ids)

    def read_twice() -> None:
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    reader, times = replace(reader, seeds=False), 1
    read()  # not timed: the first read may do more
    while _seconds(read) < LONG_ENOUGH_S and times < MAX_TIMES:
        times *= 2
    alone_s, both_s = zip(
        *((_seconds(read), _seconds(read_twice)) for _ in range(ROUNDS)), strict=True
    )
    return float(2 * min(alone_s) / min(both_s))


def _seconds(do: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    do()
    return time.perf_counter() - begun_s


class _WorkerProcess(NamedTuple):
    process: Any
    pipe: connection.Connection
    slots: tuple[Slot, ...]
    free: deque[int]  # indices of empty slots


class Processes:
    """Pool of worker processes; each sends batches through `num_slots` slots of shared memory."""

    def __init__(self, size: int, reader: Reader, *, num_slots: int, start: Start = "auto") -> None:
        self.size, self._reader, self._num_slots = size, replace(reader, seeds=True), num_slots
        self.start = find_start(start)
        self._context: Any = multiprocessing.get_context(self.start)
        if self.start != "fork":
            check_picklable(reader)
        self._workers: list[_WorkerProcess] = []
        self._owner = OwningProcess()
        if multiprocessing.current_process().daemon:
            raise DataError(
                "this process is daemonic, and a daemonic process cannot start workers",
                hint=(
                    'start it with daemon=False; or set loader.kind = "thread", '
                    "or loader.workers = 0"
                ),
            )
        for place in range(size):
            self._begin(place)

    def _begin(self, place: int) -> None:
        slots: list[Slot] = []
        try:
            slots.extend(Slot() for _ in range(self._num_slots))
            self._begin_with(place, tuple(slots))
        except OSError as error:
            for slot in slots:
                # otherwise the run has no descriptor left even for the file that records how it
                # ended
                slot.close()
            self.close()
            raise DataError(
                (
                    f"worker {place} of {self.size} could not start: {error}; each worker "
                    f"opens {self._num_slots} memory files in this process"
                ),
                hint=(
                    "lower loader.workers or loader.prefetch; or raise the limit of open "
                    "files: ulimit -n"
                ),
            ) from error

    def _begin_with(self, place: int, slots: tuple[Slot, ...]) -> None:
        ours, theirs = self._context.Pipe()
        inherited = [each.pipe for each in self._workers] + [ours] if self.start == "fork" else []
        of_main = threading.current_thread() is threading.main_thread()
        args = (
            theirs,
            slots,
            self._reader if self.start == "fork" else _PickledReader(self._reader),
            os.getpid(),
            inherited,
            of_main,
        )
        process = self._context.Process(
            target=serve, args=args, name=f"surefoot-loader-{place}", daemon=True
        )
        with warnings.catch_warnings():
            # the warning that this process has threads: the child uses none of them
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._workers[place : place + 1] = [
            _WorkerProcess(process, ours, slots, deque(range(self._num_slots)))
        ]

    def has_room(self, place: int) -> bool:
        return bool(self._workers[place].free)

    def give(self, place: int, serial: int, job: Job) -> None:
        worker = self._workers[place]
        slot = worker.free.pop()  # the slot that was freed last: no more slots fill than are needed
        with contextlib.suppress(OSError):  # the worker is dead, as `receive` will report
            worker.pipe.send(
                (serial, slot, job.window.epoch, pack_ids(job.ids, worker.slots[slot]))
            )

    def receive(self, timeout_s: float) -> list[Message]:
        pipes = {id(worker.pipe): place for place, worker in enumerate(self._workers)}
        ready = connection.wait([worker.pipe for worker in self._workers], timeout_s)
        return [self._take(pipes[id(pipe)]) for pipe in ready]

    def _take(self, place: int) -> Message:
        worker = self._workers[place]
        try:
            serial, slot, took_s, lies, problem, is_unsendable = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(ENDS_WITHIN_S)
            return Message(place, None, problem=_describe_exit(worker.process.exitcode))
        if problem is not None:
            worker.free.append(slot)
            return Message(
                place, serial, problem=problem, took_s=took_s, is_unsendable=is_unsendable
            )
        try:
            read = unpack(lies, worker.slots[slot], lambda: worker.free.append(slot))
        except Exception:  # noqa: BLE001 - unpickling the types of a batch can raise anything
            return Message(
                place, serial, problem=traceback.format_exc(), took_s=took_s, is_unsendable=True
            )
        if not worker.free:  # the caller keeps what it received: a free slot is needed to continue
            read = copy.deepcopy(read)
        return Message(place, serial, read, took_s=took_s)

    def name(self, place: int) -> str:
        return f"loader worker {place} (process {self._workers[place].process.pid})"

    def cpu_s(self, place: int) -> float:
        try:
            used = psutil.Process(self._workers[place].process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)

    def replace(self, place: int) -> None:
        self._end(self._workers[place])
        self._begin(place)

    def close(self) -> None:
        if not self._owner.is_here:
            self._workers = []  # those of the parent process, which continues to read
        for worker in self._workers:
            worker.pipe.close()  # the worker then ends by itself
        for worker in self._workers:
            worker.process.join(0.05)
            self._end(worker)
        self._workers = []

    def _end(self, worker: _WorkerProcess) -> None:
        worker.pipe.close()
        worker.process.kill()
        worker.process.join(ENDS_WITHIN_S)
        for slot in worker.slots:
            slot.close()


class _PickledReader:
    """Wrapper that pickles a reader for a spawned process.

    Before the reader is unpickled, the process imports the task files that define parts of it.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __reduce__(self) -> tuple[Any, ...]:
        content = bytes(reduction.ForkingPickler.dumps(self._reader))
        return _open_sent, (task_files(content), content)


def _open_sent(files: list[str], content: bytes) -> Any:
    for path in files:
        import_file(Path(path))
    return reduction.ForkingPickler.loads(content)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its pipe"
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"


def find_start(start: Start) -> str:
    """Return the start method of worker processes; "auto" is fork on Linux, otherwise spawn.

    Raises DataError for a method that the system does not have.
    """
    known = multiprocessing.get_all_start_methods()
    if start == "auto":
        return "fork" if sys.platform == "linux" else "spawn"
    if start not in known:
        raise DataError(
            f"loader.start is {start!r}, which this system does not support",
            hint=f"use one of {', '.join(known)}",
        )
    return start


def check_picklable(reader: Reader) -> None:
    """Raise DataError if the source or the augmentation of a reader cannot be pickled.

    The error names the attribute that cannot be pickled.
    """
    for what, given in (("the source", reader.source), ("the task", reader.augment)):
        found = _find_unpicklable(given, what)
        if found is not None:
            forks = (
                'loader.start = "fork", or '
                if "fork" in multiprocessing.get_all_start_methods()
                else ""
            )
            raise DataError(
                f"{found[0]} cannot be pickled for a spawned worker: {found[1]}",
                hint="define it at module level in a file, and import it; "
                f'or set {forks}loader.kind = "thread", or loader.workers = 0',
            )


def _find_unpicklable(given: Any, path: str) -> tuple[str, str] | None:
    """Return the innermost part of `given` that cannot be pickled, and the reason; None if all can.

    `path` is the name of `given` in the error message.
    """
    try:
        _Pickler(io.BytesIO()).dump(given)
    except Exception as error:  # noqa: BLE001 - an object can raise anything when it is pickled
        inside = (_find_unpicklable(part, f"{path}{name}") for name, part in _parts_of(given))
        why = error.message if isinstance(error, DataError) else str(error)
        return next(
            (found for found in inside if found is not None), (path, why or type(error).__name__)
        )
    return None


class _Pickler(reduction.ForkingPickler):
    """Pickler that refuses classes and functions defined in an interactive session.

    They are pickled as a name in `__main__`, which is a different module in another process.
    """

    def reducer_override(self, obj: Any) -> Any:
        if (
            isinstance(obj, type | FunctionType)
            and obj.__module__ == "__main__"
            and not _is_importable(sys.modules["__main__"])
        ):
            raise DataError(
                (
                    f"{obj.__qualname__} is defined in an interactive session, a notebook or a "
                    "script on standard input, but no other process can import it"
                ),
                hint="define it in a file, and import it",
            )
        return NotImplemented


def _is_importable(main: Any) -> bool:
    """Return whether multiprocessing can import the main module, by its name or its file."""
    return (
        getattr(main, "__spec__", None) is not None
        or Path(getattr(main, "__file__", None) or "<none>").is_file()
    )


def _parts_of(given: Any) -> list[tuple[str, Any]]:
    if isinstance(given, dict):
        return [(f"[{name!r}]", part) for name, part in given.items()]
    if isinstance(given, list | tuple):
        return [(f"[{number}]", part) for number, part in enumerate(given)]
    # for a bound method, the attributes of its object
    attributes = getattr(getattr(given, "__self__", given), "__dict__", None)
    return (
        [(f".{name}", part) for name, part in attributes.items()]
        if isinstance(attributes, dict)
        else []
    )
