"""One process: a run's steps with the profiler off, waiting for its window, or inside of it.

Its arguments are ARM REPORT FOLDER.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path

from surefoot.components.profiler.tracing.window import Window
from surefoot.contract.spec import RunSpec
from surefoot.train.run import Run
from surefoot.trial.report import Clock, write_report

WARMUP, STEPS = 20, 40
OFF, WAITING = "off", "waiting"
LEVELS = {
    "trace": (),
    "shapes": ("shapes",),
    "memory": ("memory",),
    "stacks": ("stacks",),
    "all": ("shapes", "stacks", "memory"),
}


def main() -> None:
    arm, report, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    spec = RunSpec(
        task={"use": "digits"},
        train={"length": f"{WARMUP + STEPS + 1} steps", "threads": 1, "device": "cpu"},
        schedule={"name": "constant"},
        observe={"tensorboard": False},
    )
    with Run(spec, folder=work / "run", quiet=True) as run:
        if arm == WAITING:
            later = Window(wait=WARMUP + STEPS, warmup=0, active=1)
            run.session.profiling.begin(later, (), run.step)
        elif arm != OFF:
            run.session.profiling.begin(
                Window(wait=0, warmup=WARMUP, active=STEPS + 1), LEVELS[arm], run.step
            )
        steps, clock = run.steps(), Clock()
        for _ in islice(steps, WARMUP):
            pass
        with clock:
            for _ in islice(steps, STEPS):
                pass
        began_s = time.perf_counter()
        next(steps)  # where the window closes, the trace is written
        closing_s = time.perf_counter() - began_s
    path = work / "run" / "profile" / "trace.json.gz"
    measures = {**clock.per(STEPS), "closing_s": closing_s}
    if path.exists():
        measures["trace_bytes_per_step"] = path.stat().st_size / (STEPS + 1)
    write_report(report, measures, facts={})


if __name__ == "__main__":
    main()
