"""Saving of the state of a run, and resuming from a checkpoint."""
