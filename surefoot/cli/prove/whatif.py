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
    from surefoot.components.compiler.kernels import Graph
    from surefoot.contract.spec import RunSpec
    from surefoot.prove.whatif.batch import Split, Splits
    from surefoot.prove.whatif.compiled import CompileTiming, Ways
    from surefoot.prove.whatif.fit import Fitted
    from surefoot.prove.whatif.noise import NoiseLab
    from surefoot.prove.whatif.recompute import Recomputing

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


def whatif(
    given: Annotated[
        str, typer.Argument(metavar="SPEC|RUN", help="a spec, or a run folder, whose spec is taken")
    ],
    batch: Annotated[
        str | None,
        typer.Option("--batch", metavar="SIZES", help="measure these batches, as in 128,256"),
    ] = None,
    microbatch: Annotated[
        str | None,
        typer.Option(
            "--microbatch",
            metavar="SIZES",
            help="split into these",
            show_default="all of it, 1/2, 1/4, 1/8",
        ),
    ] = None,
    updates: Annotated[
        int | None,
        typer.Option(
            "--updates", metavar="N", help="so many are measured in a round", show_default="10"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            metavar="N",
            help="fresh processes of each row",
            show_default="3; --compile, --recompute: 7",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="the table to a new file")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="eager mode beside every way to compile that is here")
    ] = False,
    save_kernels: Annotated[
        Path | None,
        typer.Option(
            "--save-kernels", metavar="DIR", help="the code that compiling makes, and what it fuses"
        ),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute", help="each way to recompute beside none, and what each block is worth"
        ),
    ] = False,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit",
            metavar="SIZE",
            help="the largest microbatch by measured peaks, as 2GiB, or device: a GPU's",
        ),
    ] = None,
    noise: Annotated[
        bool,
        typer.Option("--noise", help="the gradient noise scale, and the batch that it speaks for"),
    ] = False,
    draws: Annotated[
        int | None,
        typer.Option("--draws", metavar="N", help="batches of --noise, a power of two: 128"),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            "--size",
            metavar="N",
            help="samples of each of them",
            show_default="an eighth of train.batch",
        ),
    ] = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Measure what another batch would cost, or what compiling would bring.

    --batch: peak memory, throughput, updates and communications of an epoch, for each batch and microbatch, in fresh processes.
    --compile: compile time, step, memory and break-even of each way to compile, beside eager mode, in fresh processes.
    --save-kernels: the source of every kernel, what was fused in it, and the bytes that no longer travel.
    --recompute: bytes and time of each block, then memory and step of each way to compute blocks again, in fresh processes.
    --fit: the largest microbatch whose peak stays a tenth below so much memory, tried in fresh processes, and in a run of 50 steps.
    --noise: how far the gradients of batches lie apart at the same weights, and what that says of the batch.
    """
    question = _check_question(
        {
            "--batch": batch,
            "--compile": compiled,
            "--save-kernels": save_kernels,
            "--recompute": recompute,
            "--fit": fit,
            "--noise": noise,
        },
        {
            ("--microbatch", "--batch"): microbatch,
            ("--csv", "--batch"): csv,
            ("--updates", "--batch"): updates,
            ("--rounds", "--batch", "--compile", "--recompute"): rounds,
            ("--size", "--noise"): size,
            ("--draws", "--noise"): draws,
        },
    )

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
        from surefoot.prove.whatif.noise import measure_noise

        lab = measure_noise(spec, run=run, size=size, draws=128 if draws is None else draws)
        if json:
            options.print_json({"given": given, **lab.as_row()})
        else:
            _print_noise(lab)
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
        _compare_batches(
            given,
            spec,
            sizes,
            10 if updates is None else updates,
            3 if rounds is None else rounds,
            csv,
            tell,
            json,
        )


def _read(
    command: str, given: str, run: Path | None, stated: list[tuple[str, Any, str]], task: str | None
) -> RunSpec:
    from surefoot.contract import spec_file

    if run is None:
        return options.read_spec(command, given, stated).spec
    origin = spec_file.read_of_run(run, stated, task=task)
    name_left_out(command, origin)
    return origin.spec


def _check_question(questions: Mapping[str, Any], belonging: Mapping[tuple[str, ...], Any]) -> str:
    """Return the one question that is asked, and check that each further flag belongs to it.

    A key of `belonging` is a flag, followed by the questions that the flag belongs to.
    """
    asked = [flag for flag, value in questions.items() if value not in (None, False)]
    if len(asked) != 1:
        raise InputError(
            f"{' and '.join(asked)} are questions of their own" if asked else "what is asked?",
            hint=(
                "one of --batch 128,256, --compile, --save-kernels DIR, --recompute, "
                "--fit 2GiB and --noise"
            ),
        )
    for (flag, *owners), value in belonging.items():
        if value is not None and not set(owners) & set(asked):
            named = ", ".join(owners[:-1]) + " and " * (len(owners) > 1) + owners[-1]
            raise InputError(
                f"{flag} belongs to {named}, which {'is' if len(owners) == 1 else 'are'} "
                "not asked for",
                hint="leave it out",
            )
    return asked[0]


def _compare_batches(
    given: str,
    spec: RunSpec,
    sizes: tuple[list[int], list[int]],
    updates: int,
    rounds: int,
    csv: Path | None,
    tell: Callable[[str], None],
    json: bool,
) -> None:
    from surefoot.core.signals import ending_by_signal
    from surefoot.prove.whatif.batch import find_splits, measure

    if csv is not None:
        options.check_new_file(csv, "--csv", "batches.csv")
    pairs = find_splits(*sizes)
    with ending_by_signal():
        found = measure(spec, pairs, updates=updates, rounds=rounds, tell=tell)
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
        _print(found)
    failed = [each for each in found.rows if each.failure is not None]
    if len(failed) == len(found.rows):
        raise UserCodeError(
            f"no row could be measured: {_error_of(failed[0])}", hint="does surefoot train run it?"
        )


def _compare_compiled(
    given: str, spec: RunSpec, rounds: int | None, tell: Callable[[str], None], *, json: bool
) -> None:
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
        _print_ways(found)
    if all(each.failure is not None for each in found.ways[1:]):
        raise UserCodeError(
            f"nothing could be compiled: {_error_of(found.ways[1])}",
            hint="does surefoot train run it?",
        )


def _compare_recomputing(
    given: str, spec: RunSpec, rounds: int | None, tell: Callable[[str], None], *, json: bool
) -> None:
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
        _print_recomputing(found)


def _find_largest(
    given: str, spec: RunSpec, limit: str, tell: Callable[[str], None], *, json: bool
) -> None:
    from surefoot.core.signals import ending_by_signal
    from surefoot.core.units import format_bytes, parse_bytes
    from surefoot.prove.whatif.fit import MARGIN, find_limit, measure_largest

    limit_bytes = find_limit(spec, None if limit == "device" else parse_bytes(limit))
    with ending_by_signal():
        found = measure_largest(spec, limit_bytes, tell=tell)
    if json:
        options.print_json({"given": given, **found.as_row()})
    else:
        _print_largest(found)
    if found.microbatch is None:
        raise OutOfMemory(
            f"nothing fits into {format_bytes(limit_bytes)} less {MARGIN:.0%}",
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
    beside = f"beside its tensors the smallest takes {format_bytes(found.beside_bytes)}"
    if left <= 0:
        return f"{beside}, above that limit whatever the model is: give a larger one"
    spec = Path(given) / "spec.toml" if Path(given).is_dir() else given
    return f"{beside}; what of the model fits into the rest: surefoot memory {shlex.quote(str(spec))} --fit '{format_bytes(left)}'"


def _save_kernels(given: str, spec: RunSpec, folder: Path, *, json: bool) -> None:
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
        _print_kernels(graphs, files)


def _sizes(flag: str, text: str | None) -> list[int]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise InputError(
            f"{flag} is {text!r}", hint=f"numbers of samples with commas between: {flag} 128,256"
        )
    return [int(word) for word in words]


def _error_of(row: Split | CompileTiming) -> str:
    """Return the last error of the process, in one line, without its hint."""
    from surefoot.prove.attempts import last_words

    return last_words(row.failure or "").splitlines()[0]


def _print(found: Splits) -> None:
    from surefoot.cli.table import print_table
    from surefoot.core.units import format_bytes, format_count, format_number

    headers = (
        "batch",
        "microbatch",
        "K",
        "peak memory",
        "samples/s",
        "items/s",
        "updates an epoch",
        "communications",
    )
    rows = [
        [
            f"{each.batch:,}",
            f"{each.microbatch:,}",
            str(each.num_microbatches),
            format_bytes(each.peak_bytes),
            format_number(each.samples_per_s),
            format_count(each.items_per_s),
            format_number(each.updates_per_epoch),
            format_number(each.communications_per_epoch),
        ]
        for each in found.rows
    ]
    print_table(headers, rows, right=headers)
    for each in found.rows:
        if each.failure is not None:
            print(f"{each.batch:,} by {each.microbatch:,} failed: {_error_of(each)}")
    print(f"\n{found.conditions.get('processor')}, torch {found.conditions.get('torch')}")


def _print_ways(found: Ways) -> None:
    from surefoot.cli.table import print_table, print_text
    from surefoot.core.units import UNKNOWN, format_bytes, format_seconds

    headers = (
        "what",
        "mode",
        "compiling",
        "from its cache",
        "step",
        "of eager mode",
        "peak memory",
        "paid for after",
    )
    rows = [
        [
            each.what,
            each.mode or "",
            format_seconds(each.compile_s),
            format_seconds(each.again_s),
            format_seconds(each.step_s),
            UNKNOWN if each.ratio is None else str(each.ratio),
            format_bytes(each.peak_bytes),
            _break_even(each),
        ]
        for each in found.ways
    ]
    print_table(headers, rows, right=headers[2:])
    print()
    for mode, why in found.left_out.items():
        print_text(f"{mode}: {why}")
    for each in found.ways:
        if each.failure is not None:
            print_text(f"{each.what} {each.mode or ''}: {_error_of(each)}")
    if found.best is not None:
        print_text(
            f'best: compile.what = "{found.best.what}", compile.mode = "{found.best.mode}"; its numbers: surefoot verify --compile'
        )
    elif any(each.ratio is not None and each.ratio.verdict == "too few" for each in found.ways):
        print_text("so few rounds show no gain, whatever it is: give --rounds 7 or more")
    else:
        print_text("best: eager mode, no gain is shown")
    print_text(
        f"{found.conditions.get('processor')}, {found.conditions['device']}, "
        f"torch {found.conditions.get('torch')}"
    )


def _break_even(way: CompileTiming) -> str:
    if way.pays_after is not None:
        after, least, most = way.pays_after
        return f"{after:,} steps ({least:,} to {most:,})"
    return "never" if way.ratio is not None and way.ratio.verdict == "higher" else ""


def _print_recomputing(found: Recomputing) -> None:
    from surefoot.cli.table import print_table, print_text
    from surefoot.core.units import UNKNOWN, format_bytes, format_seconds

    headers = ("block", "keeps", "its inputs", "to compute again", "saved per ms")
    blocks = [
        [
            each.name,
            format_bytes(each.inner_bytes),
            format_bytes(each.input_bytes),
            format_seconds(each.again_s),
            UNKNOWN if each.bytes_per_s is None else format_bytes(each.bytes_per_s / 1000),
        ]
        for each in found.blocks
    ]
    print_table(headers, blocks, right=headers[1:])
    print()
    headers = ("memory.recompute", "blocks hold", "peak memory", "step", "of none")
    ways = [
        [
            each.how,
            format_bytes(each.held_bytes),
            format_bytes(each.peak_bytes),
            format_seconds(each.step_s),
            "" if each.ratio is None else str(each.ratio),
        ]
        for each in found.ways
    ]
    print_table(headers, ways, right=headers[1:])
    print()
    for each in found.ways:
        if each.failure is not None:
            print_text(f"{each.how}: {each.failure}")
    print_text(
        f"{found.conditions.get('processor')}, {found.conditions['device']}, "
        f"torch {found.conditions.get('torch')}"
    )


def _print_kernels(graphs: Sequence[Graph], files: Sequence[Path]) -> None:
    from surefoot.cli.table import print_table, print_text
    from surefoot.core.units import format_bytes

    for graph in graphs:
        print_text(
            f"{graph.name}: {graph.num_operators:,} operators in {len(graph.kernels):,} kernels, "
            f"{format_bytes(graph.num_bytes)} read and written instead of "
            f"{format_bytes(graph.eager_bytes)}"
        )
        rows = [
            [
                "called" if each.is_library else "made",
                format_bytes(each.num_bytes),
                format_bytes(each.eager_bytes),
                ", ".join(each.operators) or "none: another layout, or numbers that are drawn",
            ]
            for each in graph.kernels
        ]
        print_table(
            ("kernel", "moves", "alone", "operators"), rows, right=("moves", "alone"), indent=2
        )
    for path in files:
        print(path)


def _print_largest(found: Fitted) -> None:
    from surefoot.cli.table import print_pairs, print_table
    from surefoot.core.units import UNKNOWN, format_bytes, format_percent
    from surefoot.prove.whatif.fit import MARGIN, usable

    headers = ("microbatch", "steps", "peak memory", "of the limit", "fits")
    rows = [
        [
            f"{each.microbatch:,}",
            UNKNOWN if each.num_steps is None else f"{each.num_steps:,}",
            format_bytes(each.peak_bytes),
            format_percent(
                None if each.peak_bytes is None else each.peak_bytes / found.limit_bytes
            ),
            "yes" if each.fits else f"no: {each.failure}" if each.failure else "no",
        ]
        for each in found.tries
    ]
    print_table(headers, rows, right=headers[:4])
    pairs = [
        (
            "limit",
            (
                f"{format_bytes(found.limit_bytes)}, less {MARGIN:.0%}: "
                f"{format_bytes(usable(found.limit_bytes))}"
            ),
        )
    ]
    if found.predicted is not None:
        size = (
            "none"
            if found.predicted.microbatch is None
            else f"microbatch {found.predicted.microbatch:,}"
        )
        of = "those of the smallest" if found.predicted.microbatch is None else "its tensors"
        pairs.append(
            ("predicted", f"{size}; {of} take up to {format_bytes(found.predicted.peak_bytes)}")
        )
    if found.microbatch is not None:
        pairs.append(
            (
                "measured",
                (
                    f"microbatch {found.microbatch:,}; "
                    f"{format_bytes(found.peak_bytes)} in a run of {rows[-1][1]} steps"
                ),
            )
        )
        whole = f"no train.microbatch: the whole batch fits; a larger one may, too: --set train.batch={2 * found.batch}"
        pairs.append(
            (
                "the spec needs",
                whole
                if found.microbatch == found.batch
                else f"train.microbatch = {found.microbatch}",
            )
        )
    print()
    print_pairs(pairs)
    print(f"{found.conditions.get('processor')}, torch {found.conditions.get('torch')}")


def _print_noise(lab: NoiseLab) -> None:
    from surefoot.cli.table import print_table
    from surefoot.core.units import format_number

    rows = [
        [f"{each.batch:,}", format_number(each.variance), str(each.pairs)] for each in lab.levels
    ]
    print_table(
        ("batch", "variance of its gradient", "pairs"),
        rows,
        right=("batch", "variance of its gradient", "pairs"),
    )
    print(f"slope {lab.slope:.3f}: -1 where samples are independent")
    if lab.noise is None:
        print(
            "no noise scale: "
            + (
                "it takes more batches, as with --draws 64"
                if lab.levels[0].pairs < 32
                else "the gradients are 0"
            )
        )
        return
    high = "n/a" if lab.noise.high is None else f"{lab.noise.high:,.0f}"
    scale = "n/a" if lab.noise.scale is None else f"{lab.noise.scale:,.0f}"
    print(
        f"noise scale {scale} samples [{lab.noise.low:,.0f}, {high}], "
        f"from {lab.noise.num_steps} groups of batches"
    )
    print(lab.noise.advise(lab.batch))


def _write_csv(path: Path, found: Splits) -> None:
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            rows.writerows([_cell(each.as_row()[name]) for name in COLUMNS] for each in found.rows)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint="name another file with --csv"
        ) from None


def _cell(value: Any) -> Any:
    return "" if value is None else value
