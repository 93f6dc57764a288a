"""Weights that other programs wrote: read by a confined process, then imported as a checkpoint."""

from surefoot.components.checkpoint.foreign.weights import (
    Foreign,
    check_new,
    choose_weights,
    find_key,
    import_weights,
    list_others,
    open_foreign,
)

__all__ = [
    "Foreign",
    "check_new",
    "choose_weights",
    "find_key",
    "import_weights",
    "list_others",
    "open_foreign",
]
