"""Optimizers, parameter groups, and the optimizer step with its non-finite check.

In addition to torch's optimizers, there are LARS, LAMB, Adam with 8-bit moments, Muon for
convolution filters, and an exponential moving average of the weights (EMA).
"""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.optim", __name__)
