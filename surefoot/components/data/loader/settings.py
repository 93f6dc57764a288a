"""Settings of a loader, and the notices that it gives to its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from surefoot.components.data.loader.crew import Start

Kind = Literal["auto", "thread", "process"]


class LoaderNotice(NamedTuple):
    """Notice from a loader to its run.

    `kind` is worker (a worker failed), starving (steps wait for data), tuned (the number of workers
    was found), bad-record (a sample is left out) or data (the iterable contradicts its
    description).
    """

    kind: Literal["worker", "starving", "tuned", "bad-record", "data"]
    step: int
    what: str
    then: str  # the action taken, or the action to take


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of a loader: `workers` of a `kind`, each with `prefetch` microbatches ahead.

    Kind auto is the one that is found to be faster. Batches read ahead take at most `memory_bytes`.
    A worker that sends nothing for `timeout_s` while the loader waits for it is replaced. With 0
    workers, each step reads its samples itself. With `most`, the loader finds the number of
    workers, up to `most`, during the run.
    """

    workers: int = 0
    most: int = 0
    kind: Kind = "auto"
    prefetch: int = 2
    start: Start = "auto"
    timeout_s: float = 4.0
    memory_bytes: int = 2 << 30
