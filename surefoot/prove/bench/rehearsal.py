"""Repetition of a spec's step outside of a run: forward pass, both passes, or the whole step.

Nothing is written.
"""

from __future__ import annotations

from typing import Literal, Self, get_args

import torch
from torch import Tensor

from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.optim.backward import backward
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Batch
from surefoot.core.errors import InputError
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.runtime.comm.mesh import Mesh
from surefoot.train import environment
from surefoot.train.assemble import Assembly, assemble

Mode = Literal["forward", "backward", "step"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Rehearsal:
    """Context in which the step of `spec` can be repeated before any training.

    The length of the run is extended to `steps` if it is shorter. `take("forward")` computes the
    losses of the first batch, and `take("backward")` also their gradients; both use batches that
    are already on the device. `take("step")` is a whole training step with data, clipping and
    optimizer step. The ranks of `group` share its batch.
    """

    def __init__(self, spec: RunSpec, *, steps: int, group: Group = ALONE) -> None:
        self._spec, self._steps, self._group = spec, steps, group
        self.num_taken = 0

    def __enter__(self) -> Self:
        self._put_back = environment.apply(self._spec)
        try:
            self.assembly = _assemble_for_steps(self._spec, self._steps, self._group)
            self.device = self.assembly.engine.device
            self.step = self.assembly.engine.steps.step_function()
            self.batches = self._read()
        except BaseException:
            self._put_back()
            raise
        return self

    def __exit__(self, *of_what: object) -> None:
        self._put_back()

    def take(self, mode: Mode) -> None:
        """Run one step, or the part of it that `mode` names, and wait for the device.

        Raises:
            InputError: For an unknown mode.
        """
        if mode not in MODES:
            raise InputError(f"there is no mode {mode!r}", hint=f"use one of {', '.join(MODES)}")
        if mode == "step":
            self.step(self.num_taken + 1)
        else:
            self._compute(with_gradients=mode == "backward")
        self.num_taken += 1
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def num_samples(self) -> int:
        """Number of samples in the first step, or of batches if their sizes are unknown."""
        feed = self.assembly.feed
        source, window = feed.source, feed.window(0)
        if not isinstance(source, Iterated):
            return len(window.ids)
        read = zip(feed.mine(window)[1], self.batches, strict=True)
        sizes = [source.count_samples(window.epoch, int(ids[0]), batch) for ids, batch in read]
        return len(window.ids) if None in sizes else sum(size or 0 for size in sizes)

    def _compute(self, *, with_gradients: bool) -> None:
        engine = self.assembly.engine
        for update in self.assembly.updates:
            if with_gradients:
                update.guarded.clear_gradients()
            for batch in self.batches:
                with engine.policy.context():
                    loss = update.loss(self.assembly.model, batch)
                if with_gradients:
                    totals: list[Tensor] = [term.total for term in loss.terms]
                    backward(
                        totals, [torch.full_like(total, 1.0 / self.num_samples) for total in totals]
                    )

    def _read(self) -> list[Batch]:
        """Return the microbatches of this rank's first step, augmented and on the device."""
        assembly, feed = self.assembly, self.assembly.feed
        window = feed.window(0)
        return [assembly.read(window.epoch, ids) for ids in feed.mine(window)[1]]


def _assemble_for_steps(spec: RunSpec, steps: int, group: Group) -> Assembly:
    """Assemble the spec, with its length extended to `steps` if it is shorter.

    A schedule ends with the length of the run.
    """
    mesh = Mesh(group, group, ALONE)
    assembly = assemble(spec, mesh=mesh)
    total = assembly.course.total_steps
    return (
        assembly
        if total is None or total >= steps
        else assemble(spec.replace(train={"length": f"{steps} steps"}), mesh=mesh)
    )
