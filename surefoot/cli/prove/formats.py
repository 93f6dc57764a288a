"""Command `surefoot formats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import DataOption, JsonOption, SeedOption, SetOption, TracebackOption
from surefoot.cli.table import print_table
from surefoot.core.errors import InputError
from surefoot.core.units import format_percent

if TYPE_CHECKING:
    from surefoot.components.precision.instability import UnderflowShare

NUM_SHOWN = 8
SpecOfGradients = Annotated[
    str | None,
    typer.Argument(
        metavar="SPEC",
        help="count the gradient values of this spec that underflow to zero in fp16",
    ),
]


def formats(
    spec: SpecOfGradients = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Show the range and resolution of number formats, measured by computing with them.

    The output has the range and resolution, and where each format overflows and underflows.
    With a SPEC it also has the share of gradient values that underflow to zero in fp16, without a
    loss scale and at the scale of the spec.
    """
    if spec is None and (set_ or seed is not None or data is not None):
        raise InputError(
            "--set, --seed and --data need a SPEC, but none is given",
            hint="surefoot formats digits --seed 1",
        )
    from dataclasses import asdict

    options.import_torch()
    from surefoot.components.precision.formats import find_formats
    from surefoot.components.precision.instability import advise_scale, total

    rows = find_formats()
    scales: tuple[float, ...] = (1.0,)
    flushed: tuple[UnderflowShare, ...] = ()
    if spec is not None:
        from surefoot.prove.bench.flushed import find_flushed

        origin = options.read_spec("formats", spec, options.overrides(set_, seed=seed, data=data))
        scales = (1.0, origin.spec.precision.init_scale)
        flushed = find_flushed(origin.spec, scales)
    if json:
        row = {
            "num_values": sum(each.num_values for each in flushed),
            "advised_scale": advise_scale(flushed),
            "shares": {f"{scale:g}": total(flushed, scale) for scale in scales},
            "modules": [
                {
                    **asdict(each),
                    "shares": {f"{scale:g}": share for scale, share in each.shares.items()},
                }
                for each in flushed
            ],
        }
        options.print_json(
            {"formats": [asdict(each) for each in rows], "fp16": None if spec is None else row}
        )
        return

    names = (
        "bits",
        "significant_bits",
        "largest",
        "overflows_from",
        "least_normal",
        "least",
        "vanishes_up_to",
        "resolution",
    )
    heads = [name.replace("_", " ") for name in names]
    print_table(
        ["format", *heads, "for"],
        [[each.name, *(f"{getattr(each, name):.5g}" for name in names), each.use] for each in rows],
        right=heads,
    )
    if spec is not None:
        _print_flushed(
            flushed,
            scales,
            total(flushed, scales[0]),
            total(flushed, scales[-1]),
            advise_scale(flushed),
        )


def _print_flushed(
    flushed: tuple[UnderflowShare, ...],
    scales: tuple[float, ...],
    first: float,
    last: float,
    advised: float,
) -> None:
    heads = [f"zero at scale {scale:g}" for scale in scales]
    print()
    print_table(
        ["gradients of", "values", "largest", *heads],
        [
            [
                each.module,
                f"{each.num_values:,}",
                f"{each.largest:.3g}",
                *(format_percent(each.shares[scale]) for scale in scales),
            ]
            for each in flushed[:NUM_SHOWN]
        ],
        right=["values", "largest", *heads],
    )
    count = sum(each.num_values for each in flushed)
    print(
        f"\nof {count:,} gradient values fp16 makes {format_percent(first)} zero at scale 1, "
        f"{format_percent(last)} at {scales[-1]:g}"
    )
    print(f"the largest scale without overflow: precision.init_scale = {advised:.1f}")
