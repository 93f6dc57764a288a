"""Interleaved execution of arms: every arm runs once per round, so that drift affects all alike."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from surefoot.core.errors import InputError
from surefoot.trial.arm import Arm
from surefoot.trial.process import Outcome, run_arm
from surefoot.trial.turns import run_in_turns

MAX_FAILURES = 2  # with more failures, an arm is not started again: it only delays the others


def plan_rounds(names: Sequence[str], rounds: int, *, seed: int = 0) -> list[tuple[str, ...]]:
    """Return the order of the variants in each round: a seeded permutation, then its reverse.

    In an even number of rounds, each of two variants runs before the other equally often.

    >>> plan_rounds(["a", "b"], 4)
    [('a', 'b'), ('b', 'a'), ('a', 'b'), ('b', 'a')]
    """
    draw = random.Random(seed)
    planned: list[tuple[str, ...]] = []
    while len(planned) < rounds:
        order = list(names)
        draw.shuffle(order)
        planned += [tuple(order), tuple(reversed(order))]
    return planned[:rounds]


def run_rounds(
    arms: Sequence[Arm],
    *,
    rounds: int,
    warmup_rounds: int = 1,
    seed: int = 0,
    in_turns: bool = False,
) -> Iterator[Outcome]:
    """Run every variant (arm) `warmup_rounds + rounds` times, interleaved; yield each Outcome.

    By default one process runs at a time. With `in_turns` the arms of a round are started together
    and take turns while they are measured (`surefoot.trial.turns`). On a machine whose speed
    drifts, the ratios of the arms then scatter far less, but all arms must fit in memory together.

    Warm-up rounds fill the caches of disk and interpreter; their outcomes are marked. An arm that
    has failed twice is not run again. Raises InputError without arms or rounds, or for equal names.
    """
    named = {arm.name: arm for arm in arms}
    if not arms or len(named) < len(arms) or rounds < 1 or warmup_rounds < 0:
        raise InputError(
            f"{[arm.name for arm in arms]} for {warmup_rounds} and {rounds} rounds is not a trial",
            hint="name each arm differently, and give at least one arm and one round",
        )
    failures: Counter[str] = Counter()
    for number, order in enumerate(plan_rounds(list(named), warmup_rounds + rounds, seed=seed)):
        going = [named[name] for name in order if failures[name] < MAX_FAILURES]
        for group in [going] if in_turns and going else [[arm] for arm in going]:
            for outcome in _run_aside(group, number, warmup_rounds):
                failures[outcome.arm] += outcome.ended != "done"
                yield outcome


def _run_aside(arms: Sequence[Arm], number: int, warmup_rounds: int) -> list[Outcome]:
    at, is_warmup = max(0, number - warmup_rounds), number < warmup_rounds
    with tempfile.TemporaryDirectory(
        prefix="surefoot-trial-", ignore_cleanup_errors=True
    ) as folder:
        work = Path(folder)
        if len(arms) > 1:
            return run_in_turns(arms, work, number=at, is_warmup=is_warmup)
        return [run_arm(arms[0], work, number=at, is_warmup=is_warmup)]
