"""Precision: which dtype computes what."""

from surefoot.components.precision.policy import Compute, compute_context

__all__ = ["Compute", "compute_context"]
