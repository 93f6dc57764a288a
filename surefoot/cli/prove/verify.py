"""`surefoot verify`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
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
    TracebackOption,
)
from surefoot.core.errors import EXIT_OK, EXIT_VERDICT_FAILS, InputError
from surefoot.core.signals import ending_by_signal

NUM_WORST = 5
NUM_SEEDS, NUM_STEPS, NUM_KILLS = 3, 24, 3
OF_SPEC = ("--set", "--seed", "--data")
USED = {
    "--layouts": ("--steps", "--keep", *OF_SPEC),
    "--precision": ("--seeds", "--steps", *OF_SPEC),
    "--compile": ("--keep", *OF_SPEC),
    "--command": ("--kills", "--kill-seed", "--keep"),
    "a SPEC": ("--steps", "--kills", "--kill-seed", "--keep", *OF_SPEC),
}

if TYPE_CHECKING:
    from surefoot.prove.command import CommandVerdict
    from surefoot.prove.verify import Verdict


def verify(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="SPEC", help="a TOML file, a built-in task's name, or file.py:Task"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="kill -9 and go on against an unbroken run (what is tested by default)"
        ),
    ] = True,
    precision: Annotated[
        bool,
        typer.Option("--precision", help="the spec's precision against fp32 instead, by scores"),
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="the compiled step against eager mode instead, by every tensor"
        ),
    ] = False,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layouts",
            metavar="LIST",
            help='ranks against one process instead: "1; replicate=2"; repeatable',
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", metavar="N", help="with --precision: pairs of runs; 3 (thrice if worse)"
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="how long each run is; 24")
    ] = None,
    kills: Annotated[
        int | None, typer.Option("--kills", metavar="K", help="how often it is killed; 3")
    ] = None,
    kill_seed: Annotated[
        int | None,
        typer.Option("--kill-seed", metavar="N", help="when; the same number replays it; 0"),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("--command", metavar="WORDS", help="any training command instead of a SPEC"),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", metavar="DIR", help="with --command: the folder of all that it keeps"
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="leave the runs in DIR")
    ] = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Test whether training repeats, and goes on after a kill to the same bits.

    Two unbroken runs in fresh processes, then one that is killed with SIGKILL and started again; the first step and component that
    differ are named. Ends with 0 where all is the same, 1 where it is not. With --precision: whether fewer bits changed the score; with
    --compile: whether torch.compile changed the numbers; with --layouts: whether several ranks compute what one process does.
    """
    given: dict[str, object] = {
        "--seeds": seeds,
        "--steps": steps,
        "--kills": kills,
        "--kill-seed": kill_seed,
        "--keep": keep,
    }
    given |= {"--set": set_ or None, "--seed": seed, "--data": data}
    ways = {
        "--layouts": bool(layouts),
        "--precision": precision,
        "--compile": compiled,
        "--command": command is not None,
    }
    way = next((name for name, is_given in ways.items() if is_given), "a SPEC")
    idle = [flag for flag, value in given.items() if value is not None and flag not in USED[way]]
    if idle:
        raise InputError(
            f"{idle[0]} does nothing with {way}",
            hint=f"leave it out: {way} goes with {', '.join(USED[way])}",
        )
    steps, kills = NUM_STEPS if steps is None else steps, NUM_KILLS if kills is None else kills
    if precision or compiled or layouts:
        if spec is None or sum(ways.values()) > 1:
            raise InputError(
                f"{way} compares runs of a SPEC, and nothing else",
                hint=f"surefoot verify digits {way}",
            )
        stated = options.overrides(set_, seed=seed, data=data)
        if layouts:
            with _folder(keep) as folder:
                return _verify_layouts(
                    spec, stated, "; ".join(layouts), folder, steps=steps, json=json, quiet=quiet
                )
        if compiled:
            with _folder(keep) as folder:
                return _verify_compiled(spec, stated, folder, json=json, quiet=quiet)
        return _verify_precision(
            spec,
            stated,
            steps=steps,
            seeds=NUM_SEEDS if seeds is None else seeds,
            json=json,
            quiet=quiet,
        )
    if (spec is None) == (command is None):
        raise InputError(
            "verify needs either a SPEC or --command",
            hint='surefoot verify digits, or --command "python train.py" --state out/',
        )
    from surefoot.prove.verify import LEAST_STEPS, verify_resume

    if (command is None) != (state is None):
        raise InputError(
            "--command and --state belong together",
            hint="name the folder that holds all the script keeps",
        )
    if kills < 1:
        raise InputError(f"--kills is {kills}", hint="use a kill or more")
    if steps < LEAST_STEPS:
        raise InputError(f"--steps is {steps}", hint=f"use {LEAST_STEPS} steps or more")
    with _folder(keep) as folder:
        if command is not None and state is not None:
            return _verify_command(
                command, state, folder, kills, kill_seed or 0, json=json, quiet=quiet
            )
        origin = options.read_spec(
            "verify", str(spec), options.overrides(set_, seed=seed, data=data)
        )
        found = verify_resume(
            origin.spec,
            folder,
            steps=steps,
            kills=kills,
            seed=kill_seed or 0,
            tell=_teller(quiet or json),
        )
    if json:
        options.print_json({"version": 1, "spec": spec, "holds": found.holds, **asdict(found)})
    else:
        _print(found, str(spec))
    return EXIT_OK if found.holds else EXIT_VERDICT_FAILS


