"""Supervisor of the ranks of one host.

It starts the ranks, forwards their output, and ends all of them when one fails. The ranks end with
the supervisor, even if it is killed (on Linux, by PR_SET_PDEATHSIG). They rendezvous on the
loopback interface, at a port that the supervisor binds before they start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.contract import events, runlock
from surefoot.control.launch.decide import ExitKind, RankFailure, Rules, read_code
from surefoot.control.launch.elastic import AttemptEnd, Places
from surefoot.control.launch.forks import ForkedRank, ForkServer
from surefoot.control.launch.looking import (
    Judge,
    RankFiles,
    snapshot_ranks,
    with_last_stacks,
    with_stacks,
)
from surefoot.control.launch.peers import Peer
from surefoot.control.launch.record import record_fault
from surefoot.core import flight, place
from surefoot.core.errors import EXIT_OK, InputError, LostRank, OutOfMemory
from surefoot.core.flight import RankSnapshot
from surefoot.core.hardware import count_cores
from surefoot.core.process import memory_limits, signals

LOOK_S = 0.05
MAX_CHARACTERS = 200  # number of stored lines of a rank, from its first error on
GRACE_S = 5.0  # seconds for the ranks to end by themselves once one has failed
LOST = LostRank.exit_code
# signals from outside: what a rank did at that time is not the reason
ENDED = (
    signal.SIGKILL,
    *(getattr(signal, name) for name in signals.ENDINGS if hasattr(signal, name)),
)
STALL_LOOK_S = 0.5
FLAGS = ("--ranks", "--max-restarts")
HEARD = (*signals.ENDINGS, "SIGUSR1")


@dataclass(eq=False)
class RankProcess:
    """Process of a rank, and its output.

    `said` has the lines of standard error from the first error on, and `part` an incomplete line.
    `ended_s` is the monotonic time at which the process ended, in seconds.
    """

    number: int
    process: subprocess.Popen[bytes] | ForkedRank | Peer
    said: list[str] = field(default_factory=list)
    part: bytes = b""
    code: int | None = None
    ended_s: float = 0.0


def launch(
    words: Sequence[str],
    num_ranks: int,
    say: Callable[[str], None],
    judge: Judge,
    *,
    run: Path | None = None,
    max_restarts: int = 3,
    numbers: Sequence[int] = (),
) -> int:
    """Run `surefoot WORDS` as ranks 0 to `num_ranks` - 1 of this host, and return the exit code.

    Rank 0 uses the terminal of this process. Lines that the other ranks write to standard error are
    passed to `say` with their rank; their standard output is discarded.

    Args:
        words: the command without `surefoot`.
        num_ranks: number of rank slots.
        say: prints a line of the supervisor.
        judge: finds ranks that block the others; then all ranks are killed.
        run: folder of the run, from whose checkpoints all ranks restart if a rank is killed or
            hangs; None for no restarts.
        max_restarts: consecutive restarts allowed without a new checkpoint.
        numbers: allowed numbers of ranks. With several, a slot that fails twice is left out and
            tried again later (`decide`).

    Returns:
        0, or the exit code of the rank that failed first.

    Raises:
        InputError: if a number is out of range, or this process is a rank already.
    """
    if num_ranks < 1 or max_restarts < 0:
        raise InputError(
            f"--ranks is {num_ranks} and --max-restarts {max_restarts}",
            hint="use at least 1 rank, and 0 or more restarts",
        )
    place.check_launcher()
    if place.here().world_size > 1:
        raise InputError(
            "--ranks was given to a process that is already a rank",
            hint="leave --ranks out under torchrun and the like",
        )
    _fill_standard_streams()
    # if the run is finished, the command creates a new run folder each time: no restarts
    run = None if run is not None and events.is_finished(run) else run
    rules = Rules(
        places=num_ranks, numbers=tuple(numbers) or (num_ranks,), max_restarts=max_restarts
    )
    places = Places(rules, run, say)
    with contextlib.closing(ForkServer(words)) as server:
        while True:
            generation = 0 if run is None else runlock.read_generation(run)
            end = _attempt(server, places, say, judge)
            if run is not None:
                record_fault(run, end, after=generation, say=say)
            if (code := places.after(end)) is not None:
                return code


def _fill_standard_streams() -> None:
    """Open /dev/null for each of standard input, output and error that is closed.

    Otherwise a socket of the supervisor could get one of their descriptor numbers (0 to 2), and
    would be replaced by a stream when a rank starts.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _attempt(
    server: ForkServer, places: Places, say: Callable[[str], None], judge: Judge
) -> AttemptEnd:
    """Run all ranks once, from their start until the last one has ended."""
    num_ranks, asked, num_kills = len(places.now), list[int](), memory_limits.count_kills()
    with contextlib.ExitStack() as stack:
        meeting = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=num_ranks + 8))
        ranks: list[RankProcess] = []
        stack.callback(_end_all, ranks)
        for name in HEARD:
            if hasattr(signal, name):
                number = getattr(signal, name)
                stack.callback(
                    signals.listen(number, functools.partial(_forward_signal, ranks, number, asked))
                )
        told = [RankFiles.make(rank) for rank in range(num_ranks)]
        for each in told:
            stack.callback(each.close)
        for rank in range(num_ranks):
            begun = _start(
                server, rank, num_ranks, meeting, told[rank], local_rank=places.now[rank]
            )
            ranks.append(begun)  # so that they are ended even if the next rank cannot be started
        meeting.close()
        if asked:  # a signal came before all ranks could receive it: nothing has started
            return AttemptEnd(128 + asked[0], is_asked=True)
        with places.watch_for_growth():
            hung, is_recalled = _watch(ranks, say, judge, told, places)
        seen = with_last_stacks(snapshot_ranks(dict.fromkeys(range(num_ranks), 0), told), told)
    end = _report_end(ranks, say, judge, seen) if hung is None else AttemptEnd(LOST, hung)
    end = _name_memory(end, memory_limits.count_kills() - num_kills, say, places)
    fault = end.fault
    if fault is not None and fault.place is not None:
        fault = fault._replace(place=places.now[fault.place])
    step = 0 if fault is None else max(0, seen[fault.rank].record.step)
    return end._replace(fault=fault, is_asked=bool(asked), is_recalled=is_recalled, step=step)


