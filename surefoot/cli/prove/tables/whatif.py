"""Tables that `surefoot whatif` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.table import print_pairs, print_table, print_text
from surefoot.core.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from surefoot.components.compiler.kernels import Graph
    from surefoot.prove.whatif.batch import Split, Splits
    from surefoot.prove.whatif.compiled import CompileTiming, Ways
    from surefoot.prove.whatif.fit import FitSearch
    from surefoot.prove.whatif.noise import GradientNoiseResult
    from surefoot.prove.whatif.recompute import Recomputing


def print_splits(found: Splits) -> None:
    """Print the memory and throughput of each batch size with each microbatch size."""
    headers = (
        "batch",
        "microbatch",
        "K",
        "peak memory",
        "samples/s",
        "items/s",
        "steps per epoch",
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
            print(f"{each.batch:,} by {each.microbatch:,} failed: {error_of(each)}")
    print(f"\n{found.conditions.get('processor')}, torch {found.conditions.get('torch')}")


def print_ways(found: Ways) -> None:
    """Print the times of eager mode and of each compile option, and the best option."""
    headers = (
        "what",
        "mode",
        "compiling",
        "cached",
        "step",
        "ratio to eager",
        "peak memory",
        "break-even",
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
            print_text(f"{each.what} {each.mode or ''}: {error_of(each)}")
    if found.best is not None:
        best = f'compile.what = "{found.best.what}", compile.mode = "{found.best.mode}"'
        print_text(f"best: {best}; its numbers: surefoot verify --compile")
    elif any(each.ratio is not None and each.ratio.verdict == "too few" for each in found.ways):
        print_text("too few rounds to show a gain: give --rounds 7 or more")
    else:
        print_text("best: eager mode, no gain is shown")
    _print_machine(found.conditions)


def _break_even(way: CompileTiming) -> str:
    if way.pays_after is not None:
        after, least, most = way.pays_after
        return f"{after:,} steps ({least:,} to {most:,})"
    return "never" if way.ratio is not None and way.ratio.verdict == "higher" else ""


def print_recomputing(found: Recomputing) -> None:
    """Print what activation checkpointing would save and cost, per block and per setting."""
    headers = ("block", "keeps", "inputs", "recomputation", "saved per ms")
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
    headers = (
        "memory.activation_checkpointing",
        "blocks hold",
        "peak memory",
        "step",
        "ratio to none",
    )
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
    _print_machine(found.conditions)


def _print_machine(conditions: Mapping[str, Any]) -> None:
    torch = conditions.get("torch")
    print_text(f"{conditions.get('processor')}, {conditions['device']}, torch {torch}")


def print_kernels(graphs: Sequence[Graph], files: Sequence[Path]) -> None:
    """Print the kernels of each compiled graph, with their operators and memory traffic.

    Then print the paths in `files`.
    """
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
                ", ".join(each.operators) or "none: a change of layout, or random numbers",
            ]
            for each in graph.kernels
        ]
        print_table(
            ("kernel", "moves", "alone", "operators"), rows, right=("moves", "alone"), indent=2
        )
    for path in files:
        print(path)


def print_largest(found: FitSearch) -> None:
    """Print the microbatch sizes that were tried, and the largest one that fits."""
    from surefoot.prove.whatif.fit import MARGIN, subtract_margin

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
    limit, most = format_bytes(found.limit_bytes), format_bytes(subtract_margin(found.limit_bytes))
    pairs = [("limit", f"{format_percent(1 - MARGIN)} of {limit}: {most}")]
    if found.predicted is not None:
        size, tensors = "none", "those of the smallest microbatch"
        if found.predicted.microbatch is not None:
            size, tensors = f"microbatch {found.predicted.microbatch:,}", "its tensors"
        peak = format_bytes(found.predicted.peak_bytes)
        pairs.append(("predicted", f"{size}; {tensors} take up to {peak}"))
    if found.microbatch is not None:
        taken = f"{format_bytes(found.peak_bytes)} in a run of {rows[-1][1]} steps"
        pairs.append(("measured", f"microbatch {found.microbatch:,}; {taken}"))
        needs = f"train.microbatch = {found.microbatch}"
        if found.microbatch == found.batch:
            needs = (
                "no train.microbatch: the whole batch fits; a larger batch may fit too: "
                f"--set train.batch={2 * found.batch}"
            )
        pairs.append(("the spec needs", needs))
    print()
    print_pairs(pairs)
    print(f"{found.conditions.get('processor')}, torch {found.conditions.get('torch')}")


def print_noise(lab: GradientNoiseResult) -> None:
    """Print the gradient variance for each batch size, and the gradient noise scale."""
    rows = [
        [f"{each.batch:,}", format_number(each.variance), str(each.pairs)] for each in lab.levels
    ]
    headers = ("batch", "gradient variance", "pairs")
    print_table(headers, rows, right=headers)
    print(f"slope {lab.slope:.3f}: -1 where samples are independent")
    if lab.noise is None:
        few = lab.levels[0].pairs < 32
        reason = "more batches are needed: --draws 64" if few else "the gradients are 0"
        print(f"no noise scale: {reason}")
        return
    scale, low, high = map(format_number, (lab.noise.scale, lab.noise.low, lab.noise.high))
    print(
        f"noise scale {scale} samples ({low} to {high}), "
        f"from {lab.noise.num_steps} groups of batches"
    )
    print(lab.noise.advise(lab.batch))


def error_of(row: Split | CompileTiming) -> str:
    """Return the last error of a failed measurement, in one line, without its hint."""
    from surefoot.prove.attempts import find_last_error

    return find_last_error(row.failure or "").splitlines()[0]
