"""`surefoot data convert`: images, arrays, or the samples of a task, written as tar files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.operate.progress import progress, to_total
from surefoot.cli.options import DataOption, JsonOption, QuietOption, SetOption, TracebackOption

if TYPE_CHECKING:
    from surefoot.components.data.disk.convert import ConvertedShards
    from surefoot.components.data.disk.given import Given

SourceArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help=(
            "a folder of images by class, arrays as NAME=FILE.npy, or a SPEC whose task reads them"
        ),
    ),
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
MOST_SHOWN = 40
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
    sources: SourceArgument,
    out: OutArgument,
    split: Annotated[
        str, typer.Option("--split", metavar="NAME", help="for a SPEC: the split of its task")
    ] = "train",
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="the maximum size of a tar")
    ] = "256 MiB",
    name: NameOption = None,
    shuffle: ShuffleOption = None,
    as_: Annotated[
        list[str] | None,
        typer.Option(
            "--as",
            metavar="PART=FORM",
            help="the format of a part: npy, cls, txt, json or safetensors",
        ),
    ] = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="for an image folder: read the targets of links")
    ] = False,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="write no index beside the tars")
    ] = False,
    set_: SetOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Write samples as tars in the layout of WebDataset.

    The bytes of an image folder are copied unchanged; each part of arrays and of a task's samples
    is written in a format that stores it exactly. If the command is interrupted, the same command
    continues after the last complete tar and writes the same bytes.
    """
    from surefoot.components.data.disk.convert import ShardNaming, plain_name
    from surefoot.components.data.disk.convert import convert as write
    from surefoot.components.data.tars.index import open_index
    from surefoot.core.errors import DataError
    from surefoot.core.signals import ending_by_signal
    from surefoot.core.units import parse_bytes

    layout = ShardNaming(
        name=name or plain_name(out), shard_bytes=parse_bytes(shard_size), shuffle=shuffle
    )
    given = _find(
        sources,
        split=split,
        kinds=_pairs(as_ or []),
        follow_links=follow_links,
        set_=set_,
        data=data,
    )
    say = options.teller("data convert", quiet=quiet or json)
    with (
        ending_by_signal(),
        progress("converting", len(given), quiet or json, unit="samples") as advance,
    ):
        made = write(given, out, layout, tell=advance, say=say)
    index = None
    if not no_index:
        with progress("reading back", made.num_bytes, quiet or json) as advance:
            index = open_index(
                [out / each.name for each in made.shards], out, tell=to_total(advance), beside=True
            )
        wrong = [
            one.name
            for one, other in zip(index.shards, made.shards, strict=True)
            if one.digest != other.sha256
        ]
        if wrong:
            raise DataError(
                f"{out / wrong[0]} differs from what was written",
                hint="check the disk, and run the command again",
            )
    _tell(made, given, out, None if index is None else index.place, json)


def _find(
    sources: list[str],
    *,
    split: str,
    kinds: dict[str, str],
    follow_links: bool,
    set_: list[str] | None,
    data: str | None,
) -> Given:
    """Return the source of samples that the arguments before OUT name. Raises DataError."""
    from surefoot.components.data.disk.given import Folder, Samples, of_arrays
    from surefoot.components.data.sources.wrapped import as_source
    from surefoot.core.errors import DataError
    from surefoot.train.assemble import load_task

    is_spec = (
        len(sources) == 1 and "=" not in sources[0] and not Path(sources[0]).expanduser().is_dir()
    )
    if not is_spec and (
        idle := [flag for flag, value in {"--set": set_, "--data": data}.items() if value]
    ):
        print(
            f"note: data convert does not use {' and '.join(idle)}: arrays and images have no spec",
            file=sys.stderr,
        )
    if all("=" in word for word in sources):
        return of_arrays(_pairs(sources), kinds)
    if len(sources) > 1 or sources[0].endswith(".npy"):
        hint = "give one folder of images, one SPEC, or arrays by name: image=x.npy label=y.npy OUT"
        raise DataError(f"{' '.join(sources)} is not a valid source", hint=hint)
    if Path(sources[0]).expanduser().is_dir():
        if kinds:
            raise DataError(
                "--as sets the format of arrays, and images are copied unchanged",
                hint="leave --as out",
            )
        return Folder(sources[0], follow_links=follow_links)
    spec = options.read_spec("data convert", sources[0], options.overrides(set_, data=data)).spec
    source = as_source(load_task(spec).task.data(split))
    return Samples(
        source, kinds=kinds, known=f"{split} {spec.task.use} {sorted(spec.task.parameters.items())}"
    )


def _pairs(words: list[str]) -> dict[str, str]:
    from surefoot.core.errors import DataError

    found: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name or not value or name in found:
            raise DataError(
                f"{word} has no name, or a name that is already used",
                hint="write NAME=VALUE, each name once: label=y.npy",
            )
        found[name] = value
    return found


def _tell(made: ConvertedShards, given: Given, out: Path, index: Path | None, json: bool) -> None:
    from surefoot.cli.table import without_control
    from surefoot.core.units import format_bytes

    shards = [
        {"name": each.name, "bytes": each.bytes, "samples": each.samples, "sha256": each.sha256}
        for each in made.shards
    ]
    if json:
        told = {
            "folder": str(out),
            "samples": made.num_samples,
            "bytes": made.num_bytes,
            "kept": made.kept,
            "parts": dict(given.parts),
        }
        options.print_json(
            {
                **told,
                "beside": list(made.beside),
                "index": None if index is None else str(index),
                "shards": shards,
            }
        )
        return
    print_shards(shards)
    kept = f", {made.kept:,} of which already existed" if made.kept else ""
    print(
        f"\n{made.num_samples:,} samples in {len(made.shards):,} tars of "
        f"{format_bytes(made.num_bytes)}{kept}"
    )
    print(
        without_control(
            "other files: "
            f"{', '.join([*made.beside, 'SHA256SUMS', *([index.name] if index else [])])}"
        )
    )
    names = ", ".join(f'{name}="{extension}"' for name, extension in given.parts.items())
    if not all(map(str.isidentifier, given.parts)):
        names = f"**{dict(given.parts)}"
    print(without_control(f'read them with Tars(sorted(Path("{out}").glob("*.tar")), {names})'))


def print_shards(shards: Sequence[Mapping[str, Any]]) -> None:
    """Print tar files as a table: `name`, `samples`, `bytes` and `sha256` of each."""
    from surefoot.cli.table import print_table
    from surefoot.core.units import format_bytes

    shown = [
        (each["name"], f"{each['samples']:,}", format_bytes(each["bytes"]), each["sha256"][:12])
        for each in shards[:MOST_SHOWN]
    ]
    print_table(("tar", "samples", "size", "sha256"), shown, right=("samples", "size"))
    if len(shards) > MOST_SHOWN:
        print(f"and {len(shards) - MOST_SHOWN:,} more")
