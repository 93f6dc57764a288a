"""Metrics as partial results that are merged over batches and ranks."""

from __future__ import annotations

from surefoot.components.metrics import (
    BitsPerByte,
    FromTorchmetrics,
    Mean,
    Perplexity,
    accuracy,
    bits_per_byte,
    mean_of,
    perplexity,
    top_k,
)

__all__ = [
    "BitsPerByte",
    "FromTorchmetrics",
    "Mean",
    "Perplexity",
    "accuracy",
    "bits_per_byte",
    "mean_of",
    "perplexity",
    "top_k",
]
