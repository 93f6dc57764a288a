"""Source of one batch from each of several streams in turn, so that ranks can share a step.

A stream has no samples by number, and ranks cannot divide its batches. Its shards are divided
instead: each rank reads those of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from surefoot.components.data.feed import Share
from surefoot.components.data.sources.batch_digest import digest_of
from surefoot.components.data.sources.iterated import BatchRead, Iterated, Streams
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Batch
from surefoot.core.errors import OtherDataError, SpecError


class ShardedStream(Iterated):
    """Source whose steps have `turns` batches of each shard of a stream.

    Sample i is a batch: those of a step are ordered by shard. A shard that has ended has no batch
    until all others have ended too, which is the end of the epoch. Each rank reads, saves and
    restores the shards of its own.

    Args:
        shards: The shards, as sources of their own.
    """

    is_divided = is_sharded = True

    def __init__(self, shards: Sequence[Iterated]) -> None:  # the parts of the base are theirs
        self.shards, self.num_shards = list(shards), len(shards)
        self.given = self.shards[0].given
        self.has_length = all(each.has_length for each in self.shards)
        self.repeats, self.is_cut = False, False
        self.notices = []
        self.on_read = lambda row: None
        for index, each in enumerate(self.shards):
            each.notices = self.notices
            each.on_read = self._make_reporter(index)
        self.parts = {
            f"shard {index} {name}": part
            for index, each in enumerate(self.shards)
            for name, part in each.parts.items()
        }
        known = f"shards of {type(self.given).__qualname__}"
        self.digest = hashlib.sha256(known.encode()).hexdigest()
        self.content_digest = digest_of([each.content_digest for each in self.shards]).hex()
        self._step = 0  # of the batches that were read last
        self.divide(1, Share())

    @property
    def is_uneven(self) -> bool:
        """True if some shards end before others."""
        return len({each.num_batches for each in self.shards}) > 1

    def prepare(self, spec: RunSpec, microbatch: int | None, turns: int, share: Share) -> None:
        """Divide the stream as `divide` does.

        Raises SpecError for a microbatch, and for settings with which ranks have to compute equally
        many batches in each step, if they would not.
        """
        if microbatch is not None:
            raise SpecError(
                f"train.microbatch is {microbatch}, but a step has whole batches of "
                f"{self.num_shards} shards of a stream",
                hint="leave train.microbatch out, and return smaller batches",
            )
        self.divide(turns, share)
        layout, several = spec.layout, share.size > 1
        is_unequal = self.is_uneven or self.num_shards % share.size > 0
        needs = {
            f"layout.zero_stage is {layout.zero_stage}": several
            and layout.shard != 1
            and layout.zero_stage > 1
            and self.is_uneven,
            f"layout.virtual_ranks is {layout.virtual_ranks}": share.pieces is not None
            and (self.is_uneven or self.num_shards % share.num_pieces > 0),
            'train.batchnorm is "sync"': several and spec.train.batchnorm == "sync" and is_unequal,
        }
        if (need := next((key for key, holds in needs.items() if holds), None)) is not None:
            raise SpecError(
                f"{need}, and the shards of the stream do not give each rank the same number of "
                "batches in each step",
                hint="give all shards the same number of batches, such as "
                "surefoot.data.Iterated(stream, num_batches=100), and let the number of ranks "
                "divide data.shards",
            )

    def divide(self, turns: int, share: Share) -> None:
        """Set the number of batches of each shard in a step, and the shards of this rank.

        Raises SpecError if a rank would have no shard, or a part of one.
        """
        if share.size > self.num_shards:
            raise SpecError(
                f"the stream has {self.num_shards} shards for {share.size} ranks",
                hint=f"use fewer ranks, or set data.shards = {share.size} in a new run",
            )
        if turns > 1 and self.num_shards % share.size:
            raise SpecError(
                f"train.accumulate is {turns}, and {share.size} ranks cannot share "
                f"{self.num_shards} shards equally",
                hint="use a number of ranks that divides data.shards",
            )
        self._turns, self.step_size = turns, turns * self.num_shards
        self._own = range(*share.of(self.num_shards))
        steps = max(-(-each.num_batches // turns) for each in self.shards)
        self.num_batches = steps * self.step_size

    def repeat(self, num_batches: int | None) -> None:
        self.repeats = True
        for each in self.shards:
            if not each.has_length:
                each.repeat(num_batches)

    @property
    def loader(self) -> Any:
        return None

    @property
    def has_lasting_workers(self) -> bool:
        return any(each.has_lasting_workers for each in self.shards)

    @property
    def digest_of_first(self) -> str:
        return ""

    @property
    def promise(self) -> Any:
        return self.shards[0].promise

    def describe(self) -> str:
        return f"{self.num_shards} shards, each of {self.shards[0].describe()}"

    def count_step(self) -> tuple[int, int]:
        """Return the index of this rank's first batch in the step read last, and their number.

        Shards that have ended are not counted.
        """
        counts = [self._count_turns(each, self._step) for each in self.shards]
        return sum(counts[: self._own.start]), sum(counts)

    def _count_turns(self, shard: Iterated, step: int) -> int:
        return min(max(shard.num_batches - step * self._turns, 0), self._turns)

    def batches_of(self, numbers: list[int]) -> list[int]:
        places = map(self._place, numbers)
        return [
            self._count_before(shard, inner)
            for shard, inner in places
            if inner < self.shards[shard].num_batches
        ]

    def _count_before(self, shard: int, inner: int) -> int:
        """Return the number of batches of the epoch before batch `inner` of a shard."""
        step, turn = divmod(inner, self._turns)
        earlier = sum(min(each.num_batches, step * self._turns) for each in self.shards)
        return earlier + sum(self._count_turns(e, step) for e in self.shards[:shard]) + turn

    def count_samples(self, epoch: int, number: int, batch: Batch) -> int | None:
        shard, inner = self._place(number)
        return self.shards[shard].count_samples(epoch, inner, batch)

    def close(self) -> None:
        for each in self.shards:
            each.close()

    # ---- reading

    def _place(self, number: int) -> tuple[int, int]:
        """Return the shard of batch `number` of the epoch, and its number in that shard."""
        step, rest = divmod(number, self.step_size)
        shard, turn = divmod(rest, self._turns)
        return shard, step * self._turns + turn

    def _number(self, shard: int, inner: int) -> int:
        step, turn = divmod(inner, self._turns)
        return step * self.step_size + shard * self._turns + turn

    def _streams_of(self, shard: int, streams: Streams) -> Streams:
        return lambda inner: streams(self._number(shard, inner))

    def _make_reporter(self, shard: int) -> Callable[[BatchRead], None]:
        return lambda row: self.on_read(row._replace(number=self._count_before(shard, row.number)))

    def read(self, ids: np.ndarray) -> Batch:
        return self._read(0, ids, lambda number: contextlib.nullcontext(), keep=True)

    def _read(self, epoch: int, ids: np.ndarray, streams: Streams, *, keep: bool) -> Batch:
        number = int(ids[0])
        shard, inner = self._place(number)
        self._step = number // self.step_size
        if keep and shard not in self._own:  # a check reads what this rank will train on
            with streams(self._number(self._own.start, inner)):
                return self._read_of(self._own.start, epoch, inner, streams, keep=True)
        return self._read_of(shard, epoch, inner, streams, keep=keep)

    def _read_of(
        self, shard: int, epoch: int, inner: int, streams: Streams, *, keep: bool
    ) -> Batch:
        source = self.shards[shard]
        if inner >= source.num_batches:
            return None
        of_shard = self._streams_of(shard, streams)
        return source._read(epoch, np.array([inner]), of_shard, keep=keep)

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the shards of this rank, by their index."""
        own = {str(index): self.shards[index].state_dict() for index in self._own}
        return {"num_shards": self.num_shards, "shards": own}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        if (before := held.get("num_shards", 1)) != self.num_shards:
            raise OtherDataError(
                f"the checkpoint is of a stream of {before} shards, and this run has "
                f"{self.num_shards}",
                hint=f"resume on {before} rank{'s' * (before > 1)}; in a new run, data.shards sets "
                "the number of shards for any number of ranks",
            )
        for index in self._own:
            self.shards[index].load_state_dict(held["shards"][str(index)])

    def forget_states(self) -> None:
        for index in self._own:
            self.shards[index].forget_states()

    @contextlib.contextmanager
    def keep_generators(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for index in self._own:
                stack.enter_context(self.shards[index].keep_generators())
            yield

    def seek(self, epoch: int, number: int, streams_of: Callable[[int], Streams]) -> None:
        step = number // self.step_size
        for index in self._own:
            shard = self.shards[index]
            inner = min(step * self._turns, shard.num_batches)

            def of_shard(of: int, index: int = index) -> Streams:
                return self._streams_of(index, streams_of(of))

            shard.seek(epoch, inner, of_shard)
