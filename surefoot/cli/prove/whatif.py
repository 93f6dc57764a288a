"""`surefoot whatif`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.left_out import name_left_out
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
from surefoot.core.errors import InputError, OutOfMemory, StorageError, UserCodeError

if TYPE_CHECKING:
    from surefoot.contract.spec import RunSpec
    from surefoot.prove.whatif.batch import Splits
    from surefoot.prove.whatif.fit import Fitted

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
BatchOption = Annotated[
    str | None,
    typer.Option("--batch", metavar="SIZES", help="measure these batches, as in 128,256"),
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
    int | None,
    typer.Option(
        "--updates",
        metavar="N",
        help="the number of measured optimizer steps per process",
        show_default="10",
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        metavar="N",
        help="the number of processes for each row",
        show_default="3; --compile, --recompute: 7",
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option("--compile", help="compare eager mode with every compile option of this machine"),
]
SaveKernelsOption = Annotated[
    Path | None,
    typer.Option(
        "--save-kernels", metavar="DIR", help="save the generated kernels, and list what each fuses"
    ),
]
RecomputeOption = Annotated[
    bool,
    typer.Option(
        "--recompute", help="compare ways of activation checkpointing, and the saving of each block"
    ),
]
FitOption = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="SIZE",
        help="find the largest microbatch whose measured peak fits, as 2GiB or device",
    ),
]
NoiseOption = Annotated[
    bool,
    typer.Option("--noise", help="measure the gradient noise scale, for advice on the batch size"),
]
DrawsOption = Annotated[
    int | None,
    typer.Option(
        "--draws", metavar="N", help="with --noise: the number of batches, a power of two: 128"
    ),
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        "--size",
        metavar="N",
        help="with --noise: the number of samples of each batch",
        show_default="an eighth of train.batch",
    ),
]


def whatif(
    given: SpecOrRunArgument,
    batch: BatchOption = None,
    microbatch: MicrobatchOption = None,
    updates: UpdatesOption = None,
    rounds: RoundsOption = None,
    csv: CsvOption = None,
    compiled: CompileOption = False,
    save_kernels: SaveKernelsOption = None,
    recompute: RecomputeOption = False,
    fit: FitOption = None,
    noise: NoiseOption = False,
    draws: DrawsOption = None,
    size: SizeOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Measure the cost of another batch size, or the gain of compiling or activation checkpointing.

    --batch: peak memory, throughput, optimizer steps and communications per epoch, for each batch
    and microbatch, in fresh processes.
    --compile: compile time, step time, memory and break-even of each compile option, compared with
    eager mode, in fresh processes.
    --save-kernels: the source of every kernel, its fused operators, and the bytes that fusion
    saves.
    --recompute: memory and recomputation time of each block, then memory and step time of each way
    of activation checkpointing, in fresh processes.
    --fit: the largest microbatch whose peak is at least a tenth below the given memory, tested in
    fresh processes and in a run of 50 steps.
    --noise: the variance of gradients of different batches at the same weights, and the batch size
    that this suggests.
    """
    question = _check_question(
        {
            "--batch": batch,
            "--compile": compiled,
            "--save-kernels": save_kernels,
            "--recompute": recompute,
            "--fit": fit,
            "--noise": noise,
        }
    )
    of_batch = {"--microbatch": microbatch, "--csv": csv, "--updates": updates}
    _check_belonging(question, ("--batch",), of_batch)
    _check_belonging(question, ("--batch", "--compile", "--recompute"), {"--rounds": rounds})
    _check_belonging(question, ("--noise",), {"--size": size, "--draws": draws})
    run = Path(given) if (Path(given) / "spec.toml").is_file() else None
    options.check_of_run(task, is_run=run is not None)
    if run is not None and noise:
        options.check_as_it_is({"--set": set_, "--seed": seed}, "measured", "whatif")
    if save_kernels is not None:
        options.check_new_folder(save_kernels, "--save-kernels")
    stated = options.overrides(set_, seed=seed, data=data)
    spec = _read(f"whatif {question}", given, run, stated, task)
    tell = options.teller("whatif", quiet=quiet or json)
    if noise:
        _measure_noise(given, spec, run, size, draws, json=json)
    elif save_kernels is not None:
        _save_kernels(given, spec, save_kernels, json=json)
    elif fit is not None:
        _find_largest(given, spec, fit, tell, json=json)
    elif recompute:
        _compare_recomputing(given, spec, rounds, tell, json=json)
    elif compiled:
        _compare_compiled(given, spec, rounds, tell, json=json)
    else:
        sizes = (_sizes("--batch", batch), _sizes("--microbatch", microbatch))
        _compare_batches(given, spec, sizes, updates, rounds, csv, tell, json)


