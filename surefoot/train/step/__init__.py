"""An optimizer step, as a sequence of operations or as one compiled graph."""

from surefoot.train.step.counts import check_count, check_splittable
from surefoot.train.step.stepper import Stepper
from surefoot.train.step.update import LiveUpdate

__all__ = ["LiveUpdate", "Stepper", "check_count", "check_splittable"]
