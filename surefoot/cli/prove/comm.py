"""Command `surefoot bench comm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
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
from surefoot.core import place
from surefoot.core.errors import EXIT_OK, InputError
from surefoot.core.units import parse_bytes

if TYPE_CHECKING:
    from surefoot.contract.spec import RunSpec
    from surefoot.control.plan import Link
    from surefoot.core.statistics import Interval
    from surefoot.prove.bench.buckets import LayoutDuel
    from surefoot.prove.bench.collectives import TimedCollective
    from surefoot.prove.bench.wanted import Buckets, Sizes

RANKS = 2

BenchedSpecArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SPEC",
        help="time the gradient reduction of this spec, and find the best bucket size",
    ),
]
HostRanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks", metavar="N", help="the number of ranks, all on this host", show_default="2"
    ),
]
OnlyOption = Annotated[
    str | None,
    typer.Option("--only", metavar="NAMES", help="the collectives to time, as in all-reduce,send"),
]
SmallestOption = Annotated[
    str | None,
    typer.Option(
        "--smallest", metavar="SIZE", help="the smallest size of a tensor", show_default="1 KiB"
    ),
]
LargestOption = Annotated[
    str | None,
    typer.Option(
        "--largest", metavar="SIZE", help="the largest size of a tensor", show_default="64 MiB"
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="the device: cpu or cuda", show_default="auto"),
]
TransportOption = Annotated[
    str | None,
    typer.Option(
        "--transport",
        metavar="NAME",
        help="how CPU ranks communicate: shared_memory or gloo",
        show_default="auto",
    ),
]
BucketsOption = Annotated[
    str | None,
    typer.Option(
        "--buckets",
        metavar="SIZES",
        help="with SPEC: the bucket sizes to compare",
        show_default="1 to 100 MiB",
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        "--rounds", metavar="N", help="with SPEC: the number of rounds of steps", show_default="7"
    ),
]
CallsOption = Annotated[
    int | None,
    typer.Option(
        "--calls", metavar="N", help="the number of timed calls", show_default="20; 100 of SPEC"
    ),
]
WarmupOption = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        metavar="N",
        help="the number of unmeasured warm-up calls",
        show_default="5; 10 of SPEC",
    ),
]


def comm(
    spec: BenchedSpecArgument = None,
    ranks: HostRanksOption = None,
    only: OnlyOption = None,
    smallest: SmallestOption = None,
    largest: LargestOption = None,
    device: DeviceOption = None,
    transport: TransportOption = None,
    buckets: BucketsOption = None,
    rounds: RoundsOption = None,
    calls: CallsOption = None,
    warmup: WarmupOption = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Time communication between ranks: latency and bandwidth of each collective over sizes.

    With a SPEC the command times the reduction of its gradients and finds the bucket size with the
    shortest step. It starts two ranks on this host, or --ranks, or uses the ranks that torchrun or
    another launcher started.
    """
    _refuse_idle(
        spec,
        {
            "--only": only,
            "--smallest": smallest,
            "--largest": largest,
            "--device": device,
            "--transport": transport,
        },
        {"--buckets": buckets, "--rounds": rounds, "--set": set_, "--seed": seed, "--data": data},
    )
    from surefoot.contract.spec import RunSpec
    from surefoot.prove.bench import wanted

    if ranks is not None and ranks < 2:
        raise InputError(f"--ranks must be at least 2; got {ranks}", hint="use --ranks 2 or more")
    here = place.here()
    starts = ranks is not None or here.world_size == 1
    tell = options.make_progress_printer("bench", quiet=quiet or json or here.rank > 0)
    if spec is None:
        collectives = None if only is None else tuple(only.split(","))
        limits = {"smallest": _bytes(smallest), "largest": _bytes(largest)}
        how = {"device": device, "transport": transport, "calls": calls, "warmup": warmup}
        sizes = wanted.Sizes(**_drop_none({"collectives": collectives, **limits, **how}))
        sizes.check_memory(ranks or max(RANKS, here.world_size))
        if starts:
            return options.launch_ranks(ranks or RANKS, RunSpec(), None, None, trains=False)
        return _collectives(sizes, here.rank == 0, json=json, tell=tell)
    # started by a process that has named the ignored keys
    is_started = here.rank > 0 or here.told is not None
    origin = options.read_spec(
        "bench comm", spec, options.overrides(set_, seed=seed, data=data), is_quiet=is_started
    ).spec
    tried = None if buckets is None else tuple(map(_bytes, buckets.split(",")))
    counts = {"calls": calls, "warmup": warmup, "rounds": rounds}
    asked = wanted.Buckets(**_drop_none({"sizes": tried, **counts}))
    if starts:
        return options.launch_ranks(ranks or RANKS, origin, None, None, trains=False)
    return _buckets(spec, origin, asked, here.rank == 0, json=json, tell=tell)


