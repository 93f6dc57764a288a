"""Precision: compute dtypes, loss scaling, float8 layers, and checks for overflow and underflow."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.precision", __name__)
