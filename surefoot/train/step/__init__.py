"""One optimiser step: told in order, or as one graph."""

from surefoot.train.step.stepper import LiveUpdate, Stepper, check_count, check_splittable

__all__ = ["LiveUpdate", "Stepper", "check_count", "check_splittable"]
