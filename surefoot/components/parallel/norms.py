"""Synchronization of buffers over ranks, such as the running statistics of BatchNorm.

The statistics become those of one process that runs all microbatches. Such a process updates a
running statistic x once for each microbatch, x <- (1 - a) x + a s, which is linear in x. A rank
that starts from the same x and runs k of m consecutive microbatches ends with (1 - a)^k x + c, from
which c follows. All m microbatches in their order then give (1 - a)^m x + the sum over ranks of (1
- a)^(number of microbatches after those of the rank) c.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from surefoot.components.parallel.exact import VirtualRanks
from surefoot.components.parallel.sync_norm import SyncNorm
from surefoot.core.errors import TaskError
from surefoot.runtime.comm.group import Group

Slot = tuple[nn.Module, str]


class JoinedBuffers:
    """Synchronization of a model's buffers over the ranks of a group.

    Every rank calls `keep` before the forward passes of a step and `join` after them. The running
    statistics of BatchNorm then have the values that one process would compute. All other buffers
    that change have the values of rank 0.

    Args:
        model: The model.
        group: The ranks.
        joins_norms: If False, running statistics get the values of rank 0, too.
        virtual: Virtual ranks, or None; `end_one` must be called after each virtual rank.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        *,
        joins_norms: bool = True,
        virtual: VirtualRanks | None = None,
    ) -> None:
        """Find the running statistics and the other buffers of `model`."""
        self._group, self._virtual = group, virtual
        self._ended: list[list[Tensor]] = []  # the statistics at the end of each virtual rank
        norms = [
            each
            for each in model.modules()
            if isinstance(each, _NormBase) and isinstance(each.num_batches_tracked, Tensor)
        ]
        # these synchronize in their forward pass
        alike = [each for each in norms if isinstance(each, SyncNorm)]
        self._norms = [each for each in norms if joins_norms and each not in alike]
        known = {
            (id(module), name)
            for module in (*self._norms, *alike)
            for name, _ in module.named_buffers(recurse=False)
        }
        self._others = [
            (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if (id(module), name) not in known and buffer is not None
        ]
        self._names = {id(module): name for name, module in model.named_modules()}
        # the statistics of all ranks in a row, and this rank's share of each
        self._joined: tuple[Tensor, list[Tensor]] | None = None
        self._live: list[Slot] | None = None  # the other buffers that change
        self._before: list[Tensor] = []
        self._others_before: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Save the values of the buffers before the forward passes of a step."""
        self._before, self._ended = [each.clone() for each in self._statistics()], []
        if self._live is None:
            self._others_before = [getattr(*slot).clone() for slot in self._others]

    @torch.no_grad()
    def end_one(self) -> None:
        """End a virtual rank: record its running statistics, and reset them for the next one.

        They are reset to their values at the start of the step.
        """
        held = self._statistics()
        self._ended.append([each.clone() for each in held])
        for each, was in zip(held, self._before, strict=True):
            each.copy_(was)

    @torch.no_grad()
    def between(self) -> None:
        """Synchronize the running statistics between two optimizers of the same step.

        One process runs all microbatches for the first optimizer before those for the second. The
        second therefore starts from synchronized statistics.
        """
        if self._norms:
            self._join_norms()
            self._before, self._ended = [each.clone() for each in self._statistics()], []

    @torch.no_grad()
    def join(self) -> None:
        """Synchronize the buffers after the forward passes of a step.

        Raises TaskError if virtual ranks are used, and a buffer that is not a statistic of
        BatchNorm changed.
        """
        if self._norms:
            self._join_norms()
        if self._live is None:
            self._live = self._find_live()
        if self._live and self._virtual is not None:
            slot = self._live[0]
            raise TaskError(
                f"{type(slot[0]).__name__}.{slot[1]} changes in a pass, "
                "and layout.virtual_ranks knows only BatchNorm's statistics",
                hint="leave layout.virtual_ranks out: other buffers become those of rank 0",
            )
        if self._live:
            self._group.copy_from_first([getattr(*slot) for slot in self._live])

    def find_spoiled(self) -> tuple[str, list[int]] | None:
        """Return the name of a synchronized running statistic that is not finite, with its ranks.

        The ranks are those whose own contribution is not finite. Return None if all statistics are
        finite. All ranks must call this method; they get the same result. If the statistics are on
        a device, the host waits for it.
        """
        if self._joined is None or torch.isfinite(self._joined[0].sum()):
            return None
        mine = torch.tensor(
            [not torch.isfinite(part).all() for part in self._joined[1]], device=self._group.device
        )
        rows = self._group.gather(mine.to(torch.int64))  # (ranks, statistics)
        place = int(rows.sum(0).argmax())
        statistic = "running_var" if place % 2 else "running_mean"
        name = f"{self._names[id(self._norms[place // 2])]}.{statistic}".lstrip(".")
        return name, rows[:, place].nonzero().flatten().tolist()

    def _statistics(self) -> list[Tensor]:
        found: list[Tensor] = []
        for norm in self._norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            assert norm.num_batches_tracked is not None
            found += [norm.running_mean, norm.running_var, norm.num_batches_tracked]
        return found

    def _join_norms(self) -> None:
        if self._virtual is None:
            self._join_ranks()
        else:
            self._join_in_order(self._virtual)

    def _join_in_order(self, virtual: VirtualRanks) -> None:
        """Synchronize the running statistics, added in the order of the virtual ranks."""
        now = self._statistics()
        before = torch.stack([each.double() for each in self._before[2::3]])
        seen = torch.stack(  # (own, norms)
            [torch.stack([each.double() for each in ended[2::3]]) - before for ended in self._ended]
        )
        table = seen.new_zeros((virtual.size, seen.shape[1]))
        table[virtual.first : virtual.first + virtual.own] = seen
        table = self._group.add(table)
        total = table.sum(0)
        until = table.cumsum(0)[virtual.first : virtual.first + virtual.own]
        rows = []
        for ended, mine, up_to in zip(self._ended, seen, until, strict=True):
            parts = []
            for place, norm in enumerate(self._norms):
                counts = (int(each[place]) for each in (before, mine, up_to, total))
                _, kept_here, follows = self._weights(norm, *counts)
                for offset in (0, 1):
                    was, end = self._before[3 * place + offset], ended[3 * place + offset]
                    parts.append(((end.double() - kept_here * was.double()) * follows).view(-1))
            rows.append(torch.cat(parts))
        joined = virtual.sum_in_rank_order(torch.stack(rows))
        sizes = [
            each.numel()
            for place in range(len(self._norms))
            for each in now[3 * place : 3 * place + 2]
        ]
        for place, part in enumerate(torch.split(joined, sizes)):
            where = 3 * (place // 2) + place % 2
            stays, *_ = self._weights(
                self._norms[place // 2], int(before[place // 2]), 0, 0, int(total[place // 2])
            )
            now[where].copy_(
                (stays * self._before[where].double().view(-1) + part).view_as(now[where])
            )
        for counter, was, more in zip(now[2::3], before, total, strict=True):
            counter.copy_(was + more)

    def _join_ranks(self) -> None:
        group, now = self._group, self._statistics()
        counters = torch.stack([each.to(torch.int64) for each in now[2::3]]).to(group.device)
        before = torch.stack([each.to(torch.int64) for each in self._before[2::3]]).to(group.device)
        seen = group.gather(counters - before)  # (ranks, norms)
        total, until = seen.sum(0), seen[: group.rank + 1].sum(0)
        mine = seen[group.rank]
        parts = []
        for place, norm in enumerate(self._norms):
            stays, kept_here, follows = self._weights(
                norm, int(before[place]), int(mine[place]), int(until[place]), int(total[place])
            )
            for offset in (0, 1):
                was, ended = self._before[3 * place + offset], now[3 * place + offset]
                part = (ended.double() - kept_here * was.double()) * follows
                if group.is_first:
                    part += stays * was.double()
                parts.append(part.view(-1))
        flat = group.add(torch.cat(parts).to(group.device))
        self._joined = flat, parts
        for place, part in enumerate(torch.split(flat, [each.numel() for each in parts])):
            now[3 * (place // 2) + place % 2].copy_(part.view_as(now[3 * (place // 2) + place % 2]))
        for counter, was, more in zip(now[2::3], before, total, strict=True):
            counter.copy_(was + more)

    @staticmethod
    def _weights(
        norm: _NormBase, before: int, mine: int, until: int, total: int
    ) -> tuple[float, float, float]:
        """Return three factors, with which a running statistic is computed for all ranks.

        They are the share of the initial value that remains after all microbatches, the share of it
        that remains after the microbatches of this rank, and the weight of this rank's
        contribution. `before` is the number of batches before the step. `mine` counts the
        microbatches of this rank, `until` those of this rank and of all ranks before it, and
        `total` those of all ranks.
        """
        if norm.momentum is not None:
            stays = 1.0 - norm.momentum
            return stays**total, stays**mine, stays ** (total - until)
        if before + total == 0:
            return 1.0, 1.0, 0.0
        # a cumulative mean: each microbatch has equal weight
        kept = before / (before + mine) if before + mine else 1.0
        return before / (before + total), kept, (before + mine) / (before + total)

    def _find_live(self) -> list[Slot]:
        """Return the buffers, other than running statistics, that changed on any rank.

        Call this method only after the first step.
        """
        changed = [
            float(getattr(*slot) is not was and not torch.equal(getattr(*slot), was))
            for slot, was in zip(self._others, self._others_before, strict=True)
        ]
        self._others_before = []
        if not changed:
            return []
        told = self._group.add(torch.tensor(changed, device=self._group.device)).tolist()
        return [slot for slot, is_live in zip(self._others, told, strict=True) if is_live]