def _refuse_idle(
    spec: str | None, without: Mapping[str, object], with_spec: Mapping[str, object]
) -> None:
    """Raise InputError if a flag was given that has no effect.

    Args:
        spec: the SPEC argument; None if it was not given.
        without: values of the flags that apply only without a SPEC.
        with_spec: values of the flags that apply only with a SPEC.
    """
    idle = [
        flag
        for flag, value in (with_spec if spec is None else without).items()
        if value is not None and value != []
    ]
    if idle and spec is None:
        raise InputError(
            f"{idle[0]} needs a SPEC, but none is given",
            hint=f"surefoot bench comm digits {idle[0]} ...",
        )
    if idle:
        keys = {"--device": "train.device", "--transport": "layout.transport"}
        hint = (
            f"with a SPEC use --set {keys[idle[0]]}=..."
            if idle[0] in keys
            else f"leave out {idle[0]} or the SPEC"
        )
        raise InputError(f"{idle[0]} applies only without a SPEC, but a SPEC is given", hint=hint)


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None; the others have defaults in `Sizes` or `Buckets`."""
    return {name: value for name, value in values.items() if value is not None}


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _collectives(sizes: Sizes, is_first: bool, *, json: bool, tell: Callable[[str], None]) -> int:
    """Time collectives, as one rank of a group; the first rank prints the result."""
    from surefoot.cli.prove.tables import comm as tables
    from surefoot.prove.bench.collectives import fit, measure, on_ranks

    with on_ranks(sizes.device, sizes.transport) as group:
        rows = measure(group, sizes, tell=tell)
        device, transport = str(group.device), group.transport
    links = fit(rows)
    if not is_first:
        return EXIT_OK
    where = _environment_row(rows[0].ranks, device, transport)
    row = {
        **where,
        "calls": sizes.calls,
        "warmup": sizes.warmup,
        "rows": [_row(each) for each in rows],
        "links": {name: _link(link) for name, link in links.items()},
    }
    options.print_result(row, tables.print_collectives, rows, links, where, json=json)
    return EXIT_OK


def _buckets(
    name: str,
    spec: RunSpec,
    asked: Buckets,
    is_first: bool,
    *,
    json: bool,
    tell: Callable[[str], None],
) -> int:
    """Time training steps with several gradient bucket sizes, as one rank of a group.

    The first rank prints the result.
    """
    from surefoot.cli.prove.tables import comm as tables
    from surefoot.prove.bench.buckets import tune

    found = tune(spec, asked, tell=tell)
    if not is_first:
        return EXIT_OK
    where = _environment_row(found.ranks, found.device, found.transport)
    row = {
        "spec": name,
        **where,
        "gradient_bytes": found.gradient_bytes,
        "buckets": found.own_sizes,
        "alone": _interval(found.alone),
        "bytes_per_s": found.bytes_per_s,
        "bus_bytes_per_s": found.bus_bytes_per_s,
        "link": _link(found.link),
        "predicted_s": found.predicted_s,
        "advised_bytes": found.advised_bytes,
        "own": asdict(found.own),
        "chosen": asdict(found.chosen),
        "tried": [
            {
                **asdict(each.laid),
                "bucket_sizes": each.bucket_sizes,
                "step": _interval(each.elapsed),
            }
            for each in found.tried
        ],
        "best": _duel_row(found.best),
        "first": _duel_row(found.first),
    }
    options.print_result(row, tables.print_buckets, found, where, json=json)
    return EXIT_OK


def _interval(found: Interval) -> dict[str, Any]:
    return {"median_s": found.estimate, "low_s": found.low, "high_s": found.high, "n": found.count}


def _row(each: TimedCollective) -> dict[str, Any]:
    return {
        "collective": each.collective,
        "bytes": each.num_bytes,
        **_interval(each.elapsed),
        "bytes_per_s": each.bytes_per_s,
        "bus_bytes_per_s": each.bus_bytes_per_s,
    }


def _link(link: Link) -> dict[str, Any]:
    from surefoot.cli.prove.tables.comm import SHARE

    return {**asdict(link), "bytes_for_90_percent": link.size_for(SHARE)}


def _duel_row(duel: LayoutDuel | None) -> dict[str, Any] | None:
    if duel is None:
        return None
    return {**asdict(duel), "ratio": {**asdict(duel.ratio), "verdict": duel.ratio.verdict}}


def _environment_row(ranks: int, device: str, transport: str) -> dict[str, Any]:
    """Return the number of ranks, their backend, transport and device, and the machine.

    `share_cores` is True if all ranks are on this host and it has fewer CPU cores than ranks.
    """
    from surefoot.core.hardware import count_cores
    from surefoot.trial import find_conditions

    crowded = device == "cpu" and place.here().is_on_loopback and count_cores() < ranks
    backend = "nccl" if device.startswith("cuda") else "gloo"
    return {
        "ranks": ranks,
        "backend": backend,
        "transport": transport,
        "device": device,
        "share_cores": crowded,
        "conditions": find_conditions(("torch", "surefoot")),
    }
