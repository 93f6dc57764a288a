"""Command `surefoot profile`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    QuietOption,
    RanksOption,
    RunOption,
    SeedOption,
    SetOption,
    TaskOption,
    TracebackOption,
)
from surefoot.cli.table import print_pairs, print_table
from surefoot.core import place
from surefoot.core.errors import InputError
from surefoot.core.units import format_bytes, format_number, format_percent, format_seconds

if TYPE_CHECKING:
    from surefoot.components.profiler.tracing.analysis import TraceAnalysis
    from surefoot.components.profiler.tracing.window import Window

ROWS = 20
ALL = "shapes,stacks,memory"
ENDINGS = (".json", ".json.gz")
NUMBERS = ("calls", "self time", "share", "total time", "self memory", "GFLOP", "input size")
WithOption = Annotated[
    str,
    typer.Option(
        "--with", metavar="LEVELS", help="a list from shapes,stacks,memory; each adds overhead"
    ),
]


def profile(
    given: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|RUN", help="a spec, a run folder, or a trace to read: trace.json.gz"
        ),
    ],
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="the number of recorded steps")
    ] = 20,
    with_: WithOption = ALL,
    run: RunOption = None,
    nvtx: Annotated[
        bool,
        typer.Option("--nvtx", help="add NVTX ranges for nsys or ncu, and record nothing itself"),
    ] = False,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    task: TaskOption = None,
    ranks: RanksOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int | None:
    """Record how some steps spend their time and memory.

    For a SPEC, a new run is trained up to the end of its window. For a RUN that is running, its
    process records the next steps; a RUN that has ended is repeated from its last checkpoint, and
    only profile/ changes in its folder. The folder gets flame graphs, tables and the trace. With
    --ranks several processes train a SPEC, and the output shows their collectives: how much of each
    overlapped with computation, and how much the ranks waited for.
    """
    tell = options.make_progress_printer("profile", quiet=quiet or json)
    is_run = options.find_run(given) is not None
    options.check_of_run(task, is_run=is_run)
    if given.endswith(ENDINGS) and not is_run:
        _tell_trace(Path(given), run, json=json)
        return None
    options.import_torch()
    from surefoot.components.profiler.tracing.window import Window, check_gpu, check_levels

    if nvtx:
        check_gpu()
    window, levels = (
        Window(active=steps),
        check_levels([each.strip() for each in with_.split(",") if each.strip()]),
    )
    if is_run:
        options.reject_spec_flags(
            {"--set": set_, "--seed": seed, "--data": data, "--run": run, "--ranks": ranks},
            "profiled",
            "profile",
        )
        folder = _profile_run(Path(given), window, levels, tell, nvtx=nvtx, task=task)
    else:
        changed = options.overrides(set_, seed=seed, data=data)
        if ranks is not None:
            return _launch(given, changed, ranks)
        folder = _profile_spec(given, changed, run, window, levels, tell, nvtx=nvtx)
    if nvtx:
        tell(f"the window of {window.active} steps has ended; nsys or ncu has the recording")
        return None
    if place.here().rank:
        return None
    words = [
        "surefoot",
        "profile",
        given,
        *(part for each in set_ or [] for part in ("--set", each)),
    ]
    words += [
        *(["--seed", str(seed)] if seed is not None else []),
        *(["--data", data] if data is not None else []),
    ]
    _show(given, folder, [*words, "--steps", str(steps), "--nvtx"], json=json)
    return None


def _launch(given: str, changed: Any, ranks: int) -> int:
    from surefoot.contract import spec_file

    return options.launch_ranks(
        ranks, spec_file.read(given, changed).spec, None, None, trains=False
    )


def _profile_spec(
    given: str,
    changed: Any,
    run: Path | None,
    window: Window,
    levels: tuple[str, ...],
    tell: Callable[[str], None],
    *,
    nvtx: bool,
) -> Path:
    from surefoot.contract import spec_file
    from surefoot.train.record.windows import record
    from surefoot.train.run import Run

    return record(
        Run(spec_file.read(given, changed).spec, folder=run, fresh=True, quiet=True),
        window,
        levels,
        tell,
        nvtx=nvtx,
    )


def _profile_run(
    run: Path,
    window: Window,
    levels: tuple[str, ...],
    tell: Callable[[str], None],
    *,
    nvtx: bool,
    task: str | None,
) -> Path:
    from surefoot.contract import runlock
    from surefoot.train.record import windows

    if not runlock.is_held(run):
        return windows.record_again(
            run, window, levels, tell, warn=options.warn, nvtx=nvtx, use=task
        )
    if task is not None:
        raise InputError(
            f"--task cannot change the task of {run}, which is running", hint="leave --task out"
        )
    if nvtx:
        raise InputError(
            f"{run} is running in a process that nsys and ncu did not start",
            hint="wait until the run has ended, or profile its spec.toml",
        )
    return windows.ask(run, window, levels, tell)


def _show(given: str, folder: Path, words: list[str], *, json: bool) -> None:
    from surefoot.components.profiler.tracing.analysis import TRACE_FILE, analyze, draw
    from surefoot.components.profiler.tracing.nsight import render

    found = analyze(folder / TRACE_FILE)
    files = [folder / TRACE_FILE, *draw(found, folder)]
    commands = render(words, folder, world_size=place.here().world_size)
    row = {
        "given": given,
        "folder": str(folder),
        "files": list(map(str, files)),
        **_row(found),
        "commands": commands,
    }
    options.print_result(row, _print, found, files, commands, json=json)


def _tell_trace(path: Path, run: Path | None, *, json: bool) -> None:
    """Print the analysis of an existing PyTorch profiler trace, which any loop may have written.

    If `run` is set, figures are also written to its `profile` folder.
    """
    from surefoot.components.profiler.tracing.analysis import analyze, draw

    found = analyze(path)
    files = [] if run is None else draw(found, run / "profile")
    row = {"given": str(path), "files": list(map(str, files)), **_row(found)}
    options.print_result(row, _print, found, files, {}, json=json)


def _row(found: TraceAnalysis) -> dict[str, Any]:
    peak = None
    if found.memory is not None:
        at_s, parts = found.memory.peak
        peak = {"time_s": at_s, "bytes": sum(parts.values()), "categories": parts}
    return {**found.as_row(), "memory_peak": peak}


def _print(found: TraceAnalysis, files: Sequence[Path], commands: Mapping[str, str]) -> None:
    whole_s = sum(
        each.self_device_s if each.self_device_s is not None else each.self_s
        for each in found.operators
    )
    on_device = bool(found.operators) and found.operators[0].self_device_s is not None
    rows = []
    for each in found.operators[:ROWS]:
        own_s = each.self_device_s if on_device and each.self_device_s is not None else each.self_s
        rows.append(
            [
                each.name,
                f"{each.calls:,}",
                format_seconds(own_s),
                format_percent(own_s / whole_s if whole_s else None),
                format_seconds(each.total_s),
                format_bytes(each.self_bytes),
                format_number(None if each.flops is None else each.flops / 1e9),
                format_bytes(each.bytes),
            ]
        )
    print(f"Operators by self time{' on the device' if on_device else ''}")
    print_table(
        ("operator", *NUMBERS),
        rows,
        right=NUMBERS,
        indent=2,
        num_hidden=len(found.operators) - ROWS,
        what="more operators",
    )
    if found.collectives is not None:
        _print_collectives(found)
    print("The window")
    print_pairs(_pairs(found, whole_s))
    for title, lines in (
        ("Files", [shlex.quote(str(path)) for path in files]),
        ("The same window on an NVIDIA GPU", list(commands.values())),
    ):
        if lines:
            print("\n  ".join([title, *lines]))


def _print_collectives(found: TraceAnalysis) -> None:
    print("Collectives of the ranks in one step of this window")
    headers = (
        "collective",
        "calls",
        "begins",
        "ends",
        "overlapped",
        "exposed",
        "share",
        "before backward ends",
    )
    rows = [
        [
            f"{each.name}{f', {each.place}.' if each.place > 1 else ''}",
            f"{each.num_calls:,}",
            format_seconds(each.begins_s),
            format_seconds(each.ends_s),
            format_seconds(each.overlapped_s),
            format_seconds(each.exposed_s),
            format_percent(each.share),
            f"{each.num_early:,}",
        ]
        for each in found.collectives or ()
    ]
    print_table(headers, rows, right=headers[1:], indent=2)
    print(
        "  begins, ends: time since the start of the step; overlapped: during "
        "computation (share: of the whole); exposed: waited for"
    )


def _pairs(found: TraceAnalysis, operators_s: float) -> list[tuple[str, str]]:
    steps, paces = found.num_steps, found.facts.get("step_s") or {}
    first = found.facts.get("first_step")
    text = format_seconds(found.window_s)
    if steps:
        text += f" for {steps} steps" + (f", from step {first:,}" if isinstance(first, int) else "")
    pairs = [
        ("time", text),
        (
            "operators",
            (
                f"{format_percent(operators_s / found.window_s if found.window_s else None)} "
                "of the window"
            ),
        ),
    ]
    if found.facts.get("short_of_memory"):
        pairs.append(
            (
                "ended early",
                f"after {steps} steps: a longer window would need more memory than is available",
            )
        )
    if found.facts.get("num_kept"):
        pairs.append(
            (
                "not traced",
                (
                    f"all but the first {found.facts['num_kept']} steps: the whole trace "
                    "would exceed 50 MB"
                ),
            )
        )
    if found.slowdown is not None:
        inside, before = format_seconds(paces["inside"]), format_seconds(paces["before"])
        pace = f"{inside} per step, {before} without the profiler"
        pairs.append(("overhead", f"{format_number(found.slowdown)} times as long: {pace}"))
    if found.memory is not None:
        at_s, parts = found.memory.peak
        told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        most = f"at most {format_bytes(sum(parts.values()))}, after {format_seconds(at_s)}"
        pairs.append(("memory", f"{most}: {told}"))
    return pairs
