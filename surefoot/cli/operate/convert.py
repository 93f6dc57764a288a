"""Command `surefoot data convert`, which writes a folder of images as tar files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.operate.progress import progress
from surefoot.cli.options import JsonOption, QuietOption, TracebackOption

if TYPE_CHECKING:
    from surefoot.components.data.tars.index import Index

FolderArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="a folder of images with one subfolder per class")
]
OutArgument = Annotated[
    Path,
    typer.Argument(
        metavar="OUT",
        help="the folder for the tars: a new one, or that of an interrupted conversion",
    ),
]
ShuffleOption = Annotated[
    int | None,
    typer.Option("--shuffle", metavar="SEED", help="shuffle the samples with this seed"),
]
MAX_SHOWN = 40
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="the prefix of the names of the tars",
        show_default="the name of OUT",
    ),
]


def convert(
    folder: FolderArgument,
    out: OutArgument,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="the maximum size of a tar")
    ] = "256 MiB",
    name: NameOption = None,
    shuffle: ShuffleOption = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="read the targets of links")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Write images as tars in the layout of WebDataset.

    The bytes of the image files are copied unchanged. If the command is interrupted, the same
    command continues with the tars that are missing and writes the same bytes.
    """
    from surefoot.cli.table import without_control
    from surefoot.components.data.disk.convert import ShardNaming, plain_name
    from surefoot.components.data.disk.convert import convert as write
    from surefoot.components.data.sources.images import ImageFolder
    from surefoot.core.process.signals import exit_on_signal
    from surefoot.core.units import format_bytes, parse_bytes

    layout = ShardNaming(
        name=name or plain_name(out), shard_bytes=parse_bytes(shard_size), shuffle=shuffle
    )
    images = ImageFolder(folder, follow_links=follow_links)
    with (
        exit_on_signal(),
        progress("converting", len(images), quiet or json, unit="samples") as advance,
    ):
        made = write(images, out, layout, tell=advance)
    index, shards = made.index, shard_rows(made.index)
    num_bytes = sum(each.num_bytes for each in index.shards)
    if json:
        told = {"folder": str(out), "samples": len(index), "bytes": num_bytes, "kept": made.kept}
        options.print_json(
            {
                **told,
                "parts": made.parts,
                "beside": list(made.beside),
                "index": str(index.place),
                "shards": shards,
            }
        )
        return
    print_shards(shards)
    kept = f", {made.kept:,} of which already existed" if made.kept else ""
    print(f"\n{len(index):,} samples in {len(shards):,} tars of {format_bytes(num_bytes)}{kept}")
    print(without_control(f"other files: {', '.join([*made.beside, index.place.name])}"))
    names = ", ".join(f'{part}="{extension}"' for part, extension in made.parts.items())
    print(without_control(f'read them with Tars(sorted(Path("{out}").glob("*.tar")), {names})'))


def shard_rows(index: Index) -> list[dict[str, Any]]:
    """Return the name, size in bytes, number of samples and digest of each tar in an index."""
    return [
        {
            "name": each.name,
            "bytes": each.num_bytes,
            "samples": each.num_samples,
            "sha256": each.digest,
        }
        for each in index.shards
    ]


def print_shards(shards: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of `shard_rows` as a table, with one row per tar file."""
    from surefoot.cli.table import print_table
    from surefoot.core.units import format_bytes

    shown = [
        (each["name"], f"{each['samples']:,}", format_bytes(each["bytes"]), each["sha256"][:12])
        for each in shards[:MAX_SHOWN]
    ]
    print_table(("tar", "samples", "size", "sha256"), shown, right=("samples", "size"))
    if len(shards) > MAX_SHOWN:
        print(f"and {len(shards) - MAX_SHOWN:,} more")
