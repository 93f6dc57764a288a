"""What a loader must stand.

Pipes that are full, workers that are slow or stopped, batches that cannot be sent, draws that
nobody gave.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.batches import LoaderNotice, LoaderSettings, bytes_of
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.order import Keys
from surefoot.contract.task import Source, import_file
from surefoot.core.errors import BadRecordError, DataError
from tests.components.loading import (
    Drawing,
    Nameless,
    Numbers,
    Once,
    OnlyAtHome,
    Unsafe,
    Wordy,
    shifted,
)
from tests.components.test_loader import expected, nothing_stays, rows, same  # noqa: F401 - fixtures

ONE = LoaderSettings(workers=1, kind="process")
TWO = LoaderSettings(workers=2, kind="process")


def loader(
    source: Source,
    settings: LoaderSettings,
    *,
    batch: int = 16,
    last: int = 21,
    told: list[LoaderNotice] | None = None,
) -> Loader:
    feed = Feed(source, Order(len(source), 5), batch=batch)
    reading = Loader(feed, Reader(source, None, 5), settings, last=last)
    reading.tell = (lambda each: None) if told is None else told.append
    return reading


def test_numbers_and_words_that_fill_a_pipe_hold_nobody_up() -> None:
    """The run would wait to send, the worker to send back, and both for ever."""
    reading = loader(
        Wordy(), LoaderSettings(workers=1, kind="process", prefetch=6), batch=40_000, last=6
    )
    signal.alarm(120)
    for number in range(1, 7):
        (batch,) = reading.take(number).batches
        assert batch["words"][-1] == f"word {batch['number'][-1]}"
    signal.alarm(0)
    reading.close()


def test_a_worker_that_is_stopped_in_the_middle_of_a_batch_is_replaced() -> None:
    told: list[LoaderNotice] = []
    reading = loader(
        Wordy(),
        LoaderSettings(workers=1, kind="process", timeout_s=0.2),
        batch=4000,
        last=9,
        told=told,
    )
    drawn = random.Random(1)
    signal.alarm(120)
    for number in range(1, 10):
        if number > 1:
            time.sleep(drawn.random() * 0.01)
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGSTOP)
        (batch,) = reading.take(number).batches
        assert batch["words"][0] == f"word {batch['number'][0]}"
    signal.alarm(0)
    reading.close()
    assert told
    assert all("returned nothing for 0." in each.what for each in told)


def test_a_source_that_is_slow_each_time_is_not_taken_for_one_that_hangs() -> None:
    """Once it is known how long it takes, nobody is ended for it."""
    told: list[LoaderNotice] = []
    reading = loader(
        Numbers(1.5), LoaderSettings(workers=1, kind="process", timeout_s=1.0), last=5, told=told
    )
    for number in range(1, 6):
        reading.take(number)
    reading.close()
    assert [each.step for each in told] == [1]


def test_a_run_that_was_stopped_itself_finds_no_worker_guilty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-Z and fg: the clock went on, and neither the run nor its workers did."""
    told: list[LoaderNotice] = []
    reading = loader(Numbers(0.1), ONE, last=5, told=told)
    real, jumps = time.monotonic, iter([0.0, 0.0, 100.0])
    monkeypatch.setattr(
        "surefoot.components.data.loader.loader.time.monotonic",
        lambda: real() + next(jumps, 100.0),
        raising=True,
    )
    for number in range(1, 6):
        reading.take(number)
    reading.close()
    assert told == []


@pytest.mark.parametrize("comes_back", [True, False])
def test_batches_that_cannot_be_sent_end_the_run_and_are_not_read_twice_each(
    comes_back: bool,
) -> None:
    reading = loader(Nameless(comes_back), TWO)
    with pytest.raises(
        DataError, match="the batch of step 1 cannot be sent from a worker process to the run: "
    ) as raised:
        reading.take(1)
    assert ("made of glass" in raised.value.message) is comes_back
    assert 'loader.kind = "thread"' in raised.value.hint


def test_a_source_that_raises_in_every_worker_is_read_without_them(
    expected: list[list[Any]],  # noqa: F811
) -> None:
    told: list[LoaderNotice] = []
    reading = loader(OnlyAtHome(), TWO, told=told)
    for number in range(1, 15):
        assert reading.take(number).window.ids.tolist() == expected[number - 1][0]
    assert len(told) == 9
    assert "the workers are stopped" in told[-1].then
    assert reading.settings.workers == 0
    assert not multiprocessing.active_children()


