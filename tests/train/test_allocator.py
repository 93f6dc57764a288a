"""Freed memory is used again: a step's activations are not mapped anew."""

from __future__ import annotations

import subprocess
import sys

import pytest

from surefoot.core.place import child_environment

SCRIPT = """
import resource, sys
import torch
from surefoot.train.environment import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
for step in range(24):
    if step == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    a = torch.ones(3 << 20)
    b = torch.ones(5 << 20)
    del a, b
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 20 * 8192  # of 4 KiB, that 20 rounds of 32 MiB touch when they are mapped anew


def count_faults(word: str, **variables: str) -> tuple[str, int]:
    command, environment = (
        [sys.executable, "-c", SCRIPT, word],
        {**child_environment(threads=1), **variables},
    )
    kept, faults = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return kept, int(faults)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone is asked")
def test_freed_blocks_are_used_again_without_page_faults() -> None:
    kept, faults = count_faults("keep")
    if kept == "False":
        pytest.skip("this libc has no mallopt")
    assert faults < PAGES / 8  # not 0: a system short of memory takes idle pages back
    # what it saves from
    assert (
        count_faults("leave", MALLOC_TOP_PAD_="0", MALLOC_MMAP_THRESHOLD_="131072")[1] > PAGES / 2
    )


@pytest.mark.slow
def test_an_environment_that_chooses_its_allocator_is_left_alone() -> None:
    assert count_faults("keep", MALLOC_ARENA_MAX="2")[0] == "False"
