"""Two hosts on one machine: network namespaces, joined by a cable of so many bits a second.

It needs Linux, root, `ip`, `tc` and `nsenter`.
The namespaces have no names: a process each holds them, and they end with it, which ends with ours,
even by SIGKILL.

python -m benchmarks.distributed.hosts PID PID COMMAND ...

does COMMAND on the host of this rank, where rank 0 is met at its address.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from surefoot.core import place

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOLD = ("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity")
WAIT_S = 5.0


class NoHosts(Exception):
    """Namespaces cannot be made here, and why."""


@dataclass(frozen=True)
class Hosts:
    """The processes that hold the two of them."""

    pids: tuple[int, int]

    def on(self, host: int, *command: str) -> list[str]:
        """The command that does `command` on a host.

        It takes the place of `nsenter`, so a signal reaches it.
        """
        return ["nsenter", f"--net=/proc/{self.pids[host]}/ns/net", *command]


@contextlib.contextmanager
def two_hosts(rate: str | None = None) -> Iterator[Hosts]:
    """Two hosts at ADDRESSES; their cable takes `rate` each way, as tc writes it.

    Raises NoHosts.
    """
    with contextlib.ExitStack() as opened:
        holders = [opened.enter_context(_holder()) for _ in ADDRESSES]
        hosts = Hosts((holders[0].pid, holders[1].pid))
        for each in holders:
            _wait_for_own(each)
        first, second = hosts.pids
        _run(*f"ip link add cable0 netns {first} type veth peer name cable1 netns {second}".split())
        for host, address in enumerate(ADDRESSES):
            cable = f"cable{host}"
            _run(*hosts.on(host, "ip", "address", "add", f"{address}/24", "dev", cable))
            _run(*hosts.on(host, "ip", "link", "set", cable, "up"))
            _run(*hosts.on(host, "ip", "link", "set", "lo", "up"))
            if rate is not None:
                shape = f"rate {rate} burst 32kbit latency 400ms"
                words = f"tc qdisc add dev {cable} root tbf {shape}".split()
                _run(*hosts.on(host, *words))
        yield hosts


@contextlib.contextmanager
def _holder() -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(HOLD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise NoHosts(f"{HOLD[0]}: {error.strerror}") from None
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_own(holder: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + WAIT_S
    ours = os.readlink("/proc/self/ns/net")
    while time.monotonic() < until_s and holder.poll() is None:
        with contextlib.suppress(OSError):
            if (
                os.readlink(f"/proc/{holder.pid}/ns/net") != ours
                and Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n"
            ):
                return
        time.sleep(0.01)
    raise NoHosts("a network namespace cannot be made: that takes root on Linux")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoHosts(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")


def main() -> None:
    """Become the command, so that whoever started this one ends it."""
    hosts = Hosts((int(sys.argv[1]), int(sys.argv[2])))
    command = hosts.on(place.here().rank, "env", f"MASTER_ADDR={ADDRESSES[0]}", *sys.argv[3:])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