def _verify_precision(
    spec: str, stated: Any, *, steps: int, seeds: int, json: bool, quiet: bool
) -> int:
    from surefoot.cli.table import print_table
    from surefoot.core.units import format_number
    from surefoot.prove.precision import WIDE, verify_precision

    with ending_by_signal():
        name, score = verify_precision(
            options.read_spec("verify --precision", spec, stated).spec,
            steps=steps,
            seeds=seeds,
            tell=_teller(quiet or json),
        )
    if json:
        options.print_json(
            {
                "spec": spec,
                "precision": name,
                "against": WIDE,
                "holds": not score.is_worse,
                **asdict(score),
            }
        )
    else:
        rows = [
            (name, format_number(score.value), str(score.difference)),
            (WIDE, format_number(score.start), ""),
        ]
        print_table(
            ["precision", f"mean {score.name}", "difference, paired by seed"],
            rows,
            right=[f"mean {score.name}"],
        )
        print(
            f"\n{score.difference.count} pairs of runs, {steps} steps each; "
            f"those in {WIDE} scatter by {format_number(score.spread)}"
        )
        print(f"verdict: {spec} {'learns less' if score.is_worse else 'learns the same'} in {name}")
    return EXIT_VERDICT_FAILS if score.is_worse else EXIT_OK


def _verify_compiled(spec: str, stated: Any, folder: Path, *, json: bool, quiet: bool) -> int:
    from surefoot.cli.table import print_table
    from surefoot.core.units import format_number
    from surefoot.prove.ladder import verify_compiled

    tried, found = verify_compiled(
        options.read_spec("verify --compile", spec, stated).spec,
        folder,
        tell=_teller(quiet or json),
    )
    holds, what = found.verdict == "passes", f"{tried.compile.what}, {tried.compile.mode}"
    if json:
        rows = [asdict(each) for each in found.claims]
        options.print_json(
            {
                "spec": spec,
                "compile": tried.compile.what,
                "mode": tried.compile.mode,
                "holds": holds,
                "words": found.words,
                "comparisons": rows,
            }
        )
    else:
        worst = [
            (each.what, format_number(each.off), format_number(each.allowed))
            for each in found.claims[:NUM_WORST]
        ]
        print_table(
            ("the worst of all comparisons", "off by", "allowed"),
            worst,
            right=("off by", "allowed"),
        )
        print(f"\n{len(found.claims)} comparisons; compiled: {what}")
        print(
            f"verdict: {spec} {'computes' if holds else 'does not compute'} compiled what it does "
            f"in eager mode: {found.words}"
        )
    return EXIT_OK if holds else EXIT_VERDICT_FAILS