def test_a_dataset_that_draws_for_itself_draws_the_same_in_any_worker_and_no_two_alike() -> None:
    """numpy's stream is copied into each worker.

    For years the augmentations of a batch were those of its neighbour.
    """
    found = {}
    for workers in (0, 1, 2, 7):
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
        reading = loader(Drawing(), LoaderSettings(workers=workers, kind="process"))
        found[workers] = [
            tuple(reading.take(number).batches[0]["image"].tolist()) for number in range(1, 22)
        ]
        reading.close()
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert found[7] == found[0]
    assert all(len(set(column)) == 21 for column in zip(*found[0], strict=True))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_writes_to_its_ids_changes_nothing_but_its_own(
    workers: int, skips: bool
) -> None:
    """It counts from 1.

    A step that is done again would read others, and the ledger would hold what nobody read.
    """

    class FromOne(Unsafe):
        def read(self, ids: np.ndarray) -> dict[str, Any]:
            ids += 1
            if 41 in ids:
                raise ValueError("no image")
            return {"number": torch.from_numpy(ids - 1)}

    reading = loader(
        FromOne(), LoaderSettings(workers=workers, kind="process" if workers else "auto")
    )
    if skips:
        reading.skip_bad(1.0)
    for number in (1, 1, 2, 7) if skips else (1, 1, 3):
        taken = reading.take(number)
        assert taken.batches[0]["number"].tolist() == [
            each for each in taken.window.ids.tolist() if each != 40
        ]
        assert (
            taken.window.ids.tolist()
            == Feed(reading.source, Order(97, 5), batch=16).window(number - 1).ids.tolist()
        )
    reading.close()
    assert list(reading.bad.found) == ([40] if skips else [])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_in_tensors_come_through() -> None:
    class Ragged(Numbers):
        def read(self, ids: np.ndarray) -> Any:
            return torch.nested.nested_tensor([torch.arange(float(number)) for number in ids[:3]])

    here, there = loader(Ragged(), LoaderSettings()), loader(Ragged(), ONE)
    mine, its = here.take(1).batches[0], there.take(1).batches[0]
    there.close()
    assert [each.tolist() for each in its.unbind()] == [each.tolist() for each in mine.unbind()]


def test_a_source_that_hangs_in_workers_alone_is_told_what_may_hold_it() -> None:
    """A pool of threads that was begun before the fork has none behind it."""

    class Pooled(Unsafe):
        def __init__(self) -> None:
            super().__init__()
            self.pool = ThreadPoolExecutor(1)
            self.pool.submit(int).result()

        def read(self, ids: np.ndarray) -> dict[str, Any]:
            self.pool.submit(int).result()
            return super().read(ids)

    source = Pooled()
    reading = loader(source, LoaderSettings(workers=1, kind="process", timeout_s=0.05))
    with pytest.raises(
        BadRecordError, match=r"returned nothing for .* of step 1; so did 2 workers before it"
    ) as raised:
        reading.take(1)
    source.pool.shutdown()
    assert (
        "for code that hangs only in forked workers, such as a thread pool, "
        'set loader.start = "spawn"' in str(raised.value.hint)
    )


def test_a_gradient_that_is_asked_for_is_asked_for_behind_a_worker() -> None:
    class Inputs(Numbers):
        def read(self, ids: np.ndarray) -> dict[str, Any]:
            free = torch.ones(len(ids), requires_grad=True)
            return {
                "leaf": free,
                "made": free * 2,
                "none": torch.ones(2),
                "empty": torch.ones(0, requires_grad=True),
            }

    reading = loader(Inputs(), ONE)
    (batch,) = reading.take(1).batches
    reading.close()
    assert {name: part.requires_grad for name, part in batch.items()} == {
        "leaf": True,
        "made": True,
        "none": False,
        "empty": True,
    }
    (batch["leaf"].sum() + batch["made"].sum()).backward()


def test_a_thread_that_ends_takes_no_worker_with_it() -> None:
    """The kernel's signal of a parent's death is of the thread that forked."""
    told: list[LoaderNotice] = []
    reading = loader(Numbers(0.005), TWO, told=told)
    for number in range(1, 6):
        thread = threading.Thread(target=reading.take, args=(number,))
        thread.start()
        thread.join()
        time.sleep(0.02)
    reading.close()
    assert told == []


