"""The tasks of examples/ with dropout behind every layer and noise on every image.

So going on has random numbers to get wrong.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from examples import (
    contrastive,
    detector,
    ema_state,
    gan,
    hf_causal_lm,
    image_classifier,
    language_model,
    own_optimizer,
)
from surefoot.components.data.order import Keys

DROPOUT, NOISE = 0.1, 0.05


class Noisy:
    """Put before a task's class.

    Its model drops, its augmentation moves every float of a batch a little.
    """

    def model(self) -> nn.Module:
        made: nn.Module = super().model()  # type: ignore[misc]
        for layer in made.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.register_forward_hook(_drop)
        return made

    def augment(self, batch: Any, keys: Keys) -> Any:
        if isinstance(batch, tuple):
            return tuple(_moved(part, keys) for part in batch)
        return {name: _moved(part, keys) for name, part in batch.items()}


def _drop(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return F.dropout(output, DROPOUT, layer.training)


def _moved(part: Tensor, keys: Keys) -> Tensor:
    if not part.is_floating_point():
        return part
    return part + NOISE * keys.uniform(part[0].numel()).to(part.device).view_as(part)


class ImageClassifier(Noisy, image_classifier.ImageClassifier):
    pass


class LanguageModel(Noisy, language_model.LanguageModel):
    pass


class HfCausalLM(Noisy, hf_causal_lm.HfCausalLM):
    pass


class Gan(Noisy, gan.Gan):
    pass


class Detector(Noisy, detector.Detector):
    pass


class Halves(Noisy, contrastive.Halves):
    pass


class OwnOptimizer(Noisy, own_optimizer.OwnOptimizer):
    pass


class HardClasses(Noisy, ema_state.HardClasses):
    pass
