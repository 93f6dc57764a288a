"""An exported model gives the outputs of the one it came from, or there is no file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from surefoot.components.checkpoint import export
from surefoot.components.checkpoint.export import (
    ModelCall,
    capture,
    export_graph,
    export_weights,
    max_error,
)
from surefoot.core.errors import InputError, MissingExtra, TaskError


class Tied(nn.Module):
    """Tied weights, BatchNorm, dropout, a buffer that is not saved, and outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        self.outer.weight = self.inner.weight
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((6,), 1.5), persistent=False)

    def forward(self, x: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(self.norm(torch.relu(self.inner(x)))) * self.scale
        return {"output": self.outer(hidden) + shift, "hidden": hidden}


def made() -> Tied:
    torch.manual_seed(3)
    model = Tied()
    for _ in range(3):
        # so that the running statistics are no round numbers
        model(torch.randn(8, 6), shift=torch.zeros(8, 6))
    return model.eval()


def calls(model: nn.Module, *sizes: int) -> list[ModelCall]:
    with torch.no_grad():
        return [
            capture(model, lambda size=size: model(torch.randn(size, 6), shift=torch.ones(size, 6)))
            for size in sizes
        ]


def test_weights_are_read_back_to_the_same_outputs(tmp_path: Path) -> None:
    model, x = made(), torch.randn(4, 6)
    found = export_weights(model, Tied, lambda one: one(x, shift=x), tmp_path / "a.safetensors")
    assert found.holds
    assert found.max_error == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


class Language(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x + self.tok.weight[0])
        return output


class Thrice(nn.Module):
    """One module under three names, one of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 6)
        self.layers = nn.ModuleList([self.last, nn.Sequential(self.last, nn.BatchNorm1d(6))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.last(x)
        return output


class Cut(nn.Module):
    """Parameters that are parts of one memory, one of them with gaps, and a buffer over them."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(6, 9)
        self.left, self.right = nn.Parameter(memory[:, :6]), nn.Parameter(memory[:, 3:])
        self.register_buffer("whole", memory)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.left + x @ self.right


class Filters(nn.Module):
    """Weights that lie in memory in a different order."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.filters(x[:, None, None].expand(-1, 2, 3, -1))
        return output


@pytest.mark.parametrize("kind", [Language, Thrice, Cut, Filters])
def test_a_strict_load_takes_an_export_with_every_name_of_a_tied_weight(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(4)
    model, x = kind().eval(), torch.randn(4, 6)
    assert export_weights(model, kind, lambda one: one(x), tmp_path / "a.safetensors").holds
    opened = kind().eval()
    opened.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    assert torch.allclose(model(x), opened(x))


class Forgetful(nn.Linear):
    """A state dict that its own load refuses."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        held = super().state_dict(*args, **kwargs)
        held.pop("bias", None)
        return held


class Telling(nn.Linear):
    """Its state dict holds text."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def get_extra_state(self) -> str:
        return "words"

    def set_extra_state(self, state: str) -> None: ...


@pytest.mark.parametrize(
    ("kind", "says"), [(Forgetful, 'Missing key.*"bias"'), (Telling, "'_extra_state', a str")]
)
def test_weights_that_no_strict_load_would_take_leave_no_file(
    kind: type[nn.Module], says: str, tmp_path: Path
) -> None:
    x = torch.randn(4, 6)
    with pytest.raises(TaskError, match=says):
        export_weights(kind(), kind, lambda one: one(x), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_from_pretrained_opens_an_export_of_tied_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: the extra hf")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.arange(6)[None]
    path = tmp_path / "model.safetensors"
    assert export_weights(
        model,
        lambda: transformers.GPT2LMHeadModel(config),
        lambda one: one(input_ids=ids).logits,
        path,
    ).holds
    config.save_pretrained(tmp_path)
    opened, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert opened.lm_head.weight is opened.transformer.wte.weight
    assert torch.allclose(model(input_ids=ids).logits, opened(input_ids=ids).logits)


def test_a_graph_gives_the_same_outputs_for_any_size_of_batch_without_the_model_s_code(
    tmp_path: Path,
) -> None:
    model = made()
    found = export_graph(model, calls(model, 4, 3), tmp_path / "a.pt2", "torch-export")
    assert (found.holds, found.batch) == (True, None)
    (call,) = calls(model, 7)
    read = torch.export.load(tmp_path / "a.pt2").module()
    assert max_error(call.output, read(*call.args, **call.kwargs)) <= export.TOLERANCE


class Fixed(nn.Module):
    """Works for any batch, but a graph of it does not: its shape decides what it does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 4 else x * 3


def test_a_model_whose_graph_holds_for_one_size_of_batch_says_which(tmp_path: Path) -> None:
    model = Fixed()
    calls = [
        ModelCall((torch.ones(size, 2),), {}, torch.ones(size, 2) * by)
        for size, by in ((4, 2), (3, 3))
    ]
    found = export_graph(model, calls, tmp_path / "a.pt2", "torch-export")
    assert (found.holds, found.batch) == (True, 4)


def test_outputs_that_differ_leave_no_file(tmp_path: Path) -> None:
    model, x = made(), torch.randn(4, 6)
    path = tmp_path / "a.safetensors"

    def forward(one: nn.Module) -> Any:
        return one(x, shift=x if one is model else x + 1e-3)

    found = export_weights(model, Tied, forward, path)
    assert not found.holds
    assert list(tmp_path.iterdir()) == []
    wrong = [
        ModelCall(
            call.args,
            call.kwargs,
            {"output": call.output["output"] + 1, "hidden": call.output["hidden"]},
        )
        for call in calls(model, 4)
    ]
    assert not export_graph(model, wrong, path, "torch-export").holds
    assert list(tmp_path.iterdir()) == []


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(str(float(x.sum())))


def test_a_model_that_cannot_be_traced_is_told_with_what_can_be_done(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be exported") as caught:
        export_graph(
            Untraceable(),
            [ModelCall((torch.ones(2, 2),), {}, torch.ones(2, 2))],
            tmp_path / "a.pt2",
            "torch-export",
        )
    assert "--format safetensors" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_forward_that_calls_the_model_twice_has_no_one_graph() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TaskError, match="calls its model 2 times"):
        capture(model, lambda: model(model(torch.ones(1, 2))))


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        (torch.tensor([1.0, 100.0]), torch.tensor([1.0, 101.0]), 1 / 101),
        (torch.tensor([0.5]), torch.tensor([0.25]), 0.25),
        (
            torch.tensor([float("nan"), float("inf")]),
            torch.tensor([float("nan"), float("inf")]),
            0.0,
        ),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([1.0, 2.0]), float("inf")),
        (torch.empty(0), torch.empty(0), 0.0),
        ({"a": torch.tensor([True])}, [torch.tensor([False])], 1.0),
    ],
)
def test_the_error_is_relative_above_one_and_infinite_where_it_has_no_number(
    one: Any, other: Any, error: float
) -> None:
    assert max_error(one, other) == pytest.approx(error)


