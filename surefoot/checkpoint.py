"""Checkpoints for your own training loop; each is saved completely or not at all.

They are verified when they are loaded.
"""

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
