"""Checkpoints for a user-defined loop: saved whole or not at all, verified when loaded."""

from __future__ import annotations

from surefoot.components.checkpoint import (
    Commit,
    find_step,
    load,
    load_into,
    newest_loadable,
    retain,
    save,
)

__all__ = ["Commit", "find_step", "load", "load_into", "newest_loadable", "retain", "save"]
