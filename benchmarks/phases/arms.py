"""What one process of the benchmark runs.

The timers' own calls, steps with and without them, a task whose phases are added up, delays.

python -m benchmarks.phases.arms WHAT REPORT WORK
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measured import ROOT
from benchmarks.step_cost.models import LEARNING_RATE, SEED, WORKLOADS
from surefoot.components.profiler.phases.clock import (
    BACKWARD,
    DATA,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    OTHER,
    PhaseClock,
)
from surefoot.contract import events, spec_file
from surefoot.contract.events import Ended, Started
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import Timing
from surefoot.train.evaluate import _Few
from surefoot.train.run import Run
from surefoot.trial import write_report
from tests.train.delays import SIZES_S, tell_planted

CALLS = 200_000
EVALUATED = 64  # samples
WARMUP, BLOCKS, BLOCK, WINDOW = 200, 40, 100, 10
TASKS = {  # steps, how often it is evaluated and saved, the data set that it wants
    "digits": (300, 100, ""),
    "cifar10": (12, 6, "cifar10-webdataset"),
    "pycorpus": (16, 8, ""),
    "wikitext2": (12, 6, "wikitext-2"),
}


class Silent(PhaseClock):  # type: ignore[misc]
    """What the clock becomes where nothing is timed."""

    __slots__ = ()

    def start(self, phase: int) -> None: ...

    def switch(self, phase: int) -> int:
        return 0

    @contextmanager
    def within(self, phase: int) -> Iterator[None]:
        yield

    def begin_steps(self) -> None: ...

    def end_step(self, number: int) -> None: ...

    def take(self) -> Timing:
        return Timing(phases={}, step_s=(), outliers=())

    total = take

    def listen_to_collections(self) -> Any:
        return lambda: None


def calls() -> dict[str, float]:
    """CPU time of what the timers do in a step, one record for ten of them, and nothing else."""
    clock = PhaseClock(torch.device("cpu"))
    clock.begin_steps()
    began_s = time.process_time()
    for number in range(CALLS):
        for phase in (DATA, OTHER, FORWARD, FORWARD, BACKWARD, OPTIMIZER):
            clock.switch(phase)
        clock.end_step(number)
        if number % WINDOW == 0:
            with clock.within(LOGGING):
                clock.take()
    return {"cpu_s_per_step": (time.process_time() - began_s) / CALLS}


def steps(work: str) -> dict[str, float]:
    """What the timers add to a step of the MLP of benchmarks/step_cost, all that is on by default.

    In one process blocks of steps with the timers and without follow each other in turn: two
    processes differ by more than the timers.
    """
    workload = WORKLOADS["mlp"]
    spec = RunSpec(
        task={
            "use": "benchmarks.step_cost.arms.surefoot_run:Costed",
            "workload": "mlp",
            "batches": workload.num_batches,
        },
        optim={"lr": LEARNING_RATE},
        schedule={"name": "constant"},
        observe={"tensorboard": False},
        train={
            "length": f"{WARMUP + 2 * BLOCKS * BLOCK} steps",
            "batch": workload.batch,
            "seed": SEED,
            "threads": 1,
        },
    )
    added_s, without_s = [], []
    with Run(spec, folder=work, quiet=True) as run:
        reports = run.steps()
        for _ in islice(reports, WARMUP):
            pass
        for number in range(BLOCKS):
            order = (True, False) if number % 2 else (False, True)
            cost = {
                is_timed: block(run, PhaseClock if is_timed else Silent, reports)
                for is_timed in order
            }
            added_s.append(cost[True] - cost[False])
            without_s.append(cost[False])
        use(run, PhaseClock)
    return {
        "added_cpu_s_per_step": float(np.median(added_s)),
        "without_cpu_s_per_step": float(np.median(without_s)),
    }


def use(run: Run, kind: type[PhaseClock]) -> None:
    """Make the clock of the run one of `kind`, and hear collections only where it does."""
    clock = run.assembly.engine.steps.clock
    clock.__class__ = kind
    gc.callbacks.clear()
    clock.listen_to_collections()
    clock.begin_steps()


def block(run: Run, kind: type[PhaseClock], reports: Iterator[Any]) -> float:
    use(run, kind)
    began_s = time.process_time()
    for _ in islice(reports, BLOCK):
        pass
    return (time.process_time() - began_s) / BLOCK


def wall(task: str, work: str, *, is_busy: bool) -> dict[str, float]:
    """A run's phases against the clock of the day, between its first record and its last."""
    number, every, data = TASKS[task]
    changes: dict[str, Any] = {
        "train.length": f"{number} steps",
        "train.threads": 1,
        "observe.tensorboard": False,
        "schedule.warmup": "1 steps",
    }
    if is_busy:
        changes["checkpoint.every"] = f"{every} steps"
    if data:
        changes["data.folder"] = str(
            (ROOT / os.environ.get("DATA", "../shared/data") / data).resolve()
        )
    spec = spec_file.read(
        task, [(key, value, "the benchmark") for key, value in changes.items()]
    ).spec
    with Run(spec, folder=work, quiet=True) as run:
        whole = run.assembly.evaluation
        # all of it takes minutes
        few = replace(run.assembly, evaluation=lambda split: _Few(whole(split), EVALUATED))
        run.session.assembly = few
        for report in run.steps():
            if is_busy and report.step % every == 0:
                run.evaluate()
    records = list(events.read(Path(work)))
    first, last = records[0], records[-1]
    assert isinstance(first, Started)
    assert isinstance(last, Ended)
    phases, wall_s = last.summary["phases"], last.time_s - first.time_s
    shares = {f"{name}_share": seconds / wall_s for name, seconds in phases.items()}
    return {"coverage": sum(phases.values()) / wall_s, "wall_s": wall_s, **shares}


def delays(where: str) -> dict[str, float]:
    """How much the phase grew beyond its delay, as a share of that, and how much all others."""
    found: dict[str, float] = {}
    for against, is_aside in (("elsewhere", True), ("nowhere", False)):
        with tempfile.TemporaryDirectory() as folder:
            told = tell_planted(where, Path(folder), aside=is_aside)
        for size_s in SIZES_S:
            own_s, others_s = told.grown_s(size_s)
            size = f"{against}/{size_s * 1e3:g} ms"
            found |= {f"{size}/own": own_s / size_s, f"{size}/others": others_s / size_s}
    usual = [told.own_s[step] for step in told.without]
    return {**found, "usual_s": float(np.median(usual))}


def main() -> None:
    what, report, work = sys.argv[1:]
    torch.set_num_threads(1)
    kind, _, rest = what.partition(":")
    if kind == "calls":
        measures = calls()
    elif kind == "steps":
        measures = steps(work)
    elif kind == "wall":
        task, _, how = rest.partition(":")
        measures = wall(task, work, is_busy=how == "busy")
    else:
        measures = delays(rest)
    write_report(report, measures)


if __name__ == "__main__":
    main()
