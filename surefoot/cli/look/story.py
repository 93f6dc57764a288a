"""Summary of one run for `surefoot show`, as text and as a JSON object."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from typing import Any

from surefoot.cli.look.past import Past, finite_or_none, format_metric, format_score
from surefoot.cli.plot import overlay, terminal_style
from surefoot.cli.table import (
    format_time,
    print_pairs,
    print_table,
    print_text,
    shorten,
    without_control,
)
from surefoot.contract.events import Started
from surefoot.contract.run_folder import attached
from surefoot.control.diagnose import Spread
from surefoot.core.units import UNKNOWN, format_bytes, format_number, format_percent, format_seconds

CURVE_ROWS = 12
SPREAD = ("mean", "sd", "min", "p50", "p95", "p99", "max")
MAX_OUTLIERS = 5
MAX_ROWS = 12  # rows of evaluations; the best one is added
Pairs = list[tuple[str, str]]


def print_summary(past: Past) -> None:
    """Print the summary of a run."""
    score = [] if past.last is None else [format_score(past)]
    told = [past.started.task, past.state, *score, f"started {format_time(past.began_s)}"]
    print(
        without_control(f"{past.folder}: {', '.join(told)}"),
        end="\n\n",
    )
    _print_part("Environment", describe_environment(past))
    _print_curve(past)
    _print_evaluations(past)
    _print_faults(past)
    _print_phases(past)
    _print_part("Result", list(describe_end(past)))
    _print_part("Again", describe_reproduction(past), whole=True)


def _print_part(title: str, pairs: Pairs, *, whole: bool = False) -> None:
    print(title)
    print_pairs(pairs, whole=whole)
    print()


def describe_environment(past: Past) -> Pairs:
    """Return labeled texts: spec, host, device, versions, data, model and code of a run."""
    started = past.started
    machine, data = started.machine, started.data
    threads, ranks = machine.get("threads"), started.place.get("world_size", 1)
    cores = f"{machine.get('processor', UNKNOWN)}, {machine.get('cores', UNKNOWN)} cores"
    pairs = [
        ("spec", f"{started.spec_id}, seed {started.seed}"),
        (
            "host",
            (
                f"{started.place.get('host', UNKNOWN)}, {cores}, "
                f"{format_bytes(finite_or_none(machine.get('memory_bytes')))}"
            ),
        ),
        (
            "device",
            f"{machine.get('device', UNKNOWN)}, {threads} thread{'' if threads == 1 else 's'}"
            + (f", {ranks} ranks" if ranks > 1 else ""),
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in started.versions.items())),
        ("data", f"{data.get('describe', UNKNOWN)}"),
        (
            "",
            f"{data.get('guarantee', UNKNOWN)}, digest {shorten(data.get('digest', UNKNOWN), 15)}",
        ),
        ("model", f"{started.num_parameters:,} parameters"),
        ("code", _describe_code(started)),
    ]
    if past.num_attempts > 1:
        redone = sum(each.num_redone for each in past.goodput.attempts)
        is_least = any(each.num_redone and each.num_unrecorded for each in past.goodput.attempts)
        told = f"{'at least ' if is_least else ''}{redone:,} steps repeated; " if redone else ""
        pairs.append(
            (
                "attempts",
                (
                    f"{past.num_attempts}; {told}values of a step are those of its newest "
                    f"attempt; details: surefoot why {_quote_for_shell(past.folder)}"
                ),
            )
        )
    return pairs + [("note" if not index else "", note) for index, note in enumerate(started.notes)]


def _describe_code(started: Started) -> str:
    """Describe the code of a run: digest of the task file, number of other modules, git commit."""
    count = len(started.modules)
    modules = f" and {count} imported module{'' if count == 1 else 's'}" if count else ""
    changed = ", with uncommitted changes" if started.is_dirty else ""
    commit = shorten(started.commit or UNKNOWN, 15)
    return f"digest {shorten(started.code_digest, 15)}{modules}, commit {commit}{changed}"


def _print_curve(past: Past) -> None:
    """Print a plot of the training loss, with its first and last value.

    Nothing is printed if fewer than two records have a finite loss.
    """
    points = [
        (each.step, loss) for each in past.steps if (loss := finite_or_none(each.loss)) is not None
    ]
    if len(points) < 2:
        return
    (first, high), (last, low) = points[0], points[-1]
    print(
        f"Training loss: {format_number(high)} at step {first:,}, "
        f"{format_number(low)} at step {last:,}"
    )
    style = terminal_style(sys.stdout.encoding, x_title="step", height=CURVE_ROWS)
    print(
        overlay([step for step, _ in points], {"loss": [loss for _, loss in points]}, style),
        end="\n\n",
    )


def _print_evaluations(past: Past) -> None:
    if not past.evaluations:
        return
    chosen, left_out = _thin_evaluations(past)
    best = past.best
    names = list(dict.fromkeys(name for each in chosen for name in (*each.metrics, "loss")))
    splits = len({each.split for each in past.evaluations}) > 1
    headers = ["step", "epoch", *names, *(["split"] if splits else []), ""]
    rows = [
        [
            f"{each.step:,}",
            _epoch(past, each.step),
            *(format_metric(name, each) for name in names),
            *([each.split] if splits else []),
            "best" if each is best else "",
        ]
        for each in chosen
    ]
    what = "each split" if splits else f"the {past.evaluations[-1].split} split"
    print(f"Evaluations of {what}, {past.evaluations[-1].num_samples:,} samples")
    print_table(
        headers,
        rows,
        right=("step", "epoch", *names),
        indent=2,
        num_hidden=left_out,
        what="more evaluations",
    )
    print()


def _thin_evaluations(past: Past) -> tuple[list[Any], int]:
    """Return at most `MAX_ROWS` evenly spaced evaluations, and the number of omitted ones.

    The last evaluation is always included; the best one is added if it is not among them.
    """
    every, best = list(past.evaluations), past.best
    if len(every) <= MAX_ROWS:
        return every, 0
    wanted = {round(index * (len(every) - 1) / (MAX_ROWS - 1)) for index in range(MAX_ROWS)}
    chosen = [each for index, each in enumerate(every) if index in wanted or each is best]
    return chosen, len(every) - len(chosen)


def _epoch(past: Past, step: int) -> str:
    return (
        format_number(step / past.started.steps_per_epoch)
        if past.started.steps_per_epoch
        else UNKNOWN
    )


def _print_faults(past: Past) -> None:
    if not past.faults:
        return
    print("Faults")
    rows = [
        [f"{each.step:,}", each.fault, each.detail, each.action] for each in past.faults[-MAX_ROWS:]
    ]
    print_table(
        ("step", "fault", "what", "action"),
        rows,
        right=("step",),
        indent=2,
        num_hidden=len(past.faults) - MAX_ROWS,
        what="earlier faults",
    )
    print()


def _print_phases(past: Past) -> None:
    """Print the time per phase of the newest attempt (start or resume), and its slow steps.

    Nothing is printed if the run recorded no phases, as in older versions.
    """
    found = past.phases
    if found is None:
        return
    print("Time by phase" + (", newest attempt" if past.num_attempts > 1 else ""))
    rows = [
        [each.name, format_seconds(each.total_s), format_percent(each.share), *_spread(each.a_step)]
        for each in found.phases
    ]
    rows.append(["step", "", "", *_spread(found.step)])
    print_table(
        ("phase", "time", "share", *SPREAD), rows, right=("time", "share", *SPREAD), indent=2
    )
    print_text(
        "mean and percentiles are per step; those of the phases are of the means of the records",
        indent=2,
    )
    told = (
        ""
        if found.coverage is None
        else (
            f", {format_percent(found.coverage)} of the {format_seconds(found.wall_s)} that an "
            "independent clock measured"
        )
    )
    print_text(f"the phases add up to {format_seconds(found.total_s)}{told}", indent=2)
    for row in found.outliers[:MAX_OUTLIERS]:
        print_text(
            f"slow step {row['step']:,}: {format_seconds(row['elapsed_s'])}: {row['cause']}",
            indent=2,
        )
    if (others := sum(found.causes.values()) - MAX_OUTLIERS) > 0:
        print_text(
            f"{others} more slow steps are not shown; --json has their number by cause",
            indent=2,
        )
    print()


def _spread(spread: Spread | None) -> list[str]:
    """Format statistics of the seconds per step; `n/a` for a phase that no recorded step had."""
    if spread is not None and spread.max_s == 0:
        spread = None
    return [format_seconds(getattr(spread, f"{name}_s", None)) for name in SPREAD]


def describe_end(past: Past) -> Iterator[tuple[str, str]]:
    """Yield labeled texts: how the run ended, its score, steps, time, throughput and memory."""
    ended, started = past.ended, past.started
    if ended is not None:
        yield "ended", f"{ended.outcome}: {ended.cause}"
    else:
        yield "ended", past.health.words
    if past.last is not None:
        yield "score", format_score(past)
    total = "" if started.total_steps in (None, past.num_steps) else f" of {started.total_steps:,}"
    yield "steps", f"{past.num_steps:,}{total} ({_epoch(past, past.num_steps)} epochs)"
    yield "time", format_seconds(past.elapsed_s)
    if past.num_attempts > 1:
        yield (
            "goodput",
            (
                f"{format_percent(past.goodput.share)} of "
                f"{format_seconds(past.goodput.total_s)} since the first attempt started"
            ),
        )
    yield "throughput", past.throughput
    yield "model FLOPs", _utilization(past)
    yield "peak memory", format_bytes(past.peak_bytes)
    if (found := past.memory) is not None:
        predicted, measured = (
            format_bytes(finite_or_none(size))
            for size in (found.predicted_bytes, found.measured_bytes)
        )
        yield (
            "step memory",
            (
                f"{measured} in step {found.step:,}, predicted {predicted}: error "
                f"{format_percent(finite_or_none(found.error))}"
            ),
        )
    if (device := past.device_memory) is not None:
        peak, gaps = (
            format_bytes(finite_or_none(device.get(name)))
            for name in ("peak_bytes", "fragmented_bytes")
        )
        yield (
            "device memory",
            (
                f"at most {peak}; {gaps} reserved and unused; "
                f"{device.get('num_retries', UNKNOWN)} retries"
            ),
        )


def _quote_for_shell(path: object) -> str:
    """Return a path quoted for the shell."""
    return shlex.quote(str(path))


def _utilization(past: Past) -> str:
    """Describe the model FLOPs utilization (MFU) with its terms.

    It is `n/a` until `surefoot roofline` has counted the FLOPs of a step.
    """
    if (found := past.utilization()) is not None:
        return f"MFU {found.words(past.samples_per_s)}"
    can_count = past.use and past.has_spec
    command = f"surefoot roofline {_quote_for_shell(past.folder)}"
    return f"{UNKNOWN} (to count them: {command})" if can_count else UNKNOWN


def describe_reproduction(past: Past) -> Pairs:
    """Return labeled texts: the command that repeats the run, and the folders of its weights."""
    parent = past.parent()
    is_forked = past.use is not None and parent is not None
    command, load = _how_to_repeat(past)
    if is_forked and parent is not None:
        began = (
            f"--from {parent.get('step')} "
            f"{'--weights-only ' if parent.get('weights_only') else ''}--fork NEW"
        )
        command = f"surefoot resume {_quote_for_shell(parent.get('folder'))} {began}"
    steps = past.weights()
    weights = [
        ("weights", str(past.folder / "checkpoints" / f"step-{step:012d}")) for step in steps
    ] or [("weights", "none saved")]
    pairs = [(name if not index else "", value) for index, (name, value) in enumerate(weights)]
    changed = [("", "with the changes of the spec in the notes above")] if is_forked else []
    return [
        ("repeat", command),
        *changed,
        *pairs,
        *([("load", load)] if steps and load else []),
    ]


def _how_to_repeat(past: Past) -> tuple[str, str | None]:
    """Return how to repeat a run from step 0, and the Python call that loads its weights.

    The first is a shell command if possible, otherwise an instruction. The second is None if no
    such call exists.
    """
    if past.started.spec_id == attached.SPEC_ID:
        again = "run the script of the loop with another folder; with this one it resumes"
        return again, attached.load_call(past.folder)
    if past.use is None:
        return "n/a: the task was built in a script; run that script again", None
    if not past.has_spec:
        return "n/a: the folder has lost its spec.toml", None
    command = f"surefoot train {_quote_for_shell(past.folder / 'spec.toml')}"
    return command, f"surefoot.load({str(past.folder)!r})"


def as_row(past: Past) -> dict[str, Any]:
    """Return the summary as a JSON-compatible dict; non-finite values are None."""
    started, ended, best, use = past.started, past.ended, past.best, past.utilization()
    return {
        **past.as_row(),
        "spec": started.spec,
        "seed": started.seed,
        "machine": started.machine,
        "place": started.place,
        "versions": started.versions,
        "data": started.data,
        "code_digest": started.code_digest,
        "commit": started.commit,
        "modules": started.modules,
        "is_dirty": started.is_dirty,
        "command": started.command,
        "num_parameters": started.num_parameters,
        "steps_per_epoch": started.steps_per_epoch,
        "notes": started.notes,
        "cause": past.cause,
        "exit_code": ended.exit_code if ended else None,
        "samples_per_s": past.samples_per_s,
        "items_per_s": past.items_per_s,
        "unit": started.unit,
        "peak_bytes": past.peak_bytes,
        "mfu": use.share(past.samples_per_s) if use else None,
        "curve": [
            {
                "step": each.step,
                "loss": finite_or_none(each.loss),
                "learning_rates": each.learning_rates,
            }
            for each in past.steps
        ],
        "evaluations": [
            {
                "step": each.step,
                "split": each.split,
                "num_samples": each.num_samples,
                "loss": finite_or_none(each.loss),
                "metrics": {name: finite_or_none(value) for name, value in each.metrics.items()},
                "best": each is best,
            }
            for each in past.evaluations
        ],
        "faults": [
            {"step": each.step, "fault": each.fault, "detail": each.detail, "action": each.action}
            for each in past.faults
        ],
        "weights": past.weights(),
        "goodput": past.goodput.share,
        "device_memory": past.device_memory,
        "memory": None
        if (found := past.memory) is None
        else {
            "step": found.step,
            "predicted_bytes": found.predicted_bytes,
            "measured_bytes": found.measured_bytes,
            "error": finite_or_none(found.error),
        },
        "time": past.phases.as_row() if past.phases is not None else None,
    }
