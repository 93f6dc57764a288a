"""Whether the compiler for C++ knows the vector instructions of this CPU, so that torch need not find out by trying.

torch compiles and loads up to six small programs before its first kernel for a CPU: six seconds, on each machine and in each container that
has no cache of them yet. What it asks is whether torch was built for these instructions, which it says itself, and whether the compiler is
older than they are.
"""

from __future__ import annotations

import functools
import re
import subprocess

import torch

KNOWS = 12  # gcc and clang from this release on know AVX-512 with all that torch uses of it


def are_known(compilers: tuple[str | None, ...]) -> bool:
    """Whether the first of `compilers` that is there knows what torch was built for on this CPU; False where nobody can tell.

    Only AVX-512 is worth asking: everything else takes torch a program or two.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _release_of(compilers) >= KNOWS


@functools.cache
def _release_of(compilers: tuple[str | None, ...]) -> int:
    """The release of the first compiler that is there; 0 for none, or one that does not say."""
    for command in filter(None, compilers):
        try:
            said = subprocess.run([command, "-dumpversion"], capture_output=True, text=True, timeout=10, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        found = re.match(r"(\d+)", said)
        return int(found.group(1)) if found else 0
    return 0
