"""`surefoot show`."""

from __future__ import annotations

from surefoot.cli import options
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption


def show(run: RunArgument, json: JsonOption = False, traceback: TracebackOption = False) -> None:
    """Tell how a run went.

    Where it ran, its learning curve, its evaluations, what went wrong, how it ended, how to repeat it.
    """
    from surefoot.cli.look import past, story

    found = past.read(run)
    if json:
        options.print_json(story.as_row(found))
    else:
        story.tell(found)
