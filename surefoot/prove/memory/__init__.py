"""What a step holds at its most: predicted without running it, measured, and made to fit."""

from surefoot.prove.memory.fit import Fit, find_sizes, fit
from surefoot.prove.memory.measured import Compared, compare
from surefoot.train.preflight.predicted import Prediction, predict

__all__ = ["Compared", "Fit", "Prediction", "compare", "find_sizes", "fit", "predict"]
