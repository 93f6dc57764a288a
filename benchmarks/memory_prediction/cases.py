"""Six families of models as tasks on drawn data, and the cases.

Families x precisions x ways to recompute x optimizers.
"""

# B batch, C channels, T tokens, D width

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.tasks.transformer import Transformer

CLASSES, BATCH = 10, 16
FAMILIES = ("mlp", "convnet", "gpt", "lstm", "unet", "vit")
PRECISIONS = ("fp32", "bf16", "fp16")
WAYS = ("none", "full", "every 2", "operators")
OPTIMIZERS = ("adamw", "sgd", "muon")


class Residual(nn.Module):
    """Two convolutions with their norms, added to what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(x_BCHW + self.norm2(self.second(F.relu(self.norm1(self.first(x_BCHW))))))


class UNet(nn.Module):
    """Three levels down and up again, each joined with what it was on the way down.

    It gives a class for the whole image.
    """

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        sizes = [channels, 2 * channels, 4 * channels]
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(4, b), nn.SiLU())
            for a, b in pairwise(sizes)
        )
        self.y_of = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a + b, a, 3, padding=1), nn.GroupNorm(4, a), nn.SiLU())
            for a, b in pairwise(sizes)
        )
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        levels = [self.first(x_BCHW)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for up in reversed(self.y_of):
            x = up(torch.cat([F.interpolate(x, scale_factor=2), levels.pop()], 1))
        return self.head(x.mean((2, 3)))


class ViT(nn.Module):
    """Patches of 4 x 4 as tokens for four layers of torch's own encoder."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.zeros(64, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x_BCHW).flatten(2).mT + self.places).mean(1))


class LSTM(nn.Module):
    """Two layers over 48 steps; the last state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.cells(x_BTD)[0][:, -1])


def make_mlp() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), *blocks, nn.Linear(256, CLASSES))


def make_convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        *(Residual(24) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


class Case:
    """A task of one of the families.

    `length` is that of the tokens of the GPT, whose vocabulary is 1,000.
    """

    def __init__(self, family: str = "mlp", length: int = 64) -> None:
        self.family, self.length = family, length

    def model(self) -> nn.Module:
        if self.family == "gpt":
            return Transformer(1000, layers=4, width=64, heads=4, length=self.length, dropout=0.1)
        return {"mlp": make_mlp, "convnet": make_convnet, "lstm": LSTM, "unet": UNet, "vit": ViT}[
            self.family
        ]()

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(0)
        if self.family == "gpt":
            tokens = torch.randint(0, 1000, (2 * BATCH, self.length), generator=draws)
            return Arrays(tokens, tokens.roll(1, 1))
        shape = (2 * BATCH, 48, 32) if self.family == "lstm" else (2 * BATCH, 3, 32, 32)
        return Arrays(
            torch.randn(shape, generator=draws),
            torch.randint(0, CLASSES, (2 * BATCH,), generator=draws),
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        total = F.cross_entropy(output.flatten(0, -2).float(), batch[1].flatten(), reduction="sum")
        return Loss.sum(total, batch[1].numel())


@dataclass(frozen=True)
class Named:
    """A case with what is varied in it."""

    family: str
    precision: str
    way: str
    optimizer: str

    @property
    def name(self) -> str:
        return f"{self.family}, {self.precision}, {self.way}, {self.optimizer}"

    def spec(self) -> RunSpec:
        return RunSpec(
            task={"use": f"{__name__}:Case", "family": self.family},
            precision={"compute": self.precision},
            memory={"activation_checkpointing": self.way},
            optim={"name": self.optimizer},
            train={"batch": BATCH, "length": "10 steps", "threads": 1, "device": "cpu"},
            observe={"tensorboard": False},
        )


def make_cases() -> list[Named]:
    """Each family with each precision and each way, the optimizers in turn.

    The LSTM has no blocks to compute again.
    """
    found = []
    for number, (family, precision, way) in enumerate(product(FAMILIES, PRECISIONS, WAYS)):
        # torch has no LSTM in fp16 on a CPU
        if family == "lstm" and (way != "none" or precision == "fp16"):
            continue
        found.append(Named(family, precision, way, OPTIMIZERS[(number + number // 4) % 3]))
    return [
        *found,
        *(
            Named("lstm", "fp32", "none", each)
            for each in OPTIMIZERS
            if not any(c == Named("lstm", "fp32", "none", each) for c in found)
        ),
    ]
