"""System calls of a process, traced or made to fail by strace (https://strace.io).

strace attaches to a child process that waits.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """System call that has returned, with its thread, its result, and its arguments as printed."""

    thread: int
    name: str
    arguments: tuple[str, ...]
    result: int
    rest: str = ""

    @property
    def failed(self) -> bool:
        return self.result < 0


def missing() -> str | None:
    """Return why system calls cannot be traced on this machine; None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian package strace)"
    done = subprocess.run(
        ["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False
    )
    return (
        None if done.returncode == 0 else f"strace may not trace here: {done.stderr.strip()[-200:]}"
    )


@contextlib.contextmanager
def trace_child(child: Child, out: Path, *options: str) -> Iterator[None]:
    """Return a context in which strace writes the system calls of a waiting child to `out`.

    The file is complete when the context ends.
    """
    command = ["strace", "-f", "-xx", "-s", str(LONGEST), "-o", str(out), *options]
    words = out.with_name(out.name + ".said")
    with words.open("wb") as said:
        process = subprocess.Popen(
            [*command, "-p", str(child.pid)], stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        child.wait_until(
            lambda: "attached" in words.read_text(errors="replace") or process.poll() is not None,
            PATIENCE_S,
        )
        if "attached" not in (told := words.read_text(errors="replace")):
            raise TaskError(
                f"strace did not attach: {told[-300:]}",
                hint="it may need the right to trace processes",
            )
        yield
    finally:
        if not child.is_over:
            child.kill()
            process.terminate()
        process.wait()


def read(path: Path) -> Iterator[SystemCall]:
    """Yield the system calls of a trace in the order in which they ended.

    Calls that did not end are left out.
    """
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
    """Split the arguments of a system call at the commas outside of quotes and brackets.

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


def path_of_descriptor(descriptor: str) -> str:
    """Return the path in a descriptor that strace -y printed, such as `5<...>`."""
    return unquote(descriptor.partition("<")[2].partition(">")[0]).decode()


def paths(call: SystemCall) -> list[str]:
    """Return the paths in the arguments of a system call that strace -y printed.

    A relative path is resolved against the folder descriptor before it.
    """
    found, folder = [], ""
    for given in call.arguments:
        if given.startswith('"'):
            found.append(os.path.join(folder, unquote(given).decode()))
        folder = path_of_descriptor(given)
    return found


def trace_a_save(
    workshop: Workshop, step: int, *options: str, variant: str = "plain"
) -> list[tuple[str, int, SystemCall]]:
    """Return the system calls of a save of `step`, up to the end of the next step.

    The trace is made once and then cached.

    Returns:
        For each call its name, its number among the calls of that name in its thread (as in `when=`
        of strace), and the call.
    """

    def trace() -> list[tuple[str, int, SystemCall]]:
        with workshop.scratch("calls") as folder:
            attempt = make_paused_save(folder, step, variant)
            child = workshop.train(attempt)
            child.wait_for(f"paused {step}")
            with trace_child(child, folder / "trace", *options):
                child.go()
                child.wait()
            counts, found = Counter[tuple[int, str]](), []
            for call in read(folder / "trace"):
                counts[call.thread, call.name] += 1
                found.append((call.name, counts[call.thread, call.name], call))
            return found

    return workshop.cached(("calls", step, options, variant), trace)


def make_paused_save(folder: Path, step: int, variant: str = "plain") -> ProbedRun:
    """Return an attempt that pauses before the save of `step`, and kills itself one step later.

    It saves without background threads. Because it ends, a trace of it ends with the save.
    """
    return ProbedRun(
        folder=folder / "run",
        background=False,
        pauses=(step,),
        die_at=step + 1,
        variant=variant,
    )
