"""Observation of a run: throughput, terminal output, the event log, and TensorBoard files."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.observe", __name__)
