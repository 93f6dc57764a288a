"""Watcher process for ranks that torchrun or a different launcher started.

`runtime/comm/watched.py` starts it. If a rank blocks the others, the watcher reports this rank,
ends all ranks and records the hang in the log of the run, as the supervisor of `surefoot train
--ranks` does. Their launcher decides whether to restart them.

The command is `python -m surefoot.cli.watch JSON`. The JSON object has `stall_s` (seconds of
waiting that count as a stall), `parent` (process id of the rank that started the watcher), and
`ranks`: for each rank its `pid`, and as `files` the descriptors of its flight record and its
stacks.
"""

from __future__ import annotations

import json
import os
import sys
import time

from surefoot.cli.options import find_judge, say
from surefoot.control.launch.elastic import AttemptEnd
from surefoot.control.launch.local import STALL_LOOK_S, RankProcess, end_if_stalled
from surefoot.control.launch.looking import RankFiles
from surefoot.control.launch.peers import Peer
from surefoot.control.launch.record import record_fault
from surefoot.core import flight
from surefoot.core.errors import LostRank

HINT = (
    "torchrun --max-restarts N restarts the ranks; with --run they resume from the newest "
    "checkpoint"
)


def main(words: str) -> None:
    """Watch the ranks until the parent process or a rank ends, or a rank blocks the others.

    `words` is the JSON object that the module describes.
    """
    row = json.loads(words)
    told = [RankFiles(*each["files"]) for each in row["ranks"]]
    judge = find_judge(row["stall_s"])._replace(hint=HINT)
    try:
        ranks = [
            RankProcess(rank, Peer(each["pid"], told[rank].flight))
            for rank, each in enumerate(row["ranks"])
        ]
    except ProcessLookupError:
        return  # a rank has ended; the others, or their launcher, detect that themselves
    while os.getppid() == row["parent"]:
        for each in ranks:
            each.code = each.process.poll()
        if any(each.code is not None for each in ranks):
            return
        fault = end_if_stalled(ranks, say, judge, told)
        if fault is not None:
            step = max(0, flight.read(told[fault.rank].flight).step)
            _record(AttemptEnd(LostRank.exit_code, fault, step=step), told[0])
            return
        time.sleep(STALL_LOOK_S)


def _record(end: AttemptEnd, first: RankFiles) -> None:
    """Record in the run's log how its ranks ended; all have ended, and none writes any more.

    `first` are the files of rank 0, which names the run folder that it wrote, if it had one.
    """
    found = flight.read_run(first.flight)
    if found is not None:
        run, generation = found
        record_fault(run, end, after=generation - 1, say=say, generation=generation)


if __name__ == "__main__":
    main(sys.argv[1])
