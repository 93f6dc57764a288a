"""A run with compiled blocks: the same numbers, each compilation a record, its budget kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.compiler.regions import compile_regions
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.events import Compiled
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError, TaskError
from surefoot.train.assemble import assemble
from surefoot.train.record import compiling
from surefoot.train.run import Run
from tests.train.small import Small, faults_of, records, spec


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    # else it keeps threads that nobody ends, and tries the compiler on a file of its own: 5 s
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
        yield
    torch._dynamo.reset()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured as always, and run by torch's own kernels: making code takes long."""
    monkeypatch.setattr(
        compiling, "compile_regions", functools.partial(compile_regions, backend="eager")
    )


class Deep(Small):
    """Equal blocks with dropout."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.num_blocks = num_blocks

    def model(self) -> nn.Module:
        blocks = [
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(self.num_blocks)
        ]
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 16), *blocks, nn.Linear(16, 3))


def losses(
    folder: Path, *, batch: int = 4, evaluate_at: int = 0, num_blocks: int = 4, **compile_: Any
) -> list[float]:
    made = spec(
        8,
        train={"batch": batch, "length": "8 steps"},
        evaluate={"batch": 7},
        observe={"every": "1 step"},
        compile=compile_,
    )
    found = []
    torch._dynamo.reset()
    with Run(made, Deep(num_blocks), folder=folder, quiet=True) as run:
        for report in run.steps():
            found.append(float(report.loss or 0.0))
            if report.step == evaluate_at:
                run.evaluate()
    return found


def test_compiled_blocks_train_with_the_numbers_of_eager_mode_and_each_compilation_is_told(
    tmp_path: Path,
) -> None:
    eager = losses(tmp_path / "eager")
    assert losses(tmp_path / "compiled", what="blocks", on_failure="stop") == pytest.approx(
        eager, rel=1e-5
    )
    told = [event for event in records(tmp_path / "compiled") if isinstance(event, Compiled)]
    assert 1 <= len(told) <= 4  # equal blocks share what was compiled
    assert all(event.elapsed_s > 0 for event in told)
    assert not faults_of(tmp_path / "compiled")


@pytest.mark.usefixtures("quick")
def test_a_batch_of_another_size_is_compiled_again_and_the_budget_warns_or_stops(
    tmp_path: Path,
) -> None:
    # 24 samples: batches of 7 and of 3
    sizes: dict[str, Any] = {"what": "model", "dynamic": False, "budget": 1, "num_blocks": 1}
    assert len(losses(tmp_path / "within", batch=7, **sizes)) == 8
    again = [
        event.why_again
        for event in records(tmp_path / "within")
        if isinstance(event, Compiled) and event.why_again
    ]
    assert len(again) == 1
    assert "expected 7, actual 3" in again[0]
    assert not faults_of(tmp_path / "within")
    # where dropout is off: another graph
    assert len(losses(tmp_path / "over", batch=7, evaluate_at=5, **sizes)) == 8
    (fault,) = faults_of(tmp_path / "over")
    assert "recompilations, compile.budget is 1; the last one: compiled " in fault.detail
    with pytest.raises(TaskError, match=r"recompilations, compile\.budget is 1"):
        losses(tmp_path / "stopped", batch=7, evaluate_at=5, over_budget="stop", **sizes)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        pooled: Tensor = self.outer(torch.tanh(self.inner(rows)).mean(1))
        return pooled


class Texts(Small):
    """Batches of 20 lengths, each cut to its longest row before the model sees it."""

    LENGTHS = range(4, 24)

    def model(self) -> nn.Module:
        return Pooled()

    def data(self, split: str) -> Arrays:
        generator = torch.Generator().manual_seed(int(split == "train"))
        order = torch.randperm(len(self.LENGTHS), generator=generator)
        lengths = (order + self.LENGTHS.start).repeat_interleave(4)
        return Arrays(
            torch.randn(len(lengths), self.LENGTHS.stop, 4, generator=generator),
            torch.arange(len(lengths)) % 3,
            lengths,
        )

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch[0][:, : int(batch[2].max())], batch[1], batch[2]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("dynamic", "most"), [(None, 2), (True, 1), (False, None)])
def test_texts_of_20_lengths_are_compiled_at_most_twice_unless_sizes_are_held(
    dynamic: bool | None, most: int | None, tmp_path: Path
) -> None:
    compile_ = {"what": "model"} | ({} if dynamic is None else {"dynamic": dynamic})
    made = spec(20, data={"shuffle": False}, observe={"every": "1 step"}, compile=compile_)
    with Run(made, Texts(), folder=tmp_path, quiet=True) as run:
        assert len(list(run.steps())) == 20
    graphs = [
        event
        for event in records(tmp_path)
        if isinstance(event, Compiled) and not event.is_backward
    ]
    assert len(graphs) == (most or 9)  # the last of the nine is torch's refusal
    faults = [event.detail for event in faults_of(tmp_path)]
    assert [detail[:14] for detail in faults] == ([] if most is not None else ["torch.compile "])


@pytest.mark.usefixtures("quick")
def test_blocks_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"compile.blocks: 'layer\*' matches no module"):
        losses(tmp_path, what="blocks", blocks=("layer*",))
    with pytest.raises(InputError, match=r'set compile\.what to "blocks"'):
        losses(tmp_path, blocks=("2",))


def test_a_region_inside_a_block_whose_operators_are_recomputed_is_refused_the_block_is_not() -> (
    None
):
    class Nested(Small):
        def model(self) -> nn.Module:
            return nn.Sequential(
                nn.Linear(4, 3),
                *(nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh())) for _ in range(2)),
            )

    def tables(inner: str) -> RunSpec:
        return spec(
            memory={"activation_checkpointing": "operators", "blocks": ("1", "2")},
            compile={"what": "blocks", "blocks": (inner,)},
        )

    with pytest.raises(
        SpecError, match=r"operators of 1, and 1\.0 inside it is compiled"
    ) as raised:
        assemble(tables("?.0"), Nested())
    assert 'compile.blocks = ["1"]' in str(raised.value.hint)
    assert assemble(tables("[12]"), Nested()).engine.compiled is not None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("torchscript", "TorchScript is deprecated"),
        ("jit", "TorchScript"),
        ("TensorRT", "inference only"),
    ],
)
def test_torchscript_and_tensorrt_are_answered_with_what_to_use(asked: str, words: str) -> None:
    with pytest.raises(SpecError, match=rf"compile\.what: .*{words}") as found:
        RunSpec(compile={"what": asked})
    assert found.value.hint == 'use "model", and torch.export for serving'
