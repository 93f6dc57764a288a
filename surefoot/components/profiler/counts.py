"""Counts of the FLOPs, bytes and time of each torch operator that a model runs.

The counts are available for a whole step and for each module.

    with Counter(model) as counter:
        loss(model(batch)).backward()
    counter.of()            # the whole step, one row for each operator and dtype
    counter.modules()       # the modules that ran; a module includes its backward pass and its
        submodules

`Counter` is a `torch.utils._python_dispatch.TorchDispatchMode`, as the FLOP counter of torch is. A
fused operator counts as one call. Operators inside a compiled graph are not counted.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from surefoot.components.profiler.formulas import COMPLEX, count
from surefoot.components.profiler.phases.device_line import make_cuda_event
from surefoot.components.profiler.whereabouts import ModuleFollower
from surefoot.core.cost.roofline import OperatorWork
from surefoot.core.process.forked import uses_gpu

WHOLE = ""  # the name of the step itself among the modules


@dataclass
class _Tally:
    calls: int = 0
    flops: int = 0
    model_flops: int = 0
    again_flops: int = 0
    num_bytes: int = 0
    elapsed_s: float = 0.0


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the FLOPs, bytes and time of each torch operator that runs in it.

    Operators are attributed to the modules of `model`, under their names in
    `model.named_modules()`. On a GPU, the time of a call is that between two CUDA events around it.
    The events are read when the context ends.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whereabouts = ModuleFollower(model)
        self._tallies: dict[tuple[str, str, str, str], _Tally] = defaultdict(_Tally)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event, list[_Tally]]] = []
        self._tracker = ModuleTracker()  # used only to detect a backward pass
        # operators without a formula: they count bytes and time, and no FLOPs
        self.unknown: set[str] = set()

    def __enter__(self) -> Self:
        self._whereabouts.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._whereabouts.__exit__(kind, error, trace)
        if self._events:
            torch.cuda.synchronize()
        for begun, ended, tallies in self._events:
            for tally in tallies:
                tally.elapsed_s += begun.elapsed_time(ended) / 1e3
        self._events.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # events of a GPU cannot time an operator that runs on the CPU
        events = (make_cuda_event(), make_cuda_event()) if uses_gpu() else None
        if events is not None:
            events[0].record()
        started_s = time.perf_counter()
        out = func(*args, **kwargs)
        elapsed_s = time.perf_counter() - started_s
        if events is not None and _is_on_cuda([out, *args]):
            events[1].record()
        else:
            events = None
        call = count(func, args, kwargs, out)
        name = str(func.overloadpacket).removeprefix("aten.")
        if not call.is_known:
            # the name includes a complex dtype: for real dtypes the operator may have a formula
            self.unknown.add(f"{name} ({call.dtype})" if call.dtype in COMPLEX.values() else name)
        around = self._whereabouts.module_stack()
        is_backward, is_on = self._tracker.is_bw, torch.is_grad_enabled()
        is_again = is_backward and is_on  # gradients are on inside a backward pass: a recomputation
        # otherwise it is a matmul of the optimizer, such as Muon's
        is_asked = not is_again and (is_backward or is_on or bool(around))
        tallies = [
            self._tallies[module, name, call.dtype, call.group] for module in (WHOLE, *around)
        ]
        for tally in tallies:
            tally.calls += 1
            tally.flops += call.flops
            tally.model_flops += call.model_flops if is_asked else 0
            tally.again_flops += call.model_flops if is_again else 0
            tally.num_bytes += call.num_bytes
            tally.elapsed_s += elapsed_s if events is None else 0.0
        if events is not None:
            self._events.append((*events, tallies))
        return out

    def of(self, module: str = WHOLE) -> list[OperatorWork]:
        """Return one row for each operator and dtype that ran inside `module`, the slowest first.

        `module` is a name that `modules` returns, or "" for the whole step.
        """
        rows = [
            OperatorWork(
                operator=name,
                dtype=dtype,
                group=group,
                calls=tally.calls,
                flops=tally.flops,
                model_flops=tally.model_flops,
                num_bytes=tally.num_bytes,
                elapsed_s=tally.elapsed_s,
            )
            for (where, name, dtype, group), tally in self._tallies.items()
            if where == module
        ]
        return sorted(rows, key=lambda row: -row.elapsed_s)

    def modules(self) -> list[str]:
        """Return the names of the modules that ran an operator, in order of their first operator.

        The model itself has the name ".".
        """
        return list(dict.fromkeys(where for where, *_ in self._tallies if where != WHOLE))

    @property
    def again_flops(self) -> int:
        """FLOPs of the matmuls that backward passes recomputed because of activation checkpointing.

        They are not part of the model FLOPs.
        """
        return sum(
            tally.again_flops for (where, *_), tally in self._tallies.items() if where == WHOLE
        )


def _is_on_cuda(value: Any) -> bool:
    """Return whether `value` is a tensor on a GPU, or a list or tuple that contains one."""
    if isinstance(value, list | tuple):
        return any(map(_is_on_cuda, value))
    return isinstance(value, Tensor) and value.is_cuda
