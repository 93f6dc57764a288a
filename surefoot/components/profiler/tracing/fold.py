"""Trees of frames (callers and callees with their times) from the slices of a trace.

The self times of all frames in a tree add up exactly to the time of its root, for example to the
length of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from surefoot.components.profiler.tracing.trace import (
    AUTOGRAD_NODE,
    DEVICE_WORK,
    OPERATOR,
    PYTHON,
    RANGE,
    STEP_PREFIX,
    Slice,
    Trace,
)

MODULE_PREFIX = "module "
BACKWARD = "backward"
NamePath = tuple[str, ...]
_NO_PATH: NamePath = ()


@dataclass(slots=True)
class StackFrame:
    """Node in a tree of frames: a name, its self time, and the frames that it called."""

    name: str
    self_ns: int = 0
    children: dict[str, StackFrame] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        """Self time of the frame plus that of all frames below it, in nanoseconds."""
        total_ns, waiting = 0, [self]
        while waiting:
            frame = waiting.pop()
            total_ns += frame.self_ns
            waiting.extend(frame.children.values())
        return total_ns

    def child(self, *names: str) -> StackFrame:
        """Return the frame at the path `names` below this one; create missing frames."""
        frame = self
        for name in names:
            frame = frame.children.setdefault(name, StackFrame(name))
        return frame


@dataclass(slots=True)
class _OpenFrame:
    """Frame on the stack of running frames, which ends at `end_ns`.

    Its time up to `given_ns` is already attributed to frames below it.
    """

    frame: StackFrame
    end_ns: int
    given_ns: int


def by_stack(trace: Trace) -> StackFrame:
    """Return the tree of Python functions and the operators they call, on the thread of the steps.

    Outer callers that are common to all of the window are left out.
    """
    kept = (each for each in _main_thread_slices(trace) if each.category in (PYTHON, OPERATOR))
    root = fold(kept, trace.window, "the window")
    while not root.self_ns and len(root.children) == 1:
        (caller,) = root.children.values()
        root = StackFrame(root.name, caller.self_ns, caller.children)
    return root


def by_module(trace: Trace) -> StackFrame:
    """Return the tree of ranges, modules and operators on the thread of the steps.

    The backward pass of an operator is placed below the module that called the operator in the
    forward pass.
    """
    modules: dict[object, NamePath] = {}  # around an operator, by the number of its autograd node

    def path(each: Slice, above: Sequence[str]) -> NamePath:
        number = each.mark("Sequence number")
        if each.name.startswith(AUTOGRAD_NODE):
            chain = modules.get(number, _NO_PATH)
            return chain if BACKWARD in above else (BACKWARD, *chain)
        if number is not None and not each.mark("Fwd thread id"):
            modules[number] = tuple(name for name in above if name.startswith(MODULE_PREFIX))
        return _NO_PATH

    return fold(_ranges_and_operators(trace), trace.window, "the window", path)


def by_device(trace: Trace) -> StackFrame | None:
    """Return the tree of device work, placed below the operators that launched it.

    Return None if the trace has no device work.
    """
    work = [each for each in trace.slices if each.category in DEVICE_WORK]
    if not work:
        return None
    paths: dict[object, NamePath] = {}

    def path(each: Slice, above: Sequence[str]) -> NamePath:
        paths[each.mark("External id")] = (*above[1:], each.name)
        return _NO_PATH

    launches = _ranges_and_operators(trace)
    if launches:
        last_ns = max(each.end_ns for each in launches)
        fold(launches, (launches[0].start_ns, last_ns), "launches", path)
    root = StackFrame("device time")
    for each in work:
        root.child(*paths.get(each.mark("External id"), _NO_PATH), each.name).self_ns += (
            each.end_ns - each.start_ns
        )
    return root


def fold(
    slices: Iterable[Slice],
    window: tuple[int, int],
    name: str,
    path: Callable[[Slice, Sequence[str]], Sequence[str]] | None = None,
) -> StackFrame:
    """Return the tree of frames for the slices of one thread.

    The slices must be sorted by start time. Each slice is cut to `window` (start and end in
    nanoseconds) and to its caller. `name` is the name of the root. `path` is called with a slice
    and the names of the frames above it; it returns the names of frames to insert above the slice.
    """
    start_ns, end_ns = window
    root = StackFrame(name, end_ns - start_ns)
    stack = [_OpenFrame(root, end_ns, start_ns)]
    for each in slices:
        while len(stack) > 1 and each.start_ns >= stack[-1].end_ns:
            stack.pop()
        caller = stack[-1]
        above = () if path is None else path(each, [one.frame.name for one in stack])
        first_ns, last_ns = max(each.start_ns, caller.given_ns), min(each.end_ns, caller.end_ns)
        if last_ns <= first_ns:
            continue
        frame = caller.frame.child(*above, each.name)
        frame.self_ns += last_ns - first_ns
        caller.frame.self_ns -= last_ns - first_ns
        caller.given_ns = last_ns
        stack.append(_OpenFrame(frame, last_ns, first_ns))
    return root


def _main_thread_slices(trace: Trace) -> list[Slice]:
    thread = trace.main_thread
    return [each for each in trace.slices if each.thread == thread]


def _ranges_and_operators(trace: Trace) -> list[Slice]:
    """Return the ranges and operators on the thread of the steps.

    Ranges that belong to a single step or epoch are left out, because they would separate the steps
    of a window in the tree.
    """
    return [
        each
        for each in _main_thread_slices(trace)
        if each.category in (RANGE, OPERATOR) and not _is_of_one_step(each.name)
    ]


def _is_of_one_step(name: str) -> bool:
    kind, _, number = name.partition(" ")
    return name.startswith(STEP_PREFIX) or (kind in ("epoch", "step") and number.isdigit())
