"""Commands `surefoot spec show`, `surefoot spec schema`, `surefoot spec check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.help import Verb, Verbs
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    SeedOption,
    SetOption,
    SpecArgument,
    StepsOption,
    TracebackOption,
)
from surefoot.cli.table import print_table
from surefoot.core.errors import InputError, SpecError

app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Show, check or describe specs.")


@app.command(cls=Verb)
def show(
    spec: SpecArgument,
    set_: SetOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    plot: Annotated[
        bool,
        typer.Option(
            "--plot",
            help="print the learning rate schedule instead of the spec, as a table and a plot",
        ),
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare", metavar="NAMES", help="plot these schedules too, as in step,cosine"
        ),
    ] = None,
    steps_per_epoch: Annotated[
        int,
        typer.Option(
            "--steps-per-epoch",
            metavar="N",
            help="the number of steps per epoch in the plot",
            min=1,
        ),
    ] = 100,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Print every value of a spec with its origin, and the formulas that the spec selects.

    With --plot the command prints the learning rate schedule instead, as a table and a plot.
    """
    from surefoot.contract import spec_file
    from surefoot.contract.spec import formulas

    origin = spec_file.read(spec, options.overrides(set_, steps=steps, seed=seed, data=data))
    if plot or compare is not None:
        from surefoot.cli.look import preview

        made = preview.make(origin.spec, preview.names(compare), steps_per_epoch)
        options.print_result(made.as_row(), preview.draw, made, json=json)
        return
    rows = spec_file.rows(origin)
    chosen = [(each.key, each.text) for each in formulas.find(origin.spec)]
    row = {
        "id": origin.spec.id,
        "values": [{"key": key, "value": value, "origin": place} for key, value, place in rows],
        "formulas": [{"key": key, "formula": text} for key, text in chosen],
    }
    options.print_result(row, _print, rows, chosen, json=json)


def _print(rows: Sequence[tuple[str, Any, str]], chosen: Sequence[tuple[str, str]]) -> None:
    print_table(
        ("key", "value", "from"), [(key, as_toml(value), place) for key, value, place in rows]
    )
    print()
    print_table(("key", "formula"), chosen)


@app.command(cls=Verb)
def schema() -> None:
    """Print the JSON Schema of specs, for editors."""
    import json

    from surefoot.contract.spec import RunSpec

    made = RunSpec.model_json_schema()
    base = {
        "type": "string",
        "description": (
            "another spec file or a built-in spec, whose values apply to the keys that this "
            "spec does not set"
        ),
    }
    made["properties"] = {"base": base, **made["properties"]}
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **made}, indent=1))


@app.command(cls=Verb)
def check(
    spec: SpecArgument,
    set_: SetOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Check a spec without running anything, and print its id.

    The parameters of the task are read from its source code. The exit code is 2 if the spec is
    wrong.
    """
    from surefoot.cli.look import preview
    from surefoot.contract import spec_file

    try:
        origin = spec_file.read(spec, options.overrides(set_, steps=steps, seed=seed, data=data))
        if origin.spec.task.use is None:
            raise SpecError(
                "the spec names no task",
                hint='add [task] use = "digits"; in Python pass the task: Run(spec, task)',
            )
        preview.check(origin)
    except InputError as error:
        if json:
            place = getattr(error, "where", None)
            options.print_json(
                {
                    "ok": False,
                    "id": None,
                    "error": error.message,
                    "hint": error.hint,
                    "where": place,
                }
            )
        raise
    row = {"ok": True, "id": origin.spec.id, "error": None, "hint": None, "where": None}
    options.print_result(row, print, f"{origin.spec.id}  ok", json=json)


def as_toml(value: Any) -> str:
    """Format a value as TOML; None becomes a dash."""
    import json

    if value is None:
        return "-"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
