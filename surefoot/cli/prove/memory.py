"""Command `surefoot memory`."""

from __future__ import annotations

import json as json_
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import DataOption, JsonOption, QuietOption, SetOption, TracebackOption
from surefoot.cli.table import print_table, print_text
from surefoot.core.errors import InputError, StorageError, hint_unwritten
from surefoot.core.units import format_bytes, format_percent, parse_bytes, parse_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from surefoot.contract.spec import RunSpec

FILE = "shape.json"

OptionalSpecArgument = Annotated[
    str | None, typer.Argument(metavar="[SPEC]", help="a spec", show_default=False)
]
ParametersOption = Annotated[
    str | None,
    typer.Option(
        "--parameters",
        metavar="COUNT",
        help="instead of a spec: the number of parameters, such as 70B",
        show_default=False,
    ),
]
FitOption = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="SIZE",
        help="find what fits into this memory, as 16GiB",
        show_default=False,
    ),
]
ShardedRanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        help="the memory of each of N ranks, by sharding stage",
        show_default=False,
    ),
]
HalfOption = Annotated[
    bool,
    typer.Option(
        "--half", help="with --ranks: weights and gradients in 16 bits, master weights in 32"
    ),
]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="run three steps too, and compare with the prediction")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="write the JSON to a new file", show_default=False),
]


