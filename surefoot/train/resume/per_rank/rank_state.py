"""A task's `state()` on several ranks, with its entries declared in `state_on_ranks`.

"replicated" entries are compared between ranks at each save. "per_rank" entries are saved and
restored for each rank. The entries of rank 0 are in `state.json`, as on one rank. Those of the
other ranks are in `task-ranks.json`, and their tensors in `task-rank-<rank>.safetensors`.

The shards of a stream, which only the ranks that read them have, are all in `state.json`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import torch as safetensors
from torch import Tensor

from surefoot.components import checkpoint
from surefoot.core.errors import NumbersError, RunFolderError, SpecError, TaskError
from surefoot.train.quiet import read_entry

if TYPE_CHECKING:
    from surefoot.components.checkpoint import Commit
    from surefoot.contract.spec import RunSpec
    from surefoot.contract.task import ResolvedTask
    from surefoot.runtime.comm.group import Group
    from surefoot.train.assemble import Assembly

TREES = "task-ranks.json"
SOURCE, SHARDS = "source", "shards"  # where the state of the loader has them
OF_RANK = "task-rank-"  # prefix of the safetensors files
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class PerRankState(NamedTuple):
    """State of the other ranks that rank 0 writes into a checkpoint: tensors and texts, by file.

    `shards` are the states of their shards of a stream, by index.
    """

    tensors: dict[str, dict[str, Tensor]] = {}  # noqa: RUF012 - never changed
    texts: dict[str, bytes] = {}  # noqa: RUF012
    shards: dict[str, Any] = {}  # noqa: RUF012


def is_of_task(file: str) -> bool:
    """Return whether a safetensors file holds "per_rank" entries, which may be non-finite."""
    return file.startswith(OF_RANK)


def find_per_rank(task: ResolvedTask) -> list[str]:
    """Return the names of the entries that `state_on_ranks` declares "per_rank"."""
    return [name for name, word in task.state_on_ranks.items() if word == "per_rank"]


def check_words(task: ResolvedTask, spec: RunSpec) -> None:
    """Check the declarations in `state_on_ranks`.

    Raises TaskError for an entry that `state()` does not name, and SpecError for "per_rank" with
    virtual ranks.
    """
    names = [] if task.state is None else list(task.state())
    if unknown := [name for name in task.state_on_ranks if name not in names]:
        raise TaskError(
            f"state_on_ranks names {unknown[0]!r}, and state() names "
            f"{', '.join(map(repr, names)) or 'nothing'}",
            hint="state_on_ranks holds entries of state(), each with 'replicated' or 'per_rank'",
        )
    if (each := find_per_rank(task)) and spec.layout.virtual_ranks is not None:
        raise SpecError(
            f"state_on_ranks says that {each[0]!r} is per_rank, and "
            f"layout.virtual_ranks is {spec.layout.virtual_ranks}: a different number "
            "of ranks would have other states, and so other results",
            hint="leave layout.virtual_ranks out, or keep replicated state only",
        )


def describe(group: Group, task: ResolvedTask) -> list[str]:
    """Return messages on how `state()` is saved on several ranks. Every rank must call this.

    The message on an entry without a declaration lists the possible declarations.
    """
    if group.is_alone or task.state is None:
        return []
    words = task.state_on_ranks
    unsaid = ", ".join(repr(name) for name in task.state() if name not in words)
    told = []
    if unsaid:
        told.append(
            f"state() names {unsaid}: each of {group.size} ranks has a separate copy, "
            "which only its own microbatches change; the copy of rank 0 is "
            "saved, and all ranks resume with it. Declare the entries in the "
            f"task: state_on_ranks = {{{unsaid.split(', ')[0]}: "
            '"replicated"} for an entry that is the same on all ranks, "per_rank" '
            "for an entry of each rank"
        )
    if same := [name for name, word in words.items() if word == "replicated"]:
        told.append(
            f"state() names {_list(same)}, replicated on {group.size} ranks: all ranks are "
            "compared at each save"
        )
    if own := find_per_rank(task):
        told.append(
            f"state() names {_list(own)}, one for each of {group.size} ranks: the "
            "entry of each rank is saved and restored"
        )
    digests = [json.loads(text) for text in group.exchange(json.dumps(digest_entries(task, own)))]
    if alike := [name for name in own if len({each[name] for each in digests}) == 1]:
        told.append(
            f"{_list(alike)} of state() starts equal on all ranks; "
            "surefoot.rank_seed() returns a different seed on each rank"
        )
    return told


def _list(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def digest_entries(task: ResolvedTask, names: list[str]) -> dict[str, str]:
    """Return the SHA-256 (hex) of each entry of `state()` in `names` on this rank."""
    state = {} if task.state is None or not names else task.state()
    return {name: _digest(name, state[name]) for name in names}


def digest_replicated(task: ResolvedTask) -> dict[str, str]:
    """Return the SHA-256 (hex) of each "replicated" entry of `state()` on this rank."""
    return digest_entries(
        task, [name for name, word in task.state_on_ranks.items() if word == "replicated"]
    )


def _digest(name: str, value: Any) -> str:
    skeleton, tensors = checkpoint.split(read_entry(name, value), name)
    taken = hashlib.sha256(json.dumps(skeleton, sort_keys=True).encode())
    for each in sorted(tensors):
        taken.update(f"{each} {tensors[each].dtype} {list(tensors[each].shape)}".encode())
        taken.update(checkpoint.as_buffer(_on_host(tensors[each])))
    return taken.hexdigest()


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def has_words(group: Group, task: ResolvedTask) -> bool:
    """Return whether several ranks train and the task defines `state_on_ranks`."""
    return not group.is_alone and bool(task.state_on_ranks)


def gather(group: Group, task: ResolvedTask) -> PerRankState:
    """Compare the replicated entries, and send the per-rank entries to rank 0.

    Every rank must call this. Raises NumbersError on all ranks if a replicated entry differs from
    that on rank 0.
    """
    if not has_words(group, task):
        return PerRankState()
    facts = digest_replicated(task)
    if facts and (apart := group.check_equal(facts)):
        name, rank, _, _ = apart[0]
        raise NumbersError(
            f"state_on_ranks says that {name!r} is replicated, but its value on rank "
            f"{rank} of {group.size} differs from that on rank 0",
            hint=(
                "all-reduce the values that change it "
                "(torch.distributed.all_reduce), or declare it per_rank"
            ),
        )
    if not (names := find_per_rank(task)):
        return PerRankState()
    assert task.state is not None
    state = task.state()
    tree = {name: read_entry(name, state[name]) for name in names}
    skeleton, tensors = checkpoint.split(tree, f"{OF_RANK}{group.rank}")
    for name, tensor in tensors.items():
        checkpoint.check_storable(name, tensor)
    held = {name: _on_host(tensor) for name, tensor in tensors.items()}
    table = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in held.items()}
    rows = [json.loads(text) for text in group.exchange(json.dumps([skeleton, table]))]
    contents = _send_to_first(group, held, max(_num_bytes(table) for _, table in rows))
    if contents is None:
        return PerRankState()
    files = {
        f"{OF_RANK}{rank}.safetensors": _unpack(table, contents[rank])
        for rank, (_, table) in enumerate(rows)
        if rank and table
    }
    trees = {str(rank): each for rank, (each, _) in enumerate(rows) if rank}
    return PerRankState(files, {TREES: json.dumps(trees).encode()})


def _send_to_first(group: Group, held: Mapping[str, Tensor], most_bytes: int) -> Tensor | None:
    """Return the tensors of all ranks as rows of bytes on rank 0, and None on other ranks.

    `most_bytes` is the largest size of all ranks.
    """
    row = torch.zeros(max(1, most_bytes), dtype=torch.uint8)
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in held.values() if tensor.numel()]
    if flat:
        packed = torch.cat(flat)
        row[: len(packed)] = packed
    rows = group.gather_to_first(row.to(group.device))
    return None if rows is None else rows.cpu()


def _num_bytes(table: Mapping[str, Any]) -> int:
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in table.values())


def _unpack(table: Mapping[str, Any], content: Tensor) -> dict[str, Tensor]:
    found, start = {}, 0
    for name, (dtype, shape) in table.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        found[name] = content[start : start + size].clone().view(DTYPES[dtype]).reshape(shape)
        start += size
    return found


def count_saved(commit: Commit) -> int:
    """Return the number of ranks whose `per_rank` entries a checkpoint holds; 1 if it has none."""
    return 1 + (
        len(commit.json(TREES))
        if any(entry.name == TREES for entry in commit.manifest.files)
        else 0
    )


def check_fit(group: Group, task: ResolvedTask, commit: Commit) -> None:
    """Raise RunFolderError if a checkpoint's per-rank entries are of another number of ranks."""
    names, saved = find_per_rank(task), count_saved(commit)
    if names and saved != group.size:
        raise RunFolderError(
            f"{commit.folder} holds {_list(names)} of state() for {saved} "
            f"rank{'s' * (saved > 1)}, one for each, but the run has {group.size} "
            f"rank{'s' * (group.size > 1)} now",
            hint=f"resume with {saved} rank{'s' * (saved > 1)}: --ranks {saved}",
        )


