"""Parts that a run trains with, and the log records that are made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from surefoot.components.data.feed import Feed, to_device
from surefoot.components.data.loader.bad import ReadResult, read_sound
from surefoot.components.data.loader.batches import LoaderNotice
from surefoot.components.data.loader.jobs import look, sample_ids
from surefoot.components.data.order import Keys
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.observe.meter import Summary, make_step_record
from surefoot.components.precision.policy import PLAIN, Policy
from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import Timing
from surefoot.contract.task import Batch, ResolvedTask, Source
from surefoot.core.schedule.plan import Curve
from surefoot.runtime.attributes.tracker import AttributeTracker
from surefoot.runtime.comm.group import Group
from surefoot.train.assemble.lengths import RunSchedule
from surefoot.train.assemble.reading import read_once
from surefoot.train.environment import circumstances
from surefoot.train.evaluate import Evaluation, Reading, evaluate
from surefoot.train.record.noticed.unfrozen import TrainedSet
from surefoot.train.resume.program import Program
from surefoot.train.step import LiveUpdate, StepParts

if TYPE_CHECKING:
    from surefoot.components.compiler.regions import CompiledRegions
    from surefoot.components.memory.recompute import RecomputeHandle
    from surefoot.components.optim.average import WeightAverage
    from surefoot.components.stability.noise import GradientNoise, Noise


@dataclass(frozen=True)
class Engine:
    """Device, precision, weight average, steps, recomputation and compilation of a run."""

    device: torch.device
    policy: Policy
    average: WeightAverage | None
    steps: StepParts
    attributes: AttributeTracker
    recomputed: RecomputeHandle | None
    compiled: CompiledRegions | None = None
    noise: GradientNoise | None = None


@dataclass(frozen=True)
class Assembly:
    """All parts that a run trains with: spec, task, model, data, optimizers, schedule, notes."""

    spec: RunSpec
    task: ResolvedTask
    model: nn.Module
    evaluation: Callable[[str], Source]
    updates: list[LiveUpdate]
    course: RunSchedule
    schedule: Curve
    engine: Engine
    notes: list[str]
    told: list[str]  # notes that are printed at the start too
    tried: Evaluation | None = None  # of a few samples
    evaluates: bool = True  # the run evaluates the split of its spec
    # printed at the start, even with --quiet
    warnings: list[str] = field(default_factory=list)
    trained: TrainedSet = field(kw_only=True)

    @property
    def feed(self) -> Feed:
        return self.course.feed

    def read(self, epoch: int, ids: np.ndarray) -> Batch:
        """Return the samples `ids` of `epoch` as an augmented batch on the device of the run.

        With `data.on_bad = "skip"`, unreadable samples are left out. Otherwise an error of the
        source is raised unchanged.
        """
        source, augment, seed = self.feed.source, self.task.augment, self.spec.train.seed
        skips = self.spec.data.on_bad == "skip"
        found = (
            read_sound(source, ids) if skips else ReadResult(look(source, epoch, ids.copy(), seed))
        )
        batch = to_device(found.whole, self.engine.device)
        if augment is None:
            return batch
        numbers = sample_ids(source, found.readable_ids(ids))
        return augment(batch, Keys(seed, epoch, numbers, self.engine.device))

    def reading(self, tell: Callable[[LoaderNotice], None]) -> Reading:
        """Return a function that reads the batches of an evaluation with the loader settings.

        `tell` is called with notices about failed workers, unreadable samples and other data
        problems.
        """
        settings = replace(self.engine.steps.reader.loader.settings, most=0)
        return lambda source, batch, device, share, key: read_once(
            self.spec, source, batch, device, settings, tell, share, key
        )

    def evaluate(
        self,
        split: str,
        group: Group,
        tell: Callable[[int, int | None], None],
        notice: Callable[[LoaderNotice], None],
    ) -> Evaluation:
        """Evaluate the current weights of the model on `split`.

        The ranks of `group` share the samples. `tell` is called with the number of samples
        evaluated so far and with the total (None if unknown). `notice` is called with notices of
        the data loader.
        """
        return evaluate(
            self.model,
            self.task,
            self.evaluation(split),
            split=split,
            device=self.engine.device,
            batch=self.spec.evaluate.batch or self.spec.train.batch,
            score=self.spec.evaluate.score,
            precision=self.engine.policy.compute,
            tell=tell,
            read=self.reading(notice),
            group=group,
            is_even=self.is_even,
            seed=self.spec.train.seed,
            limit=self.spec.evaluate.batches,
        )

    @property
    def evaluation_intervals(self) -> dict[str, str]:
        """Interval of each split that the run evaluates.

        The default, an epoch, is 5 % of a run whose data have no length.
        """
        source, table = self.feed.source, self.spec.evaluate
        if not self.evaluates:
            return {}
        is_endless = isinstance(source, Iterated) and source.repeats
        # of a time, each rank would have a clock of its own
        can_divide = self.course.total_steps is not None or self.feed.share.size == 1
        if is_endless and can_divide and "every" not in table.model_fields_set:
            return dict.fromkeys(table.splits, "5 %")
        return table.intervals

    @property
    def is_even(self) -> bool:
        """True if all ranks must run the same number of passes in a step (stages 2 and 3)."""
        ranks = self.engine.steps.collectives.ranks
        return ranks is not None and ranks.is_even

    @property
    def noise(self) -> Noise | None:
        """Gradient noise estimated from the last steps.

        None if `observe.noise` is off or there were too few steps.
        """
        watched = self.engine.noise
        return None if watched is None else watched.estimate()

    @property
    def said(self) -> tuple[str, ...]:
        """Notes for the start: `told`, and the compute precision unless it is the default."""
        policy = self.engine.policy
        return (
            *([] if policy.why == PLAIN.why else [f"computing in {policy.compute} ({policy.why})"]),
            *self.told,
        )

    def make_started_record(
        self,
        generation: int,
        spec: RunSpec,
        program: Program,
        notes: tuple[str, ...],
        *,
        first_step: int,
        parent: Mapping[str, Any],
    ) -> events.Started:
        """Return the Started record of an attempt.

        `spec` is the spec of the attempt with the number of threads and absolute paths filled in.
        """
        source = self.feed.source
        return events.Started(
            generation=generation,
            spec_id=self.spec.id,
            spec=spec.as_tables(),
            task=self.task.name,
            data={
                "describe": source.describe(),
                "digest": source.digest,
                "guarantee": source.guarantee,
            },
            unit=self.task.unit,
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            seed=spec.train.seed,
            total_steps=self.course.total_steps,
            steps_per_epoch=self.feed.steps_per_epoch,
            notes=notes,
            first_step=first_step,
            parent=parent,
            precision={"compute": self.engine.policy.compute, "why": self.engine.policy.why},
            **circumstances(str(self.engine.device), program),
        )

    def make_step_record(self, generation: int, summary: Summary, timing: Timing) -> events.Step:
        """Return the Step record of the steps that `summary` and `timing` summarize."""
        ranks, noise = self.engine.steps.collectives.ranks, self.noise
        groups = {update.name: update.guarded.groups for update in self.updates}
        source: Any = self.feed.source
        mixture = source if hasattr(type(source), "order_of") else None
        record = make_step_record(
            summary, timing, groups, generation=generation, device=self.engine.device
        )
        return replace(
            record,
            noise={} if noise is None else asdict(noise),
            ranks={} if ranks is None else ranks.paces.take(),
            sources={} if mixture is None else mixture.count(self.feed, summary.step),
        )
