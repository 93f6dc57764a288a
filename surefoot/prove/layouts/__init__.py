"""Comparison of what a task computes under several layouts of its ranks."""

from surefoot.prove.layouts.compare import Compared
from surefoot.prove.layouts.verify import Verdict, verify_layouts

__all__ = ["Compared", "Verdict", "verify_layouts"]
