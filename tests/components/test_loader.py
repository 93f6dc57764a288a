"""Tests of the loader.

Whatever its workers are and whatever becomes of them, a step reads what it always reads.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.batches import LoaderNotice, LoaderSettings
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Source
from surefoot.core.errors import BadRecordError, DataError, SpecError
from surefoot.train.assemble.reading import make_settings
from tests.components.loading import Locked, Numbers, Odds, Once, Troubled, Unsafe, shifted
from tests.prove.forked import programs_are_forked

__all__ = ["programs_are_forked"]

BATCH, STEPS, SEED = 16, 21, 5  # three epochs; the last batch of each has one sample
CREWS = [
    LoaderSettings(workers=workers, kind=kind)
    for kind in ("thread", "process")
    for workers in (1, 2, 7)
]


def loader(
    source: Source, settings: LoaderSettings | None = None, *, microbatch: int | None = 6
) -> Loader:
    feed = Feed(source, Order(len(source), SEED), batch=BATCH, microbatch=microbatch)
    return Loader(
        feed,
        Reader(source, shifted if type(source) is not Odds else None, SEED),
        settings or LoaderSettings(),
        last=STEPS,
    )


def rows(taken: Any) -> list[Any]:
    return [
        taken.window.ids.tolist(),
        [(batch["number"].tolist(), batch["image"].clone()) for batch in taken.batches],
    ]


def same(left: list[Any], right: list[Any]) -> bool:
    return (
        left[0] == right[0]
        and len(left[1]) == len(right[1])
        and all(
            mine[0] == other[0] and torch.equal(mine[1], other[1])
            for mine, other in zip(left[1], right[1], strict=True)
        )
    )


@pytest.fixture(scope="module")
def expected() -> list[list[Any]]:
    reading = loader(Numbers())
    return [rows(reading.take(number)) for number in range(1, STEPS + 1)]


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    """No worker, thread, descriptor or shared memory of a test outlives it."""
    resource_tracker.ensure_running()  # Python's own, which stays
    before = psutil.Process().num_fds()
    yield
    if psutil.Process().num_fds() > before:
        gc.collect()  # which takes seconds among all tests, so it is not asked for each time
    assert not multiprocessing.active_children()
    assert psutil.Process().num_fds() <= before
    # as torch and Python name theirs
    assert not [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]


@pytest.mark.parametrize("settings", CREWS, ids=lambda each: f"{each.workers} {each.kind}")
def test_any_number_of_workers_reads_the_same(
    settings: LoaderSettings, expected: list[list[Any]]
) -> None:
    reading = loader(Numbers(), settings)
    found = [rows(reading.take(number)) for number in range(1, STEPS + 1)]
    reading.close()
    assert all(map(same, found, expected))


def test_workers_that_are_spawned_read_the_same(expected: list[list[Any]]) -> None:
    reading = loader(Numbers(), LoaderSettings(workers=1, kind="process", start="spawn"))
    assert all(
        same(rows(reading.take(number)), expected[number - 1]) for number in range(1, STEPS + 1)
    )
    reading.close()


def test_workers_stay_from_epoch_to_epoch() -> None:
    reading = loader(Numbers(), LoaderSettings(workers=2, kind="process"))
    seen = set()
    for number in range(1, STEPS + 1):
        reading.take(number)
        seen |= {each.pid for each in multiprocessing.active_children()}
    reading.close()
    assert len(seen) == 2


def test_steps_may_be_taken_from_anywhere(expected: list[list[Any]]) -> None:
    reading = loader(Numbers(), LoaderSettings(workers=2, kind="process"))
    for number in (20, 21, 3, 4, 4, 5, 1, 2, 21):
        assert same(rows(reading.take(number)), expected[number - 1])
    reading.close()


def test_other_workers_in_the_middle_change_nothing(expected: list[list[Any]]) -> None:
    reading = loader(Numbers(), LoaderSettings(workers=1, kind="process"))
    for number in range(1, STEPS + 1):
        assert same(rows(reading.take(number)), expected[number - 1])
        if number in (3, 9, 15):
            reading.use(
                LoaderSettings(workers=number // 3, kind="thread" if number == 9 else "process")
            )
    reading.close()


@pytest.mark.parametrize(
    "settings",
    [LoaderSettings(workers=2, kind="process"), LoaderSettings(workers=2, kind="thread")],
    ids=["process", "thread"],
)
def test_all_that_a_batch_may_hold_comes_through(settings: LoaderSettings) -> None:
    here, there = loader(Odds()), loader(Odds(), settings)
    for number in range(1, 9):
        for one, other in zip(here.take(number).batches, there.take(number).batches, strict=True):
            for mine, its in ((one[0].wide, other[0].wide), (one[1].left, other[1].left)):
                assert mine.dtype == its.dtype
                assert torch.equal(mine, its)
            assert other[0].words == one[0].words
            for name, part in one[1].right.items():
                its = other[1].right[name]
                assert type(its) is type(part)
                if isinstance(part, Tensor):
                    assert its.shape == part.shape
                    assert torch.equal(its, part)
                elif isinstance(part, np.ndarray):
                    assert its.dtype == part.dtype
                    assert np.array_equal(its, part)
    there.close()


def test_a_batch_that_is_kept_stays_as_it_was(expected: list[list[Any]]) -> None:
    """Slots are used again, though never while somebody has what lies in them."""
    reading = loader(Numbers(), LoaderSettings(workers=2, kind="process"))
    kept = [reading.take(number) for number in range(1, STEPS + 1)]
    reading.close()
    gc.collect()
    assert all(map(same, map(rows, kept), expected))


def test_workers_killed_at_random_change_nothing(expected: list[list[Any]]) -> None:
    drawn, told = random.Random(0), list[LoaderNotice]()
    for workers in (1, 2, 7):
        reading = loader(Numbers(0.001), LoaderSettings(workers=workers, kind="process"))
        reading.tell = told.append
        for number in range(1, STEPS + 1):
            if number > 1 and drawn.random() < 0.35:
                os.kill(drawn.choice(multiprocessing.active_children()).pid or 0, signal.SIGKILL)
            assert same(rows(reading.take(number)), expected[number - 1])
        reading.close()
    assert len(told) >= 5
    assert all(
        "was killed by signal 9" in each.what and "the worker was restarted" in each.then
        for each in told
    )


@pytest.mark.parametrize(
    "settings",
    [
        LoaderSettings(workers=2, kind="process"),
        LoaderSettings(workers=2, kind="thread", timeout_s=1),
    ],
    ids=["process", "thread"],
)
def test_a_worker_that_hangs_is_named_within_5_s_and_replaced(
    settings: LoaderSettings, tmp_path: Path, expected: list[list[Any]]
) -> None:
    # a busy machine delays one try or two; what looks too late does so each time
    folders = [tmp_path / f"{number}" for number in range(3)]
    assert any(read_past_hang(settings, folder, expected) < 5.0 for folder in folders)


def read_past_hang(settings: LoaderSettings, folder: Path, expected: list[list[Any]]) -> float:
    """Seconds of the longest step of a loader of which one worker hangs."""
    folder.mkdir()
    reading, told = loader(Troubled("hangs", Once(folder, 1)), settings), list[LoaderNotice]()
    reading.tell = told.append
    longest_s = longest_step(reading, 7, expected)
    folder.with_suffix(".over").touch()
    reading.close()
    assert [each.kind for each in told] == ["worker"]
    assert "loader" in told[0].what
    assert "samples" in told[0].what
    assert told[0].step == next(number for number in range(1, 8) if 40 in expected[number - 1][0])
    return longest_s


def longest_step(reading: Loader, steps: int, expected: list[list[Any]]) -> float:
    """Seconds of the longest of so many steps, each of which gives what is expected."""
    longest_s = 0.0
    for number in range(1, steps + 1):
        begun_s = time.monotonic()
        assert same(rows(reading.take(number)), expected[number - 1])
        longest_s = max(longest_s, time.monotonic() - begun_s)
    return longest_s


def test_a_worker_that_computes_is_given_longer(tmp_path: Path, expected: list[list[Any]]) -> None:
    reading, told = (
        loader(
            Troubled("computes", Once(tmp_path, 1)),
            LoaderSettings(workers=1, kind="process", timeout_s=0.25),
        ),
        list[LoaderNotice](),
    )
    reading.tell = told.append
    begun_s = time.monotonic()
    assert all(same(rows(reading.take(number)), expected[number - 1]) for number in range(1, 8))
    reading.close()
    assert len(told) == 1
    assert time.monotonic() - begun_s > 1.7  # eight times as long


def test_what_a_worker_raises_is_raised_where_a_person_sees_it(tmp_path: Path) -> None:
    reading = loader(
        Troubled("raises", Once(tmp_path, 100)), LoaderSettings(workers=2, kind="process")
    )
    with pytest.raises(OSError, match="the cable is loose") as raised:
        for number in range(1, 8):
            reading.take(number)
    reading.close()
    assert any(
        frame.name == "read" and "loading.py" in str(frame.path) for frame in raised.traceback
    )


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_error_of_the_moment_is_told_and_read_again(
    kind: Any, tmp_path: Path, expected: list[list[Any]]
) -> None:
    reading, told = (
        loader(Troubled("raises", Once(tmp_path, 1)), LoaderSettings(workers=2, kind=kind)),
        list[LoaderNotice](),
    )
    reading.tell = told.append
    assert all(same(rows(reading.take(number)), expected[number - 1]) for number in range(1, 8))
    reading.close()
    assert [each.then for each in told] == ["the same samples were read again, without an error"]
    assert "OSError: the cable is loose" in told[0].what


def test_samples_that_no_worker_survives_end_the_run_with_their_numbers(
    tmp_path: Path, expected: list[list[Any]]
) -> None:
    reading = loader(
        Troubled("dies", Once(tmp_path, 100)), LoaderSettings(workers=2, kind="process")
    )
    with pytest.raises(
        BadRecordError,
        match=r"killed by signal 9 while it read samples .* of step \d; so did 2 workers",
    ) as raised:
        for number in range(1, 8):
            reading.take(number)
    assert "source.read(ids)" in raised.value.hint


def test_nothing_is_read_further_ahead_than_memory_allows() -> None:
    reading = loader(Numbers(), LoaderSettings(workers=2, kind="process", prefetch=9))
    reading.take(1)
    assert reading.depth == 18
    reading.use(
        LoaderSettings(workers=2, kind="process", prefetch=9, memory_bytes=6 * reading.batch_bytes)
    )
    reading.take(1)
    assert reading.depth == 6
    assert "2 worker processes read 6 microbatches ahead" in reading.describe()
    reading.use(LoaderSettings(workers=2, kind="process", prefetch=9, memory_bytes=1))
    reading.take(1)
    reading.close()
    assert reading.depth == 2


def test_a_source_that_cannot_be_sent_is_told_with_the_attribute() -> None:
    reading = loader(Locked(), LoaderSettings(workers=1, kind="process", start="spawn"))
    with pytest.raises(
        DataError, match=r"the source\.settings\['transform'\] cannot be pickled"
    ) as raised:
        reading.take(1)
    assert 'loader.start = "fork"' in raised.value.hint


def test_threads_leave_the_threads_of_torch_alone() -> None:
    before = torch.get_num_threads()
    reading = loader(Numbers(), LoaderSettings(workers=2, kind="thread"))
    reading.take(1)
    reading.close()
    assert torch.get_num_threads() == before
    assert not [each for each in threading.enumerate() if each.name.startswith("surefoot-loader")]


@pytest.mark.usefixtures("programs_are_forked")
def test_workers_die_with_the_process_that_began_them(tmp_path: Path) -> None:
    code = (
        "import sys, multiprocessing, time\n"
        "from tests.components.test_loader import loader\n"
        "from tests.components.loading import Numbers\n"
        "from surefoot.components.data.loader.batches import LoaderSettings\n"
        "reading = loader(Numbers(0.2), LoaderSettings(workers=3, kind='process')); "
        "reading.take(1)\n"
        "print(*(each.pid for each in multiprocessing.active_children()), flush=True); "
        "time.sleep(60)\n"
    )
    (tmp_path / "parent.py").write_text(code)
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    workers = [int(number) for number in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(workers) == 3
    until_s = time.monotonic() + 60  # on a machine with much else to do
    while any(map(psutil.pid_exists, workers)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not [number for number in workers if psutil.pid_exists(number)]


def test_what_goes_together_in_a_spec() -> None:
    with pytest.raises(
        SpecError, match=r"loader\.prefetch = 4 has no effect with loader\.workers = 0, its default"
    ):
        RunSpec(loader={"prefetch": 4})
    with pytest.raises(
        SpecError, match=r"loader\.workers is 2, but the source gives whole batches"
    ) as raised:
        make_settings(RunSpec(loader={"workers": 2}), Iterated([torch.zeros(2)]))
    assert "num_workers" in raised.value.hint


class Drawing(Unsafe):
    """Draws from the streams that the run draws from."""

    def read(self, ids: np.ndarray) -> Any:
        torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002 - what careless datasets do
        return super().read(ids)


@pytest.mark.parametrize("skips", [False, True])
def test_looking_for_the_cause_of_a_wait_draws_nothing_from_the_run(skips: bool) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002

    before = states()
    assert Reader(Drawing(), shifted, 3, skips=skips).explain(0, np.arange(4))
    assert states() == before


class Nested(Unsafe):
    """Reads another source, which draws too, in the middle of its own draws."""

    def read(self, ids: np.ndarray) -> Any:
        before = [random.random(), np.random.randn(), torch.rand(()).item()]  # noqa: NPY002
        Reader(Drawing(), shifted, 9)(0, np.arange(4))
        drawn = [*before, random.random(), np.random.randn(), torch.rand(()).item()]  # noqa: NPY002
        return {"number": torch.from_numpy(ids.copy()), "image": torch.tensor(drawn)}


def test_reading_takes_nothing_from_the_stream_that_a_loop_draws_from() -> None:
    np.random.seed(3)  # noqa: NPY002
    expected = [np.random.randn() for _ in range(5)]  # noqa: NPY002 - they come in pairs, the second of which numpy keeps
    np.random.seed(3)  # noqa: NPY002
    reader, drawn, read = Reader(Nested(), None, SEED), [], []
    for _ in range(5):
        read.append(reader(0, np.arange(4)).batch["image"])  # type: ignore[index]
        drawn.append(np.random.randn())  # noqa: NPY002
    assert drawn == expected
    assert all(torch.equal(each, read[0]) for each in read)
    assert len(set(read[0].tolist())) == 6


def test_a_loop_may_draw_from_another_generator_of_numpy() -> None:
    theirs = np.random.get_bit_generator()
    mine = np.random.PCG64(1)
    np.random.set_bit_generator(mine)
    try:
        Reader(Drawing(), shifted, SEED)(0, np.arange(4))
        assert np.random.get_bit_generator() is mine
        assert np.random.rand() == np.random.Generator(np.random.PCG64(1)).random()  # noqa: NPY002
    finally:
        np.random.set_bit_generator(theirs)
