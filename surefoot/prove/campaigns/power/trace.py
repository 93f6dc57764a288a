"""System calls of a process, watched and made to fail by strace (https://strace.io), which attaches to a child that waits."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from surefoot.core.errors import TaskError
from surefoot.prove.campaigns.workshop import PATIENCE_S, Child

LINE = re.compile(r"^(\d+) +(?:(\d+\.\d+) )?(.*)$")
CALL = re.compile(r"^(\w+)\((.*)\) += (-?\d+|\?)(.*)$", re.DOTALL)
RESUMED = re.compile(r"^<\.\.\. (\w+) resumed>(.*)$", re.DOTALL)
UNFINISHED = " <unfinished ...>"
LONGEST = 1 << 26  # bytes of a string that strace prints whole


@dataclass(frozen=True)
class Call:
    """One system call that returned: by which thread, what it was given (as strace prints it), what it gave."""

    thread: int
    name: str
    arguments: tuple[str, ...]
    result: int
    rest: str = ""

    @property
    def failed(self) -> bool:
        return self.result < 0


def missing() -> str | None:
    """Why calls cannot be traced here, None where they can."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian package strace)"
    done = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace may not trace here: {done.stderr.strip()[-200:]}"


class Tracer:
    """strace on a waiting child, as a context: attached when it begins; `calls` reads what was traced once the child is over."""

    def __init__(self, child: Child, out: Path, *options: str) -> None:
        self._child, self._out, self._options = child, out, options

    def __enter__(self) -> Self:
        command = ["strace", "-f", "-xx", "-s", str(LONGEST), "-o", str(self._out), *self._options, "-p", str(self._child.pid)]
        self._words = self._out.with_name(self._out.name + ".said")
        with self._words.open("wb") as said:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        until_s = time.monotonic() + PATIENCE_S
        while "attached" not in self._words.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > until_s:
                told = self._words.read_text(errors="replace")
                self._stop()
                raise TaskError(f"strace did not attach: {told[-300:]}", hint="it may need the right to trace processes")
            time.sleep(0.001)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._child.is_over:
            self._process.wait()
        else:
            self._child.kill()
            self._process.terminate()
            self._process.wait()

    def calls(self) -> list[Call]:
        self._process.wait()
        return list(read(self._out))


def read(path: Path) -> Iterator[Call]:
    """The calls of a trace in the order in which they ended; one that never ended is left out."""
    begun: dict[int, str] = {}
    with path.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            hit = LINE.match(line.rstrip("\n"))
            if hit is None:
                continue
            thread, text = int(hit[1]), hit[3]
            if text.endswith(UNFINISHED):
                begun[thread] = text.removesuffix(UNFINISHED)
                continue
            again = RESUMED.match(text)
            if again is not None:
                text = begun.pop(thread, f"{again[1]}(") + again[2].lstrip(" ")
            call = CALL.match(text)
            if call is not None and call[3] != "?":
                yield Call(thread, call[1], tuple(split(call[2])), int(call[3]), call[4])


def split(arguments: str) -> list[str]:
    """The arguments of a call, cut at the commas outside quotes and brackets.

    >>> split('AT_FDCWD, "\\\\x61, b", [{x=1, y=2}], O_RDONLY|O_CLOEXEC')
    ['AT_FDCWD', '"\\\\x61, b"', '[{x=1, y=2}]', 'O_RDONLY|O_CLOEXEC']
    """
    found, depth, quoted, start = [], 0, False, 0
    if arguments.count(",") == 0:
        return [arguments.strip()] if arguments.strip() else []
    for place in _marks(arguments):
        letter = arguments[place]
        if letter == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            found.append(arguments[start:place].strip())
            start = place + 1
    return [*found, arguments[start:].strip()]


def _marks(text: str) -> Iterator[int]:
    return (hit.start() for hit in re.finditer(r'[",\[\](){}]', text))


def unquote(text: str) -> bytes:
    """The bytes of a string that strace printed with -xx.

    >>> unquote('"\\\\x61\\\\x00"')
    b'a\\x00'
    """
    return bytes.fromhex(text.strip('"').replace("\\x", ""))


def names(calls: Sequence[Call], thread: int) -> list[tuple[str, int]]:
    """Each call of a thread as (name, how many of that name it is): what `when=` of strace counts."""
    counted: dict[str, int] = {}
    found = []
    for call in calls:
        if call.thread == thread:
            counted[call.name] = counted.get(call.name, 0) + 1
            found.append((call.name, counted[call.name]))
    return found
