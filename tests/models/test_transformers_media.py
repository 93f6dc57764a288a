"""Models of transformers over images and sounds train as in a plain PyTorch loop.

So do those with losses of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

import surefoot
from surefoot import Loss
from surefoot.contract.task import Term
from tests.models import samples as s
from tests.models.compared import Case, check, sgd
from tests.models.hugging_face import SMALL, TEXT, of

VISION = SMALL | {"image_size": 16, "patch_size": 8}
WHISPER = {
    "vocab_size": s.WORDS,
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.1,
}
WAV2VEC2 = SMALL | {
    "vocab_size": 12,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "mask_time_prob": 0.2,
    "ctc_loss_reduction": "sum",
    "pad_token_id": 0,
    "feat_extract_norm": "group",
}


def pairs() -> list[s.Sample]:
    return [
        {"input_ids": text, "pixel_values": image["pixel_values"]}
        for text, image in zip(s.texts(), s.images(), strict=True)
    ]


def spoken(samples: int = 640) -> list[s.Sample]:
    draw = s.draws()
    sounds = [
        torch.randn(samples, generator=draw, dtype=torch.float64) for _ in range(s.NUM_SAMPLES)
    ]
    return [
        {"input_values": sound, "labels": text % 11 + 1}
        for sound, text in zip(sounds, s.texts(), strict=True)
    ]


def transcribed() -> list[s.Sample]:
    draw = s.draws()
    heard = [torch.randn(8, 32, generator=draw, dtype=torch.float64) for _ in range(s.NUM_SAMPLES)]
    return [
        {"input_features": each, "labels": text}
        for each, text in zip(heard, s.texts(), strict=True)
    ]


def padded_labels(samples: list[s.Sample]) -> s.Sample:
    rest = [{name: part for name, part in sample.items() if name != "labels"} for sample in samples]
    labels = torch.nn.utils.rnn.pad_sequence(
        [sample["labels"] for sample in samples], batch_first=True, padding_value=s.IGNORED
    )
    return {**default_collate(rest), "labels": labels}


# ---- CLIP: each pair is compared with all others of the batch


def call_clip(model: Any, batch: Any) -> Any:
    return model(**batch, return_loss=True)


def clip_loss(output: Any, batch: Any) -> Loss:
    count = len(batch["input_ids"])
    return Loss.sum(output.loss * count, count, additive=False)


def gathered_clip_loss(output: Any, batch: Any) -> Loss:
    """The loss of CLIP over the pairs of all ranks."""
    images, texts = (
        surefoot.all_gather(output.image_embeds),
        surefoot.all_gather(output.text_embeds),
    )
    logits = texts @ images.T * output.scale
    own = torch.arange(len(logits))
    total = (
        F.cross_entropy(logits, own, reduction="sum")
        + F.cross_entropy(logits.T, own, reduction="sum")
    ) / 2
    return Loss.sum(total, len(logits), additive=False)


def call_gathered_clip(model: Any, batch: Any) -> Any:
    output = call_clip(model, batch)
    output.scale = model.logit_scale.exp()
    return output


# ---- DETR: the boxes that are found are matched with those that are there


def photographs() -> list[s.Sample]:
    draw = s.draws()
    found = []
    for number, image in enumerate(s.images(32)):
        count = 1 + number % 3
        boxes = torch.rand(count, 4, generator=draw, dtype=torch.float64) * 0.4 + 0.2
        found.append(
            {
                "pixel_values": image["pixel_values"],
                "labels": {"class_labels": torch.arange(count) % s.LABELS, "boxes": boxes},
            }
        )
    return found


def listed(samples: list[s.Sample]) -> s.Sample:
    """Labels stay a list: each photograph has its own number of boxes."""
    return {
        "pixel_values": torch.stack([each["pixel_values"] for each in samples]),
        "labels": [each["labels"] for each in samples],
    }


def count_boxes(batch: Any) -> int:
    return sum(len(each["class_labels"]) for each in batch["labels"])


QUERIES, NO_OBJECT = 5, 0.1


def detection_counts(batch: Any) -> dict[str, float]:
    boxes = count_boxes(batch)
    return {
        "classes": boxes + NO_OBJECT * (QUERIES * len(batch["labels"]) - boxes),
        "boxes": boxes,
        "overlap": boxes,
    }


def detection_loss(output: Any, batch: Any) -> Loss:
    counts, parts = detection_counts(batch), output.loss_dict
    named = {
        "classes": ("loss_ce", 1.0),
        "boxes": ("loss_bbox", 5.0),
        "overlap": ("loss_giou", 2.0),
    }
    return Loss(
        *(
            Term(name, parts[part] * counts[name], counts[name], weight)
            for name, (part, weight) in named.items()
        )
    )


def last_batch_rows(batch: Any) -> int:
    return len(batch["input_ids"])


YOLOS = SMALL | {
    "image_size": [32, 32],
    "patch_size": 8,
    "num_detection_tokens": QUERIES,
    "num_labels": s.LABELS,
    "eos_coefficient": NO_OBJECT,
}
CLIP = {"text_config": TEXT | SMALL, "vision_config": VISION, "projection_dim": 8}
SCALAR = "logit_scale has no dimension"
NOT_ADDITIVE = {
    "microbatches": "is not additive",
    "two ranks": "is not additive",
    "two ranks sharded": SCALAR,
}

CASES: dict[str, Case] = {
    "ViT": of(
        "ViTForImageClassification",
        "ViTConfig",
        s.images,
        s.count_samples,
        collate=default_collate,
        sizes=VISION | {"num_labels": s.LABELS},
    ),
    "ViT-MAE, pretraining": of(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        s.images,
        s.count_samples,
        collate=default_collate,
        forward=lambda model, batch: model(
            batch["pixel_values"], noise=torch.arange(4.0).repeat(len(batch["labels"]), 1)
        ),
        sizes=VISION
        | {
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
            "norm_pix_loss": False,
        },
    ),
    "CLIP": of(
        "CLIPModel",
        "CLIPConfig",
        pairs,
        last_batch_rows,
        forward=call_clip,
        loss=clip_loss,
        refused=NOT_ADDITIVE,
        sizes=CLIP,
    ),
    "CLIP, pairs of all ranks": of(
        "CLIPModel",
        "CLIPConfig",
        pairs,
        last_batch_rows,
        forward=call_gathered_clip,
        loss=gathered_clip_loss,
        optimizer=sgd,
        refused={"microbatches": "is not additive", "two ranks sharded": SCALAR},
        sizes=CLIP,
    ),
    "Whisper, transcription": of(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        transcribed,
        s.count_labels,
        collate=padded_labels,
        sizes=WHISPER,
    ),
    "wav2vec 2.0, CTC": of(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        spoken,
        s.count_samples,
        collate=padded_labels,
        sizes=WAV2VEC2,
        mean=lambda output, batch: output.loss / len(batch["labels"]),
    ),
    "YOLOS, detection": of(
        "YolosForObjectDetection",
        "YolosConfig",
        photographs,
        count_boxes,
        collate=listed,
        loss=detection_loss,
        counts=detection_counts,
        dtype=torch.float32,
        optimizer=sgd,
        sizes=YOLOS,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_over_images_and_sounds_trains_as_in_a_plain_loop(name: str) -> None:
    check(CASES[name])
