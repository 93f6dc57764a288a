"""The command `surefoot`: it handles SIGUSR1 before it imports the rest of the package."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from surefoot.core import place
from surefoot.core.errors import EXIT_INTERRUPTED, LostRank


def main() -> None:
    """Run the verb that the command line names."""
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
    """Do nothing on SIGUSR1, since there is nothing to save yet.

    This is a handler and not SIG_IGN: the run and every child process would inherit an ignored
    signal.
    """
