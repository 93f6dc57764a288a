"""Our own supervisor of the ranks of one host: it begins them, hears for them, and ends them all when one of them fails.

The ranks die with it, however it dies (Linux: PR_SET_PDEATHSIG); they meet on the loopback, at a port that is taken before they begin.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from surefoot.control.launch.looking import Judge, Told, look, with_stacks
from surefoot.core import place, signals
from surefoot.core.errors import EXIT_OK, InputError, LostRank
from surefoot.core.hardware import count_cores

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
LOOK_S = 0.05
GRACE_S = 5.0  # for ranks to end by themselves, once one has failed
LOST = LostRank.exit_code
STALL_LOOK_S = 0.5
HEARD = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


@dataclass(eq=False)
class Rank:
    """One process of a run; `said` holds what it wrote of errors, `part` a line that is not whole yet."""

    number: int
    process: subprocess.Popen[bytes]
    said: list[str] = field(default_factory=list)
    part: bytes = b""
    code: int | None = None
    ended_s: float = 0.0


def launch(words: Sequence[str], num_ranks: int, say: Callable[[str], None], judge: Judge) -> int:
    """Run `surefoot WORDS` as ranks 0 to `num_ranks` - 1 of this host; gives the exit code: 0, or that of the rank which failed first.

    `judge` is shown what every rank does, and says who keeps the others waiting for too long; then all are ended.
    Rank 0 has this terminal. What the others write to standard error goes to `say` with their number; they write nothing else. Raises
    InputError for a number that is none, and inside of ranks.
    """
    if num_ranks < 1:
        raise InputError(f"--ranks is {num_ranks}", hint="use one rank or more")
    if place.here().world_size > 1:
        raise InputError(
            "--ranks is given to a process that is a rank already", hint="leave --ranks out under torchrun and the like"
        )
    with contextlib.ExitStack() as stack:
        meeting = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=num_ranks + 8))
        ranks: list[Rank] = []
        stack.callback(_end_all, ranks)
        for name in HEARD:
            if hasattr(signal, name):
                number = getattr(signal, name)
                stack.callback(signals.listen(number, functools.partial(_tell, ranks, number)))
        told = [Told.make(rank) for rank in range(num_ranks)]
        for each in told:
            stack.callback(each.close)
        for rank in range(num_ranks):
            ranks.append(_start(words, rank, num_ranks, meeting, told[rank]))  # noqa: PERF401 - ended even if one cannot be started
        meeting.close()
        is_hung = _watch(ranks, say, judge, told)
    return LOST if is_hung else _judge(ranks, say)


def _start(words: Sequence[str], rank: int, num_ranks: int, meeting: socket.socket, told: Told) -> Rank:
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting.getsockname()[1],
        place.FLIGHT: told.flight, place.STACKS: told.stacks,
    }  # fmt: skip
    passed = [*told, *([meeting.fileno()] if rank == 0 else [])]
    if rank == 0:
        variables[place.LISTENS] = meeting.fileno()
    threads = None if place.has_threads() else max(1, count_cores() // num_ranks)
    safe = ["-P"] if sys.flags.safe_path else []
    process = subprocess.Popen(
        [sys.executable, *safe, "-m", "surefoot", *words],
        stdin=subprocess.DEVNULL, stdout=None if rank == 0 else subprocess.DEVNULL, stderr=None if rank == 0 else subprocess.PIPE,
        env=place.child_environment(threads=threads) | {name: str(value) for name, value in variables.items()},
        pass_fds=passed, process_group=0, preexec_fn=_dying_with(os.getpid()),
    )  # fmt: skip
    return Rank(rank, process)


def _dying_with(parent: int) -> Callable[[], None]:
    """What a new process calls first: the kernel ends it with this one. A group of its own keeps Ctrl-C from reaching it twice."""
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None

    def call() -> None:
        if prctl is not None:
            prctl(DIES_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def _tell(ranks: Sequence[Rank], number: int) -> None:
    for each in ranks:
        if each.code is None:
            with contextlib.suppress(ProcessLookupError):
                each.process.send_signal(number)


def _watch(ranks: Sequence[Rank], say: Callable[[str], None], judge: Judge, told: Sequence[Told]) -> bool:
    """Until all have ended: show what they write; once one has failed the others have a while, then they are ended.

    So are all of them, where one keeps the others waiting: gives whether that was so.
    """
    is_hung, next_s = False, time.monotonic() + STALL_LOOK_S
    with selectors.DefaultSelector() as selector:
        for each in ranks:
            if each.process.stderr is not None:
                os.set_blocking(each.process.stderr.fileno(), False)
                selector.register(each.process.stderr, selectors.EVENT_READ, each)
        while waiting := [each for each in ranks if each.code is None]:
            for key, _ in selector.select(LOOK_S) if selector.get_map() else _pause():
                if not _read(key.data, say):
                    selector.unregister(key.fileobj)
            for each in waiting:
                each.code = each.process.poll()
                each.ended_s = time.monotonic()
            failed_s = min((each.ended_s for each in ranks if each.code), default=None)
            if failed_s is not None and time.monotonic() - failed_s > GRACE_S:
                _end_all(ranks)
            if time.monotonic() >= next_s and failed_s is None:
                next_s = time.monotonic() + STALL_LOOK_S
                is_hung = is_hung or _end_if_stalled(ranks, say, judge, told)
        for each in ranks:
            while _read(each, say):
                pass
    return is_hung


def _end_if_stalled(ranks: Sequence[Rank], say: Callable[[str], None], judge: Judge, told: Sequence[Told]) -> bool:
    pids = {each.number: each.process.pid for each in ranks if each.code is None}
    rows = look(pids, told)
    if len(rows) < 2 or not judge.is_stalled(rows):
        return False
    say(f"error: {judge.tell(with_stacks(rows, pids, told))}")
    say(
        "hint: all ranks are ended, and the same command goes on after the newest commit; layout.stall says how long one may take"
    )
    _end_all(ranks)
    return True


def _pause() -> Iterator[tuple[selectors.SelectorKey, int]]:
    time.sleep(LOOK_S)
    return iter(())


def _read(rank: Rank, say: Callable[[str], None]) -> bool:
    """Show the lines that a rank wrote; its errors are kept, since those of the first that failed are enough. False at the end."""
    if rank.process.stderr is None:
        return False
    try:
        content = os.read(rank.process.stderr.fileno(), 1 << 16)
    except BlockingIOError:
        return False
    *lines, rank.part = (rank.part + content).split(b"\n")
    for line in lines if content else [each for each in (*lines, rank.part) if each]:
        text = line.decode(errors="replace")
        if rank.said or text.startswith(("error: ", "Traceback ")):
            rank.said.append(text)
        else:
            say(f"[rank {rank.number}] {text}")
    if not content:
        rank.part = b""
    return bool(content)


def _end_all(ranks: Sequence[Rank]) -> None:
    """End every process that is left; what each of them began ends with it."""
    for each in ranks:
        if each.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                each.process.kill()
    for each in ranks:
        each.process.wait()


def _judge(ranks: Sequence[Rank], say: Callable[[str], None]) -> int:
    """The exit code of all; says which rank failed first, where that is not rank 0, which has said so itself."""
    failed = sorted((each for each in ranks if each.code), key=lambda each: (each.code == LOST, each.ended_s, each.number))
    if not failed:
        return EXIT_OK
    first = failed[0]
    first = next((each for each in failed if each.number == 0 and each.code == first.code), first)  # all failed alike
    assert first.code is not None
    code = first.code if first.code > 0 else 128 - first.code
    for line in first.said if first.number else ():
        say(f"[rank {first.number}] {line}")
    if first.code < 0:
        name = _signal_name(-first.code)
        say(f"error: rank {first.number} of {len(ranks)} was ended by {name}")
        say("hint: the same command goes on after the newest commit")
    elif first.number:
        say(f"error: rank {first.number} of {len(ranks)} ended with exit code {code}")
    return code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def without_ranks(words: Sequence[str]) -> list[str]:
    """The words of a command without `--ranks N`: what each rank runs.

    >>> without_ranks(["train", "digits", "--ranks", "2", "--quiet"])
    ['train', 'digits', '--quiet']
    """
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--ranks":
            next(rest, None)
        elif not word.startswith("--ranks="):
            kept.append(word)
    return kept
