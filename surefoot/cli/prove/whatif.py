"""`surefoot whatif`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import DataOption, JsonOption, QuietOption, SeedOption, SetOption, TracebackOption
from surefoot.core.errors import InputError, StorageError, UserCodeError

if TYPE_CHECKING:
    from surefoot.prove.whatif.batch import Split, Splits
    from surefoot.prove.whatif.noise import NoiseLab

COLUMNS = (
    "batch", "microbatch", "num_microbatches", "peak_bytes", "samples_per_s", "items_per_s", "updates_per_epoch",
    "communications_per_epoch", "rounds", "failure",
)  # fmt: skip


def whatif(
    given: Annotated[str, typer.Argument(metavar="SPEC|RUN", help="a spec; for --noise also a run folder")],
    batch: Annotated[str | None, typer.Option("--batch", metavar="SIZES", help="measure these batches, as in 128,256")] = None,
    microbatch: Annotated[
        str | None, typer.Option("--microbatch", metavar="SIZES", help="split into these", show_default="all of it, 1/2, 1/4, 1/8")
    ] = None,
    updates: Annotated[int, typer.Option("--updates", metavar="N", help="so many are measured in a round")] = 10,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="fresh processes of each row")] = 3,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="the table to a new file")] = None,
    noise: Annotated[bool, typer.Option("--noise", help="the gradient noise scale, and the batch that it speaks for")] = False,
    draws: Annotated[int, typer.Option("--draws", metavar="N", help="batches drawn for --noise, a power of two")] = 128,
    size: Annotated[
        int | None, typer.Option("--size", metavar="N", help="samples of each of them", show_default="an eighth of train.batch")
    ] = None,
    set_: SetOption = None, seed: SeedOption = None, data: DataOption = None, json: JsonOption = False, quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:  # fmt: skip
    """Measure what another batch would cost.

    --batch: peak memory, throughput, updates and communications of an epoch, for each batch and microbatch, in fresh processes.
    --noise: how far the gradients of batches lie apart at the same weights, and what that says of the batch.
    """
    if noise == (batch is not None):
        raise InputError("what is asked?", hint="either --batch 128,256 or --noise")
    from surefoot.contract import spec_file

    run = Path(given) if noise and (Path(given) / "spec.toml").is_file() else None
    if run:
        options.check_as_it_is({"--set": set_, "--seed": seed}, "measured", "whatif")
    spec = spec_file.read(str(run / "spec.toml") if run else given, options.overrides(set_, seed=seed, data=data)).spec
    if noise:
        from surefoot.prove.whatif.noise import measure_noise

        lab = measure_noise(spec, run=run, size=size, draws=draws)
        if json:
            options.print_json({"given": given, **lab.as_row()})
        else:
            _print_noise(lab)
        return
    from surefoot.core.signals import ending_by_signal
    from surefoot.prove.whatif.batch import find_splits, measure

    if csv is not None:
        options.check_new_file(csv, "--csv", "batches.csv")
    pairs = find_splits(_sizes("--batch", batch), _sizes("--microbatch", microbatch))
    with ending_by_signal():
        found = measure(spec, pairs, updates=updates, rounds=rounds, tell=options.teller("whatif", quiet=quiet or json))
    if csv is not None:
        _write_csv(csv, found)
    if json:
        options.print_json({"given": given, "conditions": found.conditions, "rows": [each.as_row() for each in found.rows]})
    else:
        _print(found)
    failed = [each for each in found.rows if each.failure is not None]
    if len(failed) == len(found.rows):
        raise UserCodeError(f"no row could be measured: {_last_line(failed[0])}", hint="does surefoot train run it?")


def _sizes(flag: str, text: str | None) -> list[int]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise InputError(f"{flag} is {text!r}", hint=f"numbers of samples with commas between: {flag} 128,256")
    return [int(word) for word in words]


def _last_line(row: Split) -> str:
    return (row.failure or "").splitlines()[-1]


def _print(found: Splits) -> None:
    from surefoot.cli.table import print_table
    from surefoot.core.units import format_bytes, format_count, format_number

    headers = ("batch", "microbatch", "K", "peak memory", "samples/s", "items/s", "updates an epoch", "communications")
    rows = [
        [
            f"{each.batch:,}", f"{each.microbatch:,}", str(each.num_microbatches), format_bytes(each.peak_bytes),
            format_number(each.samples_per_s), format_count(each.items_per_s), format_number(each.updates_per_epoch),
            format_number(each.communications_per_epoch),
        ]
        for each in found.rows
    ]  # fmt: skip
    print_table(headers, rows, right=headers)
    for each in found.rows:
        if each.failure is not None:
            print(f"{each.batch:,} by {each.microbatch:,} failed: {_last_line(each)}")
    print(f"\n{found.conditions.get('processor')}, torch {found.conditions.get('torch')}")


def _print_noise(lab: NoiseLab) -> None:
    from surefoot.cli.table import print_table
    from surefoot.core.units import format_number

    rows = [[f"{each.batch:,}", format_number(each.variance), str(each.pairs)] for each in lab.levels]
    print_table(("batch", "variance of its gradient", "pairs"), rows, right=("batch", "variance of its gradient", "pairs"))
    print(f"slope {lab.slope:.3f}: -1 where samples are independent")
    if lab.noise is None:
        return
    high = "n/a" if lab.noise.high is None else f"{lab.noise.high:,.0f}"
    scale = "n/a" if lab.noise.scale is None else f"{lab.noise.scale:,.0f}"
    print(f"noise scale {scale} samples [{lab.noise.low:,.0f}, {high}], from {lab.noise.num_steps} groups of batches")
    print(lab.noise.advise(lab.batch))


def _write_csv(path: Path, found: Splits) -> None:
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            rows.writerows([_cell(each.as_row()[name]) for name in COLUMNS] for each in found.rows)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}", hint="name another file with --csv") from None


def _cell(value: Any) -> Any:
    return "" if value is None else value
