"""Stability: what is done about steps whose numbers are not finite, when a run has diverged, and norms that do not join samples."""

from surefoot.components.stability.guard import Guard, GuardFault
from surefoot.components.stability.norms import convert_batchnorm, find_batch_norms

__all__ = ["Guard", "GuardFault", "convert_batchnorm", "find_batch_norms"]
