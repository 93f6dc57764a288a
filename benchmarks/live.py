"""Live processes that take turns on one core: each answers a line with the CPU time of a turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any, Self

WARMUP_TURNS = 2


class Side:
    """A live process that takes turns; `words` are its script and arguments."""

    def __init__(
        self, words: Sequence[str], folder: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
            cwd=folder,
        )
        self.facts = self._answer()

    def turn(self) -> float:
        """CPU seconds of one turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return float(self._answer()["cpu_s"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"a process ended with {self._process.wait()}: run its script by hand to see why"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def answering() -> Iterator[Callable[[Callable[[], object], dict[str, Any]], None]]:
    """A function that warms a turn up, tells the facts, and answers each line until the input ends.

    What the process prints itself is no answer.
    """
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(turn: Callable[[], object], facts: dict[str, Any]) -> None:
        for _ in range(WARMUP_TURNS):
            turn()
        told.write(json.dumps(facts) + "\n")
        for _ in sys.stdin:
            begun_s = process_time()
            turn()
            told.write(json.dumps({"cpu_s": process_time() - begun_s}) + "\n")
        os._exit(0)  # a run has no end of its own

    yield answer


def pin() -> None:
    """Bind this process, and those that it starts, to its last core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def root_of(module: Any) -> str:
    return str(Path(module.__file__).parents[1])
