"""`surefoot init`."""

from __future__ import annotations


def init() -> None:
    """Write a task file and a spec that run as they are."""
