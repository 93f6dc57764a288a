"""Recording of a window of a loop's steps with torch.profiler.

The window opens and closes automatically. Outside of it, the loop has no overhead.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self, final

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, schedule

from surefoot.components.profiler.tracing import trace
from surefoot.components.profiler.tracing.memory import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    KnownBlocks,
)
from surefoot.components.profiler.tracing.ranges import ModuleRanges, Ranges
from surefoot.contract.run_folder import files
from surefoot.core import place
from surefoot.core.errors import InputError, hint_unwritten
from surefoot.core.process.memory_limits import find_available_bytes

SHAPES, STACKS, MEMORY = LEVELS = ("shapes", "stacks", "memory")
TRACE_FILE, FACTS_FILE = "trace.json.gz", "facts.json"
MAX_TRACE_BYTES = 50_000_000
CHECK_EVERY = 20  # recorded steps between two readings of memory
# closing a window took 14 to 15 times the memory of recording it; twice that, for other models
CLOSING_FACTOR = 30


@dataclass(frozen=True, kw_only=True)
class Window:
    """Schedule of a profile, which records one window of steps.

    Args:
        wait: Steps before the profiler starts.
        warmup: Steps for which the profiler runs, but whose events are discarded.
        active: Steps that are recorded.

    Raises:
        InputError: If `active` is less than 1, or another number is negative.
    """

    wait: int = 10
    warmup: int = 10
    active: int = 20

    def __post_init__(self) -> None:
        if self.active < 1 or self.wait < 0 or self.warmup < 0:
            raise InputError(
                f"a window of {self.active} steps after {self.wait} and {self.warmup} cannot be "
                "recorded",
                hint="record at least 1 step, for example with --steps 20",
            )

    @property
    def num_steps(self) -> int:
        return self.wait + self.warmup + self.active

    def fitted(self, num_left: int | None) -> Window:
        """Return this window, shortened if it has more than `num_left` steps.

        In a shortened window, at most half of the `num_left` steps are before the recorded ones. If
        `num_left` is None, the number of steps is not limited. Raises InputError if it is less than
        1.
        """
        if num_left is None or num_left >= self.num_steps:
            return self
        if num_left < 1:
            raise InputError(
                "there is no step to record", hint="profile a run that has steps left, or its spec"
            )
        before = min(self.wait + self.warmup, num_left // 2)
        warmup = min(self.warmup, (before + 1) // 2)
        return Window(
            wait=before - warmup, warmup=warmup, active=min(self.active, num_left - before)
        )

    def __str__(self) -> str:
        return f"{self.active} steps, after {self.wait} that wait and {self.warmup} that warm up"


@final
class Profiler:
    """Recorder of one window of steps of any loop, which uses torch.profiler.

    Call `step_done()` after each step. Use the object as a context around the loop, or call
    `close()` after the loop. `is_done` is true as soon as the window has ended. The window ends
    early if the loop ends, or if all of its steps would take more than half of the available
    memory. The steps recorded until then are written.

        with Profiler(model, "profile") as profiler:
            for batch in loader:
                train_on(batch)
                profiler.step_done()

    Args:
        model: The model, for the names of modules and the memory of parameters.
        folder: The folder of the trace.
        window: The steps to record.
        levels: Any of "shapes", "stacks" and "memory"; each adds overhead.
        optimizers: Optimizers, whose memory is reported separately.
        more_state: Further tensors to report as optimizer memory.
        first_step: The number of the first step.
        nvtx: Record nothing, but open NVTX ranges and start the capture for nsys or ncu, which
            record the window.

    Raises:
        InputError: For an unknown level, for `nvtx` without a GPU, for a trace that cannot be
            written, and at the end of a context whose loop ended before any step was recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        window: Window = Window(),
        levels: Sequence[str] = LEVELS,
        optimizers: Iterable[Optimizer] = (),
        more_state: Iterable[Tensor] = (),
        first_step: int = 1,
        nvtx: bool = False,
    ) -> None:
        if nvtx:
            check_gpu()
        self.folder, self.window, self.levels = (
            Path(folder).absolute(),
            window,
            () if nvtx else check_levels(levels),
        )
        self._nvtx = nvtx
        self._model, self._optimizers, self._more = model, list(optimizers), list(more_state)
        self.ranges: Ranges | None = None  # None unless the window is open
        self._first_step, self._num_done = first_step, 0
        self._running: profile | None = None
        self._open = ExitStack()
        self._before: dict[str, dict[int, int]] = {}
        self._gradients: list[tuple[int, int]] = []
        self._marks_s: list[float] = []  # the end of every step so far
        self.is_done = self._is_short = False
        # resident bytes of this process, every CHECK_EVERY recorded steps
        self._resident: list[int] = []
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._advance(None)

    def step_done(self, epoch: int | None = None) -> None:
        """Record that a step has ended.

        `epoch` is the epoch of the next step; the range of that epoch is named after it.
        """
        if self.is_done:
            return
        self._num_done += 1
        self._marks_s.append(time.perf_counter())
        if self.ranges is not None:
            self.ranges.end("step")
        if self._num_done == self.window.num_steps or self._needs_too_much_memory():
            self.close()
            return
        if self._running is not None:
            self._running.step()
        self._advance(epoch)

    def _advance(self, epoch: int | None) -> None:
        """Start the profiler, the recording of memory, and the ranges of the next step, if due."""
        if self._num_done == self.window.wait and self._running is None and not self._nvtx:
            self._running = self._make()
            self._running.start()
        if self._num_done == self._first_recorded and MEMORY in self.levels and not self._before:
            self._watch_memory()
        if self._num_done == self.window.wait + self.window.warmup and self.ranges is None:
            if self._nvtx:
                self._begin_capture()
            self.ranges = Ranges()
            self._open.callback(self.ranges.end)
            parts = ModuleRanges(self._model)
            parts.open()
            self._open.callback(parts.close)
        if self.ranges is not None:
            if epoch is not None:
                self.ranges.begin("epoch", f"epoch {epoch}")
            self.ranges.begin("step", f"{trace.OUR_STEP}{self._first_step + self._num_done}")

    def _needs_too_much_memory(self) -> bool:
        """Return whether closing the window now would take more than half of the available memory.

        The memory of the recorded steps is the growth of the process since the first reading. By
        then the loop has allocated the memory that it needs itself.
        """
        if self._running is None or self._num_recorded == 0 or self._num_recorded % CHECK_EVERY:
            return False
        self._resident.append(psutil.Process().memory_info().rss)
        readings = len(self._resident)
        if readings < 2:
            return False
        recorded = (self._resident[-1] - self._resident[0]) / (readings - 1) * readings
        self._is_short = recorded * CLOSING_FACTOR > find_available_bytes() / 2
        return self._is_short

    def _begin_capture(self) -> None:
        """Start the capture of nsys or ncu, which ends when the window closes.

        Until then, every range and operator opens an NVTX range.
        """
        capture: Any = torch.cuda.profiler  # torch has no type annotations for both
        mark: Any = torch.autograd.profiler.emit_nvtx
        torch.cuda.synchronize()
        capture.start()
        self._open.callback(capture.stop)
        self._open.callback(torch.cuda.synchronize)
        self._open.enter_context(mark())

    @property
    def _first_recorded(self) -> int:
        """Index of the step from which memory is recorded: the last step of the warm-up.

        This step is before the window, because torch records the release of a block only if it
        recorded the allocation.
        """
        return self.window.wait + max(0, self.window.warmup - 1)

    def _make(self) -> profile:
        self._open.callback(place.quiet_profiler())
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        lead = min(1, self.window.warmup)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises a warm-up, which the window defines
            plan = schedule(
                wait=0, warmup=self.window.warmup - lead, active=lead + self.window.active, repeat=1
            )
            return profile(
                activities=activities,
                schedule=plan,
                record_shapes=SHAPES in self.levels,
                with_stack=STACKS in self.levels,
                profile_memory=MEMORY in self.levels,
            )

    def _watch_memory(self) -> None:
        self._before = self._find_known_blocks()
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                # torch has no type annotations for it
                hook: Any = parameter.register_post_accumulate_grad_hook
                self._open.callback(hook(self._record_gradient).remove)

    def _record_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._gradients.append((time.time_ns(), _address(parameter.grad)))

    def _find_known_blocks(self) -> dict[str, dict[int, int]]:
        """Return the memory blocks whose category is known now: category -> address -> bytes."""
        held = [
            value
            for each in self._optimizers
            for state in each.state.values()
            for value in state.values()
        ]
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        whole = [*self._model.parameters(), *self._model.buffers()]
        return {
            name: {
                _address(each): each.untyped_storage().nbytes()
                for each in found
                if _is_on(each, self._device)
            }
            for name, found in (
                (OPTIMIZER, [*held, *self._more]),
                (GRADIENTS, grads),
                (PARAMETERS, whole),
            )
        }

    def close(self) -> bool:
        """End the window and write the recorded steps; return whether there are any.

        A further call only returns this value.
        """
        if self.is_done:
            return self._num_recorded > 0
        self.is_done = True
        after = self._find_known_blocks() if self._before else {}
        self._open.close()
        self.ranges = None
        if self._running is None:
            return self._nvtx and self._num_recorded > 0
        running, self._running = self._running, None
        if self._num_recorded < 1:
            running.on_trace_ready = None
            running.stop()
            return False
        running.stop()
        self._write(running, after)
        return True

    @property
    def _num_recorded(self) -> int:
        return max(0, self._num_done - self.window.wait - self.window.warmup)

    def _write(self, running: profile, after: Mapping[str, Mapping[int, int]]) -> None:
        """Write the trace, and a file with the facts that the trace lacks.

        Raises InputError if they cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path, draft = self.folder / TRACE_FILE, self.folder / f".{TRACE_FILE}.draft.json.gz"
            draft.unlink(missing_ok=True)  # torch would write through a link
            running.export_chrome_trace(str(draft))
            num_kept = trace.shrink(draft, MAX_TRACE_BYTES)
            draft.replace(path)
            known = KnownBlocks(
                before=self._before,
                after=after,
                gradients=self._gradients,
                device=_number(self._device),
            )
            facts = {
                "version": 1,
                "first_step": self._first_step + self._num_done - self._num_recorded,
                "num_steps": self._num_recorded,
                "num_kept": num_kept,
                "short_of_memory": self._is_short,
                "levels": list(self.levels),
                "step_s": self._step_times(),
                "device": str(self._device),
                "memory": known.as_row() if self._before else None,
            }
            files.write_whole(self.folder, FACTS_FILE, json.dumps(facts).encode())
        except OSError as error:
            raise InputError(
                f"the profile cannot be written into {self.folder}: {error.strerror}",
                hint=hint_unwritten(error, "record fewer steps"),
            ) from error

    def _step_times(self) -> dict[str, float | None]:
        """Return the median step time in seconds, before the profiler ran and inside the window.

        A time is None if there is no step to measure.
        """
        lengths = [
            later - earlier
            for earlier, later in zip(self._marks_s, self._marks_s[1:], strict=False)
        ]
        before, inside = lengths[: max(0, self.window.wait - 1)], lengths[-self._num_recorded :]
        return {
            "before": median(before) if before else None,
            "inside": median(inside) if inside else None,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.close() and error is None:
            raise InputError(
                f"the loop ended after {self._num_done} steps, before the window of {self.window}",
                hint="record fewer: window=Window(wait=0, warmup=1, active=1)",
            )


def check_gpu() -> None:
    """Raise InputError if torch sees no GPU, which nsys and ncu need."""
    if not torch.cuda.is_available():
        raise InputError(
            "torch sees no GPU, so there is nothing for nsys or ncu to record",
            hint="leave --nvtx out: torch's own profiler records",
        )


def check_levels(levels: Sequence[str]) -> tuple[str, ...]:
    """Return the levels in the order of `LEVELS`, each of them once.

    Raises InputError for an unknown level.
    """
    for each in levels:
        if each not in LEVELS:
            raise InputError(
                f"{each!r} cannot be recorded", hint=f"give some of {', '.join(LEVELS)}"
            )
    return tuple(each for each in LEVELS if each in levels)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device == device and value.layout == torch.strided


def _number(device: torch.device) -> int:
    return -1 if device.type == "cpu" else device.index or 0
