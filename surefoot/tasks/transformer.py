"""Decoder-only transformer of the two text tasks.

It has rotary positions (Su et al., 2021), RMSNorm before attention and before the feed-forward
layers, RMSNorm on queries and keys (Dehghani et al., 2023), squared ReLU (So et al., "Primer",
2021), blocks that are initialized as the identity, and one matrix for embedding and head (Press and
Wolf, 2017).
"""

# B batch, T tokens, D model, N heads, H per head, V vocabulary, R rows (B * T)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources.packed import block_diagonal
from surefoot.components.memory.chunked import linear_cross_entropy

ROTARY_BASE = 10_000.0
EMBEDDING_STD = 0.02
IGNORED = -100  # a target with this value is ignored
CHUNK_ELEMENTS = 1 << 20  # of the logits at a time: 4 MiB in fp32 stay in a core's cache


class HiddenAndHead(NamedTuple):
    """Input and weights of the output layer, for a loss that never computes all logits at once."""

    hidden_BTD: Tensor
    weight_VD: Tensor


class Transformer(nn.Module):
    """Decoder-only transformer from token ids (B, T) to logits of the next token (B, T, V).

    T is at most `length`. With `chunked_loss`, it returns HiddenAndHead in training. With the
    `positions` and `documents` (B, T) of packed rows, a token attends only to its own document.
    Raises ValueError if the sizes do not fit together.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int,
        width: int,
        heads: int,
        length: int,
        dropout: float = 0.0,
        chunked_loss: bool = False,
    ) -> None:
        super().__init__()
        self.chunked_loss = chunked_loss
        if min(layers, width, heads, length) < 1 or width % (2 * heads):
            raise ValueError(
                f"layers {layers}, width {width}, heads {heads}: "
                "the width is a multiple of twice the heads, none is 0"
            )
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = _norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        cos_TH, sin_TH = _rotary(length, width // heads)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos_TH, persistent=False)
        self.register_buffer("sin", sin_TH, persistent=False)

    def forward(
        self, ids_BT: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor | HiddenAndHead:
        x_BTD = self.dropout(self.norm(self.embedding(ids_BT)))
        # the same for all heads
        where = slice(ids_BT.shape[1]) if positions_BT is None else positions_BT[:, None]
        mask = () if documents_BT is None else (block_diagonal(documents_BT),)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos[where], self.sin[where], *mask)
        hidden_BTD = self.norm(x_BTD)
        if self.chunked_loss and self.training:
            return HiddenAndHead(hidden_BTD, self.head.weight)
        logits_BTV: Tensor = self.head(hidden_BTD)
        return logits_BTV


class Block(nn.Module):
    """Transformer block: attention, then feed-forward layers of four times the width.

    The output of each of these two parts is added to its input.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = _norm(width)
        self.query, self.key, self.value, self.mix = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.head_norm = _norm(width // heads)
        self.widen, self.narrow = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.narrow.weight)

    def forward(
        self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor, mask_BNTT: Tensor | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.dropout(
            self._compute_attention(self.norm(x_BTD), cos_TH, sin_TH, mask_BNTT)
        )
        fed_BTD: Tensor = self.dropout(self.narrow(F.relu(self.widen(self.norm(x_BTD))).square()))
        return x_BTD + fed_BTD

    def _compute_attention(
        self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor, mask_BNTT: Tensor | None
    ) -> Tensor:
        q_BNTH, k_BNTH, v_BNTH = (
            part(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q_BNTH = _rotate(self.head_norm(q_BNTH), cos_TH, sin_TH).to(v_BNTH.dtype)
        k_BNTH = _rotate(self.head_norm(k_BNTH), cos_TH, sin_TH).to(v_BNTH.dtype)
        mixed_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BNTH, v_BNTH, attn_mask=mask_BNTT, is_causal=mask_BNTT is None
        )
        mixed_BTD: Tensor = self.mix(mixed_BNTH.transpose(1, 2).flatten(2))
        return mixed_BTD


def _norm(size: int) -> nn.RMSNorm:
    """Return a norm without weights, which has nothing to train and accepts any dtype."""
    return nn.RMSNorm(size, elementwise_affine=False)


def _rotary(length: int, per_head: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (T, H) of position * frequency.

    H has each frequency twice.
    """
    frequencies = ROTARY_BASE ** -(torch.arange(0, per_head, 2) / per_head)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH


def nats(output: Tensor | HiddenAndHead, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood in nats, and the number of targets that are not -100.

    The negative log-likelihood is summed over these targets, in fp32 or better. It equals
    `cross_entropy(logits.float(), targets, reduction="sum")`, but is computed for a few rows at a
    time: with 33,278 words, the fp32 copies of all logits would cost more than the rest of a step.
    """
    if isinstance(output, HiddenAndHead):
        return linear_cross_entropy(
            output.hidden_BTD, output.weight_VD, targets_BT, ignore_index=IGNORED
        )
    logits_BTV = output
    apply: Any = _Nats.apply
    total: Tensor = apply(logits_BTV.flatten(0, 1), targets_BT.flatten())
    return total, (targets_BT != IGNORED).sum()


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, targets_R: Tensor) -> Tensor:
        rows = max(1, CHUNK_ELEMENTS // logits_RV.shape[1])
        cuts = list(range(rows, len(logits_RV), rows))
        exact = torch.promote_types(logits_RV.dtype, torch.float32)
        norms_R = torch.cat(
            [chunk.to(exact).logsumexp(-1) for chunk in logits_RV.tensor_split(cuts)]
        )
        chosen_R = logits_RV.gather(1, targets_R.clamp(min=0)[:, None])[:, 0].to(exact)
        ctx.save_for_backward(logits_RV, targets_R, norms_R)
        ctx.cuts = cuts
        return (norms_R - chosen_R).masked_fill(targets_R == IGNORED, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits_RV, targets_R, norms_R = ctx.saved_tensors
        made_RV = torch.empty_like(logits_RV)
        weights_R = gradient * (targets_R != IGNORED)
        parts = (logits_RV, targets_R.clamp(min=0), norms_R, weights_R, made_RV)
        chunks = (part.tensor_split(ctx.cuts) for part in parts)
        for logits, targets, norms, weights, made in zip(*chunks, strict=True):
            share = (logits.to(norms.dtype) - norms[:, None]).exp_()
            share.scatter_add_(1, targets[:, None], -torch.ones_like(norms)[:, None])
            torch.mul(share, weights[:, None], out=share)
            made.copy_(share)
        return made_RV, None
