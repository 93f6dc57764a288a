"""Commits of weights: written aside, synced, renamed last; read back only after their digests were checked."""

from surefoot.components.checkpoint.weights import clear_drafts, commit, find_step, load_into, retain

__all__ = ["clear_drafts", "commit", "find_step", "load_into", "retain"]
