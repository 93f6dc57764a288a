"""Sums of a step's loss terms, counts and samples over all ranks, in one all-reduce."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surefoot.components.parallel.exact import VirtualRanks
from surefoot.core.errors import TaskError
from surefoot.runtime.comm.group import Group

Row = tuple[Tensor, float | Tensor, float]
Names = tuple[tuple[str, float], ...]  # loss terms with their weights


class Totals:
    """Sum of a step's loss terms over the ranks of a group.

    It is computed in float64, so that the order of the ranks has no visible effect.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        # update -> its loss terms with their weights
        self._names: dict[str, tuple[tuple[str, float], ...]] = {}

    def add(
        self, update: str, mine: Mapping[str, Row], extra: Sequence[float] = ()
    ) -> tuple[dict[str, Row], list[float]]:
        """Return the loss terms summed over all ranks, by name, and the sums of `extra`.

        `mine` has the total, the count and the weight of each loss term of the update on this rank.
        A rank without a batch passes no terms.
        """
        names = self._find_names(update, mine)
        row = self._as_row(names, mine, extra)
        return self._unflatten_sums(names, self._group.add(row.to(self._group.device)).tolist())

    def add_in_order(
        self,
        update: str,
        rows: Sequence[Mapping[str, Row]],
        extra: Sequence[float],
        virtual: VirtualRanks,
    ) -> tuple[dict[str, Row], list[float]]:
        """Return the same sums as `add`, but computed with virtual ranks.

        `rows` has the loss terms of each virtual rank that this rank computes. They are added in
        the order of the virtual ranks.
        """
        names = self._find_names(update, next((row for row in rows if row), {}))
        nothing = [0.0] * len(extra)
        made = torch.stack(
            [
                self._as_row(names, row, nothing if number else extra)
                for number, row in enumerate(rows)
            ]
        )
        return self._unflatten_sums(
            names, virtual.sum_in_rank_order(made.to(self._group.device)).tolist()
        )

    def _as_row(self, names: Names, mine: Mapping[str, Row], extra: Sequence[float]) -> Tensor:
        row = torch.zeros(2 * len(names) + len(extra), dtype=torch.float64)
        for place, (name, _) in enumerate(names):
            if name in mine:
                total, count, _ = mine[name]
                row[2 * place], row[2 * place + 1] = float(total), float(count)
        row[2 * len(names) :] = torch.tensor(extra, dtype=torch.float64)
        unknown = [name for name in mine if name not in dict(names)]
        if unknown:
            raise TaskError(
                f"the loss has the term {unknown[0]!r}, which no rank had in the first step",
                hint="give the same terms in every step, with a count of 0 where there is nothing",
            )
        return row

    def _unflatten_sums(
        self, names: Names, summed: list[float]
    ) -> tuple[dict[str, Row], list[float]]:
        found: dict[str, Row] = {}
        for place, (name, weight) in enumerate(names):
            total, count = summed[2 * place : 2 * place + 2]
            found[name] = (
                torch.tensor(total, dtype=torch.float64, device=self._group.device),
                count,
                weight,
            )
        return found, summed[2 * len(names) :]

    def add_counts(self, update: str, counts: Sequence[tuple[str, float]]) -> dict[str, float]:
        """Return counts summed over all ranks, which are needed before the backward pass.

        Every rank passes the same names, or none if it has no batch.
        """
        names = self._find_names(
            f"{update} (counts)", {name: (torch.zeros(()), 0.0, 1.0) for name, _ in counts}
        )
        given = dict(counts)
        row = torch.tensor(
            [given.get(name, 0.0) for name, _ in names],
            dtype=torch.float64,
            device=self._group.device,
        )
        return dict(zip((name for name, _ in names), self._group.add(row).tolist(), strict=True))

    def _find_names(self, update: str, mine: Mapping[str, Row]) -> tuple[tuple[str, float], ...]:
        """Return the names of an update's loss terms, with their weights.

        All ranks agree on them when the update has its first step, because a rank may have no
        batch.
        """
        if update not in self._names:
            text = json.dumps([(name, weight) for name, (_, _, weight) in mine.items()])
            rows = [json.loads(each) for each in self._group.exchange(text)]
            self._names[update] = tuple(
                (str(name), float(weight))
                for name, weight in next((row for row in rows if row), ())
            )
        return self._names[update]
