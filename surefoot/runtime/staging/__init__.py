"""Copies of state on the host: one, reused, taken while the next pass runs."""

from surefoot.runtime.staging.copies import Staging

__all__ = ["Staging"]
