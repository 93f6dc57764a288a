"""Recognize out-of-memory errors.

The module imports nothing large, because memory may be exhausted when it is needed.
"""

from __future__ import annotations

import errno
from types import TracebackType

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

# out-of-memory messages of C++, torch's allocators and the C library; CUDA and Python have
# exception types
REFUSED = (
    "std::bad_alloc",
    "can't allocate memory",
    "annot allocate memory",
    "not enough memory: you tried to allocate",
    "failed to map segment from shared object",
)
# under `ulimit -v` there was no memory for its stack; else there are too many threads
NO_THREAD = "can't start new thread"
TYPES = ("OutOfMemoryError", "AcceleratorOutOfMemoryError")


def is_refused(error: BaseException | None) -> bool:
    """Return whether `error`, or an error in its `__cause__` chain, is an out-of-memory error.

    Both host memory and device memory count.

    >>> is_refused(MemoryError()), is_refused(RuntimeError("std::bad_alloc"))
    (True, True)
    >>> is_refused(RuntimeError("a wrong shape"))
    False
    """
    seen, is_limited = set[int](), address_space_bytes() is not None
    words = (*REFUSED, NO_THREAD) if is_limited else REFUSED
    while error is not None and id(error) not in seen:
        # `raise error from error` makes it its own cause
        seen.add(id(error))
        if isinstance(error, MemoryError) or type(error).__name__ in TYPES:
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError | ImportError) and (
            any(each in str(error) for each in words)
            or (is_limited and _is_from_import(error.__traceback__))
        ):
            return True
        error = error.__cause__
    return False


def _is_from_import(frames: TracebackType | None) -> bool:
    """Return whether an error was raised while torch was being imported.

    Under `ulimit -v` such an error means that memory ran out: torch's C code reports a failed
    allocation with messages such as "Unable to create type object".
    """
    while frames is not None:
        code, names = frames.tb_frame.f_code, frames.tb_frame.f_globals
        if code.co_name == "<module>" and str(names.get("__name__")).split(".")[0] == "torch":
            return True
        frames = frames.tb_next
    return False


def address_space_bytes() -> int | None:
    """Return the bytes of address space that `ulimit -v` allows; None without a limit."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
