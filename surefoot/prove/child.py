"""The process of one attempt: trains a spec, writes the digests of its state after every step, and is killed when it is told to be.

The kill is a real SIGKILL of the whole process group, sent by a thread that sleeps a given time after a given step: it falls into
whatever goes on then, half of them into a save.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path

from surefoot.contract import spec_file
from surefoot.train.run import Run


def main(words: list[str] | None = None) -> None:
    """Train `spec` in `run` for so many steps, a line of JSON for each to `trace`; kill after `--kill-ms` once `--kill-step` is done."""
    parser = argparse.ArgumentParser(prog="surefoot.prove.child")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-step", type=int)
    parser.add_argument("--kill-ms", type=float, default=0.0)
    asked = parser.parse_args(words)
    spec = spec_file.read(str(asked.spec)).spec
    with asked.trace.open("a", buffering=1) as trace, Run(spec, folder=asked.run, quiet=True) as run:
        killer: threading.Thread | None = None
        for report in run.steps():
            if run.evaluation_due:
                run.evaluate()
            row = {"step": report.step, "loss": report.loss, "guarantee": run.assembly.feed.source.guarantee}
            trace.write(json.dumps({**row, "digests": run.state_digests()}) + "\n")
            if report.step >= asked.steps:
                run.stop("the trial was so long")
            elif report.step == asked.kill_step:
                killer = threading.Thread(target=_kill, args=(asked.kill_ms,), daemon=True)
                killer.start()
            if report.step >= asked.steps - 1 and killer is not None:
                killer.join()  # a fast run would be over before the kill comes


def _kill(after_ms: float) -> None:
    time.sleep(after_ms / 1000)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
