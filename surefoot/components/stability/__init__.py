"""Stability: steps whose numbers are not finite, runs that diverged, the noise of a gradient, norms that do not join samples."""

from surefoot.components.stability.guard import Guard, GuardFault
from surefoot.components.stability.noise import GradientNoise, Noise
from surefoot.components.stability.norms import convert_batchnorm, find_batch_norms

__all__ = ["GradientNoise", "Guard", "GuardFault", "Noise", "convert_batchnorm", "find_batch_norms"]
