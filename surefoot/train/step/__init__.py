"""An optimizer step, as a sequence of operations or as one compiled graph."""

from surefoot.train.step.factors import check_count, check_splittable
from surefoot.train.step.parts import StepParts, make_parts
from surefoot.train.step.program import LiveUpdate

__all__ = ["LiveUpdate", "StepParts", "check_count", "check_splittable", "make_parts"]
