"""Numbered guarantees of surefoot, and the fault campaigns that test each guarantee."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Guarantee of surefoot in words; `cases` are the campaigns that test it."""

    number: int
    name: str
    words: str
    cases: tuple[str, ...]


KEPT = (
    Promise(
        number=1,
        name="Committed means committed",
        cases=("F01", "F02", "F03", "F04", "F24"),
        words=(
            "If the log says that step N is committed, "
            "it survives kill -9 and a power cut at any instant."
        ),
    ),
    Promise(
        number=2,
        name="Never silently wrong",
        cases=("F05", "F06", "F06-run"),
        words=(
            "Every byte that is loaded was verified. A damaged checkpoint is named, "
            "set aside and skipped."
        ),
    ),
    Promise(
        number=3,
        name="The same result",
        cases=("F01", "F02", "F03", "F24"),
        words=(
            "A run that is killed and resumed ends bitwise identical to an uninterrupted run: "
            "weights, optimizer, random state, order, metrics."
        ),
    ),
    Promise(
        number=4,
        name="Every sample exactly once",
        cases=("F26",),
        words=(
            "In the same order, even when a run resumes with a different number of processes and "
            "the same global batch."
        ),
    ),
    Promise(
        number=5,
        name="No poisoned weights",
        cases=("F12", "F13"),
        words=(
            "No NaN on any rank reaches the weights or a checkpoint; all ranks take the same "
            "decision, and it is logged."
        ),
    ),
    Promise(
        number=6,
        name="No hangs, no endless restarts",
        cases=("F20", "F23", "F01-loop"),
        words=(
            "A dead, stuck or cut-off rank is named within 60 s; "
            "after 3 restarts without progress the run stops and prints the cause."
        ),
    ),
    Promise(
        number=7,
        name="A full disk costs nothing but that save",
        cases=("F07", "F08", "F09", "F10"),
        words=(
            "Older checkpoints stay intact, training continues, and the log records the failed "
            "save."
        ),
    ),
    Promise(
        number=8,
        name="One writer",
        cases=("F29",),
        words="Two jobs cannot damage one run; a stale job cannot commit.",
    ),
    Promise(
        number=9,
        name="Opening is safe",
        cases=("M01",),
        words="Loading a checkpoint, a data set, a spec or a report runs no code from it.",
    ),
)
PROOF = Promise(
    number=10,
    name="Proof",
    cases=tuple(sorted({case for promise in KEPT for case in promise.cases})),
    words="Every count can be repeated: all campaigns, with the seeds that replay each trial.",
)
PROMISES = (*KEPT, PROOF)


def find_promise(number: str) -> Promise:
    """Return the guarantee with the given number.

    Raises:
        InputError: For an unknown number.
    """
    for promise in PROMISES:
        if number == str(promise.number):
            return promise
    raise InputError(
        f"{number!r} is not a promise", hint=f"use a number from 1 to {len(PROMISES)}, or list"
    )
