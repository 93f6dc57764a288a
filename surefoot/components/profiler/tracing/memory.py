"""Memory during the recorded steps of a trace, by category; does not import torch.

| category | contents |
| --- | --- |
| parameters | the model's parameters and buffers |
| gradients | the tensors in `.grad` |
| optimizer | the state of the optimizers |
| activations | allocated outside a backward pass, freed after the next began; also the batch |
| temporaries | all other allocations |

Only the memory of torch's allocators is included. NumPy arrays and the memory of other libraries
are not.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from surefoot.components.profiler.tracing.trace import AUTOGRAD_NODE, OPERATOR, Trace

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
)
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, ACTIVATIONS, TEMPORARIES)  # the longest-lived first
MAX_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class KnownBlocks:
    """Memory blocks whose category is known.

    `before` and `after` have the blocks before the window and at its end: category -> address ->
    bytes. `gradients` are pairs (nanoseconds of the system clock, address) that hooks recorded.
    `device` is the device index of the parameters, -1 for the host.
    """

    before: Mapping[str, Mapping[int, int]]
    after: Mapping[str, Mapping[int, int]]
    gradients: Sequence[Sequence[int]] = ()
    device: int = -1

    def as_row(self) -> dict[str, Any]:
        blocks = {
            name: {key: list(map(list, blocks.items())) for key, blocks in found.items()}
            for name, found in (("before", self.before), ("after", self.after))
        }
        return {
            **blocks,
            "gradients": [list(pair) for pair in self.gradients],
            "device": self.device,
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        before, after = (
            {key: dict(pairs) for key, pairs in row[name].items()} for name in ("before", "after")
        )
        return cls(before=before, after=after, gradients=row["gradients"], device=row["device"])


@dataclass(slots=True)
class Allocation:
    """Block of memory with the times at which it was allocated and freed.

    `began_ns` is None for a block that was allocated before the window, and `ended_ns` is None for
    one that was not freed in the window.
    """

    address: int
    num_bytes: int
    began_ns: int | None
    ended_ns: int | None = None
    category: str = TEMPORARIES


@dataclass(frozen=True)
class Timeline:
    """Allocated bytes by category over time.

    `times_s` are seconds since the start of the window. Each value is valid until the next time.
    """

    times_s: list[float]
    categories: dict[str, list[int]]

    @property
    def peak(self) -> tuple[float, dict[str, int]]:
        """Time of the largest sum, in seconds, and the bytes of each category at that time."""
        sums = [sum(values) for values in zip(*self.categories.values(), strict=True)]
        place = sums.index(max(sums))
        return self.times_s[place], {
            name: values[place] for name, values in self.categories.items()
        }

    def as_row(self) -> dict[str, Any]:
        return {"version": 1, "times_s": self.times_s, "categories": self.categories}


def find_timeline(trace: Trace, known: KnownBlocks) -> Timeline:
    """Return the allocated memory of a trace by category over time.

    A block that was allocated before the window, and whose category is unknown, is included only if
    it is freed in the window.
    """
    changes = [each for each in trace.changes if each.device == known.device]
    allocated = {each.address for each in changes if each.num_bytes > 0}
    # for other earlier blocks, torch does not record the release
    kept = known.after.get(GRADIENTS, {}).keys() - allocated
    before = {
        **known.before,
        GRADIENTS: {at: size for at, size in known.before.get(GRADIENTS, {}).items() if at in kept},
    }
    blocks = [
        Allocation(at, size, None, None, name)
        for name, found in before.items()
        for at, size in found.items()
    ]
    blocks = _pair(((each.time_ns, each.address, each.num_bytes) for each in changes), blocks)
    passes, seen = backward_passes(trace), defaultdict[int, list[int]](list)
    for clock_ns, address in known.gradients:
        seen[address].append(clock_ns - trace.epoch_ns)
    for block in blocks:
        block.category = _category(block, known, passes, seen.get(block.address, ()))
    return _sample(blocks, trace.window)


def _pair(changes: Iterable[tuple[int, int, int]], before: list[Allocation]) -> list[Allocation]:
    """Return blocks of memory from a sequence of allocations and releases.

    A change is (time in nanoseconds, address, bytes); the bytes of a release are negative. `before`
    are the known blocks from before the window. A release without an allocation becomes a block
    from before the window.
    """
    held = {block.address: block for block in before}
    done: list[Allocation] = []
    for time_ns, address, num_bytes in changes:
        if num_bytes >= 0:
            if address in held:  # its release was not recorded
                held[address].ended_ns = time_ns
                done.append(held.pop(address))
            held[address] = Allocation(address, num_bytes, time_ns)
        else:
            block = held.pop(address, None) or Allocation(address, -num_bytes, None)
            block.ended_ns = time_ns
            done.append(block)
    return done + list(held.values())


def backward_passes(trace: Trace) -> list[tuple[int, int]]:
    """Return the start and end of each backward pass in a trace, in nanoseconds.

    A backward pass is a sequence of autograd nodes. It ends at the next operator that no autograd
    node called.
    """
    found: list[tuple[int, int]] = []
    goes_on = False
    for each in trace.slices:
        if each.category != OPERATOR:
            continue
        if each.name.startswith(AUTOGRAD_NODE):
            if goes_on:
                found[-1] = (found[-1][0], max(found[-1][1], each.end_ns))
            else:
                found.append((each.start_ns, each.end_ns))
            goes_on = True
        elif not found or each.start_ns >= found[-1][1]:
            goes_on = False
    return found


def _category(
    block: Allocation, known: KnownBlocks, passes: Sequence[tuple[int, int]], seen_ns: Iterable[int]
) -> str:
    if block.began_ns is None and block.category != TEMPORARIES:
        return block.category
    if block.ended_ns is None:
        for name, found in known.after.items():
            if block.address in found:
                return name
    if any(_is_allocated_at(block, time_ns) for time_ns in seen_ns):
        return GRADIENTS
    return ACTIVATIONS if _is_activation(block, passes) else TEMPORARIES


def _is_allocated_at(block: Allocation, time_ns: int) -> bool:
    return (block.began_ns is None or block.began_ns <= time_ns) and (
        block.ended_ns is None or time_ns <= block.ended_ns
    )


def _is_activation(block: Allocation, passes: Sequence[tuple[int, int]]) -> bool:
    if block.began_ns is None or block.ended_ns is None:
        return False
    place = bisect.bisect_right(passes, (block.began_ns, 0))
    if place and block.began_ns < passes[place - 1][1]:
        return False  # allocated in a backward pass
    return place < len(passes) and passes[place][0] < block.ended_ns


def _sample(blocks: Sequence[Allocation], window: tuple[int, int]) -> Timeline:
    """Return the bytes by category at every change, reduced to at most `MAX_POINTS` times.

    If there are more changes, each point has the largest sum of an interval, at the start of the
    interval.
    """
    moments: list[tuple[int, str, int]] = []
    for block in blocks:
        began_ns = window[0] if block.began_ns is None else max(window[0], block.began_ns)
        ended_ns = window[1] if block.ended_ns is None else block.ended_ns
        if window[0] < ended_ns and began_ns < window[1]:
            moments += [
                (began_ns, block.category, block.num_bytes),
                (ended_ns, block.category, -block.num_bytes),
            ]
    now = dict.fromkeys(CATEGORIES, 0)
    points: list[tuple[int, tuple[int, ...]]] = [(window[0], tuple(now.values()))]
    for time_ns, category, num_bytes in sorted(moments):
        if time_ns >= window[1]:
            break
        now[category] += num_bytes
        if time_ns == points[-1][0]:
            points.pop()
        points.append((time_ns, tuple(now.values())))
    points.append((window[1], points[-1][1]))
    stride = -(-len(points) // MAX_POINTS)
    most = [
        max((values for _, values in points[at : at + stride]), key=sum)
        for at in range(0, len(points), stride)
    ]
    columns = list(zip(*most, strict=True))
    return Timeline(
        [(time_ns - window[0]) / 1e9 for time_ns, _ in points[::stride]],
        {name: list(columns[i]) for i, name in enumerate(CATEGORIES)},
    )
