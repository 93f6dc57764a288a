"""The peaks of this CPU as surefoot measures them, and the best that a search finds.

The search is one through library calls.

python -m benchmarks.roofline.arms surefoot|torch|numpy THREADS REPORT [--no-rest]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from surefoot.components.profiler.peaks import measure_peaks
from surefoot.trial import write_report

# before each arm: after minutes of work on both cores some machines are slow until they have rested
REST_S = 20.0
BUDGET_S = 0.1  # of each call and shape; three samples at least
SHAPES = (
    *((size, size, size) for size in (256, 512, 768, 1024, 1536, 2048, 3072)),
    (4096, 512, 512),
    (512, 4096, 512),
    (512, 512, 4096),
    (4096, 1024, 1024),
    (8192, 256, 256),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
Call = Callable[[], object]


def torch_calls(
    dtype: torch.dtype, rows: int, inner: int, columns: int
) -> Iterator[tuple[str, Call]]:
    """mm into a buffer, mm with one side transposed, linear with its bias.

    And the products of oneDNN, as a linear layer and a convolution.
    """
    one, other = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    turned, bias, out = (
        other.T.contiguous(),
        torch.ones(columns, dtype=dtype),
        torch.empty(rows, columns, dtype=dtype),
    )
    yield "mm", lambda: torch.mm(one, other, out=out)
    yield "mm, transposed", lambda: torch.mm(one, turned.T, out=out)
    yield "linear", lambda: F.linear(one, turned, bias)
    if dtype is not torch.float64:  # oneDNN has none
        packed, weight = one.to_mkldnn(), turned.to_mkldnn()
        yield "oneDNN linear", lambda: F.linear(packed, weight)
        # channels last, as it is stored
        pixels = one.reshape(1, rows, 1, inner).permute(0, 3, 1, 2)
        kernel = turned.reshape(columns, inner, 1, 1)
        yield (
            "oneDNN convolution",
            lambda: torch.mkldnn_convolution(pixels, kernel, None, [0, 0], [1, 1], [1, 1], 1),
        )


def numpy_calls(
    dtype: torch.dtype, rows: int, inner: int, columns: int
) -> Iterator[tuple[str, Call]]:
    """numpy's product into a buffer, for the two dtypes that its BLAS has."""
    if dtype is torch.bfloat16:
        return
    kind = np.float32 if dtype is torch.float32 else np.float64
    one, other, out = (
        np.ones((rows, inner), kind),
        np.ones((inner, columns), kind),
        np.empty((rows, columns), kind),
    )
    yield "matmul", lambda: np.matmul(one, other, out=out)
    yield "matmul, transposed", lambda: np.matmul(one, other.T.copy().T, out=out)


def fastest_s(call: Call) -> float:
    call()
    until_s, best_s, samples = time.perf_counter() + BUDGET_S, float("inf"), 0
    while samples < 3 or time.perf_counter() < until_s:
        started_s = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - started_s)
        samples += 1
    return best_s


def search(
    calls: Callable[[torch.dtype, int, int, int], Iterator[tuple[str, Call]]],
) -> tuple[dict[str, float], dict[str, str]]:
    """The best FLOP/s of every dtype, and which call and shape it was."""
    best: dict[str, float] = {}
    named: dict[str, str] = {}
    for dtype, kind in DTYPES.items():
        for rows, inner, columns in SHAPES:
            for name, call in calls(kind, rows, inner, columns):
                rate = 2 * rows * inner * columns / fastest_s(call)
                if rate > best.get(f"{dtype}_flops_per_s", 0.0):
                    best[f"{dtype}_flops_per_s"], named[dtype] = (
                        rate,
                        f"{name}, {rows} x {inner} x {columns}",
                    )
    return best, named


def surefoot(threads: int) -> dict[str, float]:
    peaks = measure_peaks(torch.device("cpu"), threads=threads, dtypes=tuple(DTYPES))
    rates = {f"{dtype}_flops_per_s": rate for dtype, rate in peaks.flops_per_s.items()}
    assert peaks.bytes_per_s is not None
    return {**rates, "copied_bytes_per_s": peaks.bytes_per_s}


def main() -> None:
    arm, threads, report = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    if "--no-rest" not in sys.argv:
        time.sleep(REST_S)
    if arm == "surefoot":
        write_report(report, surefoot(threads))
    else:
        best, named = search(torch_calls if arm == "torch" else numpy_calls)
        write_report(report, best, facts=named)


if __name__ == "__main__":
    main()
