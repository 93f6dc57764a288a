"""The process that watches ranks which torchrun, or environment variables, started.

`runtime/comm/watched.py` starts it. As the supervisor of `--ranks` does, it names the rank that
keeps the others waiting, and ends all ranks. Their launcher decides whether to start them again.

`python -m surefoot.cli.watch JSON` takes `stall_s`, `parent` (the rank that started it), and for
each rank its `pid` and the descriptors of its flight record and its stacks.
"""

from __future__ import annotations

import json
import os
import sys
import time

from surefoot.cli.options import find_judge, say
from surefoot.control.launch.local import STALL_LOOK_S, RankProcess, end_if_stalled
from surefoot.control.launch.looking import RankFiles
from surefoot.control.launch.peers import Peer

HINT = (
    "torchrun --max-restarts N restarts the ranks; with --run they resume from the newest "
    "checkpoint"
)


def main(words: str) -> None:
    """Watch until the parent process or a rank has ended, or a rank keeps the others waiting."""
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
        if (
            any(each.code is not None for each in ranks)
            or end_if_stalled(ranks, say, judge, told) is not None
        ):
            return
        time.sleep(STALL_LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1])
