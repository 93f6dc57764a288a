"""Power cuts: one real run is traced, and the disk states that a cut at any moment may leave are written out and opened."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from surefoot.components import checkpoint
from surefoot.contract import commits, manifest, spec_file
from surefoot.core.errors import SurefootError, TaskError
from surefoot.prove.campaigns.power import disk, trace
from surefoot.prove.campaigns.power.trace import Tracer
from surefoot.prove.campaigns.probe import Attempt
from surefoot.prove.campaigns.workshop import Golden, Workshop, digests, go_on
from surefoot.prove.outcome import Campaign, Result

GOES_ON_EVERY = 20  # of so many states one is gone on from to the end, which takes longest
WHOLE = ("frozen", "plain")  # what is traced: commits with linked files, and without


@dataclass(frozen=True)
class Recording:
    """The file operations of one run from its beginning to its end."""

    attempt: Attempt
    ops: list[disk.Op]
    folders: set[int]


def cut_power(workshop: Workshop, seed: int) -> Result:
    """One state of the disk: every acknowledged step loads, nothing that can be seen is silently wrong; some go on to the end."""
    variant = WHOLE[seed % len(WHOLE)]
    golden, recording = workshop.golden(variant), _recording(workshop, variant)
    draws = random.Random(seed)
    cut = disk.PowerCut(
        moment=draws.randint(0, len(recording.ops)), entries=draws.choice(disk.ENTRIES), blocks=draws.choice(disk.BLOCKS), seed=seed
    )  # fmt: skip
    with workshop.scratch("power") as folder:
        disk.write_state(recording.ops, recording.folders, cut, folder)
        run = folder / recording.attempt.folder.name
        wrong = _look(run, disk.acknowledged(recording.ops, cut.moment), golden)
        goes_on = wrong is None and draws.randrange(GOES_ON_EVERY) == 0
        if goes_on:
            wrong = go_on(workshop, replace(recording.attempt, run=str(run), pauses=()), golden)
        return Result(
            wrong if wrong is None else f"{cut}: {wrong}", (cut.blocks, cut.entries, *(["gone on to the end"] if goes_on else []))
        )


def _recording(workshop: Workshop, variant: str) -> Recording:
    """The trace of one whole run, made once."""
    key = f"recording of {variant}"
    if key not in workshop.kept:
        root = workshop.fresh("traced")
        attempt = Attempt(run=str(root / "run"), variant=variant, pauses=(0,))
        child = workshop.train(attempt)
        child.wait_for("paused 0")
        with Tracer(child, workshop.folder / f"{variant}.trace", "-e", f"trace={disk.TRACED}") as tracer:
            child.go()
            if child.wait() != 0:
                raise TaskError(f"the run that is traced failed: {child.said[-500:]}", hint="this is a fault of surefoot")
            calls = tracer.calls()
        recorder = disk.Recorder(PurePosixPath(root))
        ops = recorder.record(calls)
        strange = {call.name for call in calls if call.name in disk.UNKNOWN and str(root).encode() in _bytes(call)}
        if strange:
            raise TaskError(f"the trace has {sorted(strange)}, which is not understood", hint="teach the recorder these calls")
        workshop.kept[key] = Recording(attempt, ops, recorder.folders)
    found: Recording = workshop.kept[key]
    return found


def _bytes(call: trace.Call) -> bytes:
    return b" ".join(trace.unquote(each) for each in call.arguments if each.startswith('"'))


def _look(run: Path, acknowledged: list[int], golden: Golden) -> str | None:
    """What is wrong once the leavings were cleared away as a start does: a step that was committed or can be seen, and is not whole."""
    if run.is_dir():
        checkpoint.clear_drafts(run)
    elif acknowledged:
        return f"step {acknowledged[-1]} was committed, and the run folder is gone"
    for step in sorted({*manifest.steps(run), *acknowledged}):
        try:
            commits.check(manifest.step_folder(run, step))
        except SurefootError as error:
            told = "was committed and does not load" if step in acknowledged else "can be seen and is not whole"
            return f"step {step} {told}: {error.message}"
        if digests(run, step) != golden.states.get(step):
            return f"step {step} loads with another state than it had"
    if acknowledged:
        try:
            spec_file.read(str(run / "spec.toml"))
        except SurefootError as error:
            return f"step {acknowledged[-1]} was committed, and the run cannot be resumed by its own spec: {error.message}"
    return None


CAMPAIGNS = (
    Campaign(
        case="F04", title="power cut at any moment of a run", trial=cut_power, few=400, many=20_000,
        missing=trace.missing,
    ),
)  # fmt: skip
