"""Saving a run while it goes on, and going on from what was saved."""
