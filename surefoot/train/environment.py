"""Process-wide settings that a run changes and restores, and the description of its machine."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.components.compiler import unloaded
from surefoot.components.precision.policy import set_products
from surefoot.components.stability.guard import GuardFault
from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.core import place
from surefoot.core.errors import SpecError
from surefoot.core.hardware import find_machine
from surefoot.train.resume.program import Program

_DETERMINISM: Any = torch.utils.deterministic
# malloc.h: blocks smaller than M_MMAP_THRESHOLD come from the heap, and as much as M_TRIM_THRESHOLD
# may be free at its end
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
MALLOC_LIMITS = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 256 << 20}
FUSED_ATTENTION = ("flash", "mem_efficient", "cudnn")  # the kernels beside "math", on every device
RECORDED_PACKAGES = ("surefoot", "torch", "numpy", "safetensors", "pydantic")


def apply(spec: RunSpec) -> Callable[[], None]:
    """Set threads, determinism, TF32, attention kernels and cuDNN benchmarking from the spec.

    Returns a function that restores the previous settings. The allocator setting of
    `train.keep_freed_memory` is not restored.
    """
    threads = torch.get_num_threads()
    fill = _DETERMINISM.fill_uninitialized_memory
    cudnn: Any = torch.backends.cudnn
    was_timed = cudnn.benchmark
    if spec.train.cudnn_benchmark:
        cudnn.benchmark = why_not_timed(spec, find_device(spec.train.device).type) is None
    if spec.train.threads is not None:
        torch.set_num_threads(spec.train.threads)
    if spec.train.keep_freed_memory:
        keep_freed_memory()
    if spec.train.deterministic:
        _DETERMINISM.fill_uninitialized_memory = False  # filling costs a pass over every new tensor
    undo = (
        unloaded.set_deterministic(spec.train.deterministic),
        unloaded.defer_compiler_import(),
        set_products(spec.precision.compute),
        _without_fused_attention() if spec.train.attention == "math" else lambda: None,
    )

    def put_back() -> None:
        for each in undo:
            each()
        torch.set_num_threads(threads)
        _DETERMINISM.fill_uninitialized_memory = fill
        cudnn.benchmark = was_timed

    return put_back


def _without_fused_attention() -> Callable[[], None]:
    """Disable the fused kernels of scaled_dot_product_attention on all devices.

    Returns a function that enables those that were enabled before.
    """
    switches: Any = torch.backends.cuda
    were = {name: getattr(switches, f"{name}_sdp_enabled")() for name in FUSED_ATTENTION}

    def put_back() -> None:
        for name, was in were.items():
            getattr(switches, f"enable_{name}_sdp")(was)

    for name in FUSED_ATTENTION:
        getattr(switches, f"enable_{name}_sdp")(False)
    return put_back


def why_not_timed(spec: RunSpec, device: str) -> str | None:
    """Return why `train.cudnn_benchmark` has no effect on `device`; None if it has one."""
    reasons = {
        "cuDNN runs only on GPUs": device != "cuda",
        "train.deterministic does not allow a choice by measured time": spec.train.deterministic,
        "train.ramp has several batch sizes, and cuDNN would time its algorithms for each": bool(
            spec.train.ramp
        ),
    }
    return next((why for why, holds in reasons.items() if holds), None)


def describe_cudnn(spec: RunSpec, device: str) -> list[str]:
    """Return a message with the reason if `train.cudnn_benchmark` is set but has no effect."""
    why = why_not_timed(spec, device) if spec.train.cudnn_benchmark else None
    return [] if why is None else [f"train.cudnn_benchmark has no effect: {why}"]


def keep_freed_memory() -> bool:
    """Let glibc reuse freed blocks instead of returning them to the system after every step.

    Returns whether the setting took effect. Without it, glibc maps blocks of several MiB again in
    each step. In some processes, the page faults took up to a quarter of the step time of a small
    convnet. Nothing is changed if the environment configures an allocator (MALLOC_*, LD_PRELOAD,
    GLIBC_TUNABLES). See mallopt(3).
    """
    if not sys.platform.startswith("linux") or place.has_chosen_allocator():
        return False
    return _limit(MALLOC_LIMITS)


def give_back_large_blocks() -> bool:
    """Let glibc return blocks of 4 MiB or more to the system when they are freed.

    Returns whether the setting took effect. Sharding stage 3, which gathers the weights of one
    block of the model at a time, needs this. glibc before 2.38 cannot reuse a free chunk of exactly
    the size of an aligned block, so that in the end the whole model would be in memory. The page
    faults cost a few percent of the step time.
    """
    if not sys.platform.startswith("linux") or place.has_chosen_allocator():
        return False
    return _limit({MMAP_THRESHOLD: 4 << 20})


def _limit(limits: Mapping[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every libc
    return mallopt is not None and all(
        mallopt(parameter, size) == 1 for parameter, size in limits.items()
    )


def find_device(name: str) -> torch.device:
    """Return the device that `train.device` names; each rank gets the GPU of its local rank.

    "auto" is the GPU if there is one, else the CPU. Raises SpecError for a device that is not
    available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SpecError("train.device is 'cuda', and torch sees no GPU", hint='use "auto" or "cpu"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    here = place.here()
    # a run that lost ranks may continue on any GPU
    if here.world_size == 1 and not 0 < here.local_rank < torch.cuda.device_count():
        return torch.device("cuda")
    if here.local_rank >= torch.cuda.device_count():
        raise SpecError(
            f"local rank {here.local_rank} has no GPU: torch sees {torch.cuda.device_count()}",
            hint='start as many ranks as there are GPUs, or set train.device = "cpu"',
        )
    torch.cuda.set_device(here.local_rank)
    return torch.device("cuda", here.local_rank)


def is_launched() -> bool:
    """Return whether the run has several ranks, or a surefoot supervisor that forwards signals."""
    return place.here().world_size > 1 or place.flight_file() is not None


def has_process_group() -> bool:
    """Return whether torch.distributed is initialized in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def set_seeds(seed: int) -> None:
    """Seed torch, NumPy and Python, so that initial weights are a function of the seed.

    Without an accelerator, only torch's CPU generator is seeded. `torch.manual_seed` would spend
    0.4 ms on devices that do not exist, and evaluations seed every batch.
    """
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a task may draw from the global stream
    random.seed(seed)


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def rank_seed(seed: int | None = None) -> int:
    """Return a seed (0 to 2^32 - 1) that differs on each rank, derived from `seed` or `train.seed`.

    Use it for state that differs from rank to rank, such as an environment of reinforcement
    learning: `numpy.random.default_rng(surefoot.rank_seed())`.
    """
    base = np.random.SeedSequence(
        (torch.initial_seed() if seed is None else seed) % 2**64
    ).generate_state(1)[0]
    return (int(base) + place.here().rank) % 2**32


def as_run(spec: RunSpec) -> RunSpec:
    """Return the spec with the number of threads and absolute paths filled in.

    The result repeats the run from any working folder.
    """
    return with_whole_paths(spec.replace(train={"threads": torch.get_num_threads()}))


def with_whole_paths(spec: RunSpec) -> RunSpec:
    """Return the spec with its relative paths resolved against the current working folder."""
    tables: dict[str, dict[str, Any]] = {}
    file, colon, name = (spec.task.use or "").partition(":")
    if colon and file.endswith(".py"):
        tables["task"] = {"use": f"{Path(file).expanduser().resolve()}:{name}"}
    if spec.data.folder is not None:
        tables["data"] = {"folder": str(Path(spec.data.folder).expanduser().resolve())}
    return spec.replace(**tables) if tables else spec


@functools.cache  # called for every checkpoint; reading takes 15 ms
def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that can change results."""
    found = {"python": sys.version.split()[0]}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # with the build, such as +cu130, which the metadata of the package omit
    return found | {"torch": str(torch.__version__)}


def circumstances(device: str, program: Program) -> dict[str, Any]:
    """Return the fields of a Started record that describe the machine, the process and the code."""
    here = place.here()
    return {
        "time_s": time.time(),
        "versions": versions(),
        "machine": {
            **find_machine().as_row(),
            "device": device,
            "threads": torch.get_num_threads(),
        },
        "place": {"rank": here.rank, "world_size": here.world_size, "host": here.host},
        "variables": place.recorded_variables(),
        "command": tuple(sys.argv),
        **program.started_fields(),
    }


def fault(generation: int, found: GuardFault) -> events.Fault:
    """Return the Fault record of `found`, with the rank and the host of this process."""
    here = place.here()
    return events.Fault(
        generation=generation,
        time_s=time.time(),
        step=found.step,
        fault=found.fault,
        rank=here.rank,
        host=here.host,
        action=found.action,
        detail=found.detail,
    )
