"""Models of transformers train as in a plain PyTorch loop.

Whole, in microbatches, on two ranks, killed and resumed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import samples as s
from tests.models.compared import Case, check, sgd
from tests.models.hugging_face import SMALL, TEXT, of


def causal(kind: str, config: str, dtype: torch.dtype = torch.float64, **sizes: Any) -> Case:
    return of(
        kind,
        config,
        s.causal_texts,
        s.count_shifted,
        optimizer=sgd,
        dtype=dtype,
        sizes=TEXT | SMALL | sizes,
    )


GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
# torch multiplies groups in float32 at most
EXPERTS = {"num_key_value_heads": 1, "num_experts_per_tok": 2, "dtype": torch.float32}
T5 = {
    "vocab_size": s.WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
BART = TEXT | {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}

CASES: dict[str, Case] = {
    "BERT, classification": of(
        "BertForSequenceClassification",
        "BertConfig",
        s.labeled_texts,
        s.count_samples,
        sizes=TEXT | SMALL | {"num_labels": s.LABELS},
    ),
    "BERT, masked words": of(
        "BertForMaskedLM", "BertConfig", s.masked_texts, s.count_labels, sizes=TEXT | SMALL
    ),
    "RoBERTa, tags of tokens": of(
        "RobertaForTokenClassification",
        "RobertaConfig",
        s.tagged_texts,
        s.count_labels,
        sizes=TEXT | SMALL | {"num_labels": s.LABELS, "max_position_embeddings": 20},
    ),
    "DistilBERT, spans of answers": of(
        "DistilBertForQuestionAnswering",
        "DistilBertConfig",
        s.spans,
        lambda batch: len(batch["input_ids"]),
        joins_samples=True,
        sizes={
            "vocab_size": s.WORDS,
            "max_position_embeddings": 16,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 24,
        },
    ),
    "DeBERTa v2, classification": of(
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        s.labeled_texts,
        s.count_samples,
        sizes=TEXT
        | SMALL
        | {"num_labels": s.LABELS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "GPT-2, tied embeddings": of(
        "GPT2LMHeadModel",
        "GPT2Config",
        s.causal_texts,
        s.count_shifted,
        optimizer=sgd,
        sizes={
            "vocab_size": s.WORDS,
            "n_positions": 16,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "Llama": causal("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1),
    "Qwen 3, tied embeddings": causal(
        "Qwen3ForCausalLM", "Qwen3Config", **GROUPED, tie_word_embeddings=True
    ),
    "Mistral, sliding window": causal(
        "MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=4
    ),
    "Gemma 2": causal("Gemma2ForCausalLM", "Gemma2Config", **GROUPED),
    "Mixtral, mixture of experts": causal(
        "MixtralForCausalLM", "MixtralConfig", **EXPERTS, num_local_experts=4
    ),
    "Qwen 2 MoE": causal(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
    ),
    "T5, encoder and decoder": of(
        "T5ForConditionalGeneration",
        "T5Config",
        s.translated_texts,
        s.count_labels,
        optimizer=sgd,
        sizes=T5,
    ),
    "BART, encoder and decoder": of(
        "BartForConditionalGeneration", "BartConfig", s.translated_texts, s.count_labels, sizes=BART
    ),
    "Mamba": of(
        "MambaForCausalLM",
        "MambaConfig",
        s.causal_texts,
        s.count_shifted,
        optimizer=sgd,
        sizes={
            "vocab_size": s.WORDS,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 4,
            "pad_token_id": 0,
        },
    ),
}
CHEAP = {"BERT, classification", "GPT-2, tied embeddings"}


@pytest.mark.quick("BERT, classification")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.slow]) for name in CASES],
)
def test_a_model_of_transformers_trains_as_in_a_plain_loop(name: str) -> None:
    check(CASES[name])
