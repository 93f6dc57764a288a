"""Commands `surefoot checkpoint export` and `surefoot checkpoint import`.

They write weights for other programs, and read the weights of other programs.
"""

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

MAX_SHOWN = 8


def export(
    run: RunArgument,
    to: Annotated[
        Path,
        typer.Option("--to", metavar="FILE", help="the new file: .safetensors, .pt2 or .onnx"),
    ],
    step: StepOption = "best",
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="the format: safetensors, torch-export or onnx",
            show_default="from the file extension",
        ),
    ] = None,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Write the model of a run for other programs.

    The file is read back and run on a batch of the task. Its outputs must equal those of the model
    within 1e-5; otherwise the file is deleted and the exit code is 1.
    """
    options.import_torch()
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
            else f", for {'any batch size' if made.batch is None else f'batches of {made.batch}'}"
        )
        print(f"{to}  {made.format}, {format_bytes(made.num_bytes)}{batch}")
        print(f"  outputs of step {used:,} differ by at most {made.max_error:.1e} (allowed: 1e-05)")
    else:
        print(f"outputs differ by {made.max_error:.1e}, more than 1e-05: the file was deleted")
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
            help="the key of the weights in the file",
            show_default="found",
        ),
    ] = None,
    strip: Annotated[
        str,
        typer.Option(
            "--strip", metavar="PREFIX", help="remove this prefix from names, for example module."
        ),
    ] = "",
    spec: Annotated[
        str | None,
        typer.Option(
            "--spec",
            metavar="SPEC",
            help="a spec whose model the weights must fit",
            show_default="none",
        ),
    ] = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Import weights that another program wrote, as safetensors with a manifest.

    A separate, confined process opens the file. Code in the file never runs: a file that holds more
    than tensors, numbers and text is refused.
    """
    from surefoot.components.checkpoint import foreign
    from surefoot.train import environment

    foreign.check_new(to)
    found = foreign.open_foreign(file)
    key = foreign.find_key(found) if key is None else key
    if key and found.tensors and not any("/" in name for name in found.tensors):
        raise InputError(
            f"no tensor below {key!r}: all tensors are at the top level of {file}",
            hint="leave --key out",
        )
    weights = foreign.choose_weights(found, key, strip)
    if spec is not None:
        _check_fit(file, spec, weights)
    made = foreign.import_weights(file, to, weights, environment.versions())
    left = foreign.list_other_entries(found, key)
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
    _print_export(to, weights, left, found)


def _check_fit(file: Path, spec: str, weights: dict[str, Tensor]) -> None:
    from surefoot.contract import spec_file
    from surefoot.train.look_back import check_weights_fit

    check_weights_fit(file, spec_file.read(spec).spec, weights)


def _print_export(to: Path, weights: dict[str, Any], left: list[str], found: Any) -> None:
    import sys

    from surefoot.cli.table import without_control
    from surefoot.core.units import format_bytes

    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    print(
        f"{to / 'checkpoints' / 'step-000000000000'}  {len(weights):,} tensors, "
        f"{format_bytes(size)}"
    )
    shown = [f"{name} {list(tensor.shape)}" for name, tensor in list(weights.items())[:MAX_SHOWN]]
    more = f" and {len(weights) - MAX_SHOWN:,} more" if len(weights) > MAX_SHOWN else ""
    print(without_control(f"  {', '.join(shown)}{more}"))
    if left:
        print(
            without_control(f"other contents of the file: {', '.join(left[:MAX_SHOWN])}"),
            file=sys.stderr,
        )
    if found.unbounded:
        print(
            (
                "bounds that this system could not set for the reading process: "
                f"{', '.join(found.unbounded)}"
            ),
            file=sys.stderr,
        )
    print(f"next: surefoot train SPEC --weights {shlex.quote(str(to))}")
