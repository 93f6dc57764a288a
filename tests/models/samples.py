"""Samples as the users of these packages have them, drawn from a seed.

Texts of unlike lengths, images, sounds; and their collators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NUM_SAMPLES, WORDS, LABELS = 16, 48, 3
PAD, IGNORED = 0, -100
Sample = dict[str, Any]


def draws(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def texts(seed: int = 1) -> list[Tensor]:
    """Token ids without padding, 3 to 9 of them."""
    draw = draws(seed)
    lengths = torch.randint(3, 10, (NUM_SAMPLES,), generator=draw).tolist()
    return [torch.randint(3, WORDS, (length,), generator=draw) for length in lengths]


def labeled_texts() -> list[Sample]:
    return [{"input_ids": text, "labels": text.sum() % LABELS} for text in texts()]


def causal_texts() -> list[Sample]:
    return [{"input_ids": text, "labels": text.clone()} for text in texts()]


def masked_texts() -> list[Sample]:
    """Every third token is to be found, and stands as token 2."""
    found = []
    for text in texts():
        is_masked = torch.arange(len(text)) % 3 == 1
        found.append(
            {
                "input_ids": text.masked_fill(is_masked, 2),
                "labels": text.masked_fill(~is_masked, IGNORED),
            }
        )
    return found


def translated_texts() -> list[Sample]:
    return [
        {"input_ids": one, "labels": other} for one, other in zip(texts(1), texts(2), strict=True)
    ]


def tagged_texts() -> list[Sample]:
    return [{"input_ids": text, "labels": text % LABELS} for text in texts()]


def spans() -> list[Sample]:
    return [
        {"input_ids": text, "start_positions": torch.tensor(1), "end_positions": torch.tensor(2)}
        for text in texts()
    ]


def images(size: int = 16, channels: int = 3) -> list[Sample]:
    draw = draws()
    return [
        {
            "pixel_values": torch.randn(channels, size, size, generator=draw, dtype=torch.float64),
            "labels": torch.tensor(n % LABELS),
        }
        for n in range(NUM_SAMPLES)
    ]


def padded(samples: list[Sample]) -> Sample:
    """A batch as a collator of transformers makes it.

    Padded texts, their mask, labels whose padding does not count.
    """
    batch: Sample = {}
    for name in samples[0]:
        parts = [sample[name] for sample in samples]
        fill = IGNORED if name == "labels" else PAD
        is_text = parts[0].ndim == 1
        batch[name] = (
            torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)
            if is_text
            else torch.stack(parts)
        )
    batch["attention_mask"] = torch.nn.utils.rnn.pad_sequence(
        [torch.ones(len(sample["input_ids"]), dtype=torch.int64) for sample in samples],
        batch_first=True,
    )
    return batch


def count_samples(batch: Any) -> int:
    return len(batch["labels"])


def count_labels(batch: Any) -> int:
    return int((batch["labels"] != IGNORED).sum())


def count_shifted(batch: Any) -> int:
    """The labels that a causal model is asked for: all but the first of each text."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())
