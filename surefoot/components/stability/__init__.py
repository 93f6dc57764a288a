"""Stability: what is done about steps whose numbers are not finite, and when a run has diverged."""

from surefoot.components.stability.guard import Guard, GuardFault

__all__ = ["Guard", "GuardFault"]
