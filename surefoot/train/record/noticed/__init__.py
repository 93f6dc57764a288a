"""Checks during a run: weights that do not change, changed data, state outside of checkpoints."""
