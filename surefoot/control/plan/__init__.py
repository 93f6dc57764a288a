"""Arithmetic about runs to come."""

from surefoot.control.plan.saving import SaveAdvice, advise_interval
from surefoot.control.plan.sharding import Sharding, compare_stages

__all__ = ["SaveAdvice", "Sharding", "advise_interval", "compare_stages"]
