"""What follows when a rank fails: the run stops, all ranks begin anew, or its place is left out. Arithmetic on what has happened.

A *place* is a slot of this host for a rank, and for its GPU. One that is left out stays empty: ranks are numbered without it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from surefoot.core.errors import InputError, LostRank
from surefoot.core.signals import ENDINGS

FIRST_WAIT = 3  # commits until a place that was left out is tried again; twice as many each time that it fails again
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)  # by a fault of the code, or of memory or processor
TOLD = tuple(getattr(signal, name) for name in ENDINGS if hasattr(signal, name))


class How(Enum):
    """How an attempt ended; `is_retried` where another one may end otherwise."""

    RAISED = "it ended with an error of its own"
    ABORTED = "it ended itself by a signal"
    TOLD = "it was told to end"
    APART = "the ranks did not do the same"
    LEFT = "a rank left as if the run were over"
    KILLED = "it was killed"
    SHORT = "the kernel killed it for memory"
    CRASHED = "it crashed"
    HUNG = "it kept the others waiting"
    PARTED = "the ranks lost each other"

    @property
    def is_retried(self) -> bool:
        return self in (How.KILLED, How.CRASHED, How.HUNG, How.PARTED)


class Fault(NamedTuple):
    """How an attempt ended, and by which place; None where no single one is to blame."""

    how: How
    place: int | None = None


class Choice(Enum):
    STOP = "stop"
    RETRY = "retry"
    LEAVE_OUT = "leave out"


class Decision(NamedTuple):
    """What follows, and why, in words: "" for a stop that the fault explains."""

    choice: Choice
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a run may have: so many `places`, `numbers` of ranks (ascending), and attempts in a row without a commit but for the first."""

    places: int
    numbers: tuple[int, ...]
    max_restarts: int = 3


@dataclass(frozen=True, kw_only=True)
class Course:
    """What the places of a run have been through; commits are counted from where its supervisor began.

    `last` failed last, `streak` times in a row; `crash` is the last one with the commits that there were. `out` holds places that were
    left out with the number of commits from which on they are tried again, `waits` how many they waited for.
    """

    num_commits: int = 0
    in_vain: int = 0
    last: int | None = None
    streak: int = 0
    crash: tuple[int, int] | None = None
    out: Mapping[int, int] = field(default_factory=dict)
    waits: Mapping[int, int] = field(default_factory=dict)


def read_code(code: int) -> How:
    """How a process ended, by its exit code; that of a signal is negative.

    SIGKILL comes from outside: somebody, or a system that is out of memory. After SIGSEGV, SIGBUS, SIGILL and SIGFPE the code may be
    wrong, or the memory of one place: it is tried once more. SIGABRT and the rest are a program's own end, as of gloo or a failed check.

    >>> [read_code(each).name for each in (3, 8, 143, -9, -11, -6)]
    ['RAISED', 'PARTED', 'TOLD', 'KILLED', 'CRASHED', 'ABORTED']
    """
    if code >= 0:
        codes = {LostRank.exit_code: How.PARTED, **dict.fromkeys((code for _, _, code in ENDINGS.values()), How.TOLD)}
        return codes.get(code, How.RAISED)
    if -code == signal.SIGKILL:
        return How.KILLED
    return How.CRASHED if -code in CRASHES else How.TOLD if -code in TOLD else How.ABORTED


def decide(rules: Rules, course: Course, fault: Fault, num_commits: int) -> tuple[Decision, Course]:
    """What follows on `fault`, now that there are so many commits.

    What another attempt cannot mend stops at once; so do two places that crash with no commit between, since it is the code then, and
    more than `max_restarts` attempts in a row without a commit. A place that fails twice, and no other between, is left out where enough
    remain, and so is one that was left out before; else all begin anew.
    """
    place, in_vain = fault.place, course.in_vain + 1 if num_commits == course.num_commits else 1
    after = replace(course, num_commits=num_commits, in_vain=in_vain)
    if not fault.how.is_retried or rules.max_restarts == 0:
        return Decision(Choice.STOP), after
    if fault.how is How.CRASHED and place is not None:
        if course.crash is not None and course.crash[0] != place and course.crash[1] == num_commits:
            both = " and ".join(map(str, sorted((course.crash[0], place))))
            return Decision(Choice.STOP, f"places {both} crashed, and no commit came between: it is the code, not a place"), after
        after = replace(after, crash=(place, num_commits))
    if in_vain > rules.max_restarts:
        return Decision(Choice.STOP, f"{in_vain} attempts in a row ended like this without a commit: no use in another"), after
    if place is None:
        return Decision(Choice.RETRY), after
    after = replace(after, last=place, streak=course.streak + 1 if place == course.last else 1)
    if after.streak < 2 and place not in course.waits:
        return Decision(Choice.RETRY), after
    wait = 2 * course.waits[place] if place in course.waits else FIRST_WAIT
    less = replace(after, out={**course.out, place: num_commits + wait}, waits={**course.waits, place: wait})
    if len(_there(rules, less)) < rules.numbers[0]:
        return Decision(Choice.RETRY), after
    again = "has failed again" if place in course.waits else f"has failed {after.streak} times in a row"
    return Decision(Choice.LEAVE_OUT, f"place {place} {again} and is left out until {wait} more commits"), less


def choose(rules: Rules, course: Course) -> tuple[int, ...]:
    """The places that have a rank now: as many as may be, those that were never left out first."""
    there = _there(rules, course)
    number = max((each for each in rules.numbers if each <= len(there)), default=rules.numbers[0])
    return tuple(sorted(sorted(there, key=lambda each: (each in course.waits, each))[:number]))


def has_more(rules: Rules, course: Course, places: tuple[int, ...], num_commits: int) -> bool:
    """Whether more than these places may have a rank, once there are so many commits."""
    return len(choose(rules, replace(course, num_commits=num_commits))) > len(places)


def _there(rules: Rules, course: Course) -> list[int]:
    return [each for each in range(rules.places) if course.out.get(each, 0) <= course.num_commits]


def find_numbers(least: int, most: int, refuse: Callable[[int], str]) -> tuple[tuple[int, ...], str]:
    """The numbers of ranks from `least` to `most` that a run may have, and a line on those that it may not, "" for none.

    `refuse` gives why a number is none, or "". Raises InputError where all are refused.
    """
    reasons = {number: refuse(number) for number in range(least, most + 1)}
    numbers = tuple(number for number, reason in reasons.items() if not reason)
    wrong = [number for number, reason in reasons.items() if reason]
    if not numbers:
        raise InputError(
            f"--ranks is {least}:{most}, and no number of these may train this spec: {reasons[most]}", hint="give another range"
        )
    names = ", ".join(map(str, wrong))
    return numbers, f"{names} rank{'s' * (wrong != [1])} will not be tried: {reasons[wrong[-1]]}" if wrong else ""