def _read(
    command: str, given: str, run: Path | None, stated: list[tuple[str, Any, str]], task: str | None
) -> RunSpec:
    from surefoot.contract import spec_file

    if run is None:
        return options.read_spec(command, given, stated).spec
    origin = spec_file.read_of_run(run, stated, task=task)
    name_left_out(command, origin)
    return origin.spec


def _check_question(questions: Mapping[str, Any]) -> str:
    """Return the one question that is asked; raise InputError for none or several."""
    asked = [flag for flag, value in questions.items() if value not in (None, False)]
    if len(asked) != 1:
        raise InputError(
            f"{' and '.join(asked)} cannot be combined"
            if asked
            else "nothing to measure: no option is given",
            hint=(
                "choose one of --batch 128,256, --compile, --save-kernels DIR, --recompute, "
                "--fit 2GiB and --noise"
            ),
        )
    return asked[0]


def _check_belonging(question: str, owners: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Raise InputError for a given flag that belongs to other questions than the one asked."""
    if question in owners:
        return
    for flag, value in flags.items():
        if value is not None:
            named = ", ".join(owners[:-1]) + " and " * (len(owners) > 1) + owners[-1]
            verb = "is" if len(owners) == 1 else "are"
            raise InputError(
                f"{flag} belongs to {named}, which {verb} not asked for", hint="leave it out"
            )


def _measure_noise(
    given: str,
    spec: RunSpec,
    run: Path | None,
    size: int | None,
    draws: int | None,
    *,
    json: bool,
) -> None:
    from surefoot.cli.prove.tables.whatif import print_noise
    from surefoot.prove.whatif.noise import measure_noise

    lab = measure_noise(spec, run=run, size=size, draws=128 if draws is None else draws)
    if json:
        options.print_json({"given": given, **lab.as_row()})
    else:
        print_noise(lab)


def _compare_batches(
    given: str,
    spec: RunSpec,
    sizes: tuple[list[int], list[int]],
    updates: int | None,
    rounds: int | None,
    csv: Path | None,
    tell: Callable[[str], None],
    json: bool,
) -> None:
    from surefoot.cli.prove.tables.whatif import error_of, print_splits
    from surefoot.core.signals import ending_by_signal
    from surefoot.prove.whatif.batch import find_splits, measure

    if csv is not None:
        options.check_new_file(csv, "--csv", "batches.csv")
    pairs = find_splits(*sizes)
    with ending_by_signal():
        found = measure(
            spec,
            pairs,
            updates=10 if updates is None else updates,
            rounds=3 if rounds is None else rounds,
            tell=tell,
        )
    if csv is not None:
        _write_csv(csv, found)
    if json:
        options.print_json(
            {
                "given": given,
                "conditions": found.conditions,
                "rows": [each.as_row() for each in found.rows],
            }
        )
    else:
        print_splits(found)
    failed = [each for each in found.rows if each.failure is not None]
    if len(failed) == len(found.rows):
        raise UserCodeError(
            f"no row could be measured: {error_of(failed[0])}",
            hint="check that surefoot train can run this spec",
        )


def _compare_compiled(
    given: str, spec: RunSpec, rounds: int | None, tell: Callable[[str], None], *, json: bool
) -> None:
    from surefoot.cli.prove.tables.whatif import error_of, print_ways
    from surefoot.core.signals import ending_by_signal
    from surefoot.prove.whatif.compiled import ROUNDS, measure_ways

    with ending_by_signal():
        found = measure_ways(spec, rounds=ROUNDS if rounds is None else rounds, tell=tell)
    if json:
        options.print_json(
            {
                "given": given,
                "conditions": found.conditions,
                "rounds": found.rounds,
                "rows": [each.as_row() for each in found.ways],
                "left_out": found.left_out,
                "best": None
                if found.best is None
                else {"what": found.best.what, "mode": found.best.mode},
            }
        )
    else:
        print_ways(found)
    if all(each.failure is not None for each in found.ways[1:]):
        raise UserCodeError(
            f"no compile option worked: {error_of(found.ways[1])}",
            hint="check that surefoot train can run this spec",
        )


def _compare_recomputing(
    given: str, spec: RunSpec, rounds: int | None, tell: Callable[[str], None], *, json: bool
) -> None:
    from surefoot.cli.prove.tables.whatif import print_recomputing
    from surefoot.core.signals import ending_by_signal
    from surefoot.prove.whatif.recompute import ROUNDS, measure_recomputing

    with ending_by_signal():
        found = measure_recomputing(spec, rounds=ROUNDS if rounds is None else rounds, tell=tell)
    if json:
        options.print_json(
            {
                "given": given,
                "conditions": found.conditions,
                "rounds": found.rounds,
                "blocks": [each.as_row() for each in found.blocks],
                "rows": [each.as_row() for each in found.ways],
            }
        )
    else:
        print_recomputing(found)


def _find_largest(
    given: str, spec: RunSpec, limit: str, tell: Callable[[str], None], *, json: bool
) -> None:
    from surefoot.cli.prove.tables.whatif import print_largest
    from surefoot.core.signals import ending_by_signal
    from surefoot.core.units import format_bytes, parse_bytes
    from surefoot.prove.whatif.fit import MARGIN, find_limit, measure_largest

    limit_bytes = find_limit(spec, None if limit == "device" else parse_bytes(limit))
    with ending_by_signal():
        found = measure_largest(spec, limit_bytes, tell=tell)
    if json:
        options.print_json({"given": given, **found.as_row()})
    else:
        print_largest(found)
    if found.microbatch is None:
        raise OutOfMemory(
            f"no microbatch fits into {format_bytes(limit_bytes)} less {MARGIN:.0%}",
            hint=_way_out(given, found),
        )


def _way_out(given: str, found: Fitted) -> str:
    """Return a hint where nothing fits: a spec with smaller tensors, or more memory.

    More memory is the hint where the tensors are not what exceeds the limit.
    """
    from surefoot.core.units import format_bytes
    from surefoot.prove.whatif.fit import usable

    if found.beside_bytes is None:
        return "give it more memory, or make the model smaller"
    left = usable(found.limit_bytes) - found.beside_bytes
    beside = f"without its tensors the smallest microbatch takes {format_bytes(found.beside_bytes)}"
    if left <= 0:
        return f"{beside}, more than the limit for any model: give a larger limit"
    spec = Path(given) / "spec.toml" if Path(given).is_dir() else given
    command = f"surefoot memory {shlex.quote(str(spec))} --fit '{format_bytes(left)}'"
    return f"{beside}; to see what fits into the remaining memory: {command}"


def _save_kernels(given: str, spec: RunSpec, folder: Path, *, json: bool) -> None:
    from surefoot.cli.prove.tables.whatif import print_kernels
    from surefoot.prove.whatif.kernels import as_row, find_kernels, write_kernels

    graphs = find_kernels(spec)
    files = write_kernels(graphs, folder)
    if json:
        options.print_json(
            {
                "given": given,
                "files": list(map(str, files)),
                "graphs": [as_row(graph) for graph in graphs],
            }
        )
    else:
        print_kernels(graphs, files)


def _sizes(flag: str, text: str | None) -> list[int]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise InputError(
            f"{flag} must be a list of positive integers; got {text!r}",
            hint=f"give numbers of samples, separated by commas: {flag} 128,256",
        )
    return [int(word) for word in words]


def _write_csv(path: Path, found: Splits) -> None:
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            rows.writerows([_cell(each.as_row()[name]) for name in COLUMNS] for each in found.rows)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint="give another file with --csv"
        ) from None


def _cell(value: Any) -> Any:
    return "" if value is None else value
