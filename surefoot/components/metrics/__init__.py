"""Metrics as partial results that can be merged."""

from surefoot.components.metrics.partial import (
    Better,
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
    "Better",
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
