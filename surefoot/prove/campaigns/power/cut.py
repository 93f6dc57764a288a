"""Power cuts: the disk states that a cut may leave are derived from one traced run, and opened."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from surefoot.components import checkpoint
from surefoot.contract import commits, manifest, spec_file
from surefoot.core.errors import SurefootError, TaskError
from surefoot.prove.campaigns import strace
from surefoot.prove.campaigns.power import disk
from surefoot.prove.campaigns.probe import ProbedRun
from surefoot.prove.campaigns.strace import Tracer
from surefoot.prove.campaigns.workshop import Golden, Workshop, digests, go_on
from surefoot.prove.outcome import Campaign, TrialResult

GOES_ON_EVERY = 20  # a run resumes to the end from one in 20 states, which takes longest
WHOLE = ("frozen", "plain")  # traced variants: checkpoints with linked files, and without


def cut_power(workshop: Workshop, seed: int) -> TrialResult:
    """Write and check one possible disk state after a power cut.

    Every acknowledged step must load, and no visible checkpoint may be silently wrong. Some runs
    are resumed to the end.
    """
    variant = WHOLE[seed % len(WHOLE)]
    golden = workshop.golden(variant)
    recorder, attempt = workshop.once(
        ("recording", variant, workshop.plant), lambda: _record(workshop, variant), planted=True
    )
    ops, draws = recorder.ops, random.Random(seed)
    cut = disk.PowerCut(
        draws.randint(0, len(ops)), draws.choice(disk.ENTRIES), draws.choice(disk.BLOCKS), seed
    )
    goes_on = draws.randrange(GOES_ON_EVERY) == 0
    with workshop.scratch("power") as folder:
        disk.write_state(ops, recorder.folders, cut, folder)
        run = folder / attempt.folder.name
        wrong = _look(run, disk.acknowledged(ops, cut.moment), golden)
        if wrong is None and goes_on:
            wrong = go_on(workshop, replace(attempt, run=str(run), pauses=()), golden)
        return TrialResult(
            wrong and f"{cut}: {wrong}",
            (cut.blocks, cut.entries, *(["resumed to the end"] if goes_on else [])),
        )


def _record(workshop: Workshop, variant: str) -> tuple[disk.Recorder, ProbedRun]:
    """Record the file operations of one run from its start to its end."""
    with workshop.scratch("traced") as folder:
        (root := folder / "disk").mkdir()
        attempt = ProbedRun(run=str(root / "run"), variant=variant, pauses=(0,))
        child = workshop.train(attempt)
        child.wait_for("paused 0")
        with Tracer(
            child, folder / "trace", "-y", "-e", f"trace={','.join(disk.TRACED)}"
        ) as tracer:
            child.go()
            if child.wait() != 0:
                raise TaskError(
                    f"the run that is traced failed: {child.said[-500:]}",
                    hint="this is a fault of surefoot",
                )
        recorder = disk.Recorder(root)
        recorder.record(tracer.calls())
        return recorder, attempt


def _look(run: Path, acknowledged: list[int], golden: Golden) -> str | None:
    """Return what is wrong with a run after its drafts were cleared, as a start clears them.

    Wrong is a step that was acknowledged, or is visible, and is not whole.
    """
    if run.is_dir():
        checkpoint.clear_drafts(run)
    step = 0
    try:
        for step in sorted({*manifest.steps(run), *acknowledged}):
            commits.check(manifest.step_folder(run, step))
            if digests(run, step) != golden.states.get(step):
                return f"step {step} loads a state that differs from the saved one"
        if acknowledged:
            spec_file.read(str(run / "spec.toml"))
    except SurefootError as error:
        return (
            f"step {step} was committed or can be seen, and the run cannot be resumed from it: "
            f"{error.message}"
        )
    return None


CAMPAIGNS = (
    Campaign(
        case="F04",
        title="power cut at any moment of a run",
        trial=cut_power,
        few=400,
        missing=strace.missing,
    ),
)
