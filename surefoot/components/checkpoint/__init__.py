"""Checkpoints: writing, verification and restoration.

A checkpoint is written in the background into a hidden folder. The folder is synced to disk and
then renamed, so that an incomplete checkpoint is never visible. When a checkpoint is loaded, every
byte is verified against its SHA-256 digest.
"""

from surefoot.components.checkpoint.background import Saver, SaveResult
from surefoot.components.checkpoint.load import (
    MODEL,
    Commit,
    identity,
    newest_loadable,
    read_weights,
)
from surefoot.components.checkpoint.modules import (
    check_buffers,
    encode_storable,
    match_buffers,
    module_state,
    put_back_buffers,
    put_back_extra,
)
from surefoot.components.checkpoint.own import (
    as_plain,
    check_state,
    content_of,
    has_state,
    is_restorable,
    read_state_dict,
    save,
)
from surefoot.components.checkpoint.restore import RestoreResult, load, load_into, restore
from surefoot.components.checkpoint.save import (
    Content,
    Stamp,
    clear_drafts,
    commit,
    commit_together,
)
from surefoot.components.checkpoint.store import Store
from surefoot.components.checkpoint.tensor_files import (
    as_buffer,
    check_storable,
    create,
    fill,
    find_unchanged,
    whole_shape,
)
from surefoot.components.checkpoint.tree import as_run_folder_errors, join, name_kind, split
from surefoot.contract.commits import find_step, sync_folder
from surefoot.contract.run_folder.retention import make_room, retain
from surefoot.runtime.attributes.generators import (
    generator_state,
    is_generator,
    random_states,
    restore_generator,
    restore_random,
)

__all__ = [
    "MODEL",
    "Commit",
    "Content",
    "RestoreResult",
    "SaveResult",
    "Saver",
    "Stamp",
    "Store",
    "as_buffer",
    "as_plain",
    "check_buffers",
    "check_state",
    "check_storable",
    "clear_drafts",
    "commit",
    "commit_together",
    "content_of",
    "create",
    "encode_storable",
    "fill",
    "find_step",
    "find_unchanged",
    "generator_state",
    "has_state",
    "module_state",
    "identity",
    "is_generator",
    "is_restorable",
    "join",
    "load",
    "load_into",
    "make_room",
    "name_kind",
    "newest_loadable",
    "match_buffers",
    "put_back_buffers",
    "put_back_extra",
    "random_states",
    "read_state_dict",
    "read_weights",
    "restore",
    "restore_generator",
    "restore_random",
    "retain",
    "save",
    "split",
    "sync_folder",
    "as_run_folder_errors",
    "whole_shape",
]
