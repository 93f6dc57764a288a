r"""A causal transformer over bytes learns to continue the source of Python's standard library.

python examples/language_model.py
surefoot train examples/language_model.py:LanguageModel --set optim.name=muon \
    --set optim.lr=0.02 --set train.batch=16
"""

# B batch, T bytes, D model, N heads, H per head, V vocabulary

from __future__ import annotations

import argparse
import json
import logging
import textwrap
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Tokens
from surefoot.metrics import Mean, bits_per_byte

FILES = {"train": (argparse, logging), "test": (textwrap, json)}  # standard modules, read as text
Batch = dict[str, Tensor]


class Block(nn.Module):
    """Attention over what came before, then a position-wise net, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BNTH, k_BNTH, v_BNTH = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_BTD)).chunk(3, dim=-1)
        )
        seen_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        x_BTD = x_BTD + self.out(seen_BNTH.transpose(1, 2).flatten(2))
        return x_BTD + self.net(self.norm_2(x_BTD))


class Decoder(nn.Module):
    """Embedding, blocks, and a head that shares its weights with the embedding."""

    def __init__(self, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT) + self.place.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class LanguageModel:
    """Predicts each byte from the up to `length` bytes before it."""

    unit = "bytes"  # what the loss counts

    def __init__(self, length: int = 64, width: int = 64, layers: int = 2) -> None:
        self.length, self.width, self.layers = length, width, layers

    def model(self) -> nn.Module:
        return Decoder(self.length, self.width, self.layers)

    def data(self, split: str) -> Tokens:
        text = b"".join(Path(module.__file__).read_bytes() for module in FILES[split])
        return Tokens(np.frombuffer(text, dtype=np.uint8), self.length)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["inputs"])

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        return Loss.sum(*self._nats(output, batch))

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"bits per byte": bits_per_byte(*self._nats(output, batch))}

    def _nats(self, logits_BTV: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed surprise, and over how many bytes.

        The padding of the last window (-100) counts for neither.
        """
        targets_BT = batch["targets"]
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum"), (
            targets_BT >= 0
        ).sum()


def main(folder: str | None = None) -> Run:
    spec = RunSpec(
        optim={"name": "muon", "lr": 0.02},
        schedule={"warmup": "10 steps"},
        train={"length": "120 steps", "batch": 16},
        evaluate={"every": "60 steps"},
    )
    with Run(spec, LanguageModel(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
