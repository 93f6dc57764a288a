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

Shape = tuple[int, int, int]  # rows, inner size, columns
SHAPES: dict[str, tuple[Shape, ...]] = {  # the fastest differs with dtype and cores: thin ones stay in the caches
    "cpu": ((512, 512, 512), (4096, 1024, 1024), (8192, 256, 256)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # past the last cache; of the memory at most a sixteenth
CACHED_BYTES = 256 << 10  # the second cache of a core holds both sides
LEAST_SAMPLES, LONGEST_S = 2, 0.5  # of one product; what would take longer is left out
# each shape and copy so many times for so long: a machine that others use too is slow for seconds at a time
PASSES, BUDGET_S = 6, 0.04


def measure_peaks(device: torch.device, *, threads: int | None = None, dtypes: Sequence[str] | None = None) -> Peaks:
    """Measure the device; of a CPU with `threads`, those that torch uses now by default. A dtype that it has no product for is left out."""
    with _threads(threads if device.type == "cpu" else None):
        wanted = {name: dtype for dtype, name in DTYPES.items() if dtypes is None or name in dtypes}
        size = min(COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"]), psutil.virtual_memory().total // 16)
        products: dict[str, float] = {}
        copied, cached = 0.0, 0.0
        for _ in range(PASSES):
            for name, dtype in list(wanted.items()):
                found = _product_flops_per_s(device, dtype, products.get(name))
                if found is None:
                    del wanted[name]
                else:
                    products[name] = found
            copied = max(copied, _copied_bytes_per_s(device, size))
            cached = max(cached, _copied_bytes_per_s(device, CACHED_BYTES))
        return Peaks(
            device=device_name(device), threads=torch.get_num_threads() if device.type == "cpu" else None,
            flops_per_s=products, bytes_per_s=copied, cache_bytes_per_s=cached, source="measured here",
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


def _product_flops_per_s(device: torch.device, dtype: torch.dtype, best: float | None) -> float | None:
    """The best of all shapes and `best`; a shape is left out where it would take too long, as with a dtype that is emulated."""
    for rows, inner, columns in SHAPES.get(device.type, SHAPES["cpu"]):
        flops = product_flops(rows * columns, inner)
        if best is not None and flops / best > LONGEST_S:
            continue
        try:
            one, other = (torch.ones(*size, device=device, dtype=dtype) for size in ((rows, inner), (inner, columns)))
            out = torch.empty(rows, columns, device=device, dtype=dtype)
            fastest_s = _fastest_s(lambda: torch.mm(one, other, out=out), device)  # noqa: B023 - called here
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

    return 2 * source.numel() * source.element_size() * repeats / _fastest_s(copy, device)


def _fastest_s(call: Callable[[], Any], device: torch.device) -> float:
    """The shortest of the calls that fit into the budget, two at least: the first one is cold."""
    until_s, samples = time.perf_counter() + BUDGET_S, 0
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
