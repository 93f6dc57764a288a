"""One block timed in one line, and the memory of a device."""

from __future__ import annotations

import time

import pytest
import torch

import surefoot
from surefoot.components.observe.memory_use import take_device_memory


def test_a_block_is_timed_by_the_monotonic_clock_even_when_it_raises() -> None:
    outside_s = time.perf_counter()
    with surefoot.timed("cpu") as took:
        assert took.elapsed_s is None
        inside_s = time.perf_counter()
        time.sleep(0.003)
        inside_s = time.perf_counter() - inside_s
    outside_s = time.perf_counter() - outside_s
    assert took.elapsed_s is not None
    assert inside_s <= took.elapsed_s <= outside_s
    first_s = took.elapsed_s
    with pytest.raises(ZeroDivisionError), took:
        raise ZeroDivisionError
    assert took.elapsed_s < first_s


def test_without_a_gpu_in_use_the_cpu_is_timed() -> None:
    with surefoot.timed() as took:
        pass
    assert took.elapsed_s is not None
    assert took.elapsed_s >= 0


def test_a_cpu_has_no_device_memory() -> None:
    assert take_device_memory(torch.device("cpu")) == {}
