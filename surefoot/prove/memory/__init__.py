"""Peak memory of a step: predicted without running it, measured, and fitted to a budget."""

from surefoot.prove.memory.fit import Fit, check_divisible, find_sizes, fit
from surefoot.prove.memory.measured import MemoryComparison, compare
from surefoot.train.preflight.predicted import Prediction, predict

__all__ = [
    "MemoryComparison",
    "Fit",
    "Prediction",
    "check_divisible",
    "compare",
    "find_sizes",
    "fit",
    "predict",
]
