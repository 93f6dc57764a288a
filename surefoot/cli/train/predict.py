"""Command `surefoot predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    QuietOption,
    RunArgument,
    SplitOption,
    StepOption,
    TaskOption,
    TracebackOption,
)


def predict(
    run: RunArgument,
    split: SplitOption = None,
    step: StepOption = "best",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="a new .safetensors or .npz file",
            show_default="RUN/predictions-SPLIT.safetensors",
        ),
    ] = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Write the model's outputs for a split to a file.

    The file has one array per tensor that the task's forward returns, with one row per sample, in
    order.
    """
    options.import_torch()
    from surefoot.train.look_back import predict_run

    path, shapes, used = predict_run(run, step, split, data, output, quiet=quiet or json, use=task)
    if json:
        options.print_json({"run": str(run), "step": used, "file": str(path), "shapes": shapes})
        return
    print(path)
    for name, shape in shapes.items():
        print(f"  {name}  {tuple(shape)}")
