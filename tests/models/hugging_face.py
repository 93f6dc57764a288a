"""Small models of transformers by the names of their classes, and the cases of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.models import operators
from tests.models import samples as s
from tests.models.compared import Case

operators.declare()
transformers = pytest.importorskip("transformers", reason="needs transformers: the extra hf")
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT = {
    "vocab_size": s.WORDS,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(kind: str, config: str, drops: bool, **sizes: Any) -> nn.Module:
    """The model `kind` of a small configuration; without `drops` each dropout rate in it is 0."""
    made = getattr(transformers, config)(**sizes)
    if not drops:
        _without_dropout(made)
    model: nn.Module = getattr(transformers, kind)(made)
    return model


def _without_dropout(config: Any) -> None:
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and (
            "drop" in name or name in ("mask_time_prob", "mask_feature_prob")
        ):
            setattr(config, name, 0.0)
        elif name == "apply_spec_augment":
            setattr(config, name, False)


def of(
    kind: str,
    config: str,
    samples: Any,
    count: Any,
    *,
    collate: Any = s.padded,
    sizes: dict[str, Any],
    **more: Any,
) -> Case:
    return Case(
        model=lambda drops: build(kind, config, drops, **sizes),
        samples=samples,
        count=count,
        collate=collate,
        **more,
    )
