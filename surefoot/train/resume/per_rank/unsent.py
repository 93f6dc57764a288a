"""PowerSGD residuals (gradients that are not sent yet), saved and restored for each rank.

Rank 0 writes a file for each rank, and a file with the state that all ranks share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.components.checkpoint import Commit

if TYPE_CHECKING:
    from surefoot.components.parallel.low_rank import LowRankState
    from surefoot.train.step.ranks import Ranks

ALIKE = "unsent.safetensors"
OF_RANK = re.compile(r"unsent-rank-(\d+)\.safetensors")
Files = dict[str, dict[str, Tensor]]
Names = Mapping[int, str]  # name of a parameter by its id


def powersgd_state_of(ranks: Ranks | None, names: Names) -> dict[str, LowRankState]:
    """Return the PowerSGD state by update and parameter name."""
    if ranks is None:
        return {}
    pairs = zip(ranks.names, ranks.replicas, strict=True)
    return {
        f"{update}/{names[id(each.parameter)]}": each
        for update, replicas in pairs
        for each in replicas.held()
    }


def num_bytes(ranks: Ranks | None) -> int:
    """Return the number of bytes of the residuals of all ranks."""
    if ranks is None:
        return 0
    held = [each.residual for replicas in ranks.replicas for each in replicas.held()]
    return int(ranks.group.size * sum(each.numel() * each.element_size() for each in held))


def gather(ranks: Ranks | None, names: Names) -> Files:
    """Return the files of all ranks on rank 0, and none on other ranks. Every rank must call this.

    Tensors are sent one at a time, so that only rank 0 needs memory for all of them.
    """
    files: Files = {}
    for name, each in powersgd_state_of(ranks, names).items():
        assert ranks is not None
        rows = ranks.group.gather_to_first(each.residual.to(ranks.group.device))
        if rows is None:
            continue
        alike = {f"warm/{name}": each.warm, f"unit/{name}": each.unit}
        files.setdefault(ALIKE, {}).update(
            {key: tensor.clone().cpu() for key, tensor in alike.items()}
        )
        for rank, row in enumerate(rows.cpu().unbind()):
            files.setdefault(f"unsent-rank-{rank}.safetensors", {})[f"unsent/{rank}/{name}"] = row
    return files


@torch.no_grad()
def restore(ranks: Ranks | None, names: Names, commit: Commit) -> list[str]:
    """Load the residuals of this rank; return messages if they are not restored exactly.

    Every rank must call this. If the number of ranks differs from that of the checkpoint, rank 0
    gets the sum of all residuals, because only the sum determines which gradients are sent in the
    end.
    """
    held = powersgd_state_of(ranks, names)
    for each in held.values():
        each.residual.zero_()
    saved = sorted(
        int(found.group(1)) for name in commit.names("") if (found := OF_RANK.fullmatch(name))
    )
    if not saved:
        return []
    if ranks is None or not held:
        return [
            (
                f"the saved PowerSGD residuals of {len(saved)} ranks are dropped: "
                "this run does not compress with PowerSGD"
            )
        ]
    alike = commit.read(ALIKE)
    lost = [
        key.removeprefix("unit/")
        for key in alike
        if key.startswith("unit/") and key.removeprefix("unit/") not in held
    ]
    for name, each in held.items():
        if f"unit/{name}" in alike:
            each.unit.copy_(alike[f"unit/{name}"])
            warm = alike[f"warm/{name}"]
            each.warm.copy_(warm if warm.shape == each.warm.shape else each.fresh)
    told = []
    if len(saved) == ranks.group.size:
        _add(commit, ranks.group.rank, held)
    else:
        for rank in saved if ranks.group.is_first else ():
            _add(commit, rank, held)
        told = [
            (
                f"the saved PowerSGD residuals of {len(saved)} ranks are summed on "
                f"rank 0: {ranks.group.size} ranks resume"
            )
        ]
    if lost:
        told.append(
            f"the saved PowerSGD residuals of {', '.join(lost[:8])} are dropped: "
            "these gradients are no longer compressed"
        )
    return told


def _add(commit: Commit, rank: int, held: Mapping[str, LowRankState]) -> None:
    prefix = f"unsent/{rank}/"
    for key, tensor in commit.read(f"unsent-rank-{rank}.safetensors").items():
        each = held.get(key.removeprefix(prefix))
        if each is not None and each.residual.shape == tensor.shape:
            each.residual.add_(tensor.to(each.residual.device))