def test_onnx_without_its_packages_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    model = made()
    with pytest.raises(MissingExtra) as caught:
        export_graph(model, calls(model, 4), tmp_path / "a.onnx", "onnx")
    assert "surefoot[onnx]" in str(caught.value)


def test_onnx_gives_the_same_outputs(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs onnx: the extra onnx")
    pytest.importorskip("onnxscript", reason="needs onnxscript: the extra onnx")
    model = made()
    found = export_graph(model, calls(model, 4, 3), tmp_path / "a.onnx", "onnx")
    assert (found.holds, found.batch) == (True, None)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        export_weights(
            made(),
            Tied,
            lambda one: one(torch.ones(2, 6), shift=torch.ones(2, 6)),
            tmp_path / "no" / "a.safetensors",
        )


@dataclass
class Scores:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    attention: Tensor | None = None


class Scoring(nn.Module):
    """Returns a dataclass, as models of many libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Scores:
        return Scores(self.layer(x), (x * 2,))


@pytest.mark.parametrize("kind", ["safetensors", "torch-export", "onnx"])
def test_a_model_whose_output_is_a_dataclass_is_exported(kind: Any, tmp_path: Path) -> None:
    model, sizes = Scoring(), (torch.randn(4, 3), torch.randn(3, 3))
    if kind == "safetensors":
        assert export_weights(model, Scoring, lambda one: one(sizes[0]), tmp_path / "a").holds
        return
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    taken = [ModelCall((x,), {}, model(x)) for x in sizes]
    found = export_graph(model, taken, tmp_path / "a.pt2", kind)
    assert (found.holds, found.batch) == (True, None)
    assert isinstance(model(sizes[0]), Scores)
    if kind == "torch-export":
        read = torch.export.load(tmp_path / "a.pt2").module()(sizes[0])
        assert {name: type(part) for name, part in read.items()} == {
            "logits": Tensor,
            "hidden": tuple,
        }