def _verify_layouts(
    spec: str, stated: Any, text: str, folder: Path, *, steps: int, json: bool, quiet: bool
) -> int:
    from surefoot.cli.table import print_table
    from surefoot.core.ranks.layout import Layout
    from surefoot.core.units import format_number, format_seconds
    from surefoot.prove.layouts import verify_layouts

    # each once, however it is written
    layouts = list(dict.fromkeys(Layout.parse(each) for each in text.split(";")))
    if all(each.world_size == 1 for each in layouts):
        raise InputError(
            f"--layouts {text!r} names no layout of several ranks",
            hint='--layouts "replicate=2; replicate=4"',
        )
    if steps < 1:
        raise InputError(f"--steps is {steps}", hint="use a step or more")
    found = verify_layouts(
        options.read_spec("verify --layouts", spec, stated).spec,
        layouts,
        folder,
        steps=steps,
        tell=_teller(quiet or json),
    )
    if json:
        rows = [{**asdict(row), "holds": row.holds} for row in found.rows]
        options.print_json({**asdict(found), "spec": spec, "holds": found.holds, "rows": rows})
    else:
        heads = ("layout", "precision", "tensors", "the worst", "off by", "allowed")
        table = [
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
        print_table(heads, table, right=("tensors", "off by", "allowed"))
        print(
            f"\n{found.num_steps} steps of {found.batch} samples in microbatches of "
            f"{found.microbatch}, against one process"
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
            print_table(
                ("layout", "a step with the same bits", "without", "ratio"), costs, right=("ratio",)
            )
        same = "to the same bits" if found.costs else "the same"
        verdict = (
            f"computes {same} under every layout"
            if found.holds
            else f"does not compute {same} under every layout"
        )
        print(f"verdict: {spec} {verdict}")
    return EXIT_OK if found.holds else EXIT_VERDICT_FAILS


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder for the runs: `keep`, new or empty, or a temporary one that is deleted."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_by_signal())
        try:
            if keep is None:
                folder = Path(
                    stack.enter_context(tempfile.TemporaryDirectory(prefix="surefoot-verify-"))
                )
            else:
                folder = _made(keep).resolve()
        except OSError as error:
            what, hint = (
                ("a folder for the runs", "name one with --keep")
                if keep is None
                else (f"--keep {keep}", "name another")
            )
            raise InputError(
                f"{what} cannot be made and written: {error.strerror}", hint=hint
            ) from error
        yield folder


def _made(keep: Path) -> Path:
    """Create the folder and check that files can be written to it.

    Raises OSError where they cannot, InputError where the folder is not empty.
    """
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InputError(f"--keep {keep} is not an empty folder", hint="name a new one")
    keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=keep):
        return keep


def _teller(quiet: bool) -> Any:
    return (
        (lambda text: None)
        if quiet
        else lambda text: print(f"verify: {text}", file=sys.stderr, flush=True)
    )


def _print(found: Verdict, spec: str) -> None:
    from surefoot.cli.table import print_table, print_text
    from surefoot.core.units import format_number

    rows = [
        ("two unbroken runs", f"{found.num_steps} steps each", _told(found.repeat, "the same bits"))
    ]
    if found.repeat is None:
        kills = ", ".join(
            f"{step}{' (a save cut in two)' if in_save else ''}" for step, _, in_save in found.kills
        )
        rows.append(
            (
                f"killed {len(found.kills)} time{'s' * (len(found.kills) != 1)} and resumed",
                f"after step{'s' * (len(found.kills) != 1)} {kills}",
                _told(found.resume, "the same bits"),
            )
        )
    print_table(("test", "how", "outcome"), rows)
    print()
    print_text(
        f"compared after every step: {', '.join(found.components)}; "
        "at the end every tensor of the last commit, and the ledger"
    )
    print(f"data: {found.guarantee}; kill seed {found.seed}")
    for difference in (found.repeat, found.resume):
        if difference is not None:
            print(
                f"likely cause: {difference.cause}; "
                f"the losses part by {format_number(difference.loss_gap)} at most"
            )
    print(f"verdict: {spec} {'goes on exactly' if found.holds else _fails(found)}")


def _told(difference: Any, same: str) -> str:
    if difference is None:
        return same
    where = "in the last commit" if difference.step is None else f"at step {difference.step}"
    return f"part {where}: {difference.component}"


def _fails(found: Verdict) -> str:
    return (
        "does not repeat, so nothing can be said of going on"
        if found.repeat is not None
        else "does not go on exactly"
    )


def _verify_command(
    command: str, state: Path, folder: Path, kills: int, seed: int, *, json: bool, quiet: bool
) -> int:
    from surefoot.prove.command import verify_command

    found = verify_command(
        command, state, folder, kills=kills, seed=seed, tell=_teller(quiet or json)
    )
    if json:
        options.print_json(
            {"version": 1, "command": command, "holds": found.holds, **asdict(found)}
        )
    else:
        _print_command(found, command)
    return EXIT_OK if found.holds else EXIT_VERDICT_FAILS


def _print_command(found: CommandVerdict, command: str) -> None:
    from surefoot.cli.table import print_table

    rows = [("two unbroken runs", f"{found.num_files} files each", found.repeat or "the same")]
    if found.repeat is None:
        after = ", ".join(str(count) for count in found.kills)
        how = f"after {after} of {found.num_changes} changes in its folder"
        rows.append(
            (f"killed {len(found.kills)} times and restarted", how, found.resume or "the same")
        )
    print_table(("test", "how", "outcome"), rows)
    if found.by_digest:
        print(f"\ncompared by SHA-256 alone: {', '.join(found.by_digest)}")
    if found.unfollowed:
        print(
            "links out of the folder, compared by the name of their target alone: "
            f"{', '.join(found.unfollowed)}"
        )
    if found.left_out:
        print(
            f"left out, since they hold times: {', '.join(found.left_out)}; "
            "and the random states of saved streams"
        )
    print(f"kill seed {found.seed}")
    verdict = (
        "goes on exactly"
        if found.holds
        else "does not repeat, so nothing can be said of going on"
        if found.repeat
        else "does not go on exactly"
    )
    print(f"verdict: {command} {verdict}")
