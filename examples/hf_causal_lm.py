r"""A causal language model of Hugging Face transformers, built from a config and trained unchanged.

python examples/hf_causal_lm.py
surefoot train examples/hf_causal_lm.py:HfCausalLM --set optim.name=muon --set optim.lr=0.02 \
    --set train.batch=32

Nothing is downloaded. The documents have unequal lengths. Their losses are summed and divided once
by the number of tokens in the whole global batch, so that microbatches give the numbers of one
large batch; averaging the model's own `loss` over microbatches would not.
"""

# B batch, T tokens, V vocabulary

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays
from surefoot.metrics import Mean, perplexity

LONGEST = 64  # bytes; a byte is a token, 0 is padding
Batch = dict[str, Tensor]


class HfCausalLM:
    """Continues the lines of Python source.

    Batches are what transformers takes: input_ids, attention_mask, labels, each (B, T).
    """

    unit = "tokens"

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        self.width, self.layers = width, layers

    def model(self) -> nn.Module:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LONGEST,
            use_cache=False,
        )
        return AutoModelForCausalLM.from_config(config)

    def data(self, split: str) -> Arrays:
        lines = Path((logging if split == "test" else argparse).__file__).read_bytes().splitlines()
        lines = [line[:LONGEST] for line in lines if len(line) > 1]
        ids = np.zeros((len(lines), LONGEST), dtype=np.int64)
        for row, line in zip(ids, lines, strict=True):
            row[: len(line)] = np.frombuffer(line, dtype=np.uint8)
        return Arrays(
            input_ids=ids,
            attention_mask=(ids > 0).astype(np.int64),
            labels=np.where(ids > 0, ids, -100),
        )

    def counts(self, batch: Batch) -> int:
        """How many tokens the loss of this batch sums over, known without the model.

        It lets the step divide before it adds up.
        """
        return int((batch["labels"][:, 1:] >= 0).sum())

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        logits_BTV, targets_BT = output[:, :-1], batch["labels"][:, 1:]
        nats = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return Loss.sum(nats, count=self.counts(batch))

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        (term,) = self.loss(output, batch).terms
        return {"perplexity": perplexity(term.total, term.count)}


def main(folder: str | None = None) -> Run:
    spec = RunSpec(
        optim={"name": "muon", "lr": 0.02},
        train={"length": "50 steps", "batch": 32, "microbatch": 16},
        evaluate={"every": "50 steps"},
    )
    with Run(spec, HfCausalLM(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
