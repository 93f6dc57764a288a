"""Findings during a run: weights that do not move, changed data, state outside of checkpoints."""
