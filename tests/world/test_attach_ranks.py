"""`surefoot.attach` in a loop of the user's own on several ranks.

One folder, and after a kill the bits of a loop that was never killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import surefoot
from surefoot.components import checkpoint
from surefoot.contract import events, ledger, loop_ledger, manifest
from surefoot.core.errors import SurefootError
from tests.world.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

GROUPS: list[Any] = []  # of this process, until its end
PASSES, BATCHES = 3, 4  # a pass has as many batches on each rank
# gives the model, and what is called between the backward pass and the optimizer step
Wrap = Callable[[nn.Module, int], Any]


class Net(nn.Module):
    """A block with dropout, running statistics and a hidden buffer.

    It has tied weights, and a parameter with fewer rows than ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6))
        self.norm, self.head, self.tied = (
            nn.BatchNorm1d(6),
            nn.Linear(6, 6),
            nn.Linear(6, 6, bias=False),
        )
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += x.mean()
        made: Tensor = self.tied(self.head(self.norm(self.block(self.first(x))))) * self.scale
        return made


def data_of(rank: int, size: int, *, uneven: bool = False) -> DataLoader[Any]:
    count = 3 * BATCHES * size
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, torch.arange(count) % 6)
    sampler = DistributedSampler(dataset, size, rank, seed=5)
    return DataLoader(dataset, batch_size=2 if uneven and rank else 3, sampler=sampler)


def ddp(model: nn.Module, rank: int) -> Any:
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False), lambda: None


def ddp_of_fixed_buckets(model: nn.Module, rank: int) -> Any:
    """Sums of three are in the same order before and after a resume."""
    return nn.parallel.DistributedDataParallel(
        model, broadcast_buffers=False, find_unused_parameters=True
    ), lambda: None


def fsdp(model: nn.Module, rank: int) -> Any:
    fully_shard(model.block)
    return fully_shard(model), lambda: None


def hybrid(model: nn.Module, rank: int) -> Any:
    return fully_shard(
        model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    ), lambda: None


def columns(model: nn.Module, rank: int) -> Any:
    """FSDP2 that cuts matrices along their second dimension: no rows."""

    def place(each: nn.Parameter) -> Shard | None:
        return Shard(1) if each.ndim == 2 and each.shape[1] > 3 else None

    return fully_shard(model, shard_placement_fn=place), lambda: None


def by_hand(model: nn.Module, rank: int) -> Any:
    """Gradients are summed by the loop, but for the norm's and the head's.

    Each rank trains these for itself.
    """

    def reduce() -> None:
        for name, each in model.named_parameters():
            if not name.startswith(("norm", "head")) and each.grad is not None:
                dist.all_reduce(each.grad)

    return model, reduce


KINDS: dict[str, tuple[int, Wrap]] = {
    "DDP": (2, ddp),
    "FSDP2": (2, fsdp),
    "FSDP2 on three": (3, fsdp),
    "FSDP2 in copies": (4, hybrid),
    "FSDP2 by columns": (2, columns),
    "by hand": (2, by_hand),
    "DDP on three": (3, ddp_of_fixed_buckets),
}


