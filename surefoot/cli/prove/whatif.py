"""Commands of `surefoot whatif`.

They are `batch`, `compile`, `activation-checkpointing`, `fit`, `kernels` and `noise`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.help import Verb, Verbs
from surefoot.cli.options import (
    CsvOption,
    DataOption,
    JsonOption,
    QuietOption,
    SeedOption,
    SetOption,
    TaskOption,
    TracebackOption,
)
from surefoot.cli.table import write_csv
from surefoot.core.errors import InputError, OutOfMemory, UserCodeError
from surefoot.core.process.signals import exit_on_signal
from surefoot.core.units import format_bytes, format_percent, parse_bytes

if TYPE_CHECKING:
    from surefoot.contract.spec import RunSpec
    from surefoot.prove.whatif.fit import FitSearch

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    help="Measure what another batch size, compiling or activation checkpointing would change.",
)

# the fewest rounds that can show a gain: statistics.FIRST_LOOK, whose module loads NumPy
FEWEST_ROUNDS = 7
COLUMNS = (
    "batch",
    "microbatch",
    "num_microbatches",
    "peak_bytes",
    "samples_per_s",
    "items_per_s",
    "updates_per_epoch",
    "communications_per_epoch",
    "rounds",
    "failure",
)

SpecOrRunArgument = Annotated[
    str, typer.Argument(metavar="SPEC|RUN", help="a spec, or a run folder, whose spec is used")
]
SizesArgument = Annotated[
    str, typer.Argument(metavar="SIZES", help="the batches to measure, as 128,256")
]
MicrobatchOption = Annotated[
    str | None,
    typer.Option(
        "--microbatch",
        metavar="SIZES",
        help="the microbatches that split each batch",
        show_default="all of it, 1/2, 1/4, 1/8",
    ),
]
UpdatesOption = Annotated[
    int,
    typer.Option(
        "--updates", metavar="N", help="the number of measured optimizer steps per process"
    ),
]
RoundsOption = Annotated[
    int, typer.Option("--rounds", metavar="N", help="the number of processes for each row")
]
FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="the new folder for the generated source")
]
LimitArgument = Annotated[
    str,
    typer.Argument(metavar="SIZE", help="the memory, as 2GiB, or device for that of the device"),
]
DrawsOption = Annotated[
    int, typer.Option("--draws", metavar="N", help="the number of batches, a power of two")
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        "--size",
        metavar="N",
        help="the number of samples of each batch",
        show_default="an eighth of train.batch",
    ),
]


@app.callback()
def whatif() -> None:
    "Measure what another batch size, compiling or activation checkpointing would change."


def _read(
    command: str,
    given: str,
    set_: list[str] | None,
    seed: int | None,
    data: str | None,
    task: str | None,
) -> RunSpec:
    """Read a spec, or the spec of a run folder, and apply the overrides of the command line."""
    stated = options.overrides(set_, seed=seed, data=data)
    return options.read_spec_or_run(command, given, stated, task).spec


@app.command(cls=Verb)
def batch(
    given: SpecOrRunArgument,
    sizes: SizesArgument,
    microbatch: MicrobatchOption = None,
    updates: UpdatesOption = 10,
    rounds: RoundsOption = 3,
    csv: CsvOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Measure what other batches and microbatches cost, each in fresh processes.

    A row has the peak memory, the throughput, and the optimizer steps and communications per epoch.
    """
    from surefoot.cli.prove.tables.whatif import error_of, print_splits
    from surefoot.prove.whatif.batch import find_splits, measure

    if csv is not None:
        options.check_new_file(csv, "--csv", "batches.csv")
    spec = _read("whatif batch", given, set_, seed, data, task)
    tell = options.make_progress_printer("whatif", quiet=quiet or json)
    pairs = find_splits(_sizes("SIZES", sizes), _sizes("--microbatch", microbatch))
    with exit_on_signal():
        found = measure(spec, pairs, updates=updates, rounds=rounds, tell=tell)
    if csv is not None:
        rows = [each.as_row() for each in found.rows]
        write_csv(csv, COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    row = {
        "given": given,
        "conditions": found.conditions,
        "rows": [each.as_row() for each in found.rows],
    }
    options.print_result(row, print_splits, found, json=json)
    failed = [each for each in found.rows if each.failure is not None]
    if len(failed) == len(found.rows):
        raise UserCodeError(
            f"no row could be measured: {error_of(failed[0])}",
            hint="check that surefoot train can run this spec",
        )


@app.command("compile", cls=Verb)
def compile_(
    given: SpecOrRunArgument,
    rounds: RoundsOption = FEWEST_ROUNDS,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Compare eager mode with every compile option of this machine, in fresh processes.

    A row has the compile time, the step time, the memory, and the steps until compiling pays off.
    """
    from surefoot.cli.prove.tables.whatif import error_of, print_ways
    from surefoot.prove.whatif.compiled import measure_ways

    spec = _read("whatif compile", given, set_, seed, data, task)
    tell = options.make_progress_printer("whatif", quiet=quiet or json)
    with exit_on_signal():
        found = measure_ways(spec, rounds=rounds, tell=tell)
    best = found.best
    row = {
        "given": given,
        "conditions": found.conditions,
        "rounds": found.rounds,
        "rows": [each.as_row() for each in found.ways],
        "left_out": found.left_out,
        "best": None if best is None else {"what": best.what, "mode": best.mode},
    }
    options.print_result(row, print_ways, found, json=json)
    if all(each.failure is not None for each in found.ways[1:]):
        raise UserCodeError(
            f"no compile option worked: {error_of(found.ways[1])}",
            hint="check that surefoot train can run this spec",
        )


@app.command(cls=Verb)
def activation_checkpointing(
    given: SpecOrRunArgument,
    rounds: RoundsOption = FEWEST_ROUNDS,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Compare ways of activation checkpointing, in fresh processes.

    First the memory and the recomputation time of each block, then the memory and the step time of
    each way.
    """
    from surefoot.cli.prove.tables.whatif import print_recomputing
    from surefoot.prove.whatif.recompute import measure_recomputing

    spec = _read("whatif activation-checkpointing", given, set_, seed, data, task)
    tell = options.make_progress_printer("whatif", quiet=quiet or json)
    with exit_on_signal():
        found = measure_recomputing(spec, rounds=rounds, tell=tell)
    row = {
        "given": given,
        "conditions": found.conditions,
        "rounds": found.rounds,
        "blocks": [each.as_row() for each in found.blocks],
        "rows": [each.as_row() for each in found.ways],
    }
    options.print_result(row, print_recomputing, found, json=json)


@app.command(cls=Verb)
def fit(
    given: SpecOrRunArgument,
    limit: LimitArgument,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Find the largest microbatch whose measured peak fits into a memory.

    Its peak is at least a tenth below the memory, measured in fresh processes and in a run of 50
    steps.
    """
    from surefoot.cli.prove.tables.whatif import print_largest
    from surefoot.prove.whatif.fit import MARGIN, find_limit, measure_largest

    spec = _read("whatif fit", given, set_, seed, data, task)
    tell = options.make_progress_printer("whatif", quiet=quiet or json)
    limit_bytes = find_limit(spec, None if limit == "device" else parse_bytes(limit))
    with exit_on_signal():
        found = measure_largest(spec, limit_bytes, tell=tell)
    options.print_result({"given": given, **found.as_row()}, print_largest, found, json=json)
    if found.microbatch is None:
        raise OutOfMemory(
            f"no microbatch fits into {format_percent(1 - MARGIN)} of {format_bytes(limit_bytes)}",
            hint=_remedy_hint(given, found),
        )


def _remedy_hint(given: str, found: FitSearch) -> str:
    """Return a hint for the case that no microbatch fits into the memory limit.

    If the tensors exceed the limit, the hint is a command that finds a spec with smaller tensors.
    If the limit is exceeded even without tensors, the hint is a larger limit.
    """
    from surefoot.prove.whatif.fit import subtract_margin

    if found.beside_bytes is None:
        return "give it more memory, or make the model smaller"
    left = subtract_margin(found.limit_bytes) - found.beside_bytes
    beside = f"without its tensors the smallest microbatch takes {format_bytes(found.beside_bytes)}"
    if left <= 0:
        return f"{beside}, more than the limit for any model: give a larger limit"
    spec = Path(given) / "spec.toml" if Path(given).is_dir() else given
    command = f"surefoot memory {shlex.quote(str(spec))} --fit '{format_bytes(left)}'"
    return f"{beside}; to see what fits into the remaining memory: {command}"


@app.command(cls=Verb)
def kernels(
    given: SpecOrRunArgument,
    folder: FolderArgument,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Save the source of every generated kernel, and list what each fuses.

    Each kernel has the operators that it replaces, and the bytes of memory traffic that it saves.
    """
    from surefoot.cli.prove.tables.whatif import print_kernels
    from surefoot.prove.whatif.kernels import as_row, find_kernels, write_kernels

    options.check_new_folder(folder, "DIR")
    spec = _read("whatif kernels", given, set_, seed, data, task)
    graphs = find_kernels(spec)
    files = write_kernels(graphs, folder)
    row = {
        "given": given,
        "files": list(map(str, files)),
        "graphs": [as_row(graph) for graph in graphs],
    }
    options.print_result(row, print_kernels, graphs, files, json=json)


@app.command(cls=Verb)
def noise(
    given: SpecOrRunArgument,
    draws: DrawsOption = 128,
    size: SizeOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Measure the gradient noise scale, for advice on the batch size.

    It is the variance of the gradients of different batches at the same weights: the first of a
    spec, or the last that a run saved.
    """
    from surefoot.cli.prove.tables.whatif import print_noise
    from surefoot.prove.whatif.noise import measure_noise

    run = options.find_run(given)
    if run is not None:
        options.reject_spec_flags({"--set": set_, "--seed": seed}, "measured", "whatif noise")
    spec = _read("whatif noise", given, set_, seed, data, task)
    lab = measure_noise(spec, run=run, size=size, draws=draws)
    options.print_result({"given": given, **lab.as_row()}, print_noise, lab, json=json)


def _sizes(flag: str, text: str | None) -> list[int]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise InputError(
            f"{flag} must be a list of positive integers; got {text!r}",
            hint="give numbers of samples, separated by commas: 128,256",
        )
    return [int(word) for word in words]
