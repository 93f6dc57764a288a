"""Stability: non-finite steps, diverged runs, the gradient noise scale, and norms that do not mix
samples."""

from surefoot.components.stability.guard import Guard, GuardFault
from surefoot.components.stability.noise import GradientNoise, Noise
from surefoot.components.stability.norms import convert_batchnorm, find_batch_norms

__all__ = ["GradientNoise", "Guard", "GuardFault", "Noise", "convert_batchnorm", "find_batch_norms"]
