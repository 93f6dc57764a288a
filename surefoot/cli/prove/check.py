"""Command `surefoot check`."""

from __future__ import annotations

from surefoot.cli import options
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption
from surefoot.cli.table import print_table, print_text


def check(run: RunArgument, json: JsonOption = False, traceback: TracebackOption = False) -> int:
    """Check that a run folder is complete and undamaged.

    The command checks the spec, the log, the ledger, and every byte of every checkpoint that the
    log names, even in a copied folder. The exit code is 1 if a part is damaged or missing.
    """
    from surefoot.cli.operate import wholeness

    found = wholeness.check(run)
    is_whole = all(each.is_whole for each in found)
    if json:
        parts, commits = (
            [each.as_row() for each in found if (each.step is not None) == of_commits]
            for of_commits in (False, True)
        )
        options.print_json({"run": str(run), "ok": is_whole, "parts": parts, "commits": commits})
        return int(not is_whole)
    removed = [each.name for each in found if each.state == wholeness.REMOVED]
    shown = [each for each in found if each.state != wholeness.REMOVED]
    rows = [
        (each.name, each.state if each.is_whole else each.state.upper(), each.found)
        for each in shown
    ]
    print_table(("part", "state", ""), rows)
    if removed:
        print_text(
            f"removed by retention or manually: {len(removed):,}, from {removed[0]} to "
            f"{removed[-1]}"
        )
    for each in found:
        for problem in each.problems:
            print_text(f"{each.name}: {problem}")
    has_commits = any(each.step is not None for each in found)
    whole = (
        "the run folder is whole"
        if has_commits
        else "spec, log and ledger are whole; there is no checkpoint, and the log names none"
    )
    print_text(whole if is_whole else "the run folder is NOT whole")
    return int(not is_whole)
