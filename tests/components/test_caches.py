"""Models whose forward pass fills a cache of keys and values are recomputed and exported.

Those of transformers fill one by default.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.checkpoint.export import capture, export_graph, max_error
from surefoot.components.memory.caches import without_caches
from surefoot.components.memory.recompute import recompute
from surefoot.contract import manifest
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.errors import SurefootError, TaskError
from surefoot.train.run import Run, drive

transformers = pytest.importorskip("transformers", reason="needs transformers: the extra hf")


class Attending(nn.Module):
    """Attends to whatever is in the cache, after it has written itself."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, past: list[Tensor] | None) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        if past is not None:
            past.append(torch.stack([k, v]))
            k, v = torch.cat(past, 2).unbind()
        mixed: Tensor = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.to_out(mixed)


class OwnCache(nn.Module):
    """A model that is not of transformers, and has the switch."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.words, self.blocks = nn.Embedding(11, 8), nn.ModuleList(Attending() for _ in range(3))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        x = self.words(input_ids)
        pasts: list[list[Tensor]] = [[] for _ in self.blocks]
        for block, past in zip(self.blocks, pasts, strict=True):
            x = block(x, past if self.config.use_cache else None)
        return {"logits": x @ self.words.weight.T}


MASK = torch.tensor([[1] * 5 + [0], [1] * 4 + [0] * 2])
SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def llama(**given: Any) -> Any:
    sizes = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 16, **given}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=3, n_head=2)
    )


def t5() -> Any:
    sizes = {
        "vocab_size": 11,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, pad_token_id=0))


MODELS = {"Llama": llama, "GPT-2": gpt2, "T5": t5, "one of one's own": OwnCache}


def made(name: str, **given: Any) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = MODELS[name](**given)
    return model


def gradients(model: nn.Module, name: str) -> dict[str, Tensor]:
    torch.manual_seed(2)
    ids = torch.arange(12).reshape(2, 6) % 11
    more = {"decoder_input_ids": ids.flip(1)} if name == "T5" else {}
    found = model(input_ids=ids, attention_mask=MASK, **more)
    found["logits"].square().sum().backward()
    return {key: each.grad for key, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("how", ["full", "every 2", "operators", "1 MiB"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_blocks_give_the_same_gradients_and_the_switch_is_as_it_was(
    name: str, how: str
) -> None:
    plain = made(name)
    again = copy.deepcopy(plain)
    done = recompute(again, how)
    assert any("use_cache" in note for note in done.notes)
    expected, found = gradients(plain, name), gradients(again, name)
    assert expected.keys() == found.keys()
    for key, gradient in expected.items():
        assert torch.allclose(gradient, found[key], rtol=1e-5, atol=1e-6), key
    assert again.config.use_cache is True  # type: ignore[union-attr]
    copied = copy.deepcopy(again)
    assert copied.config.use_cache is True  # type: ignore[union-attr]
    gradients(copied, name)
    done.undo()
    assert not again._forward_pre_hooks


def test_the_switch_is_put_back_after_a_pass_that_failed_and_left_alone_without_gradients() -> None:
    model = made("Llama")
    recompute(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[99]]))
    assert model.config.use_cache is True  # type: ignore[union-attr]
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[1, 2]])).past_key_values.get_seq_length() == 2
    assert model(input_ids=torch.tensor([[1, 2]])).past_key_values is None


class Causal:
    """Continues numbers; a batch is what transformers takes."""

    def __init__(self, model: str = "Llama", **given: Any) -> None:
        self.name, self.given = model, given

    def model(self) -> nn.Module:
        return made(self.name)

    def data(self, split: str) -> dict[str, Tensor]:
        ids = torch.randint(0, 11, (12, 6), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "attention_mask": MASK.repeat(6, 1)}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch, **self.given)

    def loss(self, output: Any, batch: Any) -> Loss:
        logits, ids = output["logits"], batch["input_ids"]
        total = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        return Loss.sum(total, ids[:, 1:].numel())


def spec(**memory: Any) -> RunSpec:
    train = {"length": "3 steps", "batch": 4, "microbatch": 2}
    return RunSpec(
        train=train, memory=memory, observe={"tensorboard": False}, evaluate={"every": "2 steps"}
    )


@pytest.mark.parametrize("name", ["Llama", "one of one's own"])
def test_a_run_trains_to_the_same_weights_and_says_so(name: str, tmp_path: Path) -> None:
    weights = []
    for number, memory in enumerate(({}, {"activation_checkpointing": "full"})):
        with Run(spec(**memory), Causal(name), folder=tmp_path / str(number), quiet=True) as run:
            drive(run)
            assert run.model.config.use_cache is True  # type: ignore[union-attr]
        weights.append(run.model.state_dict())
    assert all(torch.allclose(weights[0][key], weights[1][key], atol=1e-6) for key in weights[0])
    told = (tmp_path / "1" / "events.jsonl").read_text()
    assert "config.use_cache" in told
    if name == "Llama":
        config = json.loads((manifest.step_folder(tmp_path / "1", 3) / "config.json").read_text())
        assert config["use_cache"] is True


@pytest.mark.parametrize("how", ["full", "1 MiB"])
def test_a_cache_that_was_asked_for_is_named_with_the_switch(how: str, tmp_path: Path) -> None:
    task = Causal("GPT-2", use_cache=True)
    with (
        pytest.raises(SurefootError) as caught,
        Run(spec(activation_checkpointing=how), task, folder=tmp_path / "a", quiet=True) as run,
    ):
        drive(run)
    assert "use_cache=False" in str(caught.value.hint)


def test_a_graph_of_a_model_of_transformers_is_exported_with_the_switch_off(tmp_path: Path) -> None:
    model, ids = made("Llama", num_hidden_layers=1).eval(), torch.arange(12).reshape(2, 6) % 11
    with torch.no_grad(), without_caches(model):
        calls = [capture(model, lambda: model(input_ids=ids, attention_mask=MASK))]
        found = export_graph(model, calls, tmp_path / "a.pt2", "torch-export")
    assert found.holds
    assert model.config.use_cache is True  # type: ignore[union-attr]
    with torch.no_grad():
        read = torch.export.load(tmp_path / "a.pt2").module()
        given = {"input_ids": ids.flip(1), "attention_mask": MASK}
        assert max_error(model(**given)["logits"], read(**given)["logits"]) <= 1e-5


def test_a_graph_that_returns_a_cache_is_refused_with_the_switch(tmp_path: Path) -> None:
    model = made("Llama", num_hidden_layers=1).eval()
    with torch.no_grad():
        calls = [
            capture(
                model, lambda: model(input_ids=torch.ones(2, 6, dtype=torch.long), use_cache=True)
            )
        ]
    with pytest.raises(TaskError) as caught:
        export_graph(model, calls, tmp_path / "a.pt2", "torch-export")
    assert "use_cache" in str(caught.value.hint)
