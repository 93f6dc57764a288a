"""Peak memory of a step (memory.predict): predicted in `shape.json`, and measured in the log."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from surefoot.components.data.sources.iterated import Iterated
from surefoot.contract import events
from surefoot.contract.run_folder import files
from surefoot.contract.state import StepReport
from surefoot.core.errors import InputError
from surefoot.core.units import format_bytes, format_percent
from surefoot.train.assemble import Assembly
from surefoot.train.failure.out_of_memory import WithinMemory
from surefoot.train.quiet import preserve_attributes, preserve_state
from surefoot.train.record.noticed.attribute_notes import OptimizerWatch
from surefoot.train.record.noticed.in_place import WatchedForWrites
from surefoot.train.record.noticed.unfrozen import Unfreezing
from surefoot.train.record.telling import Telling

if TYPE_CHECKING:
    from surefoot.components.memory.measure import Rise
    from surefoot.train.preflight.predicted import Prediction

FILE = "shape.json"
MEASURED = 3  # the step of an attempt that is measured, when all persistent tensors exist


def make_step_function(
    assembly: Assembly, telling: Telling, folder: Path
) -> Callable[[int], StepReport]:
    """Return the step function of a run with its checks; called with the number of the step."""
    observers = assembly.engine.steps.observers.copy()
    step: Callable[[int], StepReport] = Unfreezing(
        WithinMemory(assembly, telling, folder, observers), assembly, telling
    )
    step = WatchedForWrites(OptimizerWatch(step, assembly, telling), assembly, telling, observers)
    if assembly.spec.memory.predict:
        step = PeakCheck(step, assembly, telling, folder)
    is_timed = assembly.spec.train.cudnn_benchmark and torch.backends.cudnn.benchmark
    if is_timed:
        from surefoot.train.record.convolutions import TimedConvolutions

        step = TimedConvolutions(step, telling, observers)
    ranks = assembly.engine.steps.collectives.ranks
    if ranks is None or ranks.group.is_alone or not ranks.group.is_first:
        return step
    from surefoot.train.record.waited import WaitRecorder

    return WaitRecorder(step, ranks.paces, telling)


@final
class PeakCheck:
    """Step function that measures the peak memory of the third step of an attempt.

    The peak is logged together with the prediction.
    """

    def __init__(
        self, step: Callable[[int], StepReport], assembly: Assembly, telling: Telling, folder: Path
    ) -> None:
        self._step, self._assembly, self._telling, self._left = step, assembly, telling, MEASURED
        self._microbatch = assembly.feed.microbatch
        self._predicted = self._predict()
        if self._predicted is not None:
            telling.say(
                f"predicted peak memory of a step: {format_bytes(self._predicted.peak_bytes)}"
            )
            with contextlib.suppress(OSError):
                files.write_whole(
                    folder, FILE, f"{json.dumps(self._predicted.as_row(), indent=1)}\n".encode()
                )

    def _predict(self) -> Prediction | None:
        """Return the predicted peak; the model, the task and random generators stay unchanged."""
        from surefoot.train.preflight.predicted import predict

        assembly = self._assembly
        try:
            if isinstance(assembly.feed.source, Iterated):
                raise InputError(
                    "the source returns each batch once, and the prediction would "
                    "consume the first batch"
                )
            with (
                preserve_attributes(assembly.task.task),
                preserve_state(assembly.model, assembly.task.state),
                torch.enable_grad(),
            ):
                return predict(
                    assembly.spec,
                    assembly.task,
                    source=assembly.feed.source,
                    num_ranks=assembly.feed.share.size,
                )
        except InputError as error:
            self._telling.warn(f"the peak memory of a step is not predicted: {error.message}")
            return None

    def __call__(self, number: int) -> StepReport:
        self._left -= 1
        if self._left:
            return self._step(number)
        for update in self._assembly.updates:
            update.guarded.clear_gradients()  # their release would not be recorded
        measure = (
            _Device(self._assembly)
            if self._assembly.engine.device.type == "cuda"
            else _HostPeak(self._assembly)
        )
        try:
            report = self._step(number)
        finally:
            peak = measure.stop()
        self._report_peak(number, peak)
        return report

    def _report_peak(self, number: int, peak: int | None) -> None:
        feed = self._assembly.feed
        is_same = feed.microbatch == self._microbatch and feed.batch_at(number - 1) == feed.largest
        predicted = self._predicted.peak_bytes if self._predicted is not None and is_same else None
        error = None if predicted is None or not peak else (predicted - peak) / peak
        self._telling.write(
            events.Memory(
                generation=self._telling.generation,
                time_s=time.time(),
                step=number,
                predicted_bytes=predicted,
                measured_bytes=peak,
                error=error,
            )
        )
        if error is not None:
            self._telling.say(
                f"step {number}: peak memory {format_bytes(peak)}, the prediction is "
                f"off by {format_percent(error)}"
            )


class _HostPeak:
    """Peak host memory of a step in bytes, from torch's profiler; None if it is in use."""

    def __init__(self, assembly: Assembly) -> None:
        from surefoot.components.memory.measure import Rise
        from surefoot.train.preflight.predicted import held_bytes

        self._held = held_bytes(assembly)
        self._rise: Rise | None = Rise()
        try:
            self._rise.start()
        except RuntimeError:
            self._rise = None

    def stop(self) -> int | None:
        return None if self._rise is None else self._held + self._rise.stop()


class _Device:
    """Peak GPU memory of a step in bytes, as torch's CUDA allocator reports it."""

    def __init__(self, assembly: Assembly) -> None:
        self._device = assembly.engine.device
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)
