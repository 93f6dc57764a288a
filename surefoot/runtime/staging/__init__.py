"""Reusable host copy of state, taken during the next forward and backward pass."""

from surefoot.runtime.staging.copies import Staging

__all__ = ["Staging"]
