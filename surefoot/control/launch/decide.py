"""Decision after the failure of a rank: stop, restart all ranks, or leave out a rank slot.

The functions are pure: they depend only on the failures so far. A slot (`place`) of this host is
for one rank and its GPU. A slot that is left out has no rank, and the ranks are numbered without
it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from surefoot.core.errors import InputError, LostRank
from surefoot.core.process.signals import ENDINGS

# checkpoints until a slot that was left out is tried again; doubled each time it fails again
FIRST_WAIT = 3
# signals after a fault of the code, the memory or the processor
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
TOLD = tuple(getattr(signal, name) for name in ENDINGS if hasattr(signal, name))

IN_VAIN = "consecutive attempts ended like this without a new checkpoint"


class ExitKind(Enum):
    """Reason for the end of an attempt; `is_retried` is True if a restart may help."""

    RAISED = "it raised an error"
    ABORTED = "it ended itself with a signal"
    TOLD = "it was asked to stop"
    APART = "the ranks called different collectives"
    LEFT = "a rank exited as if the run had finished"
    KILLED = "it was killed"
    SHORT = "the kernel killed it for memory"
    CRASHED = "it crashed"
    HUNG = "it did not reach a collective in time"
    PARTED = "the ranks lost their connections"

    @property
    def is_retried(self) -> bool:
        return self in (ExitKind.KILLED, ExitKind.CRASHED, ExitKind.HUNG, ExitKind.PARTED)


class RankFailure(NamedTuple):
    """Failure that ended an attempt.

    `how` is the reason. `place` is the slot that is to blame; None if no single slot is. `rank` is
    the first rank that failed or blocked the others, and `cause` describes what it did.
    """

    how: ExitKind
    place: int | None = None
    rank: int = 0
    cause: str = ""


class Choice(Enum):
    STOP = "stop"
    RETRY = "retry"
    LEAVE_OUT = "leave out"


class Decision(NamedTuple):
    """Decision after a failure, with the reason to print; "" if there is nothing to add."""

    choice: Choice
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Limits for the ranks and the restarts of a run.

    `places` is the number of rank slots. `numbers` are the allowed numbers of ranks, ascending.
    `max_restarts` is the number of consecutive restarts allowed without a new checkpoint.
    """

    places: int
    numbers: tuple[int, ...]
    max_restarts: int = 3


@dataclass(frozen=True, kw_only=True)
class RestartHistory:
    """History of a run's failures, since its supervisor started.

    All numbers of checkpoints are counted from the start of the supervisor. `num_commits` is the
    number at the last failure. `in_vain` counts the failed attempts since the last one that wrote a
    checkpoint, including that one. `last` is the slot that failed last, and `streak` how many times
    in a row it failed. `crash` is the slot that crashed last, with the number of checkpoints at
    that time.

    `out` maps each slot that was left out to the number of checkpoints from which it is tried
    again. `waits` maps it to the number of checkpoints for which it was left out.
    """

    num_commits: int = 0
    in_vain: int = 0
    last: int | None = None
    streak: int = 0
    crash: tuple[int, int] | None = None
    out: Mapping[int, int] = field(default_factory=dict)
    waits: Mapping[int, int] = field(default_factory=dict)


def read_code(code: int) -> ExitKind:
    """Classify the exit code of a rank; a negative code is that of a signal.

    PARTED: the connection to the other ranks was lost. TOLD: a signal such as SIGTERM requested the
    end. KILLED: SIGKILL, from a user, or from the kernel when memory ran out. CRASHED: SIGSEGV,
    SIGBUS, SIGILL or SIGFPE; the cause is the code, or the memory of one slot, so one restart is
    worth trying. ABORTED: any other signal, with which a program ends itself, such as SIGABRT after
    a failed check or in gloo. RAISED: any other exit code.

    >>> [read_code(each).name for each in (3, 8, 143, -9, -11, -6)]
    ['RAISED', 'PARTED', 'TOLD', 'KILLED', 'CRASHED', 'ABORTED']
    """
    if code >= 0:
        codes = {
            LostRank.exit_code: ExitKind.PARTED,
            **dict.fromkeys((code for _, _, code in ENDINGS.values()), ExitKind.TOLD),
        }
        return codes.get(code, ExitKind.RAISED)
    if -code == signal.SIGKILL:
        return ExitKind.KILLED
    return (
        ExitKind.CRASHED
        if -code in CRASHES
        else ExitKind.TOLD
        if -code in TOLD
        else ExitKind.ABORTED
    )


