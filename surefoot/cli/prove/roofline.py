"""Command `surefoot roofline`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    QuietOption,
    SeedOption,
    SetOption,
    TaskOption,
    TracebackOption,
)
from surefoot.cli.table import print_pairs, print_table
from surefoot.core.errors import StorageError
from surefoot.core.units import UNKNOWN, format_number, format_percent, format_seconds

if TYPE_CHECKING:
    from surefoot.core.cost.roofline import Point
    from surefoot.core.hardware import Peaks
    from surefoot.prove.bench.place import MeasuredRooflinePoint

ROWS = 14
BUSY = 0.7  # load average above which other processes compete
NUMBERS = ("calls", "time", "share", "GFLOP/s", "GB/s", "FLOP/byte", "of the roof")
DRAWN = 8  # operators in the plot; more would overlap


def roofline(
    given: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC|RUN]",
            help="a spec or a run folder; without it only the peaks are measured",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="the number of timed steps")
    ] = 10,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="write the JSON to a new file; for a RUN also to its profile/",
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
    """Compare the time of a training step with the least time that this machine allows.

    The command measures the peak rates of matmuls and memory copies, counts FLOPs and bytes of
    every operator and module of a step, and shows whether compute or memory limits each of them,
    which operators would gain from fusion, and model FLOPs utilization.
    """
    tell = options.make_progress_printer("roofline", quiet=quiet or json)
    if given is None:
        _peaks_alone(json=json, tell=tell)
        return
    from surefoot.core.cost.roofline import FILE
    from surefoot.prove.bench.place import place

    run = options.find_run(given)
    if run:
        options.reject_spec_flags(
            {"--set": set_, "--seed": seed, "--data": data}, "measured", "roofline"
        )
    if out:
        options.check_new_file(out, "--out", "roofline.json")
    elif run:
        _check_folder((run / FILE).parent)
    stated = options.overrides(set_, seed=seed, data=data)
    spec = options.read_spec_or_run("roofline", given, stated, task).spec
    found = place(spec, steps=steps, tell=tell)
    row, unwritten = found.as_row(), dict[Path, StorageError]()
    for path in [*([out] if out else []), *([run / FILE] if run else [])]:
        try:
            _write(path, row, run=None if path == out else run)
            tell(f"written to {path}")
        except StorageError as error:  # the results are printed all the same
            unwritten[path] = error
    options.print_result(row, _print, found, json=json)
    for path, why in unwritten.items():
        if path == out or not out:
            raise why
        print(f"warning: {why.message}; {out} has the result", file=sys.stderr)


def _peaks_alone(*, json: bool, tell: Any) -> None:
    import torch

    from surefoot.core.hardware import find_machine, find_published
    from surefoot.prove.bench.place import find_peaks

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peaks, one_core = find_peaks(device, find_machine().cores, tell)
    published = find_published(peaks.device)
    row = {
        "device": peaks.device,
        "peaks": peaks.as_row(),
        "one_core": one_core.as_row() if one_core else None,
        "published": published.as_row() if published else None,
    }
    options.print_result(row, _print_peaks, peaks, one_core, published, json=json)


def _check_folder(folder: Path) -> None:
    """Raise StorageError if no file can be written to `folder`.

    The command calls this function first, because measuring takes a minute.
    """
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder if folder.exists() else folder.parent):
            pass
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}", hint="give another file with --out"
        ) from None


def _write(path: Path, row: dict[str, Any], *, run: Path | None) -> None:
    """Write `row` as JSON, atomically: a reader sees the old file or the complete new one.

    Args:
        path: path of the file.
        row: content of the file.
        run: run folder that contains the path; None for a path that the user chose.

    Raises:
        StorageError: if the file cannot be written.
    """
    import json

    from surefoot.contract.run_folder import files

    folder = path.parent if run is None else run
    try:
        files.make_folder(folder, str(path.parent.relative_to(folder)))
        files.write_whole(
            folder, str(path.relative_to(folder)), json.dumps(row, allow_nan=False).encode()
        )
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint="give another file with --out"
        ) from None


def _print_peaks(peaks: Peaks, one_core: Peaks | None, published: Peaks | None) -> None:
    from surefoot.core.cost.roofline import format_giga

    many = one_core is not None and one_core.threads != peaks.threads
    columns = [
        peaks,
        *([one_core] if many and one_core else []),
        *([published] if published else []),
    ]
    names = [_column(each) for each in columns]
    print(f"Peaks of {peaks.device}")
    rows = [
        [
            f"matmuls in {dtype}, GFLOP/s",
            *(format_giga(each.flops_per_s.get(dtype)) for each in columns),
            _ridge(peaks, dtype),
        ]
        for dtype in dict.fromkeys(name for each in columns for name in each.flops_per_s)
    ]
    rows.append(
        ["copy (read and write), GB/s", *(format_giga(each.bytes_per_s) for each in columns), ""]
    )
    rows.append(
        [
            "copy within the cache, GB/s",
            *(format_giga(each.cache_bytes_per_s) for each in columns),
            "",
        ]
    )
    print_table(
        ("what", *names, "ridge, FLOP/byte"), rows, right=(*names, "ridge, FLOP/byte"), indent=2
    )
    if published:
        print(f"  published: {published.source}")


def _column(peaks: Peaks) -> str:
    if peaks.threads is None:
        return "measured" if peaks.source.startswith("measured") else "published"
    return f"{peaks.threads} thread{'' if peaks.threads == 1 else 's'}"


def _ridge(peaks: Peaks, dtype: str) -> str:
    from surefoot.core.cost.roofline import ridge

    peak = peaks.flops_per_s.get(dtype)
    return format_number(
        None if peak is None or not peaks.bytes_per_s else ridge(peak, peaks.bytes_per_s)
    )


def _print(found: MeasuredRooflinePoint) -> None:
    _print_peaks(found.peaks, found.one_core, found.published)
    print()
    _draw(found)
    _print_points("Operators", "operator", found)
    _print_points("Modules, forward and backward, with their submodules", "module", found)
    print("The step")
    print_pairs(_pairs(found))


def _pairs(found: MeasuredRooflinePoint) -> list[tuple[str, str]]:
    from surefoot.core.cost.roofline import format_giga

    step, inside = format_seconds(found.step_s), format_seconds(found.operators_s)
    outside, total = (
        format_seconds(max(0.0, found.step_s - found.operators_s)),
        format_giga(found.flops),
    )
    fusible = f"{format_percent(found.fusible_share)} of the operators' time"
    pairs = [
        ("time", f"{step} for {found.num_samples} samples, the median of {found.num_steps}"),
        ("operators", f"{inside}; {outside} outside of operators: Python and launching operators"),
        ("model FLOPs", f"{format_giga(found.model_flops)} GFLOP in matmuls, of {total} in total"),
        ("MFU", found.utilization.words(found.samples_per_s)),
        ("fusible", f"{fusible}: pointwise, norms, sums, copies, limited by memory"),
    ]
    if found.again_flops:
        pairs.append(
            (
                "recomputed",
                f"{format_giga(found.again_flops)} GFLOP more, not counted in the model FLOPs",
            )
        )
    if found.rule_flops is not None and found.model_flops:
        share = format_percent(found.rule_flops / found.model_flops)
        pairs.append(
            (
                "rule of thumb",
                (
                    f"6 x parameters x tokens, attention: {format_giga(found.rule_flops)} GFLOP, "
                    f"{share} of the model's"
                ),
            )
        )
    if found.load is not None and found.load > BUSY:
        told = (
            f"the load was {format_number(found.load)} at the start: peaks and times are "
            "worse than on an idle machine"
        )
        pairs.append(("busy", told))
    if found.unknown:
        pairs.append(
            (
                "no formula",
                f"{', '.join(found.unknown)}: bytes and time are counted, FLOPs are not",
            )
        )
    return pairs


def _print_points(title: str, kind: str, found: MeasuredRooflinePoint) -> None:
    """Print a table of the operators or modules that take the most time.

    `kind` is "operator" or "module". Shares are relative to the time of all operators.
    """

    timed = [
        each
        for each in found.points
        if each.kind == kind and each.group != "view" and each.elapsed_s > 0
    ]
    first = ("operator", "dtype") if kind == "operator" else ("module",)
    print(title)
    rows = [_cells(each, len(first) > 1, found.operators_s) for each in timed[:ROWS]]
    headers = (*first, *NUMBERS, "limited by")
    hidden = len(timed) - ROWS
    print_table(headers, rows, right=NUMBERS, indent=2, num_hidden=hidden, what=f"more {kind}s")
    print()


def _cells(point: Point, with_dtype: bool, total_s: float) -> list[str]:
    from surefoot.core.cost.roofline import format_giga

    return [
        point.name,
        *([point.dtype or ""] if with_dtype else []),
        format_number(point.calls),
        format_seconds(point.elapsed_s),
        format_percent(point.elapsed_s / total_s),
        format_giga(point.flops / point.elapsed_s),
        format_giga(point.num_bytes / point.elapsed_s),
        format_number(point.intensity),
        format_percent(point.share_of_roof),
        point.bound or UNKNOWN,
    ]


def _draw(found: MeasuredRooflinePoint) -> None:
    """Plot the roofline with the operators that take the most time.

    The roof is that of the dtype with the most FLOPs.
    """
    from surefoot.cli.plot import overlay, terminal_style
    from surefoot.core.cost.roofline import attainable_flops_per_s

    peak, bytes_per_s = (
        found.peaks.flops_per_s.get(found.utilization.dtype),
        found.peaks.bytes_per_s,
    )
    drawn = [
        each
        for each in found.points
        if each.kind == "operator" and each.flops and each.intensity and each.elapsed_s
    ][:DRAWN]
    if peak is None or not bytes_per_s or not drawn:
        return
    at = [math.log10(each.intensity or 1.0) for each in drawn]
    low, high = (
        min(*at, math.log10(peak / bytes_per_s)) - 0.5,
        max(*at, math.log10(peak / bytes_per_s)) + 0.5,
    )
    x = sorted({*at, *(low + (high - low) * part / 60 for part in range(61))})
    curves: dict[str, list[float | None]] = {
        f"roof, {found.utilization.dtype}": [
            attainable_flops_per_s(10**each, peak, bytes_per_s) / 1e9 for each in x
        ]
    }
    for point, where in zip(drawn, at, strict=True):
        curves[f"{point.name} {point.dtype}"] = [
            point.flops / point.elapsed_s / 1e9 if each == where else None for each in x
        ]
    print("GFLOP/s over the intensity")
    print(
        overlay(
            x,
            curves,
            terminal_style(
                sys.stdout.encoding, log=True, x_title="log10 of FLOP per byte", height=12
            ),
        ),
        end="\n\n",
    )
