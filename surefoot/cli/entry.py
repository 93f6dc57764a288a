"""Entry point of the `surefoot` command.

A handler for SIGUSR1 is set first, because importing the rest of the package takes long.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from surefoot.core import place
from surefoot.core.errors import EXIT_INTERRUPTED, LostRank


def main() -> None:
    """Run the subcommand that `sys.argv` names, such as `train`, and exit.

    If this process is the fork server, it first serves requests; then only the forked ranks run the
    subcommand.
    """
    if hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        # SIGUSR1 requests a save, and would end the process until a run handles it
        signal.signal(signal.SIGUSR1, _ignore_signal)
    if (link := place.take_forks()) is not None:
        from surefoot.cli.forks import serve

        serve(link)  # returns in each rank
    try:
        from surefoot.cli.main import main as run_a_verb

        run_a_verb()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as ended:
        if link is not None and ended.code == LostRank.exit_code:
            from surefoot.cli.forks import leave

            leave(LostRank.exit_code)
        raise


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing: SIGUSR1 requests a checkpoint, but no run has started yet.

    `SIG_IGN` is not used, because child processes would inherit it and ignore the signal too.
    """