def decide(
    rules: Rules, course: RestartHistory, fault: RankFailure, num_commits: int
) -> tuple[Decision, RestartHistory]:
    """Decide what to do after a failure; return the decision and the new history.

    The run stops in three cases: a restart would not remove the cause, or none is allowed; two
    slots crashed without a checkpoint between the crashes, so the cause is the code; or more than
    `max_restarts` consecutive attempts ended without a new checkpoint. A slot that failed twice in
    a row, or that was left out before, is left out if enough slots remain. Otherwise all ranks
    restart.

    Args:
        rules: limits of the run.
        course: history before this failure.
        fault: the failure.
        num_commits: checkpoints that were written since the supervisor started.
    """
    place, in_vain = fault.place, course.in_vain + 1 if num_commits == course.num_commits else 1
    after = replace(course, num_commits=num_commits, in_vain=in_vain)
    if not fault.how.is_retried or rules.max_restarts == 0:
        return Decision(Choice.STOP), after
    if fault.how is ExitKind.CRASHED and place is not None:
        if course.crash is not None and course.crash[0] != place and course.crash[1] == num_commits:
            both = " and ".join(map(str, sorted((course.crash[0], place))))
            return Decision(
                Choice.STOP,
                (
                    f"slots {both} crashed without a new checkpoint between the crashes: "
                    "the cause is the code, not a slot"
                ),
            ), after
        after = replace(after, crash=(place, num_commits))
    if in_vain > rules.max_restarts:
        return Decision(
            Choice.STOP,
            f"{in_vain} {IN_VAIN}: another restart would not help",
        ), after
    if place is None:
        return Decision(Choice.RETRY), after
    after = replace(after, last=place, streak=course.streak + 1 if place == course.last else 1)
    if after.streak < 2 and place not in course.waits:
        return Decision(Choice.RETRY), after
    wait = 2 * course.waits[place] if place in course.waits else FIRST_WAIT
    less = replace(
        after, out={**course.out, place: num_commits + wait}, waits={**course.waits, place: wait}
    )
    if len(_find_usable_slots(rules, less)) < rules.numbers[0]:
        return Decision(Choice.RETRY), after
    again = (
        "has failed again" if place in course.waits else f"has failed {after.streak} times in a row"
    )
    return Decision(
        Choice.LEAVE_OUT, f"slot {place} {again} and is left out until {wait} more checkpoints"
    ), less


def choose(rules: Rules, course: RestartHistory) -> tuple[int, ...]:
    """Return the slots on which ranks start: as many as possible and allowed.

    Slots that were never left out are preferred.
    """
    there = _find_usable_slots(rules, course)
    number = max((each for each in rules.numbers if each <= len(there)), default=rules.numbers[0])
    return tuple(sorted(sorted(there, key=lambda each: (each in course.waits, each))[:number]))


def can_grow(
    rules: Rules, course: RestartHistory, places: tuple[int, ...], num_commits: int
) -> bool:
    """Return whether more ranks than now can run.

    Args:
        rules: limits of the run.
        course: history of its failures.
        places: slots that have a rank now.
        num_commits: checkpoints that were written since the supervisor started.
    """
    return len(choose(rules, replace(course, num_commits=num_commits))) > len(places)


def _find_usable_slots(rules: Rules, course: RestartHistory) -> list[int]:
    return [each for each in range(rules.places) if course.out.get(each, 0) <= course.num_commits]


def find_numbers(
    least: int, most: int, refuse: Callable[[int], str]
) -> tuple[tuple[int, ...], str]:
    """Return the allowed numbers of ranks from `least` to `most`, and a message on the others.

    Args:
        least: smallest number of ranks.
        most: largest number of ranks.
        refuse: returns why a number of ranks is not allowed, or "" if it is allowed.

    Returns:
        The allowed numbers, and one line on those that are not; "" if all are allowed.

    Raises:
        InputError: if no number is allowed.
    """
    reasons = {number: refuse(number) for number in range(least, most + 1)}
    numbers = tuple(number for number, reason in reasons.items() if not reason)
    wrong = [number for number, reason in reasons.items() if reason]
    if not numbers:
        raise InputError(
            (
                f"--ranks is {least}:{most}, and this spec can be trained with none of these "
                f"numbers: {reasons[most]}"
            ),
            hint="give another range",
        )
    names = ", ".join(map(str, wrong))
    return (
        numbers,
        f"{names} rank{'s' * (wrong != [1])} will not be tried: {reasons[wrong[-1]]}"
        if wrong
        else "",
    )
