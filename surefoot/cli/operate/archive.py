"""Command `surefoot archive`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption


def archive(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="FILE.tar", help="the new tar file")],
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Copy a run folder into one tar file.

    The command refuses a run that is running. The run folder does not change; `tar -xf FILE.tar`
    restores the folder, and surefoot remove RUN deletes it.
    """
    import os
    import tarfile

    from surefoot.cli.operate.whole_run import check_is_run, list_files, lock_run
    from surefoot.core.errors import InputError, hint_unwritten
    from surefoot.core.units import format_bytes

    check_is_run(run)
    options.check_new_file(out, "FILE.tar", f"{run.resolve().name}.tar")
    draft, name = out.with_name(f".{out.name[:200]}.draft"), run.resolve().name
    try:
        with lock_run(run):
            files = [(path, f"{name}/{path.relative_to(run)}") for path, _ in list_files(run)]
            with draft.open("xb") as raw, tarfile.open(fileobj=raw, mode="w") as tar:
                for path, inside in files:
                    tar.add(path, inside, recursive=False)
                tar.close()
                os.fsync(raw.fileno())
        os.link(draft, out)  # unlike a rename it never replaces a file that was created meanwhile
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: {error.strerror}",
            hint=hint_unwritten(error, "give another file"),
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    size = out.stat().st_size
    if json:
        options.print_json(
            {"run": str(run), "file": str(out), "num_files": len(files), "num_bytes": size}
        )
    else:
        print(f"{out}  {len(files):,} files, {format_bytes(size)}")