def read(group: Group, task: ResolvedTask, commit: Commit) -> dict[str, Any]:
    """Return the per-rank entries of this rank from a checkpoint.

    The result is empty on rank 0, whose entries are in `state.json`.
    """
    if group.is_first or not find_per_rank(task):
        return {}
    skeleton = commit.json(TREES)[str(group.rank)]
    file = f"{OF_RANK}{group.rank}.safetensors"
    tensors = commit.read(file) if file in commit.names("") else {}
    found: dict[str, Any] = checkpoint.join(skeleton, tensors, commit.folder)
    return found


# ---- shards of a stream


def has_shards(group: Group, assembly: Assembly) -> bool:
    """Return whether each rank reads shards of its own."""
    return not group.is_alone and getattr(assembly.feed.source, "is_sharded", False)


def gather_shards(group: Group, assembly: Assembly) -> dict[str, Any]:
    """Return the states of the shards of all other ranks, on rank 0. Every rank must call this."""
    if not has_shards(group, assembly):
        return {}
    source: Any = assembly.feed.source
    try:
        skeleton, tensors = checkpoint.split(source.state_dict()[SHARDS])
    except TaskError:
        source.forget_states()
        skeleton, tensors = checkpoint.split(source.state_dict()[SHARDS])
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    mine = json.dumps([skeleton, base64.b64encode(safetensors.save(held)).decode()])
    found: dict[str, Any] = {}
    texts = group.exchange(mine)
    for text in texts[1:] if group.is_first else ():
        skeleton, content = json.loads(text)
        found |= checkpoint.join(skeleton, safetensors.load(base64.b64decode(content)))
    return found


def join_shards(more: Mapping[str, Any], others: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the run with the shards of the other ranks."""
    if not others:
        return more
    source = more[SOURCE]
    return {**more, SOURCE: {**source, SHARDS: {**source[SHARDS], **others}}}
