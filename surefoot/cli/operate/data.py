"""Commands `surefoot data index` and `surefoot data check`, for tar files of samples.

The other commands of `surefoot data` are registered in this module too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.help import Verb, Verbs
from surefoot.cli.operate import convert, read_speed, stage
from surefoot.cli.operate.progress import progress, to_total
from surefoot.cli.options import JsonOption, QuietOption, TracebackOption
from surefoot.core.errors import EXIT_OK, EXIT_VERDICT_FAILS

if TYPE_CHECKING:
    from surefoot.components.data.tars.audit import Audit

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    help="Write, index, check, stage and time tars of samples.",
)

TarsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="tars in the layout of WebDataset, folders of them, or URLs with {000..099}",
    ),
]
MAX_SHOWN = 40
app.command(cls=Verb)(convert.convert)
app.command(cls=Verb)(read_speed.bench)
app.command(cls=Verb)(stage.stage)


@app.command(cls=Verb)
def index(
    paths: TarsArgument,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Write the position of each sample in the tars of a folder into an index file beside them.

    Every run that reads these tars uses the index; without it each user's first run makes one in a
    cache. An unchanged tar is not read again. For URLs the index is stored in the cache; upload it
    to the folder of the tars.
    """
    from surefoot.components.data.tars.audit import find_tars
    from surefoot.components.data.tars.far import find_remote, open_remote
    from surefoot.components.data.tars.index import open_index

    remote = find_remote(paths)
    tars = find_tars(paths) if remote is None else []
    total = sum(path.stat().st_size for path in tars) if remote is None else len(remote)
    with progress("indexing", total, quiet or json) as advance:
        tell = to_total(advance)
        made = (
            open_index(tars, tars[0].parent, tell=tell, beside=True)
            if remote is None
            else open_remote(remote, tell=tell)
        )
    shards = convert.shard_rows(made)
    if json:
        told = {
            "folder": str(made.folder),
            "index": str(made.place),
            "samples": len(made),
            "digest": made.digest,
            "shards": shards,
        }
        options.print_json(told)
        return
    convert.print_shards(shards)
    print(f"\n{len(made):,} samples in {len(made.shards):,} tars; index: {made.place}")


@app.command(cls=Verb)
def check(
    paths: TarsArgument,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Read and decode every part of every sample, and list the bad parts.

    The exit code is 1 if a part is bad.
    """
    from surefoot.cli.table import print_table
    from surefoot.core.errors import DataError

    found = _audit(paths, quiet or json)
    if not found.num_samples and not found.bad:
        raise DataError(
            f"no sample in {' '.join(map(str, paths))}, so there is nothing to check",
            hint="give tars that hold samples",
        )
    if json:
        rows = [{"shard": each.shard, "key": each.key, "reason": each.reason} for each in found.bad]
        options.print_json(
            {
                "ok": not found.bad,
                "samples": found.num_samples,
                "bytes": found.num_bytes,
                "bad": rows,
            }
        )
        return int(bool(found.bad))
    if found.bad:
        print_table(
            ("tar", "member", "reason"),
            [(each.shard, each.key, each.reason) for each in found.bad[:MAX_SHOWN]],
        )
        if len(found.bad) > MAX_SHOWN:
            print(f"and {len(found.bad) - MAX_SHOWN:,} more: --json has all of them")
        print()
    print(
        f"{found.num_samples:,} samples are undamaged, "
        f"{len(found.bad):,} {'part is' if len(found.bad) == 1 else 'parts are'} bad"
    )
    return EXIT_VERDICT_FAILS if found.bad else EXIT_OK


def _audit(paths: list[str], quiet: bool) -> Audit:
    from surefoot.components.data.tars.audit import audit, find_tars
    from surefoot.components.data.tars.far import find_remote, open_each

    remote = find_remote(paths)
    if remote is not None:
        with progress("reading", None, quiet) as advance:
            return audit(open_each(remote), tell=advance)
    tars = find_tars(paths)
    with progress("reading", sum(path.stat().st_size for path in tars), quiet) as advance:
        return audit(tars, tell=advance)
