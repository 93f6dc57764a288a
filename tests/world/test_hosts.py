"""Two hosts that train one run.

Network namespaces with a cable between them, plain variables, no launcher.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.distributed.hosts import ADDRESSES, Hosts, NoHosts, two_hosts
from surefoot.contract import events, manifest

PORT = "29511"
TRAIN = (
    sys.executable,
    "-P",
    "-m",
    "surefoot",
    "train",
    "digits",
    "--steps",
    "20",
    "--set",
    'layout.check_every="9 steps"',
)
JOIN = """
import sys, torch
from surefoot.core import place
from surefoot.runtime.comm.join import join
with join(place.here(), torch.device("cpu"), wait_s=float(sys.argv[1]), timeout_s=20) as group:
    print(group.exchange(f"rank {group.rank}"))
"""

MAKE = """
import time
from benchmarks.distributed.hosts import two_hosts
with two_hosts() as made:
    print(*made.pids, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with two_hosts() as made:
            yield made
    except NoHosts as error:
        pytest.skip(f"no two hosts can be made here: {error}")


def start(
    hosts: Hosts, rank: int, *command: str, address: str = ADDRESSES[0]
) -> subprocess.Popen[str]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": PORT,
    }
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    return subprocess.Popen(
        hosts.on(rank, *command), stdout=-1, stderr=-1, text=True, env=environment
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, out, err


def test_two_hosts_train_one_run_and_agree_and_rank_0_alone_prints(
    hosts: Hosts, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = start(hosts, 0, *TRAIN, "--run", str(run))
    time.sleep(1.5)  # the other one comes late
    second = end(start(hosts, 1, *TRAIN, "--run", str(run)))
    code, _, said = end(first)
    assert (code, second[0]) == (0, 0), (said, second)
    assert "run folder" in said
    assert [
        line for line in "".join(second[1:]).splitlines() if "[c10d]" not in line
    ] == []  # but for what torch itself says
    assert manifest.steps(run)[-1] == 20
    losses = [
        [each.loss for each in events.read(home) if isinstance(each, events.Step)]
        for home in (run, run / "ranks" / "1")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_host_that_comes_late_is_waited_for_and_one_that_does_not_is_named(hosts: Hosts) -> None:
    first = start(hosts, 0, sys.executable, "-c", JOIN, "30")
    time.sleep(3.0)
    second = end(start(hosts, 1, sys.executable, "-c", JOIN, "30"))
    assert end(first)[:2] == second[:2] == (0, "['rank 0', 'rank 1']\n")
    code, _, said = end(start(hosts, 0, sys.executable, "-c", JOIN, "2"))
    assert code
    assert "rank 1 of 2 did not connect within 2 s" in said


@pytest.mark.slow
def test_a_wrong_address_is_named(hosts: Hosts) -> None:
    """One that nobody has, and one where nobody listens."""
    wrong = ("10.77.0.9", ADDRESSES[1])
    tried = [start(hosts, 1, sys.executable, "-c", JOIN, "2", address=address) for address in wrong]
    for address, process in zip(wrong, tried, strict=True):
        code, _, said = end(process)
        assert code
        assert f"rank 1 of 2 found no rank 0 at {address}:{PORT} within 2 s" in said


def test_hosts_end_with_who_made_them_also_by_sigkill(hosts: Hosts) -> None:
    with subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        pids = maker.stdout.readline().split()
        maker.kill()
    until_s = time.monotonic() + 60
    while left := [
        pid for pid in pids if Path(f"/proc/{pid}/ns/net").is_symlink() and _is_there(pid)
    ]:
        assert time.monotonic() < until_s, left
        time.sleep(0.02)
    assert len(pids) == 2


def _is_there(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
