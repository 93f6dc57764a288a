"""Conversion of a task to float64: its model and its batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.data.sources.wrapped import as_source
from surefoot.components.stability.norms import find_batch_norms
from surefoot.contract.task import Batch, ResolvedTask, Source
from surefoot.prove.layouts.pass_record import PassRecord
from surefoot.runtime.nested_tensors import map_tensors


class Wide:
    """Task whose model and batches are converted to float64, so that rounding is negligible.

    Args:
        found: The task to convert.
        float64: False to leave all dtypes as they are.
        record: Record of operators, which gets the model. It pauses while the model is built and
            data are read.
        plain: Let BatchNorm and dropout work as in evaluation. Only the loss can then depend on how
            a batch is split.
    """

    def __init__(
        self,
        found: ResolvedTask,
        *,
        float64: bool = True,
        record: PassRecord | None = None,
        plain: bool = False,
    ) -> None:
        self._task, self._own, self._record, self._plain = found.task, found.augment, record, plain
        self._convert = _to_fp64 if float64 else _as_it_is
        self._is_wide = float64
        self.augment = None if found.augment is None else self._augment

    def _augment(self, batch: Batch, keys: Any) -> Batch:
        assert self._own is not None
        with _pause(self._record):
            return map_tensors(self._own(batch, keys), self._convert)

    def model(self) -> nn.Module:
        with _pause(self._record):
            made: nn.Module = self._task.model()
        if self._is_wide:
            made = made.double()
        if self._plain:
            make_plain(made)
        if self._record is not None:
            self._record.know(made)
        return made

    def data(self, split: str) -> Source:
        with _pause(self._record):
            given = self._task.data(split)
            if given is None:  # the task has no such split
                return given
            source = as_source(given, getattr(self._task, "collate", None))
            if isinstance(source, Iterated) and source.loader is not None:
                loader = copy.copy(source.loader)
                convert = _Converting(loader.collate_fn, self._convert, self._record)
                vars(loader)["collate_fn"] = convert
                return Iterated(loader, source.num_batches if source.is_cut else None)
            made: Any = WideSource(source, self._convert, self._record)
        return made  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class _Converting(NamedTuple):
    """Collate function of a DataLoader whose tensors are converted."""

    collate: Callable[[Any], Batch]
    convert: Callable[[Tensor], Tensor]
    record: PassRecord | None

    def __call__(self, samples: Any) -> Batch:
        with _pause(self.record):
            return map_tensors(self.collate(samples), self.convert)


class WideSource:
    """Source whose tensors are converted, for example to float64."""

    def __init__(
        self, source: Source, convert: Callable[[Tensor], Tensor], record: PassRecord | None = None
    ) -> None:
        self._source, self._convert, self._record = source, convert, record

    def __len__(self) -> int:
        return len(self._source)

    def read(self, ids: np.ndarray) -> Batch:
        with _pause(self._record):
            return map_tensors(self._source.read(ids), self._convert)

    def seeded(self, key: int) -> Source:
        source: Any = self._source
        if hasattr(type(source), "seeded"):
            source = source.seeded(key)
        made: Any = WideSource(source, self._convert, self._record)
        return made  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def make_plain(model: nn.Module) -> None:
    """Fix the BatchNorm and dropout layers of `model` in evaluation mode; `train()` has no effect.

    Dropout inside RNN and attention modules is set to 0.
    """
    dropouts = [each for each in model.modules() if isinstance(each, nn.modules.dropout._DropoutNd)]
    for module in (*dropouts, *find_batch_norms(model).values()):
        module.training = False
        module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]
    for module in model.modules():
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


def _pause(record: PassRecord | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if record is None else record.pause()


def _to_fp64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