def memory(
    given: OptionalSpecArgument = None,
    parameters: ParametersOption = None,
    fit: FitOption = None,
    ranks: ShardedRanksOption = None,
    half: HalfOption = False,
    measure: MeasureOption = False,
    out: OutOption = None,
    set_: SetOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Predict the peak memory of a training step without running it.

    The prediction has parameters, gradients, optimizer state, activations by block and temporaries,
    from a trace without values. `--fit` finds the largest microbatch, and the cheapest activation
    checkpointing, that fit into a given memory. `--parameters 175B --ranks 64` compares the
    sharding stages.
    """

    if (given is None) == (parameters is None):
        what = (
            "memory needs a spec or --parameters"
            if given is None
            else "give a spec or --parameters, not both"
        )
        raise InputError(what, hint="surefoot memory digits, or surefoot memory --parameters 70B")
    of_spec = {"--measure": measure, "--set": set_, "--data": data}
    idle = [flag for flag, value in of_spec.items() if value]
    if idle and parameters is not None:
        raise InputError(
            f"{idle[0]} needs a spec and has no effect with --parameters",
            hint=f"leave out {idle[0]} or --parameters",
        )
    if ranks is None and half:
        raise InputError(
            "--half needs --ranks",
            hint="surefoot memory --parameters 175B --ranks 64 --half",
        )
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks must be at least 1; got {ranks}", hint="give --ranks 1 or more")
    if ranks is not None and (parameters is None or fit is not None):
        raise InputError(
            f"--ranks {ranks} needs --parameters, without --fit",
            hint="surefoot memory --parameters 175B --ranks 64",
        )
    if measure and fit is not None:
        raise InputError(
            "--fit searches for a spec that fits, and --measure runs the given spec: choose one",
            hint="run --fit first, then --measure with the values that it found",
        )
    budget = None if fit is None else parse_bytes(fit)
    if out is not None:
        options.check_new_file(out, "--out", FILE)
    if parameters is None:
        tell = options.make_progress_printer("memory", quiet=quiet or json)
        row = _predict_from_spec(
            str(given), options.overrides(set_, data=data), budget, measure, tell
        )
    elif ranks is None:
        row = _predict_from_sizes(parameters, budget)
    else:
        row = _state_bytes_by_stage(parameters, ranks, is_half=half)
    if out is not None:
        _write(out, row)
    options.print_result(row, _print, row, json=json)


def _write(out: Path, row: Mapping[str, Any]) -> None:
    try:
        out.write_text(json_.dumps(row, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{out} cannot be written: {error.strerror}",
            hint=hint_unwritten(error, "give another --out"),
        ) from None


def _count(parameters: str) -> int:
    count = parse_count(parameters)
    if not count:
        raise InputError(
            "--parameters must be at least 1; got 0",
            hint="give the number of parameters, such as 70B",
        )
    return count


def _predict_from_sizes(parameters: str, budget: int | None) -> dict[str, Any]:
    """Predict training memory from the number of parameters alone, without torch.

    `budget` is the available memory in bytes, with which the prediction is compared.
    """
    from surefoot.core.cost.shape import training_bytes

    count = _count(parameters)
    terms = training_bytes(count)
    peak = sum(terms.values())
    row = {"peak_bytes": peak, "interval": None, "terms": terms, "num_parameters": count}
    if budget is None:
        return row
    return {**row, "budget_bytes": budget, "times_budget": peak / budget, "fits": peak <= budget}


def _state_bytes_by_stage(parameters: str, ranks: int, *, is_half: bool) -> dict[str, Any]:
    """Return the bytes per rank of weights, gradients and optimizer state, for each ZeRO stage."""
    from dataclasses import asdict

    from surefoot.control.plan import compare_stages

    count = _count(parameters)
    sizes = {"weight_bytes": 2, "gradient_bytes": 2, "state_bytes": 12} if is_half else {}
    stages = [asdict(each) for each in compare_stages(count, ranks, **sizes)]
    return {"num_parameters": count, "num_ranks": ranks, "is_half": is_half, "stages": stages}


def _predict_from_spec(
    given: str, overrides: list[tuple[str, Any, str]], budget: int | None, measure: bool, tell: Any
) -> dict[str, Any]:
    options.import_torch()
    from surefoot.cli.left_out import name_left_out
    from surefoot.contract import spec_file
    from surefoot.prove import memory as room
    from surefoot.train import environment

    origin = spec_file.read(given, overrides)
    spec = origin.spec
    if spec.memory.offload != "none":
        raise InputError(
            f"memory.offload is {spec.memory.offload!r}, and offloaded memory cannot be predicted",
            hint="leave out memory.offload to predict the peak of a device without offloading",
        )
    left_out = {"left_out": name_left_out("memory", origin)}
    put_back = environment.apply(spec)  # train.attention decides what attention allocates
    try:
        if budget is not None:
            found = room.fit(spec, budget, tell)
            return {"budget_bytes": budget, **found.as_row(), **left_out}
        try:
            row = room.predict(spec).as_row()
        except InputError as error:
            if not measure:
                raise
            tell(error.message)
            row = {"spec_id": spec.id, "peak_bytes": None, "interval": None, "terms": {}}
    finally:
        put_back()
    if measure:
        row |= _measure(spec, row, tell)
    return {**row, **left_out}


def _measure(spec: RunSpec, row: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure the memory of three steps in one process, and compare it with the prediction.

    There is no comparison if the prediction `row` is for one of several ranks.
    """
    from surefoot.prove import memory as room

    layout = row.get("layout", "1")
    if layout != "1":
        print(
            f"note: --measure runs one process, but the prediction is for a rank of {layout}: "
            "they are not compared; "
            "surefoot train SPEC --ranks N --set memory.predict=true measures a rank",
            file=sys.stderr,
        )
    tell("running three steps")
    return room.compare(spec, row["peak_bytes"] if layout == "1" else None).as_row()


def _print(row: Mapping[str, Any]) -> None:
    if "stages" in row:
        stages = [
            (
                f"stage {each['stage']}" if each["stage"] else "none",
                f"{each['num_bytes'] / 1e9:,.2f} GB",
                format_percent(each["saved"]),
                f"{each['volumes']} times the weights",
            )
            for each in row["stages"]
        ]
        print_table(("sharding", "per rank", "saved", "sent per step"), stages)
        print_text(
            "weights, gradients and optimizer state (Adam); without activations, which "
            "no stage divides"
        )
        return
    peak = row["peak_bytes"]
    if "microbatch" in row:
        print(f"microbatch {row['microbatch']}, memory.activation_checkpointing {row['recompute']}")
    rows = [
        (name, format_bytes(size), format_percent(size / peak))
        for name, size in sorted(row["terms"].items(), key=lambda pair: -pair[1])
    ]
    if rows:  # there are none without a prediction
        print_table(("what", "bytes", "share"), rows)
    if peak is not None:
        low_high = row["interval"]
        between = ""
        if low_high is not None:
            between = f", between {format_bytes(low_high[0])} and {format_bytes(low_high[1])}"
        layout = row.get("layout", "1")
        where = "" if layout == "1" else f", on each rank of {layout}"
        print_text(f"peak {format_bytes(peak)}{between}{where}")
    if "times_budget" in row:
        print(f"{row['times_budget']:.3g} times {format_bytes(row['budget_bytes'])}")
    if "measured_bytes" in row:
        error = ""
        if row["error"] is not None:
            error = f", prediction error {format_percent(row['error'])}"
        print_text(
            f"measured {format_bytes(row['measured_bytes'])}{error}; "
            f"resident {format_bytes(row['resident_bytes'])}"
        )
