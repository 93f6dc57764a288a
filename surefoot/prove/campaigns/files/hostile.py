"""Hostile commits, opened: a child does so under a limit of memory, and whatever it does outside of the run is heard."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

from surefoot.contract import events, manifest
from surefoot.contract.events import Fault
from surefoot.core.errors import EXIT_OK, InputError
from surefoot.prove.campaigns.files.damage import Left, copy_run, find_left
from surefoot.prove.campaigns.files.forge import HOSTILE, Commit, gadget
from surefoot.prove.campaigns.probe import VARIANTS
from surefoot.prove.campaigns.workshop import Workshop
from surefoot.prove.outcome import Campaign, Result

MEMORY_BYTES = 1 << 30  # beyond what the child holds before it opens the run
BESIDE = ("events.jsonl", "ledger.bin", "spec.toml", "run.lock")


def open_a_hostile_commit(workshop: Workshop, seed: int) -> Result:
    """A child opens it: no code of it runs, nothing outside the run is touched, and it is refused in words or set aside."""
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
            _make_hostile(newest, outside, kind, draws)
        else:
            (run / kind.rpartition(" ")[2]).write_bytes(gadget(outside / "canary"))
        words = {"attempt": asdict(replace(left.attempt, run=str(run))), "memory_bytes": MEMORY_BYTES}
        child = workshop.fork("open", words)
        status = child.wait()
        wrong = _find_wrong(left, newest, status, child.marks, child.said)
        if (outside / "canary").exists():
            wrong = "code of it ran"
        return Result(wrong and f"{kind}: {wrong}", ("refused" if status else "set aside",))


def _make_hostile(folder: Path, outside: Path, kind: str, draws: random.Random) -> None:
    row = json.loads((folder / manifest.FILE).read_text())
    row.pop("sha256")
    one = Commit(folder, row, outside, draws)
    HOSTILE[kind](one)
    if one.row and not folder.is_symlink() and not (folder / manifest.FILE).is_symlink():
        one.sign()


def _find_wrong(left: Left, newest: Path, status: int, marks: list[str], said: str) -> str | None:
    step = int(newest.name.removeprefix("step-"))
    touched = [mark for mark in marks if mark.startswith("outside")]
    if touched:
        return f"something outside of the run was touched: {touched[0]}"
    if status not in (EXIT_OK, InputError.exit_code) or "Traceback" in said:
        return f"the child ended with {status}: {said[-600:]}"
    if status == InputError.exit_code:
        is_named = str(newest.parents[1]) in said or f"step {step}" in said
        return None if is_named else f"it was refused, and not named: {said}"
    if f"state {json.dumps(left.states[step], sort_keys=True)}" in marks:
        return None  # what it says besides does no harm
    told = [event.detail for event in events.read(newest.parents[1]) if isinstance(event, Fault)]
    is_aside = not newest.exists() and len(told) == 1 and str(newest) in told[0]
    return None if is_aside else f"another state was loaded, and the events tell of {told}"


CAMPAIGNS = (
    Campaign(
        case="M01", title="hostile commits with right digests, pickles in every place", trial=open_a_hostile_commit,
        few=100, many=2_000,
    ),
)  # fmt: skip
