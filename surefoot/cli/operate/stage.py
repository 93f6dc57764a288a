"""Command `surefoot data stage`, which copies tar files to faster storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.operate.progress import progress
from surefoot.cli.options import JsonOption, QuietOption, TracebackOption

if TYPE_CHECKING:
    from surefoot.components.data.disk.devices import Device, Speed

LocalArgument = Annotated[
    list[str], typer.Argument(metavar="PATH", help="the tars of one folder, or that folder")
]
DestArgument = Annotated[
    Path, typer.Argument(metavar="DEST", help="a folder on faster storage: a local NVMe, /dev/shm")
]


def stage(
    paths: LocalArgument,
    dest: DestArgument,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Copy tars to faster storage, and print the read speed before and after.

    The command first checks the free disk space. Each copy must have the digest in the index or
    SHA256SUMS, and is read back. If the command is interrupted, the same command continues after
    the last complete tar.
    """
    from surefoot.cli.table import print_table, without_control
    from surefoot.components.data.disk.stage import stage as copy
    from surefoot.components.data.remote.names import is_url
    from surefoot.components.data.tars.audit import find_tars
    from surefoot.core.errors import DataError
    from surefoot.core.process.signals import exit_on_signal
    from surefoot.core.units import format_bytes

    if any(map(is_url, paths)):
        raise DataError(
            f"{paths[0]} is a URL",
            hint='shards of URLs are cached as they are read: Remote([...], cache="/fast/disk")',
        )
    tars = find_tars([Path(path).expanduser() for path in paths])
    with (
        exit_on_signal(),
        progress("copying", sum(path.stat().st_size for path in tars), quiet or json) as advance,
    ):
        made = copy(tars, dest.expanduser(), tell=advance)
    sides = {
        "before": (tars[0].parent, made.source, made.before),
        "after": (dest, made.dest, made.after),
    }
    if json:
        speeds = {
            name: _row(folder, device, speed) for name, (folder, device, speed) in sides.items()
        }
        told = {
            "folder": str(dest),
            "index": str(made.index.place),
            "samples": len(made.index),
            "tars": len(made.index.shards),
        }
        options.print_json(
            {
                **told,
                "bytes": made.num_bytes,
                "copied_bytes": made.copied_bytes,
                "kept": made.kept,
                "checked": made.checked,
                **speeds,
            }
        )
        return
    rows = [
        (name, str(folder), str(device), _speed(speed))
        for name, (folder, device, speed) in sides.items()
    ]
    print_table(("", "folder", "device", "sequential read"), rows)
    if any(device.kind != "memory" and not speed.cold for _, device, speed in sides.values()):
        print("\nfrom memory: the system did not drop the files from its cache")
    kept = f", {made.kept:,} of which already existed" if made.kept else ""
    known = (
        "all digests were known before"
        if made.checked == len(made.index.shards)
        else f"{made.checked:,} digests were known before"
    )
    print(
        f"\n{len(made.index):,} samples in {len(made.index.shards):,} tars of "
        f"{format_bytes(made.num_bytes)}{kept}; {known}"
    )
    print(without_control(f"index: {made.index.place}"))


def _speed(speed: Speed) -> str:
    from surefoot.core.units import format_bytes

    return f"{format_bytes(speed.bytes_per_s)}/s{'' if speed.cold else ' from memory'}"


def _row(folder: Path, device: Device, speed: Speed) -> dict[str, object]:
    from dataclasses import asdict

    return {"folder": str(folder), "device": asdict(device), **asdict(speed)}
