"""Detection of AVX-512 support in the C++ compiler, so that torch skips its test programs.

Before its first CPU kernel, torch compiles and loads up to six small programs to find the vector
instructions it may use. That takes about six seconds, on each machine and in each container without
a cache of the results. The answer depends on two facts that are cheaper to read: the CPU capability
that torch reports (`torch.backends.cpu.get_cpu_capability`), and the release of the compiler.
"""

from __future__ import annotations

import functools
import re
import subprocess

import torch

KNOWS = 12  # gcc and clang support the AVX-512 that torch uses from this release on


def are_known(compilers: tuple[str | None, ...]) -> bool:
    """Return whether torch uses AVX-512 on this CPU, and the C++ compiler supports it.

    The compiler is the first of `compilers` that is installed. The result is False if its release
    cannot be read. Other instruction sets are not checked, because each costs torch only one or two
    test programs.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _release_of(compilers) >= KNOWS


@functools.cache
def _release_of(compilers: tuple[str | None, ...]) -> int:
    """Return the major release of the first installed compiler; 0 if it cannot be determined."""
    for command in filter(None, compilers):
        try:
            said = subprocess.run(
                [command, "-dumpversion"], capture_output=True, text=True, timeout=10, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        found = re.match(r"(\d+)", said)
        return int(found.group(1)) if found else 0
    return 0
