"""Optimizers: parameter groups, the fused update with its non-finite check, Muon for filters, LARS
and LAMB, 8-bit Adam, EMA."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.optim", __name__)