def _name_memory(
    end: AttemptEnd, num_kills: int, say: Callable[[str], None], places: Places
) -> AttemptEnd:
    """Return `end`, with the out-of-memory exit code if the kernel killed a rank to free memory.

    Such a run restarts only if fewer ranks are allowed: the same number of ranks would fail again.
    `num_kills` is the number of processes that the kernel killed for memory during the attempt.
    """
    if num_kills <= 0 or end.fault is None or end.fault.how is not ExitKind.KILLED:
        return end
    words = (
        f"the kernel killed {num_kills} process{'es' * (num_kills > 1)} of this run's "
        "cgroup for memory; all ranks together may "
        f"use {memory_limits.find_limit().words}"
    )
    say(f"error: {words}")
    say(
        "hint: use a smaller train.microbatch, memory.activation_checkpointing, layout.shard or "
        "fewer ranks, or raise the limit"
    )
    how = end.fault.how if places.is_elastic else ExitKind.SHORT
    return end._replace(code=OutOfMemory.exit_code, fault=end.fault._replace(how=how, cause=words))


def _start(
    server: ForkServer,
    rank: int,
    num_ranks: int,
    meeting: socket.socket,
    told: RankFiles,
    *,
    local_rank: int,
) -> RankProcess:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": meeting.getsockname()[1],
    }
    passed = {place.FLIGHT: told.flight, place.STACKS: told.stacks} | (
        {} if rank else {place.LISTENS: meeting.fileno()}
    )
    threads = None if place.has_threads() else max(1, count_cores() // num_ranks)
    return RankProcess(
        rank,
        server.start(
            {name: str(value) for name, value in variables.items()},
            passed,
            speaks=rank == 0,
            threads=threads,
        ),
    )


def _forward_signal(ranks: Sequence[RankProcess], number: int, asked: list[int]) -> None:
    """Forward a signal to every running rank, and append it to `asked` if it ends the ranks.

    Only SIGUSR1, which requests a checkpoint, does not end them.
    """
    if number != getattr(signal, "SIGUSR1", None):
        asked.append(number)
    for each in ranks:
        if each.code is None:
            with contextlib.suppress(ProcessLookupError):
                each.process.send_signal(number)


def _watch(
    ranks: Sequence[RankProcess],
    say: Callable[[str], None],
    judge: Judge,
    told: Sequence[RankFiles],
    places: Places,
) -> tuple[RankFailure | None, bool]:
    """Supervise the ranks until all have ended, and print their output.

    When a rank fails, the others are killed after `GRACE_S` seconds. When a rank blocks the others,
    all ranks are killed. When more slots can have a rank, all ranks are asked to save and end.

    Returns:
        The failure if a rank blocked the others, else None; and whether the ranks were ended to
        restart with more ranks.
    """
    hung, is_recalled, next_s = None, False, time.monotonic() + STALL_LOOK_S
    with selectors.DefaultSelector() as selector:
        for each in ranks:
            if each.process.stderr is not None:
                os.set_blocking(each.process.stderr.fileno(), False)
                selector.register(each.process.stderr, selectors.EVENT_READ, each)
        while waiting := [each for each in ranks if each.code is None]:
            for key, _ in selector.select(LOOK_S) if selector.get_map() else _pause():
                if not _read(key.data, say):
                    selector.unregister(key.fileobj)
            now_s = time.monotonic()
            for each in waiting:
                each.code, each.ended_s = each.process.poll(), now_s
            failed_s = min((each.ended_s for each in ranks if each.code), default=None)
            if failed_s is not None and time.monotonic() - failed_s > GRACE_S:
                _end_all(ranks)
            if time.monotonic() >= next_s and failed_s is None:
                next_s = time.monotonic() + STALL_LOOK_S
                hung = hung or end_if_stalled(ranks, say, judge, told)
                if hung is None and not is_recalled and places.can_grow():
                    is_recalled = True
                    places.log_growth()
                    _request_restart(ranks, told)
        for each in ranks:
            while _read(each, say):
                pass
    return hung, is_recalled


def _request_restart(ranks: Sequence[RankProcess], told: Sequence[RankFiles]) -> None:
    """Make all ranks save and end after the same step, to be restarted.

    They end as on SIGTERM, but their flight records show that the run will continue.
    """
    for each in told:
        flight.request_restart(each.flight)
    _forward_signal(ranks, signal.SIGTERM, [])


def end_if_stalled(
    ranks: Sequence[RankProcess],
    say: Callable[[str], None],
    judge: Judge,
    told: Sequence[RankFiles],
) -> RankFailure | None:
    """Kill all ranks if a rank blocks the others, and report that rank.

    Return the failure; None if no rank blocks the others.
    """
    pids = {each.number: each.process.pid for each in ranks if each.code is None}
    rows = snapshot_ranks(pids, told)
    if len(rows) < 2 or not judge.is_stalled(rows):
        return None
    rows = with_stacks(rows, pids, told)
    late = judge.blame(rows)
    words = judge.tell(rows)
    say(f"error: {words}")
    say(
        "hint: all ranks were stopped: every rank must call the same collectives, in the same order"
        if late is None
        else (
            f"hint: all ranks were stopped, and {judge.hint}; layout.hang_timeout is the "
            "time limit of a collective"
        )
    )
    _end_all(ranks)
    return (
        RankFailure(ExitKind.APART, cause=words)
        if late is None
        else RankFailure(
            ExitKind.HUNG, late[0] if len(late) == 1 else None, (*late, 0)[0], cause=words
        )
    )


def _pause() -> Iterator[tuple[selectors.SelectorKey, int]]:
    time.sleep(LOOK_S)
    return iter(())


def _read(rank: RankProcess, say: Callable[[str], None]) -> bool:
    """Print new output lines of a rank; return False if there was no output to read.

    From the first error on, lines are stored in `said` and not printed, because only the errors of
    the rank that failed first are printed in full.
    """
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
            del rank.said[:-MAX_CHARACTERS]
        else:
            say(f"[rank {rank.number}] {text}")
    if not content:
        rank.part = b""
    return bool(content)


def _end_all(ranks: Sequence[RankProcess]) -> None:
    """Kill every rank that is still running, and wait until all have ended.

    The processes that a rank started end with it.
    """
    for each in ranks:
        if each.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                each.process.kill()
    for each in ranks:
        each.process.wait()


def _report_end(
    ranks: Sequence[RankProcess],
    say: Callable[[str], None],
    judge: Judge,
    seen: Sequence[RankSnapshot],
) -> AttemptEnd:
    """Report the rank that failed first, and return how the ranks ended.

    Errors of rank 0 are not printed again, since rank 0 prints them itself. `seen` has the last
    progress of each rank. It may show that a different rank is at fault: gloo crashes the rank that
    receives unexpected data, whichever rank sent it.
    """
    failed = sorted(
        (each for each in ranks if each.code),
        key=lambda each: (each.code == LOST, each.ended_s, (each.code or 0) > 0, each.number),
    )
    if not failed:
        return AttemptEnd(EXIT_OK)
    first = failed[0]
    assert first.code is not None
    if first.code > 0:
        # if rank 0 failed with the same exit code, it is reported
        first = next(
            (each for each in failed if each.number == 0 and each.code == first.code), first
        )
    assert first.code is not None
    code = first.code if first.code > 0 else 128 - first.code
    for line in first.said if first.number else ():
        say(f"[rank {first.number}] {line}")
    words = f"rank {first.number} of {len(ranks)} ended with exit code {code}"
    if first.code < 0:
        words = f"rank {first.number} of {len(ranks)} was ended by {_signal_name(-first.code)}"
    if first.code < 0 or first.number:
        say(f"error: {words}")
    if first.code == LOST or (first.code < 0 and -first.code not in ENDED):
        apart = judge.tell_apart(seen)
        words += f"; at that time {apart}" * bool(apart)
        _print_other_ranks(ranks, first, say, apart)
    if first.code < 0:
        say(f"hint: {judge.hint}")
    how = read_code(first.code)
    for each in ranks if how is ExitKind.PARTED else ():
        if each.code == 0:
            words = (
                f"rank {each.number} of {len(ranks)} ended with exit code 0, as if "
                "the run had finished"
            )
            say(f"error: {words}")
            how, first = ExitKind.LEFT, each
    if first.said and how in (ExitKind.RAISED, ExitKind.ABORTED):
        words += f": {first.said[0].removeprefix('error: ')}"
    slot = first.number if how in (ExitKind.KILLED, ExitKind.CRASHED) else None
    return AttemptEnd(code, RankFailure(how, slot, first.number, words))


def _print_other_ranks(
    ranks: Sequence[RankProcess], first: RankProcess, say: Callable[[str], None], words: str
) -> None:
    """Print `words`, and the first error of each rank other than rank 0 and `first`.

    `words` describes what other ranks did when rank `first` failed; if it is "", it is not printed.
    """
    if words:
        say(f"error: at that time {words}")
    for each in ranks:
        if each.number and each is not first and each.said:
            say(f"[rank {each.number}] {each.said[0]}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def without_ranks(words: Sequence[str]) -> list[str]:
    """Return a command line without `--ranks` and `--max-restarts`, as each rank runs it.

    >>> without_ranks(["train", "digits", "--ranks", "2", "--quiet"])
    ['train', 'digits', '--quiet']
    """
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in FLAGS:
            next(rest, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in FLAGS)):
            kept.append(word)
    return kept
