"""Progress bar on standard error, shown only in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(
    what: str, total: int | None, quiet: bool, *, unit: str = "bytes"
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield a callback that advances it.

    The callback takes the amount of new work, in bytes or in `unit`.

    Args:
        what: text beside the bar.
        total: amount of work; None if unknown.
        quiet: if True, no bar is shown.
        unit: unit of the work.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    counted = (
        (DownloadColumn(), TransferSpeedColumn())
        if unit == "bytes"
        else (MofNCompleteColumn(), TextColumn(unit))
    )
    columns = (TextColumn(what), BarColumn(), *counted, TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def to_total(advance: Callable[[int], None]) -> Callable[[int, int], None]:
    """Adapt `advance`, which takes the amount of new work, to callers that report the total so far.

    The returned callback ignores its second argument.
    """
    done = 0

    def tell(now: int, _: int) -> None:
        nonlocal done
        advance(now - done)
        done = now

    return tell
