"""Import of weights that other programs wrote, as a checkpoint.

A process with restricted rights reads the files.
"""

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
