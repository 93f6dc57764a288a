"""Peak FLOP/s and memory bandwidth of a device, measured with short matmuls and copies.

The result is the best of many measurements, not their mean. Other load on the machine can only make
a kernel slower, so the fastest measurement is the closest to the peak, and it is repeatable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from surefoot.components.profiler.formulas import DTYPES
from surefoot.components.profiler.phases.timed import timed
from surefoot.core.cost.shape import product_flops
from surefoot.core.hardware import Peaks, find_machine
from surefoot.core.process.memory_limits import find_limit

Shape = tuple[int, int, int]  # rows, inner size, columns
Make = Callable[[int, int, int, dict[str, Any]], Callable[[], Any]]
# the fastest shape depends on dtype and cores: thin ones stay in the caches
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cpu": (
        (512, 512, 512),
        (768, 768, 768),
        (1536, 1536, 1536),
        (4096, 1024, 1024),
        (8192, 256, 256),
    ),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
# larger than the last-level cache; at most 1/16 of the memory
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
CACHED_BYTES = 256 << 10  # source and target fit into the L2 cache of a core
MIN_SAMPLES, MAX_S = 2, 0.1  # of one matmul; a longer one is left out
# a shared machine is slow for seconds at a time: the KEPT fastest are measured PASSES times
PASSES, KEPT, BUDGET_S, COPIES_S = 8, 4, 0.03, 0.1


def measure_peaks(
    device: torch.device, *, threads: int | None = None, dtypes: Sequence[str] | None = None
) -> Peaks:
    """Measure the peak FLOP/s of each dtype and the memory bandwidth of `device`.

    On a CPU, `threads` is the number of threads; None stands for the number that torch uses now.
    `dtypes` are names such as "bf16"; None stands for all of them. A dtype is left out of the
    result if the device has no matmul for it.
    """
    with _threads(threads if device.type == "cpu" else None):
        wanted = {
            name: _Products(device, dtype)
            for dtype, name in DTYPES.items()
            if dtypes is None or name in dtypes
        }
        size = min(COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"]), find_limit().num_bytes // 16)
        copied, cached = 0.0, 0.0
        for _ in range(PASSES):
            for products in wanted.values():
                products.take()
            copied = max(copied, _copied_bytes_per_s(device, size, COPIES_S))
            cached = max(cached, _copied_bytes_per_s(device, CACHED_BYTES, BUDGET_S))
        return Peaks(
            device=device_name(device),
            threads=torch.get_num_threads() if device.type == "cpu" else None,
            flops_per_s={name: products.best for name, products in wanted.items() if products.best},
            bytes_per_s=copied,
            cache_bytes_per_s=cached,
            source="measured here",
        )


def device_name(device: torch.device) -> str:
    """Return the model name of the CPU or GPU; for any other device, return its type."""
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


def _plain(rows: int, inner: int, columns: int, like: dict[str, Any]) -> Callable[[], Any]:
    one, other = torch.ones(rows, inner, **like), torch.ones(inner, columns, **like)
    out = torch.empty(rows, columns, **like)
    return lambda: torch.mm(one, other, out=out)


def _matmul_transposed(
    rows: int, inner: int, columns: int, like: dict[str, Any]
) -> Callable[[], Any]:
    """Return a function that multiplies by a transposed matrix, as a linear layer does."""
    one, other = torch.ones(rows, inner, **like), torch.ones(columns, inner, **like).T
    out = torch.empty(rows, columns, **like)
    return lambda: torch.mm(one, other, out=out)


def _onednn(rows: int, inner: int, columns: int, like: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that runs a matmul with oneDNN, which convolutions use on a CPU.

    On some processors, oneDNN uses instructions that are twice as wide as those of `torch.mm`.
    """
    one, other = (
        torch.ones(rows, inner, **like).to_mkldnn(),
        torch.ones(columns, inner, **like).to_mkldnn(),
    )
    return lambda: F.linear(one, other)


CALLS: dict[str, tuple[Make, ...]] = {
    "cpu": (_plain, _matmul_transposed, _onednn),
    "cuda": (_plain,),
}


class _Products:
    """Matmuls of one dtype on one device, which are measured in rounds.

    The first round measures all functions and shapes; later rounds measure only the fastest of
    them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._like = device, {"device": device, "dtype": dtype}
        shapes, calls = SHAPES.get(device.type, SHAPES["cpu"]), CALLS.get(device.type, CALLS["cpu"])
        self._left: list[tuple[Make, Shape]] = [(make, shape) for shape in shapes for make in calls]
        self._best_of = dict.fromkeys(calls, 0.0)

    @property
    def best(self) -> float:
        return max(self._best_of.values())

    def take(self) -> None:
        """Measure the remaining matmuls, and discard all but the fastest of them.

        A matmul is also discarded if the device does not support it, or if it takes too long, for
        example because its dtype is emulated.
        """
        rates = {(make, shape): self._flops_per_s(make, shape) for make, shape in self._left}
        self._left = sorted((each for each in rates if rates[each]), key=lambda each: -rates[each])[
            :KEPT
        ]

    def _flops_per_s(self, make: Make, shape: Shape) -> float:
        flops, best = product_flops(shape[0] * shape[2], shape[1]), self._best_of[make]
        if best and flops / best > MAX_S:
            return 0.0
        try:
            found = flops / _min_call_s(make(*shape, self._like), self._device, BUDGET_S)
        except (RuntimeError, TypeError):  # the device does not support this matmul
            return 0.0
        self._best_of[make] = max(best, found)
        return found


def _copied_bytes_per_s(device: torch.device, size: int, budget_s: float) -> float:
    """Return the bandwidth of a copy in bytes per second, the sum of bytes read and bytes written.

    A CPU may also read a cache line before it writes it; these reads are not counted.
    """
    # written once, so that all pages are mapped
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    repeats = max(1, (1 << 22) // size)  # a copy inside a cache is shorter than a clock's tick

    def copy() -> None:
        for _ in range(repeats):
            target.copy_(source)

    return (
        2 * source.numel() * source.element_size() * repeats / _min_call_s(copy, device, budget_s)
    )


def _min_call_s(call: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    """Return the shortest time of one call, in seconds.

    `call` is repeated for `budget_s` seconds. It runs at least twice, because the first call is
    slower.
    """
    until_s, samples = time.perf_counter() + budget_s, 0
    best_s = float("inf")
    while samples < MIN_SAMPLES or time.perf_counter() < until_s:
        with timed(device) as took:
            call()
        best_s = min(best_s, took.elapsed_s or best_s)
        samples += 1
    return best_s
