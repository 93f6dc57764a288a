"""Reusable host copy of state, taken during the next forward and backward pass."""
