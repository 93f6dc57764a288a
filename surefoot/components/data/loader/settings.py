"""Settings of a loader, and the notices that it sends to its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from surefoot.components.data.loader.crew import Start

Kind = Literal["auto", "thread", "process"]


class LoaderNotice(NamedTuple):
    """Notice from a loader to its run.

    `kind` is worker (a worker failed), starving (steps wait for data), tuned (the number of workers
    was found), bad-record (a sample is left out) or data (a problem with the iterable).
    """

    kind: Literal["worker", "starving", "tuned", "bad-record", "data"]
    step: int
    what: str
    then: str  # the action taken, or the action to take


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of a loader.

    It has `workers` workers of type `kind`; "auto" is the faster type. Each worker reads `prefetch`
    microbatches ahead. All batches read ahead take at most `memory_bytes`. A worker that sends
    nothing for `timeout_s` seconds while the loader waits for it is replaced. With 0 workers, each
    step reads its samples in the main process. If `most` is not 0, the loader searches for the best
    number of workers, up to `most`, during the run.
    """

    workers: int = 0
    most: int = 0
    kind: Kind = "auto"
    prefetch: int = 2
    start: Start = "auto"
    timeout_s: float = 4.0
    memory_bytes: int = 2 << 30
