"""What this device does at most, by short kernels: the best of many dense products of each dtype, and of copies.

The best and not the mean: whatever else runs on the machine can only make a kernel slower, so the fastest comes nearest to a peak,
and it repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from surefoot.components.profiler.formulas import DTYPES
from surefoot.core.hardware import Peaks, find_machine
from surefoot.core.shape import product_flops

SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}  # of square matrices: larger ones are faster until they leave the caches
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # past the last cache; of the memory at most a sixteenth
CACHED_BYTES = 256 << 10  # the second cache of a core holds both sides
LEAST_SAMPLES, LONGEST_S = 3, 0.5  # of the products of one size; what would take longer is left out
BUDGET_S = 0.4  # of each dtype, and of the copies


def measure_peaks(device: torch.device, *, threads: int | None = None, dtypes: Sequence[str] | None = None) -> Peaks:
    """Measure the device; of a CPU with `threads`, those that torch uses now by default. A dtype that it has no product for is left out."""
    with _threads(threads if device.type == "cpu" else None):
        wanted = {name: dtype for dtype, name in DTYPES.items() if dtypes is None or name in dtypes}
        products = {name: _product_flops_per_s(device, dtype) for name, dtype in wanted.items()}
        size = min(COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"]), psutil.virtual_memory().total // 16)
        return Peaks(
            device=device_name(device), threads=torch.get_num_threads() if device.type == "cpu" else None,
            flops_per_s={name: value for name, value in products.items() if value is not None},
            bytes_per_s=_copied_bytes_per_s(device, size), cache_bytes_per_s=_copied_bytes_per_s(device, CACHED_BYTES),
            source="measured here",
        )  # fmt: skip


def device_name(device: torch.device) -> str:
    """What the machine calls the device: the processor, or the GPU by its driver."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return find_machine().processor if device.type == "cpu" else device.type


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _product_flops_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """The best of all sizes; the next size is left out where it would take too long, as with a dtype that is emulated."""
    best: float | None = None
    sizes = SIZES.get(device.type, SIZES["cpu"])
    for size in sizes:
        flops = product_flops(size * size, size)
        if best is not None and flops / best > LONGEST_S:
            break
        try:
            one, other = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
            out = torch.empty(size, size, device=device, dtype=dtype)
            fastest_s = _fastest_s(lambda: torch.mm(one, other, out=out), device, BUDGET_S / len(sizes))  # noqa: B023 - called here
        except (RuntimeError, TypeError):  # no such product on this device
            return best
        best = max(best or 0.0, flops / fastest_s)
    return best


def _copied_bytes_per_s(device: torch.device, size: int) -> float:
    """Bytes read and written; what a processor reads of a line before it writes it is not counted."""
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))  # written once, so that all pages are there
    repeats = max(1, (1 << 22) // size)  # a copy inside a cache is shorter than a clock's tick

    def copy() -> None:
        for _ in range(repeats):
            target.copy_(source)

    return 2 * source.numel() * source.element_size() * repeats / _fastest_s(copy, device, BUDGET_S)


def _fastest_s(call: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    """The shortest of the calls that fit into the budget, three at least, after one that does not count."""
    call()
    until_s, samples = time.perf_counter() + budget_s, 0
    best_s = float("inf")
    while samples < LEAST_SAMPLES or time.perf_counter() < until_s:
        best_s = min(best_s, _once_s(call, device))
        samples += 1
    return best_s


def _once_s(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        begun, ended = (event(enable_timing=True) for _ in range(2))
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize(device)
        return float(begun.elapsed_time(ended)) / 1e3
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
