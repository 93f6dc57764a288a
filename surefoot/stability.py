"""Checks for non-finite gradients, their noise, and norms that do not join samples."""

from __future__ import annotations

from surefoot.components.stability import (
    GradientNoise,
    Guard,
    convert_batchnorm,
)

__all__ = [
    "GradientNoise",
    "Guard",
    "convert_batchnorm",
]
