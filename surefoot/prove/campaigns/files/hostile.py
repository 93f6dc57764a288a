"""Trials that open hostile checkpoints in a child process with limited memory.

Everything that the child does outside of the run is recorded.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from surefoot.contract import events, manifest
from surefoot.contract.events import Fault
from surefoot.core.errors import EXIT_OK, InputError
from surefoot.prove.campaigns import jobs
from surefoot.prove.campaigns.files.damage import Left, copy_run, find_left
from surefoot.prove.campaigns.files.forge import HOSTILE, forge, gadget
from surefoot.prove.campaigns.probe import VARIANTS
from surefoot.prove.campaigns.workshop import Child, Workshop
from surefoot.prove.outcome import Campaign, TrialResult

MEMORY_BYTES = 1 << 30  # beyond what the child holds before it opens the run
BESIDE = ("events.jsonl", "ledger.bin", "spec.toml", "run.lock")


def open_a_hostile_commit(workshop: Workshop, seed: int) -> TrialResult:
    """Open a hostile checkpoint in a child process.

    None of its code may run, nothing outside of the run may be touched, and the checkpoint must be
    refused with a message or set aside.
    """
    draws = random.Random(seed)
    kinds = [*HOSTILE, *(f"a pickle beside: {name}" for name in BESIDE)]
    kind, left = kinds[seed % len(kinds)], find_left(workshop, draws.choice(list(VARIANTS)))
    with workshop.scratch("hostile") as scratch:
        run, outside = scratch / "run", scratch / "outside"
        outside.mkdir()
        (outside / "secret").write_text("this is for nobody")
        copy_run(left.attempt.folder, run)
        newest = manifest.step_folder(run, left.steps[-1])
        if kind in HOSTILE:
            forge(HOSTILE[kind], newest, outside, draws)
        else:
            (run / kind.rpartition(" ")[2]).write_bytes(gadget(outside / "canary"))
        child = workshop.fork(
            jobs.open_run, replace(left.attempt, run=str(run), memory_bytes=MEMORY_BYTES)
        )
        status = child.wait()
        wrong = (
            "code of it ran"
            if (outside / "canary").exists()
            else _find_wrong(left, newest, status, child)
        )
        return TrialResult(wrong and f"{kind}: {wrong}", ("refused" if status else "set aside",))


def _find_wrong(left: Left, newest: Path, status: int, child: Child) -> str | None:
    step, run, said = int(newest.name.removeprefix("step-")), newest.parents[1], child.said
    if touched := [mark for mark in child.marks if mark.startswith("outside")]:
        return f"something outside of the run was touched: {touched[0]}"
    if status not in (EXIT_OK, InputError.exit_code) or "Traceback" in said:
        return f"the child ended with {status}: {said[-600:]}"
    if status == InputError.exit_code:
        return (
            None
            if str(run) in said or f"step {step}" in said
            else f"it was refused, and not named: {said}"
        )
    told = [event.detail for event in events.read(run) if isinstance(event, Fault)]
    is_aside = not newest.exists() and len(told) == 1 and str(newest) in told[0]
    # any other output is harmless if the state is that of the run
    return (
        None
        if is_aside or left.states[step] in child.marks
        else f"a different state was loaded, and the events tell of {told}"
    )


CAMPAIGNS = (
    Campaign(
        case="M01",
        title="malicious checkpoints with valid digests, and a pickle in place of every file",
        trial=open_a_hostile_commit,
        few=100,
    ),
)
