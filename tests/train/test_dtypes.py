"""The dtype record: what is observed in the first step is what is there.

A contract is held against it before the second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from surefoot.components.precision.policy import compute_context
from surefoot.components.precision.record import DtypeRecord, check_contract
from surefoot.contract.events import Dtypes
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import NumbersError, SpecError
from surefoot.train.assemble import assemble
from surefoot.train.run import Run
from tests.train.small import OPTIMIZERS, Small, call, end_of, records, spec, state_of, write_task
from tests.train.test_resume import Rich, train

ALL = ("storage", "compute", "gradient", "reduce", "master", "state")


class Mixed(nn.Module):
    """Embedding, attention, norm, a tied head; and one parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.query, self.norm, self.unused = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        weights = F.softmax(self.query(x) @ x.transpose(1, 2), -1)
        return F.linear(weights @ x, self.embedding.weight)


def observed(compute: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> DtypeRecord:
    record = DtypeRecord(model)
    ids = torch.arange(10).view(2, 5)
    with record:
        with compute_context(compute, torch.device("cpu"))():
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
    optimizer.step()
    record.see_update(optimizer.state.items())
    return record


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_products_are_observed_in_the_chosen_dtype_and_softmax_norms_and_losses_in_fp32(
    compute: str,
) -> None:
    model = Mixed()
    record = observed(compute, model, torch.optim.AdamW(model.parameters()))
    operators = record.operators
    assert {operators[name] for name in ("addmm", "bmm", "mm") if name in operators} == {compute}
    for name in ("_softmax", "native_layer_norm", "_log_softmax", "nll_loss_forward"):
        assert operators[name] == "fp32", name
    rows = {row.name: row for row in record.parameters}
    assert rows["query.weight"].compute == compute
    assert rows["norm.weight"].compute == "fp32"
    # looked up, and multiplied
    assert rows["embedding.weight"].compute == ("fp32" if compute == "fp32" else f"fp32, {compute}")
    for name, row in rows.items():
        if name.startswith("unused"):
            assert (row.compute, row.gradient, row.reduce, row.master, row.state) == (None,) * 5
        else:
            assert (row.storage, row.gradient, row.reduce, row.master, row.state) == (
                "fp32",
            ) * 5, name


def test_what_is_wrong_is_seen_and_not_presumed() -> None:
    """Planted: a layer cast to bf16, state made half, a module that is never computed in bf16."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    record = DtypeRecord(model)
    with record:
        x = model[1](model[0](torch.ones(1, 4)).bfloat16()).float()
        model[2](x).sum().backward()
    optimizer.step()
    optimizer.state[model[2].weight]["momentum_buffer"] = torch.zeros(4, 4, dtype=torch.float16)
    record.see_update(optimizer.state.items())
    rows = {row.name: [getattr(row, role) for role in ALL] for row in record.parameters}
    assert rows["0.weight"] == ["fp32"] * 6
    assert rows["1.weight"] == ["bf16"] * 6
    assert rows["2.weight"] == ["fp32"] * 5 + ["fp16"]
    for contract, name in (
        ({"master": "fp32"}, "1.weight"),
        ({"state": "fp32"}, "1.weight"),
        ({"state": "bf16"}, "0.weight"),
    ):
        with pytest.raises(NumbersError, match=name):
            check_contract(contract, record.parameters)
    check_contract({}, record.parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_records_its_first_step_and_no_number_changes_for_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = spec(3, precision={"compute": "bf16", "weights": "bf16"}, optim=OPTIMIZERS[name])
    ends = []
    for looks in (True, False):
        if not looks:
            monkeypatch.setattr(DtypeRecord, "__enter__", lambda self: self)
            monkeypatch.setattr(DtypeRecord, "__exit__", lambda self, *of_what: None)
        with Run(how, Rich(), folder=tmp_path / str(looks), quiet=True) as run:
            for _ in run.steps():
                pass
        ends.append(state_of(run))
    for key, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][key]), key
    (event,) = [each for each in records(tmp_path / "True") if isinstance(each, Dtypes)]
    assert (event.step, event.operators["addmm"]) == (1, "bf16")
    roles = {each: row for row in event.parameters for each in row["names"]}
    assert [roles["0.weight"][role] for role in ALL[:5]] == ["bf16", "bf16", "bf16", "fp32", "fp32"]
    assert roles["0.weight"]["state"] == (None if name == "plain sgd" else "fp32")
    assert sum(row["num_numbers"] for row in event.parameters) == sum(
        p.numel() for p in run.model.parameters()
    )


def test_an_attempt_that_goes_on_looks_at_its_own_first_step(tmp_path: Path) -> None:
    how = spec(12, checkpoint={"every": "4 steps"}, precision={"contract": {"state": "fp32"}})
    train(tmp_path / "a", how, Rich(), leave_at=7)
    train(tmp_path / "a", how, Rich())
    assert [event.step for event in records(tmp_path / "a") if isinstance(event, Dtypes)] == [1, 5]


BROKEN: dict[str, dict[str, Any]] = {
    "master": {
        "weights": "bf16",
        "compute": "bf16",
        "master": "none",
        "contract": {"master": "fp32"},
    },
    "compute": {"compute": "bf16", "contract": {"compute": "fp32"}},
    "reduce": {
        "weights": "bf16",
        "compute": "bf16",
        "master": "none",
        "contract": {"reduce": "fp32"},
    },
}


@pytest.mark.parametrize("role", BROKEN)
def test_a_contract_that_is_broken_ends_the_run_before_step_2_and_names_the_parameter(
    role: str, tmp_path: Path
) -> None:
    done = 0
    with (
        pytest.raises(
            NumbersError,
            match=rf"says {role} = 'fp32', and that of 0\.weight is bf16, as observed in step 1",
        ),
        Run(spec(5, precision=BROKEN[role]), Small(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            done += 1
    assert done == 0
    end = end_of(tmp_path / "a")
    assert (end.exit_code, end.step) == (4, 1)


def test_a_contract_that_holds_lets_the_run_go_on(tmp_path: Path) -> None:
    contract = {
        "storage": "bf16",
        "gradient": "bf16",
        "reduce": "fp32",
        "master": "fp32",
        "state": "fp32",
    }
    how = spec(3, precision={"compute": "bf16", "weights": "bf16", "contract": contract})
    with Run(how, Small(), folder=tmp_path / "a", quiet=True) as run:
        assert len(list(run.steps())) == 3


@pytest.mark.parametrize("contract", [{"masters": "fp32"}, {"master": "float32"}])
def test_a_contract_about_nothing_is_refused(contract: dict[str, str]) -> None:
    with pytest.raises(SpecError):
        RunSpec(precision={"contract": contract})


def test_explain_shows_every_parameter_and_whether_the_contract_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    use = write_task(tmp_path)
    small = ("--set", "train.batch=4", "--set", 'precision.compute="bf16"')
    assert call(monkeypatch, "explain", use, *small, "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["compute"], row["breach"], row["operators"]["addmm"]) == ("bf16", None, "bf16")
    assert [each["name"] for each in row["parameters"]] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert (
        call(monkeypatch, "explain", use, *small, "--set", 'precision.contract.compute="fp32"') == 1
    )
    assert (
        "contract: precision.contract says compute = 'fp32', and that of 0.weight is bf16"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "runs").exists()


def test_tensors_without_an_address_of_their_own_are_not_taken_for_one_another() -> None:
    """Nested tensors have none, and all empty ones have the same."""
    model = nn.ModuleDict({"linear": nn.Linear(4, 3), "empty": nn.Linear(0, 2, bias=False)})
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with DtypeRecord(model) as record:
        loss = model["linear"](ragged).values().sum() + torch.ones(0).exp().sum()
        loss.backward()
    record.see_update(())
    rows = {row.name: row for row in record.parameters}
    assert (rows["linear.weight"].compute, rows["linear.weight"].gradient) == ("fp32", "fp32")
    assert rows["empty.weight"].compute is None


def test_a_first_step_that_broke_off_leaves_nothing_that_looks_on() -> None:
    class Breaks(Small):
        is_full = False

        def loss(self, output: Tensor, batch: Any) -> Any:
            if self.is_full:
                raise torch.OutOfMemoryError("planted")
            return super().loss(output, batch)

    task = Breaks()
    assembly = assemble(spec(4), task)
    steps, task.is_full = assembly.engine.steps, True
    hooked = []
    steps.observers.batch_read.append(
        lambda batch: hooked.extend(
            bool(each._backward_hooks) for each in assembly.model.parameters()
        )
    )
    with pytest.raises(torch.OutOfMemoryError):
        steps.step_function()(1)
    assert any(hooked)
    assert not any(parameter._backward_hooks for parameter in assembly.model.parameters())


def test_what_lies_where_a_gathered_weight_lay_is_not_that_weight(tmp_path: Path) -> None:
    """FSDP2 frees a gathered weight after the forward pass, and an activation takes its address."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        seen = [reuse_of_a_gathered_weight(width) for width in range(256, 1024, 32)]
    finally:
        dist.destroy_process_group()
    assert any(is_reused for is_reused, _ in seen)  # else nothing was tried
    assert {compute for _, compute in seen} == {"bf16"}


def reuse_of_a_gathered_weight(width: int) -> tuple[bool, str | None]:
    """Return whether an activation took the freed address, and the dtypes that were observed."""
    layer, places = nn.Linear(width, width, bias=False), list[int]()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    layer.register_forward_pre_hook(lambda module, _: places.append(address(module.weight)))
    record = DtypeRecord(layer)
    with record:
        out = layer(torch.ones(4, width, dtype=torch.bfloat16))
        others = [torch.ones(width, width, dtype=torch.bfloat16) for _ in range(8)]
        for other in others:
            (other.float() * 2).sum()
        out.float().sum().backward()
    record.see_update([])
    return places[0] in map(address, others), record.parameters[0].compute


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
