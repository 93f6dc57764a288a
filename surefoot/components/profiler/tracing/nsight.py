"""Commands that record the window of a run with NVIDIA Nsight Systems and Nsight Compute.

Their reports have the extensions .nsys-rep and .ncu-rep.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def render(words: Sequence[str], folder: Path, *, world_size: int = 1) -> dict[str, str]:
    """Return the command lines of nsys and ncu that run and record the command `words`.

    The command must open NVTX ranges, and start and stop the capture of its window. The reports are
    written to `folder`. If there is more than one rank, each rank has its own report: nsys and ncu
    replace %q{RANK} with the rank.

    >>> print(render(["surefoot", "profile", "digits", "--nvtx"], Path("p"))["ncu"])
    ncu --profile-from-start=off --nvtx --set=full --export=p/ncu surefoot profile digits --nvtx
    """
    rank = "-%q{RANK}" if world_size > 1 else ""
    nsys = [
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt,cudnn,cublas",
        "--cuda-memory-usage=true",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={folder / f'nsys{rank}'}",
    ]
    ncu = [
        "ncu",
        "--profile-from-start=off",
        "--nvtx",
        "--set=full",
        f"--export={folder / f'ncu{rank}'}",
    ]
    return {"nsys": shlex.join([*nsys, *words]), "ncu": shlex.join([*ncu, *words])}
