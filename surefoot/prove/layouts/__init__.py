"""Comparison of the results of a task under several layouts of its ranks."""

from surefoot.prove.layouts.compare import LayoutComparison
from surefoot.prove.layouts.verify import LayoutVerdict, verify_layouts

__all__ = ["LayoutComparison", "LayoutVerdict", "verify_layouts"]
