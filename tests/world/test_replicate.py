"""Gradients, sums and buffers over real ranks: what one process would have."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.components.parallel.norms import JoinedBuffers
from surefoot.components.parallel.replicate import Replicas
from surefoot.components.parallel.sync_norm import join_batchnorm
from surefoot.components.parallel.totals import Totals
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import TaskError
from surefoot.prove.bench.rehearsal import Rehearsal
from surefoot.runtime.comm.group import Group
from tests.train.small import TEXT
from tests.world.ranks import RankFailed, together


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).double()


def make_batches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator, dtype=torch.float64), torch.randint(
        0, 3, (12,), generator=generator
    )


def loss_of(model: nn.Module, rows: slice) -> Tensor:
    inputs, labels = make_batches()
    return F.cross_entropy(model(inputs[rows]), labels[rows], reduction="sum")


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(
        b"".join(each.detach().contiguous().numpy().tobytes() for each in tensors)
    ).hexdigest()


def grads(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.quick("1-4", "1024-3", "26214400-2")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 10, 25 << 20])
def test_the_gradient_is_that_of_all_samples_with_the_same_bits_on_every_rank(
    num_ranks: int, bucket_bytes: int, tmp_path: Path
) -> None:
    def job(group: Group) -> Any:
        model = make_model()
        replicas = Replicas(model.parameters(), group, bucket_bytes=bucket_bytes)
        each = 12 // group.size
        first = group.rank * each
        loss_of(model, slice(first, first + each // 2)).backward()  # accumulated: not sent
        assert replicas.num_collectives == 0
        replicas.arm()
        loss_of(model, slice(first + each // 2, first + each)).backward()
        replicas.finish()
        alone = make_model()
        loss_of(alone, slice(0, 12)).backward()
        worst = max(
            float((one - two).abs().max())
            for one, two in zip(grads(model), grads(alone), strict=True)
        )
        return [
            worst,
            digest(grads(model)),
            replicas.num_collectives,
            replicas.num_buckets,
            replicas.num_bytes,
        ]

    found = together(num_ranks, job, tmp_path)
    assert max(each[0] for each in found) < 1e-12
    assert len({each[1] for each in found}) == 1
    # one sum for each bucket, however many passes were added up
    assert all(each[2] == each[3] for each in found)
    assert (found[0][3] == 1) == (bucket_bytes > 1 << 20)
    num_numbers = sum(each.numel() + 1 for each in make_model().parameters())
    assert found[0][4] == 8 * num_numbers


def test_the_first_bucket_has_a_size_of_its_own(tmp_path: Path) -> None:
    # the last one's gradient comes first
    parameters = [nn.Parameter(torch.zeros(size)) for size in (100, 50, 10, 5, 5)]
    for bucket, first, expected in (
        (200, 40, [40, 240, 400]),
        (200, 200, [280, 400]),
        (40, 200, [40, 40, 200, 400]),
    ):
        assert (
            Replicas(parameters, Group(), bucket_bytes=bucket, first_bytes=first).bucket_sizes
            == expected
        )


def test_the_gradients_of_a_step_are_on_their_way_while_most_of_it_is_still_to_be_computed(
    tmp_path: Path,
) -> None:
    """Biases are a group of the optimizer's, and come from every layer.

    Sent first, as the groups stand, they would hold up the rest.
    """
    (tmp_path / "mine.py").write_text(TEXT)
    spec = RunSpec(
        task={"use": f"{tmp_path}/mine.py:Mine"},
        train={"batch": 8, "length": "2 steps"},
        optim={"weight_decay": 0.1},
        layout={"bucket_size": "48 B", "first_bucket_size": "48 B"},
    )

    def job(group: Group) -> Any:
        seen, begin = [], Group.begin_to_add
        with Rehearsal(spec, steps=2, group=group) as rehearsal:
            parameters = list(rehearsal.assembly.model.parameters())

            def begin_and_look(self: Group, tensor: Tensor) -> Any:
                seen.append([each.grad is not None for each in parameters])
                return begin(self, tensor)

            Group.begin_to_add = begin_and_look  # type: ignore[method-assign]
            rehearsal.take("step")
        return seen

    found = together(2, job, tmp_path / "ranks")
    assert found[0] == found[1]
    assert found[0][0] == [False, False, True, True]  # the first layer is not computed yet
    assert found[0][-1] == [True] * 4


def test_a_parameter_that_some_ranks_do_not_use_counts_as_nothing_an_unused_one_keeps_no_gradient(
    tmp_path: Path,
) -> None:
    def job(group: Group) -> Any:
        used, sometimes, never = (nn.Parameter(torch.ones(3)) for _ in range(3))
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        replicas = Replicas([used, sometimes, never, frozen], group, bucket_bytes=1)
        for _ in range(2):
            for each in (used, sometimes, never):
                each.grad = None
            replicas.arm()
            (used.sum() * 2 + (sometimes.sum() * 5 if group.rank == 1 else 0.0)).backward()
            replicas.finish()
        return [
            used.grad.tolist(),
            sometimes.grad.tolist(),
            never.grad is None,
            frozen.grad is None,
        ]  # type: ignore[union-attr]

    assert together(3, job, tmp_path) == [[[6.0] * 3, [5.0] * 3, True, True]] * 3


def test_a_rank_without_a_batch_takes_part(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        model = make_model()
        replicas, totals = Replicas(model.parameters(), group), Totals(group)
        mine: dict[str, Any] = {}
        if group.rank == 0:
            replicas.arm()
            loss = loss_of(model, slice(0, 5))
            loss.backward()
            mine = {"loss": (loss.detach(), 5, 1.0)}
        replicas.finish()
        summed, extra = totals.add("main", mine, (float(group.rank),))
        total, count, weight = summed["loss"]
        return [digest(grads(model)), float(total), count, weight, extra]

    first, second = together(2, job, tmp_path)
    assert first == second
    assert first[2:] == [5.0, 1.0, [1.0]]


def test_what_is_stored_in_16_bits_is_summed_in_32(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        replicas = Replicas([weight], group)
        replicas.arm()
        (
            weight * (256.0 if group.rank == 0 else 0.75)
        ).sum().backward()  # three of them are lost one by one, in bf16
        replicas.finish()
        assert weight.grad is not None
        return [str(weight.grad.dtype), weight.grad.float().tolist()]

    assert together(4, job, tmp_path) == [["torch.bfloat16", [258.0] * 4]] * 4


@pytest.mark.parametrize("kind", ["channels last", "complex", "sparse", "tied", "scalar"])
def test_gradients_of_every_layout_are_summed(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[list[nn.Parameter], Any]:
        torch.manual_seed(3)
        if kind == "channels last":
            weight = nn.Parameter(
                torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
            )
            return [weight], lambda rank: (weight * (rank + 1)).square().sum()
        if kind == "complex":
            weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))
            return [weight], lambda rank: (weight * (rank + 1)).abs().square().sum()
        if kind == "sparse":
            table = nn.Embedding(6, 3, sparse=True)
            return [table.weight], lambda rank: table(torch.tensor([rank, 5])).square().sum()
        if kind == "tied":
            weight = nn.Parameter(torch.randn(3, 3))
            return [weight], lambda rank: (weight @ weight * (rank + 1)).sum()
        weight = nn.Parameter(torch.tensor(2.0))
        return [weight], lambda rank: weight**2 * (rank + 1)

    def job(group: Group) -> Any:
        (weight,), loss = make()
        replicas = Replicas([weight], group)
        replicas.arm()
        loss(group.rank).backward()
        replicas.finish()
        assert weight.grad is not None
        (alone,), every = make()
        sum(every(rank) for rank in range(group.size)).backward()
        expected = alone.grad.to_dense() if alone.grad.is_sparse else alone.grad  # type: ignore[union-attr]
        return [
            bool(torch.allclose(weight.grad, expected)),
            weight.grad.stride() == weight.stride(),
        ]

    assert together(2, job, tmp_path) == [[True, True]] * 2


@pytest.mark.quick("shares1-None", "shares2-0.1", "shares3-None")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shares", [(2, 2), (3, 1), (1, 1, 2), (4, 0)])
def test_running_statistics_are_those_of_one_process_that_saw_all_microbatches(
    momentum: float | None, shares: tuple[int, ...], tmp_path: Path
) -> None:
    parts = (
        torch.randn(
            3 * sum(shares), 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        * 3
        + 1
    )

    def make() -> nn.Module:
        return (
            nn.Sequential(nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(4)).double().train()
        )

    def job(group: Group) -> Any:
        model, alone = make(), make()
        joined = JoinedBuffers(model, group)
        at = 0
        for _ in range(3):
            joined.keep()
            for rank, share in enumerate(shares):
                for part in parts[at : at + share]:
                    alone(part)
                    if rank == group.rank:
                        model(part)
                at += share
            joined.join()
        return [
            max(
                float((one.double() - two.double()).abs().max())
                for one, two in zip(model.buffers(), alone.buffers(), strict=True)
            ),
            digest([each.double() for each in model.buffers()]),
        ]

    found = together(len(shares), job, tmp_path)
    assert max(each[0] for each in found) < 1e-12
    assert len({each[1] for each in found}) == 1


def test_other_buffers_that_move_become_those_of_rank_0(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("moves", torch.zeros(3))
            self.register_buffer("stays", torch.ones(3))

    def job(group: Group) -> Any:
        model = Counting()
        joined = JoinedBuffers(model, group)
        for _ in range(2):
            joined.keep()
            model.moves += group.rank + 1  # type: ignore[operator]
            joined.join()
        return [model.moves.tolist(), model.stays.tolist()]  # type: ignore[union-attr, operator]

    assert together(2, job, tmp_path) == [[[2.0] * 3, [1.0] * 3]] * 2


def test_texts_tensors_and_facts_go_round(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        texts = group.exchange("ä" * group.rank)
        tensors = [
            torch.full((2, 3), group.rank, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
        ]
        tensors += [
            torch.full((4, 2), float(group.rank)).t(),
            torch.tensor(group.rank),
            torch.empty(0),
        ]
        group.copy_from_first(tensors)
        apart = group.check_equal({"spec": "a" if group.rank != 2 else "b", "data": "d"})
        most = group.most([group.rank, -group.rank])
        return [texts, all(float(each.float().abs().sum()) == 0 for each in tensors), apart, most]

    assert (
        together(3, job, tmp_path)
        == [[["", "ä", "ää"], True, [["spec", 2, "b", "a"]], [2.0, 0.0]]] * 3
    )


def test_what_fails_on_one_rank_ends_the_others_too(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        return group.settle(lambda: 1 // (0 if group.rank == 1 else 1))

    with pytest.raises(
        RankFailed, match=r"rank 0: rank 1 of 2 did not start: ZeroDivisionError: .*"
    ):
        together(2, job, tmp_path)


@pytest.mark.quick("True-0.1-shares1", "False-None-shares1")
@pytest.mark.parametrize("shares", [(4, 4), (5, 2, 3)])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_a_joint_batch_norm_computes_what_one_process_does_that_sees_all_samples(
    shares: tuple[int, ...], momentum: float | None, affine: bool, tmp_path: Path
) -> None:
    inputs = (
        torch.randn(
            2, sum(shares), 3, 4, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64
        )
        * 2
        + 3
    )

    def make() -> nn.Module:
        torch.manual_seed(6)
        norm = nn.BatchNorm2d(3, momentum=momentum, affine=affine).double()
        return nn.Sequential(nn.Conv2d(3, 3, 1).double(), norm, nn.Tanh())

    def job(group: Group) -> Any:
        model, alone = make(), make()
        for each in join_batchnorm(model):
            each.group = group
        first = sum(shares[: group.rank])
        worst = 0.0
        for whole in inputs:
            mine, every = (
                part.clone().requires_grad_()
                for part in (whole[first : first + shares[group.rank]], whole)
            )
            out, expected = model(mine), alone(every)
            (out**3).sum().backward()
            (expected**3).sum().backward()
            rows = slice(first, first + shares[group.rank])
            worst = max(
                worst,
                float((out - expected[rows]).abs().max()),
                float((mine.grad - every.grad[rows]).abs().max()),
            )  # type: ignore[index, operator]
        for one, two in zip(model.parameters(), alone.parameters(), strict=True):
            worst = max(worst, float((group.add(one.grad.clone()) - two.grad).abs().max()))  # type: ignore[union-attr]
        buffers = max(
            float((one.double() - two.double()).abs().max())
            for one, two in zip(model.buffers(), alone.buffers(), strict=True)
        )
        return [worst, buffers, list(model.state_dict()) == list(alone.state_dict())]

    found = together(len(shares), job, tmp_path)
    assert max(each[0] for each in found) < 1e-11
    assert max(each[1] for each in found) < 1e-12
    assert all(each[2] for each in found)


def test_what_ranks_tell_each_other_may_name_files_whose_names_are_no_text(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        return [
            each == f"{rank}: caf\udce9"
            for rank, each in enumerate(group.exchange(f"{group.rank}: caf\udce9"))
        ]

    assert together(2, job, tmp_path) == [[True, True]] * 2


def _two_passes(replicas: Replicas, weight: nn.Parameter) -> None:
    replicas.arm()
    (weight * 2).sum().backward()
    (weight * 3).sum().backward()


def _two_arms(replicas: Replicas, weight: nn.Parameter) -> None:
    for factor in (2, 3):
        replicas.arm()
        (weight * factor).sum().backward()


def _a_third_pass(replicas: Replicas, weight: nn.Parameter) -> None:
    (weight * 2).sum().backward()
    _two_passes(replicas, weight)


@pytest.mark.parametrize("misuse", [_two_passes, _two_arms, _a_third_pass])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_pass_after_arm_is_refused_where_gradients_are_on_their_way(
    misuse: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    def job(group: Group) -> Any:
        weight = nn.Parameter(torch.ones(4, dtype=dtype))
        try:
            misuse(Replicas([weight], group), weight)
        except TaskError as error:
            return [error.message, error.hint]
        return ["nothing was refused", ""]

    for message, hint in together(2, job, tmp_path):
        assert (
            "a second backward pass after arm()" in message or "arm() was called twice" in message
        )
        assert "before the last backward pass" in hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_grows_before_its_bucket_is_sent_is_summed_whole(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def job(group: Group) -> Any:
        first, second = (nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2))
        replicas = Replicas([first, second], group)
        replicas.arm()
        (first * 2).sum().backward()  # the bucket waits for `second`
        (first * 3).sum().backward()
        second.sum().backward()
        replicas.finish()
        assert first.grad is not None
        return first.grad.tolist()

    assert together(2, job, tmp_path) == [[10.0] * 4] * 2
