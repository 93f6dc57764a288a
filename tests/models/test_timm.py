"""Models of timm train as in a plain PyTorch loop.

Whole, in microbatches, on two ranks, killed and resumed.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F

from tests.models import operators
from tests.models import samples as s
from tests.models.compared import Case, check

operators.declare()
timm = pytest.importorskip("timm", reason="needs timm: the extra models", exc_type=ImportError)


RATES = {"drop_rate": 0.1, "drop_path_rate": 0.1}


def of(
    name: str,
    *,
    size: int = 32,
    joins_samples: bool = False,
    stage: int = 3,
    make: Any = timm.create_model,
    rates: tuple[str, ...] = tuple(RATES),
    **sizes: Any,
) -> Case:
    def model(drops: bool) -> nn.Module:
        made: nn.Module = make(
            name, num_classes=s.LABELS, **{key: RATES[key] * drops for key in rates}, **sizes
        )
        return made

    return Case(
        model=model,
        samples=lambda: s.images(size),
        count=s.count_samples,
        joins_samples=joins_samples,
        stage=stage,
        forward=lambda model, batch: model(batch["pixel_values"]),
        mean=lambda output, batch: F.cross_entropy(output, batch["labels"]),
    )


def make_mixer(name: str, **sizes: Any) -> nn.Module:
    """Of its class: the names of timm fix the width."""
    mixer: nn.Module = timm.models.mlp_mixer.MlpMixer(**sizes)
    return mixer


NORMED = {"joins_samples": True}
CASES: dict[str, Case] = {
    "ResNet": of("test_resnet", **NORMED, stage=2),
    "ViT": of("test_vit", img_size=32),
    "ConvNeXt": of("test_convnext"),
    "EfficientNet": of("test_efficientnet", **NORMED),
    "Swin": of(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    "MobileNet v3": of("mobilenetv3_small_050", **NORMED),
    "MLP-Mixer": of(
        "mixer", make=make_mixer, img_size=32, patch_size=8, embed_dim=16, num_blocks=2
    ),
    "RegNet": of("regnetx_002", **NORMED, stage=2),
    "DenseNet": of(
        "densenet121", **NORMED, rates=("drop_rate",), growth_rate=8, block_config=(2, 2)
    ),
}
CHEAP = {"ResNet", "ViT"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.slow]) for name in CASES],
)
def test_a_model_of_timm_trains_as_in_a_plain_loop(name: str) -> None:
    check(CASES[name])
