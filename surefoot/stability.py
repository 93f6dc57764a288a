"""Check for non-finite steps, gradient noise scale, and replacement of BatchNorm."""

from __future__ import annotations

from surefoot.components.stability.guard import Guard
from surefoot.components.stability.noise import GradientNoise
from surefoot.components.stability.norms import convert_batchnorm

__all__ = ["GradientNoise", "Guard", "convert_batchnorm"]
