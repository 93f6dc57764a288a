"""Gradients that are sent compressed, by real ranks: how far off, how many bytes, what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.parallel.low_rank import LowRank
from surefoot.components.parallel.replicate import Replicas
from surefoot.components.parallel.wires import Compression
from surefoot.core.errors import TaskError
from surefoot.runtime.comm.group import Group
from tests.world.ranks import together
from tests.world.test_replicate import digest, grads

BF16, FP16 = 2.0**-8, 2.0**-11  # a rounding, as a share of the number
# 6, 3: too small for P and Q to be fewer
SHAPES = ((48, 40), (48,), (24, 48), (3, 8), (16, 8, 3, 3), (64, 8))


def leaves(*, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    found[4].data = found[4].data.contiguous(memory_format=torch.channels_last)
    return found


def gradients(rank: int, step: int, *, columns: int | None = None) -> list[Tensor]:
    """What a rank has in a step.

    Matrices of so many `columns` times others of each rank and step, else of full rank.
    """
    draws = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for shape in SHAPES:
        matrix = torch.randn(shape, generator=draws)
        if columns is not None and len(shape) > 1:
            tall, wide = (
                torch.randn(shape[0], columns, generator=draws),
                torch.randn(columns, matrix[0].numel(), generator=draws),
            )
            matrix = (tall.double() @ wide.double()).view(shape)
        found.append(matrix * 10.0 ** (step % 3 - 1))
    return found


def add_up(
    replicas: Replicas, parameters: list[nn.Parameter], given: list[Any], factor: float = 1.0
) -> list[Any]:
    """The sums of a step over the ranks."""
    for each in parameters:
        each.grad = None
    replicas.arm()
    some = [(each, grad) for each, grad in zip(parameters, given, strict=True) if grad is not None]
    torch.autograd.backward([(each * grad.to(each.dtype)).sum() for each, grad in some])
    replicas.finish(factor)
    return [None if each.grad is None else each.grad.clone() for each in parameters]


def start(
    group: Group, kind: Any, rank: int = 2, *, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    parameters = leaves(dtype=dtype)
    return parameters, Replicas(parameters, group, compress=Compression(kind, rank), **more)


@pytest.mark.quick("bf16-0.00390625-2", "fp16-0.00048828125-4")
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("kind", "unit"), [("bf16", BF16), ("fp16", FP16)])
def test_16_bits_are_off_by_a_rounding_for_each_rank_at_most_and_take_half_the_bytes(
    kind: str, unit: float, num_ranks: int, tmp_path: Path
) -> None:
    def job(group: Group) -> Any:
        parameters, replicas = start(group, kind, bucket_bytes=1 << 12)
        _, plain = start(group, "none", bucket_bytes=1 << 12)
        worst = 0.0
        for step in range(3):
            found = add_up(replicas, parameters, gradients(group.rank, step))
            every = [gradients(rank, step) for rank in range(group.size)]
            for place, each in enumerate(found):
                exact = sum(rows[place].double() for rows in every)
                sizes = sum(rows[place].double().abs() for rows in every)
                allowed = ((1 + unit) ** group.size - 1) * sizes + 1e-6 * sizes
                worst = max(worst, float(((each.double() - exact).abs() / allowed).max()))
            replicas.keep()
        plain.arm()
        plain.finish()
        return [
            worst,
            replicas.num_bytes / 3,
            plain.num_bytes,
            replicas.num_buckets,
            digest(grads(nn.ParameterList(parameters))),
        ]

    found = together(num_ranks, job, tmp_path)
    assert max(each[0] for each in found) <= 1.0
    assert max(each[0] for each in found) > 0.05  # it is 16 bits that were sent
    assert len({each[4] for each in found}) == 1
    _, sent, whole, buckets, _ = found[0]
    assert sent == whole / 2 + (4 * buckets if kind == "fp16" else 0)


@pytest.mark.quick("1e-30", "1.0", "1e+30")
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 1e6, 1e30])
def test_fp16_takes_gradients_of_any_size(size: float, tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        weight = nn.Parameter(torch.zeros(5))
        replicas = Replicas([weight], group, compress=Compression("fp16"))
        (found,) = add_up(replicas, [weight], [torch.tensor([1.0, 0.5, 1e-5, -1.0, 0.0]) * size])
        return (found.double() / (group.size * size)).tolist()  # type: ignore[union-attr]

    for each in together(3, job, tmp_path):
        assert each == pytest.approx([1.0, 0.5, 1e-5, -1.0, 0.0], rel=((1 + FP16) ** 3 - 1) + 1e-6)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_powersgd_gives_the_whole_gradient_where_it_is_of_its_rank_and_sends_what_its_formula_says(
    num_ranks: int, tmp_path: Path
) -> None:
    """One column from each rank: the sum has as many dimensions as there are ranks."""

    def job(group: Group) -> Any:
        parameters, replicas = start(group, "powersgd", group.size, dtype=torch.float64)
        worst = 0.0
        for step in range(4):
            found = add_up(replicas, parameters, gradients(group.rank, step, columns=1))
            replicas.keep()
            every = [gradients(rank, step, columns=1) for rank in range(group.size)]
            for place, each in enumerate(found):
                exact = sum(rows[place].double() for rows in every)
                worst = max(worst, float((each - exact).abs().max() / exact.abs().max()))
        rests = max(float(each.residual.abs().max()) for each in replicas.held())
        return [worst, rests, replicas.num_bytes / 4, digest(grads(nn.ParameterList(parameters)))]

    found = together(num_ranks, job, tmp_path)
    assert max(each[0] for each in found) < 1e-9
    assert max(each[1] for each in found) < 1e-9
    assert len({each[3] for each in found}) == 1
    rank, numbers = num_ranks, len(SHAPES)  # a count for each
    for shape in SHAPES:
        n, m = shape[0], int(torch.Size(shape[1:]).numel())
        numbers += rank * (n + m) if len(shape) > 1 and 2 * rank * (n + m) <= n * m else n * m
    assert found[0][2] == 8 * numbers


def test_where_no_matrix_gets_smaller_powersgd_has_the_bits_of_none(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        rows = []
        for kind in ("none", "powersgd"):
            parameters, replicas = start(group, kind, 64)
            found = add_up(replicas, parameters, gradients(group.rank, 0))
            rows.append([digest(found), replicas.num_bytes, len(replicas.held())])  # type: ignore[arg-type]
        return rows

    plain, low = together(2, job, tmp_path)[0]
    assert plain == low
    assert low[2] == 0


def without_feedback(patch: pytest.MonkeyPatch) -> None:
    keep = LowRank.keep

    def forgetful(self: LowRank, applied: Any) -> None:
        keep(self, applied)
        for each in self.held:
            each.residual.zero_()

    patch.setattr(LowRank, "keep", forgetful)


def the_rest_of_one_rank_for_all(patch: pytest.MonkeyPatch) -> None:
    """The residual of the sum on every rank.

    Added up, it would come back as often as there are ranks.
    """
    expand = LowRank._expand

    def summed(self: LowRank, bases: Any, own: Any, right: Tensor, wait: Any) -> None:
        expand(self, bases, own, right, wait)
        for each in self.held:
            self._link.group.add(each.rest)

    patch.setattr(LowRank, "_expand", summed)


def another_factor_is_not_minded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LowRank, "use", lambda self, factor: None)


@pytest.mark.quick(
    "None-2",
    "without_feedback-2",
    "the_rest_of_one_rank_for_all-2",
    "another_factor_is_not_minded-2",
)
@pytest.mark.parametrize(
    ("plant", "num_ranks"),
    [
        (None, 2),
        (None, 4),
        (without_feedback, 2),
        (the_rest_of_one_rank_for_all, 2),
        (another_factor_is_not_minded, 2),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_what_was_applied_and_what_was_not_sent_add_up_to_the_gradients_of_all_steps(
    plant: Callable[[pytest.MonkeyPatch], None] | None, num_ranks: int, tmp_path: Path
) -> None:
    """With factors that change from step to step, and a step that is skipped.

    Unequal counts and loss scales make such factors.
    """

    def job(group: Group) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if plant is not None:
                plant(patch)
            parameters, replicas = start(group, "powersgd", 2, dtype=torch.float64)
            applied = [torch.zeros_like(each) for each in parameters]
            exact = [torch.zeros_like(each) for each in parameters]
            for step in range(30):
                factor, skips = (1.0, 0.5, 4.0)[step % 3], step == 11
                found = add_up(replicas, parameters, gradients(group.rank, step), factor)
                replicas.keep(not skips)
                for place, each in enumerate(found if not skips else ()):
                    applied[place] += factor * each
                    exact[place] += factor * sum(
                        gradients(rank, step)[place].double() for rank in range(group.size)
                    )
            owed = {
                id(each.parameter): group.add(each.residual * each.unit) for each in replicas.held()
            }
        gaps, rests = [], []
        for parameter, had, wanted in zip(parameters, applied, exact, strict=True):
            rest = owed.get(id(parameter))
            if rest is None:
                gaps.append(float((had - wanted).abs().max()))
                continue
            laid = (
                torch.empty_like(parameter).as_strided((rest.numel(),), (1,)).copy_(rest.view(-1))
            )
            missing = (wanted - had).as_strided((rest.numel(),), (1,))
            gaps.append(float((missing - laid).abs().max()))
            rests.append(float(missing.norm() / wanted.norm()))
        return [max(gaps), max(rests), len(rests)]

    found = together(num_ranks, job, tmp_path)
    assert found[0][2] == 4
    if plant is None:
        assert max(each[0] for each in found) < 1e-10
        assert max(each[1] for each in found) < 0.9
    else:
        assert min(each[0] for each in found) > 1.0


@pytest.mark.quick("nan-powersgd", "inf-bf16", "-inf-fp16")
@pytest.mark.parametrize("kind", ["bf16", "fp16", "powersgd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_on_one_rank_is_none_on_all_and_leaves_no_trace(
    kind: str, bad: float, tmp_path: Path
) -> None:
    def job(group: Group) -> Any:
        parameters, replicas = start(group, kind)
        seen: list[Any] = []
        for step, is_bad in enumerate((False, True, False)):
            given = gradients(group.rank, step)
            if is_bad and group.rank == 1:
                given[0][5, 3] = bad
            before = (
                [digest([each.residual, each.warm, each.unit]) for each in replicas.held()]
                if step
                else []
            )
            found = add_up(replicas, parameters, given)
            finite = all(bool(each.isfinite().all()) for each in found if each is not None)
            assert bool(found[0].isfinite().all()) is not is_bad  # type: ignore[union-attr]
            replicas.keep(finite)
            after = [digest([each.residual, each.warm, each.unit]) for each in replicas.held()]
            seen.append([finite, before == after if is_bad else True])
        return [seen, digest(found)]  # type: ignore[arg-type]

    found = together(2, job, tmp_path)
    assert [each[0] for each in found] == [[[True, True], [False, True], [True, True]]] * 2
    assert found[0][1] == found[1][1]


def test_a_gradient_that_no_rank_has_stays_none_and_one_that_a_rank_lacks_counts_as_nothing_there(
    tmp_path: Path,
) -> None:
    def job(group: Group) -> Any:
        rows = []
        for kind in ("bf16", "fp16", "powersgd"):
            # stored in 16 bits, too
            parameters, replicas = start(group, kind, dtype=torch.bfloat16)
            for step, has in enumerate(([0, 1, 2, 3, 4, 5], [1, 2] if group.rank else [1, 3])):
                given = [
                    each if place in has else None
                    for place, each in enumerate(gradients(group.rank, step))
                ]
                held = {
                    id(each.parameter): digest([each.residual, each.warm])
                    for each in replicas.held()
                }
                found = add_up(replicas, parameters, given)
                replicas.keep()
            unmoved = all(
                (held[id(each.parameter)] == digest([each.residual, each.warm]))
                == (each.parameter.grad is None)
                for each in replicas.held()
            )
            rows.append([[each is None for each in found], unmoved])
        return rows

    assert together(2, job, tmp_path) == [[[[True, False, False, False, True, True], True]] * 3] * 2


def test_columns_that_came_to_nothing_begin_anew(tmp_path: Path) -> None:
    """A gradient that is 0 once, whose first rows are 0 ever after.

    Power iteration by itself would stay at 0.
    """

    def job(group: Group) -> Any:
        parameters, replicas = start(group, "powersgd")
        for step in range(30):
            given = [
                torch.zeros(shape) if step < 2 else each
                for shape, each in zip(SHAPES, gradients(0, 3, columns=1), strict=True)
            ]
            for each in given:
                each[:2] = 0
            found = add_up(replicas, parameters, given)
            replicas.keep()
        return float((found[0] - 2 * given[0]).abs().max() / given[0].abs().max())  # type: ignore[operator]

    assert max(together(2, job, tmp_path)) < 1e-3


def test_sums_of_which_nobody_said_whether_they_were_applied_are_an_error(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        parameters, replicas = start(group, "powersgd")
        add_up(replicas, parameters, gradients(group.rank, 0))
        with pytest.raises(TaskError, match=r"keep\(\) was not called for the step"):
            add_up(replicas, parameters, gradients(group.rank, 1))
        return True

    assert together(2, job, tmp_path) == [True, True]