@pytest.mark.parametrize("of_main", [False, True])
def test_workers_in_the_middle_of_a_batch_die_with_the_process(of_main: bool) -> None:
    """They look at no pipe then; and the thread that began them is the main one, or another."""

    def begin(pipe: Any) -> None:
        reading = loader(Numbers(30), TWO)
        threading.Thread(
            target=tell if of_main else reading.take, args=(pipe if of_main else 1,)
        ).start()
        (reading.take if of_main else tell)(1 if of_main else pipe)
        time.sleep(30)

    def tell(pipe: Any) -> None:
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.01)
        time.sleep(0.1)  # until they read
        pipe.send([each.pid for each in multiprocessing.active_children()])

    ours, theirs = multiprocessing.Pipe()
    run = multiprocessing.get_context("fork").Process(target=begin, args=(theirs,))
    run.start()
    workers = ours.recv()
    run.kill()
    run.join()
    run.close()
    ours.close()
    theirs.close()
    until_s = time.monotonic() + 60
    while any(map(psutil.pid_exists, workers)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not [each for each in workers if psutil.pid_exists(each)]


class Deadly(Numbers):
    """A worker dies once of the samples of the first step, and of those of the third each time."""

    def __init__(self, once: Once) -> None:
        super().__init__()
        self.once, feed = once, Feed(Numbers(), Order(97, 5), batch=16)
        self.first, self.third = (int(feed.window(step).ids[0]) for step in (0, 2))

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        if self.third in ids or (self.first in ids and self.once.is_due()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(ids)


def test_samples_that_were_read_when_a_worker_died_of_others_are_not_blamed(tmp_path: Path) -> None:
    """What it had is read again in the same order, so that the first of it is what it died of."""
    reading = loader(
        Deadly(Once(tmp_path, 1)), LoaderSettings(workers=1, kind="process", prefetch=3)
    )
    with pytest.raises(BadRecordError, match="of step 3; so did 2 workers before it"):
        for number in range(1, 4):
            reading.take(number)


class Late(Numbers):
    """The first batch comes only while the fourth is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.gate = itertools.count(1), threading.Event()

    def read(self, ids: np.ndarray) -> dict[str, Any]:
        number = next(self.reads)
        if number == 1:
            self.gate.wait(60)
        elif number == 4:
            self.gate.set()
            time.sleep(0.1)
        return super().read(ids)


def test_what_a_thread_gives_after_it_was_replaced_is_nobodys() -> None:
    told: list[LoaderNotice] = []
    here, there = (
        loader(Numbers(), LoaderSettings()),
        loader(Late(), LoaderSettings(workers=1, kind="thread", timeout_s=0.1), told=told),
    )
    for number in range(1, 9):
        assert same(rows(there.take(number)), rows(here.take(number)))
    there.close()
    assert [each.step for each in told] == [1]


def test_a_sample_is_augmented_by_its_own_draws(expected: list[list[Any]]) -> None:  # noqa: F811
    """Not by its place in a microbatch, which another cut or an omitted sample would change."""
    for step, (_, batches) in enumerate(expected):
        for numbers, images in batches:
            for number, image in zip(numbers, images, strict=True):
                ids = np.array([number])
                assert torch.equal(
                    shifted(Numbers().read(ids), Keys(5, step // 7, ids))["image"][0], image
                )


def test_a_process_that_may_have_no_children_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="daemonic"):
        loader(Numbers(), TWO).take(1)


def test_more_files_than_a_process_may_open_are_told_and_given_back() -> None:
    before, (soft, hard) = psutil.Process().num_fds(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 60, hard))
    try:
        with pytest.raises(
            DataError, match=r"worker 1 of 2 could not start: .* each worker opens 42 memory files"
        ) as raised:
            loader(Numbers(), LoaderSettings(workers=2, kind="process", prefetch=20)).take(1)
        assert psutil.Process().num_fds() <= before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in str(raised.value.hint)


def test_batches_that_grow_are_held_to_the_memory_that_was_allowed() -> None:
    class Growing(Numbers):
        def read(self, ids: np.ndarray) -> Any:
            return _Batch(torch.ones(1 if 0 in ids else 1 << 16))

    source = Growing()
    reading = Loader(
        Feed(source, Order(97, 0, shuffle=False), batch=16),
        Reader(source, None, 0),
        LoaderSettings(workers=1, kind="thread", prefetch=9, memory_bytes=1 << 20),
        last=20,
    )
    reading.take(1)
    assert reading.depth == 9
    reading.take(2)
    assert reading.depth == 4
    reading.close()


class _Batch:
    def __init__(self, large: torch.Tensor) -> None:
        self.large = large


def test_the_memory_of_a_batch_of_a_type_of_its_own_is_counted() -> None:
    assert bytes_of(_Batch(torch.ones(4))) == 16


def test_what_is_bad_does_not_break_the_search_for_what_steps_wait_for() -> None:
    class Bad(Numbers):
        def read(self, ids: np.ndarray) -> dict[str, Any]:
            if 40 in ids:
                raise ValueError("no image")
            return super().read(ids)

    assert Reader(Bad(), None, 0, skips=True).explain(0, np.arange(39, 42)).keys() == {"read"}


def test_what_a_task_file_defines_goes_to_a_worker_that_is_spawned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that it is not there afterwards
    monkeypatch.setitem(sys.modules, "surefoot_task_elsewhere", sys)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "elsewhere.py").write_text(
        "from tests.components.loading import Numbers\nclass Mine(Numbers):\n    pass\n"
        "class Task:\n    source = Mine()\n"
    )
    source = import_file(tmp_path / "elsewhere.py").Task.source
    # another file of this process, which cannot be imported again, is not the worker's
    monkeypatch.setitem(sys.modules, "surefoot_task_other", sys)
    (tmp_path / "other.py").write_text("import sys\nassert 'pytest' in sys.modules\n")
    import_file(tmp_path / "other.py")
    reading = loader(source, LoaderSettings(workers=1, kind="process", start="spawn"))
    assert len(reading.take(1).window.ids) == 16
    reading.close()
