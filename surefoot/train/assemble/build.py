"""Build all parts of a run from a spec and a task, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from surefoot.components.metrics import Better
from surefoot.contract.spec import RunSpec
from surefoot.runtime.comm.mesh import SOLO, Mesh
from surefoot.train.assemble import stages
from surefoot.train.assemble.assembly import Assembly
from surefoot.train.assemble.stages import Build
from surefoot.train.environment import give_back_large_blocks


class Stage(NamedTuple):
    """Stage of the assembly: its name, what it builds, and the reason for its place."""

    name: str
    build: Callable[[Build], None]
    why: str


ORDER = (
    Stage("device", stages.choose_device, "seeds come before all that may draw"),
    Stage("task", stages.resolve_task, "a task may bring tables of the spec"),
    Stage("data", stages.read_data, "the steps of an epoch follow from the number of samples"),
    Stage(
        "model",
        stages.make_model,
        "the seeds are set again, so that the weights do not depend on what reading the data drew",
    ),
    Stage("feed", stages.make_feed_of_rank, "it divides the samples among the ranks"),
    Stage(
        "storage",
        stages.set_storage_dtypes,
        "frozen parameters and their dtypes are settled before anything refers to parameters",
    ),
    Stage("recompute", stages.wrap_blocks, "sharding gathers the weights of a wrapped block"),
    Stage(
        "length",
        stages.make_course,
        "a length that does not fit is refused before a sample is read",
    ),
    Stage(
        "trial",
        stages.evaluate_few_samples,
        "a plateau schedule has to know which scores are better; sharded weights need all ranks",
    ),
    Stage("schedule", stages.make_schedule, "its lengths count the samples that the feed gives"),
    Stage("shard", stages.shard_model, "optimizers hold the rows of this rank only"),
    Stage("optimizers", stages.make_optimizers, "they start with the rates of the schedule"),
    Stage("precision", stages.choose_precision, "optimizers on a device scale the loss there"),
    Stage("step", stages.make_step, "it calls all of the above"),
    Stage("observers", stages.add_observers, "they are called at the points of the step"),
    Stage("compile", stages.compile_parts, "a graph holds what the other stages have left"),
    Stage("messages", stages.collect_messages, "they are about the finished parts"),
)


def assemble(
    spec: RunSpec, task: Any = None, *, better: Better | None = None, mesh: Mesh = SOLO
) -> Assembly:
    """Build all parts that a run of `spec` trains with, in the order of `ORDER`.

    Args:
        spec: the settings of the run.
        task: the task object; None for the task that the spec names.
        better: whether a higher or a lower score is better; None to find out by evaluating a few
            samples.
        mesh: the ranks of the run.

    Raises:
        InputError: if the spec or the task cannot be run.
    """
    build = Build(spec, task, mesh, better)
    if not mesh.is_sharded or spec.layout.zero_stage < 3:
        return _build(build)
    from surefoot.components.memory.spilled import FileBackedParameters

    give_back_large_blocks()
    with FileBackedParameters():  # parameters that are built whole before sharding
        return _build(build)


def _build(build: Build) -> Assembly:
    for stage in ORDER:
        stage.build(build)
    return build.assembly()
