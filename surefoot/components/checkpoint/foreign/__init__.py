"""Weights that other programs wrote: read by a confined process, then imported as a checkpoint."""

from surefoot.components.checkpoint.foreign.weights import (
    ForeignFile,
    check_new,
    choose_weights,
    find_key,
    import_weights,
    list_other_entries,
    open_foreign,
)

__all__ = [
    "ForeignFile",
    "check_new",
    "choose_weights",
    "find_key",
    "import_weights",
    "list_other_entries",
    "open_foreign",
]
