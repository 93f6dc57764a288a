"""Arithmetic about runs to come."""

from surefoot.control.plan.saving import SaveAdvice, advise_interval

__all__ = ["SaveAdvice", "advise_interval"]
