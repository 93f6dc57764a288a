"""Check of BatchNorm under gradient accumulation, where its statistics are per microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.feed import Feed
from surefoot.components.data.sources.iterated import Iterated, copy_of
from surefoot.components.stability.norms import find_batch_norms
from surefoot.contract.state import leaf_of
from surefoot.contract.task import Batch
from surefoot.core.units import format_percent
from surefoot.train.assemble import Assembly
from surefoot.train.preflight.contract import trial_context
from surefoot.train.preflight.samples import reads_by_index
from surefoot.train.quiet import preserve_state
from surefoot.train.step import LiveUpdate

MAX_MICROBATCHES = 4  # that are joined for the comparison, to limit memory


def check(assembly: Assembly) -> list[str]:
    """Return a warning if the model trains BatchNorm and batches are split into microbatches.

    The warning contains the measured effect on the gradient.
    """
    window, feed = assembly.feed.window(0), assembly.feed
    norms = [module for module in find_batch_norms(assembly.model).values() if module.training]
    parts = feed.microbatches(window)
    if len(parts) < 2 or not norms or not reads_by_index(feed.source):
        return []
    if isinstance(feed.source, Iterated):
        parts = parts[: _count_parts(feed.source)]
    parts = parts[:MAX_MICROBATCHES]

    def read(ids: np.ndarray) -> Batch:
        # a forward pass may write into its inputs; the data must not change
        return copy_of(assembly.read(window.epoch, ids))

    with preserve_state(assembly.model, assembly.task.state), torch.enable_grad():
        for module in norms:
            # only norms: dropout would draw different masks for the whole and its parts
            module.train()
        shares = [
            _relative_difference(
                assembly, update, [read(np.concatenate(parts))], list(map(read, parts))
            )
            for update in assembly.updates
        ]
    told = max((share for share in shares if share is not None), default=None)
    sizes, size = [_count(feed, ids) for ids in parts], _count(feed, window.ids)
    moved = (
        f"which changes the gradient of its first {sum(sizes):,} samples by {format_percent(told)}"
    )
    if told is None:  # not measured
        moved = "which changes its gradient"
    cure = (
        'train.batchnorm = "group" (or "layer") replaces '
        "BatchNorm by a norm that normalizes each sample separately"
    )
    return [
        (
            f"BatchNorm normalizes a microbatch of {sizes[0]:,} samples, not the "
            f"batch of {size:,}, {moved}; {cure}"
        )
    ]


def _count_parts(source: Any) -> int:
    """Return the number of microbatches of the first step, which has been read."""
    return int(source.count_step()[1])


def _count(feed: Feed, ids: np.ndarray) -> int:
    """Return the number of samples in microbatches of the first step, which have been read."""
    source = feed.source
    if not isinstance(source, Iterated):
        return len(ids)
    return sum(source.count_samples(0, number, None) or 0 for number in ids.tolist())


def _relative_difference(
    assembly: Assembly, update: LiveUpdate, whole: Sequence[Batch], parts: Sequence[Batch]
) -> float | None:
    """Return how much the gradients of `whole` and `parts` differ, relative to that of `whole`.

    The result is None if the gradient of `whole` is zero, if the difference is not finite, or if
    the model computes its loss in training mode only.
    """
    try:
        one, other = (_gradient(assembly, update, batches) for batches in (whole, parts))
    # an error that steps have too is reported there
    except Exception:  # noqa: BLE001
        return None
    size = math.sqrt(sum(float(each.square().sum()) for each in one))
    apart = math.sqrt(
        sum(float((mine - theirs).square().sum()) for mine, theirs in zip(one, other, strict=True))
    )
    return apart / size if size > 0 and math.isfinite(apart) else None


def _gradient(assembly: Assembly, update: LiveUpdate, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the fp32 gradient of the mean loss over all of `batches`, per parameter."""
    params = [leaf_of(each) for each in update.guarded.parameters if each.requires_grad]
    found = [torch.zeros_like(each, dtype=torch.float32) for each in params]
    count = 0.0
    for batch in batches:
        with trial_context(assembly):
            loss = update.loss(assembly.model, batch)
        total = torch.stack([term.total * term.weight for term in loss.terms]).sum()
        count += sum(float(term.count) for term in loss.terms)
        if not total.requires_grad:  # a constant: images without boxes, a merged LoRA layer
            continue
        parts = torch.autograd.grad(total, params, allow_unused=True)
        for into, part in zip(found, parts, strict=True):
            if part is not None:
                into += part
    return [each / count for each in found] if count else found
