"""A step folder of a Hugging Face model opens as it is with from_pretrained and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from surefoot.contract import commits, manifest
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run, drive

transformers = pytest.importorskip("transformers", reason="needs transformers: the extra hf")
STEPS = 3


class Causal:
    """A small decoder whose input and output embeddings are tied."""

    kind = "GPT2LMHeadModel"

    def model(self) -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2
        )
        made: nn.Module = getattr(transformers, self.kind)(config)
        return made

    def data(self, split: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {"input_ids": torch.randint(0, 11, (12, 6), generator=generator)}

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(input_ids=batch["input_ids"]).logits
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        total = nn.functional.cross_entropy(
            output[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum"
        )
        return Loss.sum(total, batch["input_ids"][:, 1:].numel())


class Encoder(Causal):
    """A small encoder with a head, nothing tied."""

    kind = "BertForSequenceClassification"

    def model(self) -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=3,
        )
        made: nn.Module = getattr(transformers, self.kind)(config)
        return made

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(
            nn.functional.cross_entropy(output, batch["input_ids"][:, 0] % 3, reduction="sum"),
            len(output),
        )


HOW: dict[str, tuple[type[Causal], dict[str, Any]]] = {
    "a decoder, tied": (Causal, {}),
    "an encoder": (Encoder, {}),
    "a decoder with frozen embeddings": (Causal, {"freeze": ["*wpe*", "*wte*"]}),
    "an encoder with all frozen but its head": (Encoder, {"freeze": ["bert.*"]}),
    "a decoder with an average of its weights": (Causal, {"ema": 0.5}),
}


@pytest.mark.parametrize("name", HOW)
def test_from_pretrained_opens_a_step_folder_to_the_weights_that_were_evaluated(
    name: str, tmp_path: Path
) -> None:
    task, optim = HOW[name]
    spec = RunSpec(
        train={"length": f"{STEPS} steps", "batch": 4}, optim=optim, observe={"tensorboard": False}
    )
    with Run(spec, task(), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    folder = manifest.step_folder(tmp_path / "run", STEPS)
    opened, report = getattr(transformers, task.kind).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    if run.assembly.engine.average is not None:
        with run.assembly.engine.average.swapped_in():
            _assert_same(run.model, opened)
    else:
        _assert_same(run.model, opened)
    commits.check(folder)  # opening it wrote nothing


def _assert_same(model: nn.Module, opened: nn.Module) -> None:
    held = opened.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(held[name], tensor), name
    # where a tensor lies decides the last bits of a product on some processors
    for parameter in opened.parameters():
        parameter.data = parameter.data.clone()
    ids = torch.arange(6)[None]
    model.eval()
    assert torch.equal(model(input_ids=ids).logits, opened(input_ids=ids).logits)


def test_plain_safetensors_open_what_is_trained_and_what_is_frozen(tmp_path: Path) -> None:
    spec = RunSpec(
        train={"length": "2 steps", "batch": 4},
        optim={"freeze": ["bert.*"]},
        observe={"tensorboard": False},
    )
    with Run(spec, Encoder(), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    folder = manifest.step_folder(tmp_path / "run", 2)
    trained, frozen = (
        load_file(folder / f"model-0000{number}-of-00002.safetensors") for number in (1, 2)
    )
    assert all(name.startswith("classifier") for name in trained)
    assert all(name.startswith("bert.") for name in frozen)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal((trained | frozen)[name], tensor), name
    with safe_open(folder / "model-00001-of-00002.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
