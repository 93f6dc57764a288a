"""What a run sets in the process and puts back, and what it records of where it ran."""

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
from surefoot.components.precision import set_products
from surefoot.components.stability import GuardFault
from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.core import place
from surefoot.core.errors import SpecError
from surefoot.core.hardware import find_machine
from surefoot.train.resume.program import Program, find_commit

_DETERMINISM: Any = torch.utils.deterministic
# M_MMAP_THRESHOLD: smaller blocks come from the heap; M_TRIM_THRESHOLD: so much may lie free at its end (malloc.h)
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
MALLOC_LIMITS = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 256 << 20}
FUSED_ATTENTION = ("flash", "mem_efficient", "cudnn")  # the kernels beside "math", on every device
RECORDED_PACKAGES = ("surefoot", "torch", "numpy", "safetensors", "pydantic")


def apply(spec: RunSpec) -> Callable[[], None]:
    """Set threads, deterministic kernels, tf32, attention and cuDNN's search as the spec says; gives what puts them back."""
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
        unloaded.leave_unloaded(),
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
    """Let scaled_dot_product_attention take its steps one by one; gives what puts back what was. The switches hold on a CPU, too."""
    switches: Any = torch.backends.cuda
    were = {name: getattr(switches, f"{name}_sdp_enabled")() for name in FUSED_ATTENTION}

    def put_back() -> None:
        for name, was in were.items():
            getattr(switches, f"enable_{name}_sdp")(was)

    for name in FUSED_ATTENTION:
        getattr(switches, f"enable_{name}_sdp")(False)
    return put_back


def why_not_timed(spec: RunSpec, device: str) -> str | None:
    """Why cuDNN times no algorithm although train.cudnn_benchmark asks for it; None where it does."""
    reasons = {
        "cuDNN computes on a GPU alone": device != "cuda",
        "train.deterministic lets nothing be chosen by its time": spec.train.deterministic,
        "train.ramp gives batches of several sizes, and each would be timed anew": bool(spec.train.ramp),
    }
    return next((why for why, holds in reasons.items() if holds), None)


def describe_cudnn(spec: RunSpec, device: str) -> list[str]:
    """What a person should hear of train.cudnn_benchmark at the start: that it does nothing here, and why."""
    why = why_not_timed(spec, device) if spec.train.cudnn_benchmark else None
    return [] if why is None else [f"train.cudnn_benchmark does nothing here: {why}"]


def keep_freed_memory() -> bool:
    """Let glibc use freed blocks again instead of giving them back to the system after every step; gives whether it will.

    Activations of some MiB are otherwise mapped anew at each step, or cut off the heap and grown again: up to a quarter of a small
    convnet's step went into page faults, in one process and not in the next. An environment that chooses (MALLOC_*, LD_PRELOAD,
    GLIBC_TUNABLES) is left alone. See mallopt(3).
    """
    if not sys.platform.startswith("linux") or place.has_chosen_allocator():
        return False
    return _limit(MALLOC_LIMITS)


def give_back_large_blocks() -> bool:
    """Let glibc give blocks of some MiB back to the system when they are freed; gives whether it will.

    Weights that are gathered for one block of a model at a time want it: glibc before 2.38 finds no room for an aligned block in a hole of
    just its size, so that the whole model comes to lie in memory, block behind block. The page faults cost a few percent of such a step.
    """
    if not sys.platform.startswith("linux") or place.has_chosen_allocator():
        return False
    return _limit({MMAP_THRESHOLD: 4 << 20})


def _limit(limits: Mapping[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every libc
    return mallopt is not None and all(mallopt(parameter, size) == 1 for parameter, size in limits.items())


def find_device(name: str) -> torch.device:
    """The device that `train.device` names; "auto" is the GPU where there is one; of several ranks each has its own.

    Raises SpecError for one that is not here.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SpecError("train.device is 'cuda', and torch sees no GPU", hint='use "auto" or "cpu"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    here = place.here()
    if here.world_size == 1 and not 0 < here.local_rank < torch.cuda.device_count():  # of a run that shrank it may be any of them
        return torch.device("cuda")
    if here.local_rank >= torch.cuda.device_count():
        raise SpecError(
            f"local rank {here.local_rank} has no GPU of its own: torch sees {torch.cuda.device_count()}",
            hint='start as many ranks as there are GPUs, or set train.device = "cpu"',
        )
    torch.cuda.set_device(here.local_rank)
    return torch.device("cuda", here.local_rank)


def is_launched() -> bool:
    """Whether there are several ranks, or one that a supervisor of ours passes signals on to."""
    return place.here().world_size > 1 or place.flight_file() is not None


def has_process_group() -> bool:
    """Whether this process has joined others by torch.distributed already."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def set_seeds(seed: int) -> None:
    """Seed torch, numpy and Python, so that a model's weights are a function of the seed."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a task may draw from the global stream
    random.seed(seed)


def rank_seed(seed: int | None = None) -> int:
    """Return a seed (0 to 2^32 - 1) that is another one on each rank, from `seed` or the seed of the run (`train.seed`).

    For the parts of a task of which each rank has its own, as an environment: `numpy.random.default_rng(surefoot.rank_seed())`.
    """
    base = np.random.SeedSequence((torch.initial_seed() if seed is None else seed) % 2**64).generate_state(1)[0]
    return (int(base) + place.here().rank) % 2**32


def as_run(spec: RunSpec) -> RunSpec:
    """The spec with what was decided here filled in, so that it repeats the run from any folder: threads, and whole paths."""
    return with_whole_paths(spec.replace(train={"threads": torch.get_num_threads()}))


def with_whole_paths(spec: RunSpec) -> RunSpec:
    """The spec with its relative paths resolved against the working folder of now."""
    tables: dict[str, dict[str, Any]] = {}
    file, colon, name = (spec.task.use or "").partition(":")
    if colon and file.endswith(".py"):
        tables["task"] = {"use": f"{Path(file).expanduser().resolve()}:{name}"}
    if spec.data.folder is not None:
        tables["data"] = {"folder": str(Path(spec.data.folder).expanduser().resolve())}
    return spec.replace(**tables) if tables else spec


@functools.cache  # asked for at every commit, and 15 ms of reading
def versions() -> Mapping[str, str]:
    """Versions of Python and of the packages that can change numbers."""
    found = {"python": sys.version.split()[0]}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def circumstances(device: str, program: Program) -> dict[str, Any]:
    """What a Started record says of where and how the process runs, and with which code, whatever it trains."""
    here = place.here()
    commit, is_dirty = find_commit(program.project, asks_git=here.rank == 0)
    return {
        "time_s": time.time(),
        "versions": versions(),
        "machine": {**find_machine().as_row(), "device": device, "threads": torch.get_num_threads()},
        "place": {"rank": here.rank, "world_size": here.world_size, "host": here.host},
        "variables": place.recorded_variables(),
        "command": tuple(sys.argv),
        "code_digest": program.digest, "modules": program.modules(), "commit": commit, "is_dirty": is_dirty,
    }  # fmt: skip


def fault(generation: int, found: GuardFault) -> events.Fault:
    """The record of a fault."""
    here = place.here()
    return events.Fault(
        generation=generation, time_s=time.time(), step=found.step, fault=found.fault, rank=here.rank, host=here.host,
        action=found.action, detail=found.detail,
    )  # fmt: skip
