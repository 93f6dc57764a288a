"""System calls of a process, traced or made to fail by strace (https://strace.io).

strace attaches to a child that waits.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from surefoot.core.errors import TaskError
from surefoot.prove.campaigns.probe import ProbedRun
from surefoot.prove.campaigns.workshop import PATIENCE_S, Child, Workshop

LINE = re.compile(r"^(\d+) +(.*)$")
CALL = re.compile(r"^(\w+)\((.*)\) += (-?\d+)(.*)$")
RESUMED = re.compile(r"^<\.\.\. (\w+) resumed>(.*)$")
# with -xx no string holds a quote or a bracket
ARGUMENT = re.compile(r'(?:"[^"]*"|<[^>]*>|\[[^\]]*\]|\{[^}]*\}|[^,])+')
UNFINISHED = " <unfinished ...>"
LONGEST = 1 << 26  # the most bytes of a string that strace prints


@dataclass(frozen=True)
class SystemCall:
    """A system call that returned: its thread, arguments (as strace prints them) and result."""

    thread: int
    name: str
    arguments: tuple[str, ...]
    result: int
    rest: str = ""

    @property
    def failed(self) -> bool:
        return self.result < 0


def missing() -> str | None:
    """Return why calls cannot be traced on this machine; None where they can."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian package strace)"
    done = subprocess.run(
        ["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False
    )
    return (
        None if done.returncode == 0 else f"strace may not trace here: {done.stderr.strip()[-200:]}"
    )


class Tracer:
    """strace on a waiting child, as a context; `calls` reads the trace once the child has ended."""

    def __init__(self, child: Child, out: Path, *options: str) -> None:
        self._child, self._out, self._options = child, out, options

    def __enter__(self) -> Self:
        command = [
            "strace",
            "-f",
            "-xx",
            "-s",
            str(LONGEST),
            "-o",
            str(self._out),
            *self._options,
            "-p",
            str(self._child.pid),
        ]
        words = self._out.with_name(self._out.name + ".said")
        with words.open("wb") as said:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        until_s = time.monotonic() + PATIENCE_S
        while "attached" not in (told := words.read_text(errors="replace")):
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.__exit__()
                raise TaskError(
                    f"strace did not attach: {told[-300:]}",
                    hint="it may need the right to trace processes",
                )
            time.sleep(0.001)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._child.ends_within(0):
            self._child.kill()
            self._process.terminate()
        self._process.wait()

    def calls(self) -> list[SystemCall]:
        self._process.wait()
        return list(read(self._out))


def read(path: Path) -> Iterator[SystemCall]:
    """Yield the calls of a trace in the order in which they ended; unfinished ones are left out."""
    begun: dict[str, str] = {}
    with path.open(encoding="ascii", errors="replace") as lines:
        for thread, text in (hit.groups() for line in lines if (hit := LINE.match(line))):
            if text.endswith(UNFINISHED):
                begun[thread] = text.removesuffix(UNFINISHED)
                continue
            if (again := RESUMED.match(text)) is not None:
                text = begun.pop(thread, f"{again[1]}(") + again[2].lstrip(" ")
            if (call := CALL.match(text)) is not None:
                yield SystemCall(int(thread), call[1], tuple(split(call[2])), int(call[3]), call[4])


def split(arguments: str) -> list[str]:
    """Split the arguments of a call at the commas outside of quotes and brackets.

    >>> split('AT_FDCWD, "\\\\x61, b", [{x=1, y=2}], O_RDONLY|O_CLOEXEC')
    ['AT_FDCWD', '"\\\\x61, b"', '[{x=1, y=2}]', 'O_RDONLY|O_CLOEXEC']
    """
    return [found.strip() for found in ARGUMENT.findall(arguments) if found.strip()]


def unquote(text: str) -> bytes:
    """Return the bytes of a string that strace printed with -xx.

    >>> unquote('"\\\\x61\\\\x00"')
    b'a\\x00'
    """
    return bytes.fromhex(text.strip('"').replace("\\x", ""))


def named(descriptor: str) -> str:
    """Return the path that strace -y prints with a descriptor, `5<...>`."""
    return unquote(descriptor.partition("<")[2].partition(">")[0]).decode()


def paths(call: SystemCall) -> list[str]:
    """Return the paths in a call of strace -y, each below the folder descriptor before it."""
    found, folder = [], ""
    for given in call.arguments:
        if given.startswith('"'):
            found.append(os.path.join(folder, unquote(given).decode()))
        folder = named(given)
    return found


def numbered(calls: Iterable[SystemCall]) -> Iterator[tuple[str, int, SystemCall]]:
    """Yield the name of each call, its count among calls of that name in its thread, and the call.

    `when=` of strace uses the same count.
    """
    counts = Counter[tuple[int, str]]()
    for call in calls:
        counts[call.thread, call.name] += 1
        yield call.name, counts[call.thread, call.name], call


def trace_a_save(
    workshop: Workshop, step: int, *options: str, variant: str = "plain"
) -> list[tuple[str, int, SystemCall]]:
    """Return the numbered calls from the end of a step to the end of the next one, traced once.

    The step is saved in between.
    """

    def trace() -> list[tuple[str, int, SystemCall]]:
        with workshop.scratch("calls") as folder:
            child = workshop.train(
                ProbedRun(
                    run=str(folder / "run"),
                    background=False,
                    pauses=(step,),
                    die_at=step + 1,
                    variant=variant,
                )
            )
            child.wait_for(f"paused {step}")
            with Tracer(child, folder / "trace", *options) as tracer:
                child.go()
                child.wait()
            return list(numbered(tracer.calls()))

    return workshop.once(("calls", step, options, variant), trace)
