"""Tables that `surefoot verify` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.cli.table import print_table, print_text
from surefoot.core.units import format_number, format_seconds

if TYPE_CHECKING:
    from surefoot.prove.command import CommandVerdict
    from surefoot.prove.ladder.gate import GateVerdict, Score
    from surefoot.prove.layouts.verify import LayoutVerdict
    from surefoot.prove.verify import Verdict

NUM_WORST = 5


def print_resume(found: Verdict, spec: str) -> None:
    """Print whether training a spec is bitwise repeatable, even if it is killed and resumed."""
    rows = [
        (
            "two uninterrupted runs",
            f"{found.num_steps} steps each",
            _describe_difference(found.repeat, "bitwise identical"),
        )
    ]
    if found.repeat is None:
        kills = ", ".join(
            f"{step}{' (during a save)' if in_save else ''}" for step, _, in_save in found.kills
        )
        rows.append(
            (
                f"killed {len(found.kills)} time{'s' * (len(found.kills) != 1)} and resumed",
                f"after step{'s' * (len(found.kills) != 1)} {kills}",
                _describe_difference(found.resume, "bitwise identical"),
            )
        )
    print_table(("test", "how", "outcome"), rows)
    print()
    print_text(
        f"compared after every step: {', '.join(found.components)}; at the end every "
        "tensor of the last checkpoint, and the ledger"
    )
    print(f"data: {found.guarantee}; kill seed {found.seed}")
    for difference in (found.repeat, found.resume):
        if difference is not None:
            print(
                f"likely cause: {difference.cause}; the losses differ by at most "
                f"{format_number(difference.loss_gap)}"
            )
    print(f"verdict: {spec} {'resumes exactly' if found.holds else _fails(found)}")


def _describe_difference(difference: Any, same: str) -> str:
    if difference is None:
        return same
    where = "in the last checkpoint" if difference.step is None else f"at step {difference.step}"
    return f"differ {where}: {difference.component}"


def _fails(found: Verdict | CommandVerdict) -> str:
    return (
        "is not repeatable, so resuming cannot be tested"
        if found.repeat is not None
        else "does not resume exactly"
    )


def print_command(found: CommandVerdict, command: str) -> None:
    """Print whether a training command always writes the same files, even if it is killed."""
    rows = [
        ("two uninterrupted runs", f"{found.num_files} files each", found.repeat or "identical")
    ]
    if found.repeat is None:
        after = ", ".join(str(count) for count in found.kills)
        how = f"after {after} of {found.num_changes} changes in its folder"
        rows.append(
            (f"killed {len(found.kills)} times and restarted", how, found.resume or "identical")
        )
    print_table(("test", "how", "outcome"), rows)
    if found.by_digest:
        print(f"\ncompared by SHA-256 only: {', '.join(found.by_digest)}")
    if found.unfollowed:
        print(
            "links out of the folder, compared only by the name of their target: "
            f"{', '.join(found.unfollowed)}"
        )
    if found.left_out:
        print(
            f"not compared, because they hold times: {', '.join(found.left_out)}; nor "
            "the random states of saved streams"
        )
    print(f"kill seed {found.seed}")
    print(f"verdict: {command} {'resumes exactly' if found.holds else _fails(found)}")


def print_precision(score: Score, spec: str, precision: str, steps: int) -> None:
    """Print the mean scores of a spec in its own precision and in fp32, and the verdict.

    The verdict is whether the score in its own precision is worse.
    """
    from surefoot.prove.precision import WIDE

    mean = f"mean {score.name}"
    rows = [
        (precision, format_number(score.value), str(score.difference)),
        (WIDE, format_number(score.start), ""),
    ]
    print_table(["precision", mean, "difference, paired by seed"], rows, right=[mean])
    print(
        f"\n{score.difference.count} pairs of runs, {steps} steps each; "
        f"standard deviation in {WIDE}: {format_number(score.spread)}"
    )
    learns = "learns less" if score.is_worse else "learns the same"
    print(f"verdict: {spec} {learns} in {precision}")


def print_compiled(found: GateVerdict, spec: str, what: str) -> None:
    """Print the largest differences between the compiled step and eager mode, and the verdict.

    `what` describes what was compiled.
    """
    rows = [
        (each.what, format_number(each.off), format_number(each.allowed))
        for each in found.claims[:NUM_WORST]
    ]
    headers = ("worst comparison", "difference", "allowed")
    print_table(headers, rows, right=headers[1:])
    print(f"\n{len(found.claims)} comparisons; compiled: {what}")
    computes = "computes" if found.verdict == "passes" else "does not compute"
    print(f"verdict: {spec} {computes} compiled what it does in eager mode: {found.words}")


def print_layouts(found: LayoutVerdict, spec: str) -> None:
    """Print how much each layout of ranks differs from one process, and the verdict.

    For layouts with virtual ranks, whose results are bitwise identical, print their step time too.
    """
    rows = [
        (
            row.layout,
            row.precision,
            f"{row.count:,}",
            row.worst,
            format_number(row.off),
            format_number(row.allowed),
        )
        for row in found.rows
    ]
    headers = ("layout", "precision", "tensors", "worst tensor", "difference", "allowed")
    print_table(headers, rows, right=("tensors", "difference", "allowed"))
    print(
        f"\n{found.num_steps} steps of {found.batch} samples in microbatches of "
        f"{found.microbatch}, compared with one process"
    )
    for note in found.notes:
        print(f"note: {note}")
    if found.costs:
        costs = [
            (
                each.layout,
                format_seconds(each.exact_s),
                format_seconds(each.plain_s),
                f"{each.exact_s / each.plain_s:.2f}",
            )
            for each in found.costs
        ]
        heads = ("layout", "step with virtual ranks", "without", "ratio")
        print_table(heads, costs, right=("ratio",))
    same = "bitwise identical results" if found.costs else "the same"
    computes = "computes" if found.holds else "does not compute"
    print(f"verdict: {spec} {computes} {same} under every layout")
