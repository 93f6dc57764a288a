"""Precision: which dtype computes what."""

from surefoot.components.precision.policy import compute_context

__all__ = ["compute_context"]