@contextlib.contextmanager
def joined(rank: int, size: int, folder: Path, name: str) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / f"store-{name}"), size),
        rank=rank,
        world_size=size,
    )
    # a Reducer that frees the group last waits, with the GIL held, for a thread that waits for the
    # GIL (https://github.com/pytorch/pytorch/issues/56297): the process ends before that
    GROUPS.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(
    rank: int,
    folder: Path,
    kind: str,
    name: str,
    *,
    leave_at: int | None = None,
    save: str = "3 steps",
    passes: int = PASSES,
    stop: Callable[[int, int], None] = lambda rank, step: None,
    size: int | None = None,
    uneven: bool = False,
) -> dict[str, Any]:
    """The loop on one rank; what it holds at its end."""
    size = size or KINDS[kind][0]
    with joined(rank, size, folder, name):
        torch.manual_seed(0)
        bare = Net()
        model, reduce = KINDS[kind][1](bare, rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        torch.manual_seed(100 + rank)  # each rank draws a dropout of its own
        loader, losses = data_of(rank, size, uneven=uneven), []
        run = surefoot.attach(
            model=model,
            optimizer=optimizer,
            data=loader,
            folder=folder / "run",
            every=1,
            save=save,
            state={"schedule": schedule},
        )
        for epoch in range(run.first_pass, passes):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for x, y in run.batches():
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                reduce()
                optimizer.step()
                schedule.step()
                run.step_done(loss)
                losses.append((run.step, loss.item()))
                with torch.no_grad():
                    model(x)  # an evaluation, which leaves FSDP2's weights gathered
                stop(rank, run.step)
                if run.step == leave_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        run.close()
        held = {
            "losses": losses,
            "draw": torch.rand(2).tolist(),
            "rate": schedule.get_last_lr(),
            "model": digest(bare),
            "moments": digest(optimizer),
            "count": bare.count.item(),
        }
        return {**held, "folder": str(run.folder)}


def digest(owner: nn.Module | torch.optim.Optimizer) -> str:
    """Of all that this rank holds."""
    state: Any = owner.state_dict()
    taken = hashlib.sha256()
    for each in state.values() if isinstance(owner, nn.Module) else state["state"].values():
        for tensor in each.values() if isinstance(each, dict) else (each,):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            taken.update(local.detach().contiguous().numpy().tobytes())
    return taken.hexdigest()


def launch(kind: str, folder: Path, name: str, **more: Any) -> list[Any]:
    size = more.get("size") or KINDS[kind][0]
    found = run_ranks(size, lambda rank: train(rank, folder, kind, name, **more), folder / name)
    for rank, each in enumerate(found):
        assert "error" not in each, f"rank {rank}: {each['trace']}"
    return found


def kill(kind: str, folder: Path, name: str, leave_at: int, **more: Any) -> None:
    """All ranks are killed after `leave_at` steps."""
    with pytest.raises(FileNotFoundError):  # no rank says anything
        launch(kind, folder, name, leave_at=leave_at, **more)


def apart(whole: list[Any], left: list[Any]) -> list[str]:
    """What of a resumed loop is not as in one that was never killed.

    All but its folder, and the losses before it was killed.
    """
    return [
        f"rank {rank}: {key}"
        for rank, (one, other) in enumerate(zip(whole, left, strict=True))
        for key in one
        if key != "folder"
        and (one[key][-len(other[key]) :] if key == "losses" else one[key]) != other[key]
    ]


@pytest.mark.quick("FSDP2")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_were_killed_end_with_the_bits_of_ranks_that_were_not(
    kind: str, tmp_path: Path
) -> None:
    whole = launch(kind, tmp_path / "whole", "a")
    kill(kind, tmp_path / "left", "a", 8)
    again = launch(kind, tmp_path / "left", "b")
    assert apart(whole, again) == []
    assert [each["losses"][0][0] for each in again] == [7] * KINDS[kind][0]
    assert {each["folder"] for each in again} == {str(tmp_path / "left" / "run")}
    run = tmp_path / "left" / "run"
    assert manifest.read(manifest.step_folder(run, 12)).layout == {"world_size": KINDS[kind][0]}
    assert [each.first_step for each in events.read(run) if isinstance(each, events.Started)] == [
        1,
        7,
    ]
    check_rows(loop_ledger.check(run), run, KINDS[kind][0])


def check_rows(found: loop_ledger.LoopConsumed, run: Path, size: int) -> None:
    """The ledger holds what all ranks consumed, and no verdict on what none of them knows alone."""
    assert found.holds
    assert found.num_batches == PASSES * BATCHES
    assert not found.promise.once
    for number in range(PASSES):
        ids = [
            each
            for row in ledger.consumed(loop_ledger.read(run))[0]
            if row.number_of_pass == number
            for each in row.ids
        ]
        assert sorted(ids) == list(range(3 * BATCHES * size))


@pytest.mark.slow  # six ranks
def test_a_resume_under_ddp_on_three_ranks_says_what_may_be_summed_otherwise(
    tmp_path: Path,
) -> None:
    for name, wrap in (("a", ddp), ("b", ddp_of_fixed_buckets)):
        KINDS[name] = (3, wrap)
        launch(name, tmp_path / name, "a", passes=1)
        launch(name, tmp_path / name, "b", passes=2)
        started = [
            each
            for each in events.read(tmp_path / name / "run")
            if isinstance(each, events.Started)
        ]
        assert ["find_unused_parameters=True" in " ".join(each.notes) for each in started] == [
            False,
            name == "a",
        ]


@pytest.fixture(scope="module")
def in_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a loop of one pass, whose ranks hold weights in shards."""
    folder = tmp_path_factory.mktemp("shards")
    launch("FSDP2", folder, "a", passes=1)
    return folder / "run"


def test_weights_that_ranks_hold_in_shards_are_read_by_one_process(
    in_shards: Path, tmp_path: Path
) -> None:
    model = Net()
    checkpoint.load_into(model, in_shards, 4)
    launch("DDP", tmp_path / "ddp", "a", passes=1)
    other = Net()
    # its names are those of the model inside
    checkpoint.load_into(other, tmp_path / "ddp" / "run", 4)
    assert model.state_dict().keys() == other.state_dict().keys()
    assert model.first.weight.isfinite().all()


def test_a_loop_that_was_saved_by_other_ranks_is_refused_with_both_numbers(tmp_path: Path) -> None:
    launch("by hand", tmp_path, "a", passes=1)
    found = run_ranks(3, lambda rank: train(rank, tmp_path, "by hand", "b", size=3), tmp_path / "b")
    told = "was saved by a loop on 2 ranks, but this loop runs on 3 ranks"
    assert [told in each["error"] for each in found] == [True] * 3
    model = Net()
    given: Any = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "data": data_of(0, 2),
        "folder": tmp_path / "run",
    }
    schedule = torch.optim.lr_scheduler.StepLR(given["optimizer"], 3)
    with pytest.raises(
        SurefootError, match="by a loop on 2 ranks, but this loop runs on one process"
    ):
        surefoot.attach(**given, state={"schedule": schedule})


def test_weights_that_are_spread_in_another_way_are_refused(
    in_shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(in_shards, tmp_path / "run")
    found = run_ranks(2, lambda rank: train(rank, tmp_path, "DDP", "b"), tmp_path / "b")
    told = "weights that were S(0) on 2 ranks; R on 2 ranks: they are now whole on every rank"
    assert [told in each["error"] for each in found] == [True, True], found


def test_a_rank_that_raises_ends_the_others_and_says_so_in_its_own_log(tmp_path: Path) -> None:
    def stop(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            raise ValueError("no such image")

    found = run_ranks(2, lambda rank: train(rank, tmp_path, "DDP", "a", stop=stop), tmp_path / "a")
    assert found[1]["error"] == "no such image"
    assert "error" in found[0]  # torch's own, or that of a save: rank 1 has exited
    assert launch("DDP", tmp_path, "b")[0]["losses"][0][0] == 4


def test_a_folder_that_rank_0_is_refused_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    found = run_ranks(2, lambda rank: train(rank, tmp_path, "by hand", "a"), tmp_path / "a")
    assert "is a file, not a folder" in found[0]["error"]
    assert "rank 0 of 2 did not start" in found[1]["error"]


def test_ranks_that_have_done_other_numbers_of_steps_are_told_so_by_a_save(tmp_path: Path) -> None:
    def loop(rank: int) -> None:
        with joined(rank, 2, tmp_path, "a"):
            model = nn.Linear(3, 6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = surefoot.attach(
                model=model,
                optimizer=optimizer,
                data=data_of(rank, 2, uneven=True),
                folder=tmp_path / "run",
            )
            for x, y in run.batches():
                run.step_done(F.cross_entropy(model(x), y))
            run.close()

    found = run_ranks(2, loop, tmp_path / "a")
    assert ["rank 1 of 2 has done 6 steps, rank 0 4" in each["error"] for each in found] == [
        True,
        True,
    ]


def test_a_save_that_the_disk_refuses_to_one_rank_is_given_up_by_all(tmp_path: Path) -> None:
    def stop(rank: int, step: int) -> None:
        if rank == 1 and step in (2, 7):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(
                resource.RLIMIT_FSIZE,
                (1 if step == 2 else resource.RLIM_INFINITY, resource.RLIM_INFINITY),
            )

    launch("by hand", tmp_path, "a", stop=stop)
    assert manifest.steps(tmp_path / "run") == [9, 12]


def test_a_save_that_is_due_by_time_is_due_on_all_ranks(tmp_path: Path) -> None:
    launch("by hand", tmp_path, "a", save="0.001 s", passes=1)
    run = tmp_path / "run"
    assert manifest.steps(run)[-1] == BATCHES
    assert len([each for each in events.read(run) if isinstance(each, events.Committed)]) > 1


@pytest.mark.parametrize(
    "folders", [("a", "b"), ("a", "a")], ids=["each its own", "one without a group"]
)
def test_ranks_that_share_nothing_are_loops_of_their_own(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    is_joined = folders[0] != folders[1]

    def loop(rank: int) -> str:
        with joined(rank, 2, tmp_path, "store") if is_joined else contextlib.nullcontext():
            model = nn.Linear(3, 6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = surefoot.attach(
                model=model,
                optimizer=optimizer,
                data=data_of(0, 1),
                folder=tmp_path / folders[rank],
            )
            for x, y in run.batches():
                run.step_done(F.cross_entropy(model(x), y))
            (tmp_path / f"done-{rank}").touch()
            while not is_joined and not (tmp_path / "refused").exists():
                time.sleep(0.01)
            run.close()
            return str(run.folder)

    def wait_for_0(rank: int) -> str:
        if is_joined or rank == 0:
            return loop(rank)
        while not (tmp_path / "done-0").exists():
            time.sleep(0.01)
        try:
            return loop(rank)
        except SurefootError as error:
            return str(error.hint)
        finally:
            (tmp_path / "refused").touch()

    found = run_ranks(2, wait_for_0, tmp_path / "results")
    assert found[0] == str(tmp_path / "a")
    assert (
        found[1] == str(tmp_path / "b")
        if is_joined
        else "init_process_group() before surefoot.attach" in found[1]
    )
