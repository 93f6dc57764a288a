"""`surefoot checkpoint export` and `import`: write weights for other programs, and read theirs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    RunArgument,
    StepOption,
    TaskOption,
    TracebackOption,
)
from surefoot.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

MOST_SHOWN = 8


def export(
    run: RunArgument,
    to: Annotated[
        Path,
        typer.Option("--to", metavar="FILE", help="what to write: .safetensors, .pt2 or .onnx"),
    ],
    step: StepOption = "best",
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors, torch-export or onnx",
            show_default="by the file's ending",
        ),
    ] = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Write a run's model for other programs.

    What was written is read back and run on a batch of the task: outputs must equal the model's to
    1e-5, or no file is left and it ends with 1.
    """
    from surefoot.core.units import format_bytes
    from surefoot.train.look_back import export_run

    made, used = export_run(run, step, to, format_, data, use=task)
    if json:
        options.print_json(
            {
                "run": str(run),
                "step": used,
                "file": str(to),
                "format": made.format,
                "bytes": made.num_bytes,
                "max_error": made.max_error,
                "tolerance": 1e-5,
                "ok": made.holds,
                "batch": made.batch,
            }
        )
    elif made.holds:
        batch = (
            ""
            if made.format == "safetensors"
            else f", for {'any batch' if made.batch is None else f'batches of {made.batch}'}"
        )
        print(f"{to}  {made.format}, {format_bytes(made.num_bytes)}{batch}")
        print(f"  outputs of step {used:,} differ by {made.max_error:.1e} at most (allowed: 1e-05)")
    else:
        print(f"outputs differ by {made.max_error:.1e}, 1e-05 is allowed: no file is left")
    return int(not made.holds)


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help=".safetensors, .pt, .ckpt, .bin, or a folder of torch.distributed.checkpoint",
        ),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="a new folder")],
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="NAME",
            help="where the weights stand in the file",
            show_default="found",
        ),
    ] = None,
    strip: Annotated[
        str,
        typer.Option(
            "--strip", metavar="PREFIX", help="take it from the front of names, as module."
        ),
    ] = "",
    spec: Annotated[
        str | None,
        typer.Option(
            "--spec", metavar="SPEC", help="a spec whose model they must fit", show_default="none"
        ),
    ] = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Import weights that another program wrote, as safetensors with a manifest.

    A separate, confined process opens the file. Code in it never runs: what holds more than
    tensors, numbers and text is refused.
    """
    from surefoot.components.checkpoint import foreign
    from surefoot.train import environment

    foreign.check_new(to)
    found = foreign.open_foreign(file)
    key = foreign.find_key(found) if key is None else key
    if key and found.tensors and not any("/" in name for name in found.tensors):
        raise InputError(
            f"nothing below {key!r} is a tensor: all of them stand at the top of {file}",
            hint="leave --key out",
        )
    weights = foreign.choose_weights(found, key, strip)
    if spec is not None:
        _check_fit(file, spec, weights)
    made = foreign.import_weights(file, to, weights, environment.versions())
    left = foreign.list_others(found, key)
    if json:
        tensors = {
            name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for name, t in weights.items()
        }
        options.print_json(
            {
                "file": str(file),
                "to": str(to),
                "num_tensors": len(weights),
                "bytes": made.num_bytes,
                "tensors": tensors,
                "also": left,
                "left_out": dict(found.left_out),
                "unbounded": list(found.unbounded),
            }
        )
        return
    _tell(file, to, weights, left, found)


def _check_fit(file: Path, spec: str, weights: dict[str, Tensor]) -> None:
    from surefoot.contract import spec_file
    from surefoot.train.look_back import check_weights_fit

    check_weights_fit(file, spec_file.read(spec).spec, weights)


def _tell(file: Path, to: Path, weights: dict[str, Any], left: list[str], found: Any) -> None:
    import sys

    from surefoot.cli.table import without_control
    from surefoot.core.units import format_bytes

    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    print(
        f"{to / 'checkpoints' / 'step-000000000000'}  {len(weights):,} tensors, "
        f"{format_bytes(size)}"
    )
    shown = [f"{name} {list(tensor.shape)}" for name, tensor in list(weights.items())[:MOST_SHOWN]]
    more = f" and {len(weights) - MOST_SHOWN:,} more" if len(weights) > MOST_SHOWN else ""
    print(without_control(f"  {', '.join(shown)}{more}"))
    if left:
        print(
            without_control(f"in the file stands also: {', '.join(left[:MOST_SHOWN])}"),
            file=sys.stderr,
        )
    if found.unbounded:
        print(
            "this system could not keep from the process that read it: "
            f"{', '.join(found.unbounded)}",
            file=sys.stderr,
        )
    print(f"next: surefoot train SPEC --weights {shlex.quote(str(to))}")
