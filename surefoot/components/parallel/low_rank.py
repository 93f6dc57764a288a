"""PowerSGD: the gradient of a matrix is sent as a product of two matrices of low rank.

The error is added to the gradient of the next step. This is algorithm 1 of Vogels, Karimireddy,
Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization (NeurIPS
2019). Rank i has M_i = gradient + residual. Each training step makes one step of power iteration,
starting from Q of the previous training step:

    P = sum of M_i Q, its columns made orthonormal;    Q_i = M_i' P,  Q = sum of Q_i;    all ranks
        get P Q' = P P' (sum of M_i)

    residual_i = M_i - P Q_i'

These are sums over the ranks, not means. The residual of a rank is the error of its own M_i, so
that the residuals of all ranks add up to the part of the sum that was not sent. The columns of P
are orthonormalized by Householder reflections (QR), which give orthonormal columns even if P has a
lower rank. The columns of Q have length 1. A column of zeros is replaced by fixed random numbers,
because power iteration would leave it at zero.

A training step multiplies the sums by a factor, such as 1 / count or 1 / loss scale. A residual is
stored with the factor of its step, and is rescaled to the factor of the next step. A skipped step
must not change the residuals and Q. They are therefore replaced only if `keep` is called with
`applied` true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from surefoot.components.parallel.wires import CountedGroup, Wait
from surefoot.core.errors import TaskError

SAVES = 2  # least compression ratio of a matrix


@dataclass(eq=False)
class LowRankState:
    """State of the compression of one (n, m) gradient matrix between steps.

    `rest` and `next` replace `residual` and `warm` if the step is applied.
    """

    parameter: Tensor
    place: int  # index of the parameter in its bucket
    matrix: Tensor  # (n, m), a view of the bucket: the gradient, then the decompressed sum
    fresh: Tensor  # (m, r): initial columns of Q
    residual: Tensor = field(init=False)  # (n, m): the error not sent yet
    warm: Tensor = field(init=False)  # (m, r): Q, with columns of length 1
    # (), float64: the factor of the step that computed the residual; their product is in the unit
    # of the gradient that is applied
    unit: Tensor = field(init=False)
    rest: Tensor = field(init=False)  # (n, m): the residual after this step
    next: Tensor = field(init=False)  # (m, r): Q after this step

    def __post_init__(self) -> None:
        self.residual, self.rest = torch.zeros_like(self.matrix), torch.zeros_like(self.matrix)
        self.warm, self.next = self.fresh.clone(), self.fresh
        self.unit = self.matrix.new_ones((), dtype=torch.float64)


class LowRank:
    """Reducer of one bucket, which sends each matrix as P and Q with `rank` columns.

    All other gradients are sent uncompressed, together with P.
    """

    def __init__(
        self,
        flat: Tensor,
        parameters: Sequence[Tensor],
        rank: int,
        link: CountedGroup,
        generator: torch.Generator,
    ) -> None:
        """Split `flat` into the gradients of `parameters`.

        `flat` contains the gradients, one after the other, and then for each gradient the number of
        ranks that have it. `generator` draws the initial columns of Q; it must return the same
        values on every rank.
        """
        sizes = [each.numel() * (2 if each.is_complex() else 1) for each in parameters]
        self._link, self._is_open = link, False
        self._factor: float | Tensor = 1.0
        *parts, self._presence = torch.split(flat, [*sizes, len(parameters)])
        self.held: list[LowRankState] = []
        self._others = [self._presence]
        for place, (part, parameter) in enumerate(zip(parts, parameters, strict=True)):
            shape = matrix_shape(parameter, rank)
            if shape is None:
                self._others.append(part)
            else:
                self.held.append(_hold(parameter, place, part.view(shape), rank, generator))

    def begin(self) -> Wait:
        if self._is_open:
            raise TaskError(
                "gradients of low rank were summed, but keep() was not called for the step",
                hint="call keep() after finish(), once the step is decided",
            )
        self._is_open = bool(self.held)
        return self._project  # runs in finish(), not in the backward pass

    def use(self, factor: float | Tensor) -> None:
        """Set the factor by which the sums of this step will be multiplied.

        Every rank must pass the same value.
        """
        self._factor = factor

    def _project(self) -> Wait:
        parts = []
        for each in self.held:
            each.matrix.addcmul_(each.residual, (each.unit / self._factor).to(each.residual.dtype))
            parts.append((each.matrix @ each.warm).view(-1))
        left = torch.cat([*parts, *self._others])
        return partial(self._answer, left, self._link.add(left))

    def _answer(self, left: Tensor, wait: Callable[[], None]) -> Wait | None:
        wait()
        sizes = [each.matrix.shape[0] * each.warm.shape[1] for each in self.held]
        parts = torch.split(left, [*sizes, *(each.numel() for each in self._others)])
        for other, summed in zip(self._others, parts[len(self.held) :], strict=True):
            other.copy_(summed)
        if not self.held:
            return None
        bases = [
            torch.linalg.qr(part.view(each.matrix.shape[0], -1)).Q
            for each, part in zip(self.held, parts, strict=False)
        ]
        own = [each.matrix.t() @ base for each, base in zip(self.held, bases, strict=True)]
        right = torch.cat([each.view(-1) for each in own])
        return partial(self._expand, bases, own, right, self._link.add(right))

    def _expand(
        self,
        bases: Sequence[Tensor],
        own: Sequence[Tensor],
        right: Tensor,
        wait: Callable[[], None],
    ) -> None:
        wait()
        summed = torch.split(right, [each.numel() for each in own])
        for each, base, mine, part in zip(self.held, bases, own, summed, strict=True):
            all_ = part.view_as(mine)
            torch.addmm(each.matrix, base, mine.t(), alpha=-1, out=each.rest)
            torch.mm(base, all_.t(), out=each.matrix)
            length = torch.linalg.vector_norm(all_, dim=0)
            each.next = torch.where(length > 0, all_ / length, each.fresh)

    def keep(self, applied: bool | Tensor) -> None:
        """End the step; if it was `applied`, replace the residuals and Q with their new values."""
        self._is_open = False
        for each in self.held:
            moves = (self._presence[each.place] > 0) & applied
            torch.where(moves, each.rest, each.residual, out=each.residual)
            torch.where(moves, each.next, each.warm, out=each.warm)
            torch.where(
                moves,
                torch.as_tensor(self._factor, dtype=each.unit.dtype),
                each.unit,
                out=each.unit,
            )


def matrix_shape(parameter: Tensor, rank: int) -> tuple[int, int] | None:
    """Return the shape (n, m) of the matrix for PowerSGD, or None for an uncompressed gradient.

    The matrix has the elements of the gradient in memory order. A gradient is not compressed if it
    has fewer than 2 dimensions, if it is complex or empty, or if P and Q with `rank` columns would
    have more than half as many elements.

    >>> matrix_shape(torch.empty(64, 16, 3, 3), 4)
    (64, 144)
    >>> matrix_shape(torch.empty(64), 4), matrix_shape(torch.empty(8, 8), 4)
    (None, None)
    """
    if parameter.is_complex() or parameter.ndim < 2 or not parameter.numel():
        return None
    laid = torch.empty_like(parameter, device="meta")
    outer = max(range(laid.ndim), key=lambda dim: (laid.shape[dim] > 1, laid.stride(dim)))
    n = laid.shape[outer]
    m = laid.numel() // n
    return (n, m) if SAVES * (n + m) * rank <= n * m else None


def _hold(
    parameter: Tensor, place: int, matrix: Tensor, rank: int, generator: torch.Generator
) -> LowRankState:
    draws = torch.randn(matrix.shape[1], rank, generator=generator, dtype=torch.float64)
    return LowRankState(
        parameter, place, matrix, (draws / torch.linalg.vector_norm(draws, dim=0)).to(matrix)
    )
