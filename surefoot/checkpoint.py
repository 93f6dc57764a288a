"""Checkpoints of a loop of one's own: saved whole or not at all, verified when they are loaded."""

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

__all__ = [
    "Commit",
    "find_step",
    "load",
    "load_into",
    "newest_loadable",
    "retain",
    "save",
]
