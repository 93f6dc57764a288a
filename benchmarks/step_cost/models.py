"""The three models of every cost measurement, with their data.

Written once and for all, so that numbers stay comparable.

MLP: 32-64-10, batch 32. Convnet: two 3x3 convolutions, 32 and 64 channels, BatchNorm and pooling,
3x32x32, batch 64. GPT: 4 layers, width 128, 4 heads, vocabulary 256, 128 tokens, batch 8.

The data is synthetic, a function of a fixed seed, and learnable in part: classes with noise, tokens
of a Markov chain.
"""

# B batch, T tokens, D width, N heads, C channels, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
SEED = 0  # of weights and data
LEARNING_RATE = 1e-3
CLIP = 1.0
READ_EVERY = 50  # steps between two looks at the loss
NUM_BATCHES = 50


@dataclass(frozen=True)
class Workload:
    """A model with its data: `batch` samples a step.

    `warmup` steps come before the `steps` timed ones.

    The data is `num_batches` batches, over and over.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    batch: int
    warmup: int
    steps: int
    num_batches: int = NUM_BATCHES

    def model(self) -> nn.Module:
        """The model with the weights of SEED, in training mode."""
        torch.manual_seed(SEED)
        return self.make().train()

    def samples(self) -> Batch:
        """All inputs and all targets."""
        return self.draw(self.num_batches * self.batch, torch.Generator().manual_seed(SEED + 1))

    def batches(self) -> list[Batch]:
        """The same, cut into batches in their order, each one contiguous and of its own memory."""
        inputs, targets = self.samples()
        return [
            (x.clone(), y.clone())
            for x, y in zip(inputs.split(self.batch), targets.split(self.batch), strict=True)
        ]


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over classes or over the next tokens, the mean over items."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def draw_mlp(count: int, draws: torch.Generator) -> Batch:
    """Points of 32 numbers; the class is that of a fixed random projection with as much noise."""
    points = torch.randn(count, 32, generator=draws)
    scores = points @ torch.randn(32, 10, generator=draws) / 32**0.5
    return points, (scores + torch.randn(count, 10, generator=draws)).argmax(1)


def make_convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def draw_convnet(count: int, draws: torch.Generator) -> Batch:
    """Ten smooth patterns under noise; one label in five is random."""
    labels = torch.randint(0, 10, (count,), generator=draws)
    patterns = F.interpolate(torch.randn(10, 3, 8, 8, generator=draws), size=32, mode="bilinear")
    images = 0.5 * patterns[labels] + torch.randn(count, 3, 32, 32, generator=draws)
    wrong = torch.rand(count, generator=draws) < 0.2
    return images, torch.where(wrong, torch.randint(0, 10, (count,), generator=draws), labels)


class GPT(nn.Module):
    """A decoder-only transformer after GPT-2.

    Normalized before each part, learned positions, biases everywhere but in the head.
    """

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        vocabulary: int = 256,
        tokens: int = 128,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Scores (B, T, V) of the next token."""
        x_BTD = self.token(tokens_BT) + self.position[: tokens_BT.shape[1]]
        scores_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return scores_BTV


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.y_of, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x_BTD)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.y_of(self.norm2(x_BTD))))


def draw_gpt(count: int, draws: torch.Generator) -> Batch:
    """Windows of 128 tokens, and the tokens that follow them.

    They come from a Markov chain in which each token has 8 successors.
    """
    successors = torch.randint(0, 256, (256, 8), generator=draws)
    choices = torch.randint(0, 8, (count, 128), generator=draws)
    tokens = [torch.randint(0, 256, (count,), generator=draws)]
    for step in range(128):
        tokens.append(successors[tokens[-1], choices[:, step]])
    rows = torch.stack(tokens, 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


WORKLOADS = {
    each.name: each
    for each in (
        Workload("mlp", make_mlp, draw_mlp, batch=32, warmup=200, steps=800),
        Workload("convnet", make_convnet, draw_convnet, batch=64, warmup=2, steps=15),
        Workload("gpt", GPT, draw_gpt, batch=8, warmup=2, steps=12),
    )
}
