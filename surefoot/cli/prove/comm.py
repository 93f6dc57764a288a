"""`surefoot bench comm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from surefoot.core.errors import EXIT_OK, InputError

if TYPE_CHECKING:
    from surefoot.contract.spec import RunSpec
    from surefoot.control.plan import Link
    from surefoot.core.statistics import Interval
    from surefoot.prove.bench.buckets import BucketTuning, Duel
    from surefoot.prove.bench.collectives import TimedCollective
    from surefoot.prove.bench.wanted import Buckets, Sizes

RANKS = 2
WORDS = {"shared_memory": "shared memory (broadcast, all-to-all, send: gloo)"}
SHARE = 0.9  # share of the bandwidth that a bucket should reach
VERDICTS = {
    "lower": "that is quicker",
    "higher": "that is slower",
    "no effect": "no effect",
    "too few": "too few rounds to tell",
}


def comm(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="SPEC", help="time the gradients of this spec, and tune their buckets"
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="processes of this host", show_default="2"),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAMES", help="as in all-reduce,send")
    ] = None,
    smallest: Annotated[
        str | None,
        typer.Option("--smallest", metavar="SIZE", help="of a buffer", show_default="1 KiB"),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option("--largest", metavar="SIZE", help="of a buffer", show_default="64 MiB"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="cpu or cuda", show_default="auto"),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            "--transport", metavar="NAME", help="shared_memory or gloo", show_default="auto"
        ),
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(
            "--buckets", metavar="SIZES", help="of SPEC, to compare", show_default="1 to 100 MiB"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", metavar="N", help="of steps with SPEC", show_default="7"),
    ] = None,
    calls: Annotated[
        int | None,
        typer.Option("--calls", metavar="N", help="that are timed", show_default="20; 100 of SPEC"),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option("--warmup", metavar="N", help="before them", show_default="5; 10 of SPEC"),
    ] = None,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Time what ranks send each other: each collective over sizes, its latency and its bandwidth.

    With a SPEC: the gradients of its model, and which buckets make its steps short. Two ranks of
    this host, or as many as --ranks says, or those that torchrun and the like started.
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
    from surefoot.core import place
    from surefoot.prove.bench import wanted

    if ranks is not None and ranks < 2:
        raise InputError(
            f"--ranks is {ranks}, and a rank alone sends nothing", hint="use --ranks 2 or more"
        )
    here = place.here()
    starts = ranks is not None or here.world_size == 1
    tell = options.teller("bench", quiet=quiet or json or here.rank > 0)
    if spec is None:
        sizes = wanted.Sizes(
            **_given(
                {
                    "collectives": None if only is None else tuple(only.split(",")),
                    "smallest": _bytes(smallest),
                    "largest": _bytes(largest),
                    "device": device,
                    "transport": transport,
                    "calls": calls,
                    "warmup": warmup,
                }
            )
        )
        sizes.check_memory(ranks or max(RANKS, here.world_size))
        if starts:
            return options.launch_ranks(ranks or RANKS, RunSpec(), None, None, trains=False)
        return _collectives(sizes, here.rank == 0, json=json, tell=tell)
    # started by a process that has named the ignored keys
    is_started = here.rank > 0 or here.told is not None
    origin = options.read_spec(
        "bench comm", spec, options.overrides(set_, seed=seed, data=data), is_quiet=is_started
    ).spec
    asked = wanted.Buckets(
        **_given(
            {
                "sizes": None if buckets is None else tuple(map(_bytes, buckets.split(","))),
                "calls": calls,
                "warmup": warmup,
                "rounds": rounds,
            }
        )
    )
    if starts:
        return options.launch_ranks(ranks or RANKS, origin, None, None, trains=False)
    return _buckets(spec, origin, asked, here.rank == 0, json=json, tell=tell)


def _refuse_idle(
    spec: str | None, without: Mapping[str, object], with_spec: Mapping[str, object]
) -> None:
    """Raise InputError for a flag that has no effect, with or without a SPEC."""
    idle = [
        flag
        for flag, value in (with_spec if spec is None else without).items()
        if value is not None and value != []
    ]
    if idle and spec is None:
        raise InputError(
            f"{idle[0]} is of a SPEC, and none is given",
            hint=f"surefoot bench comm digits {idle[0]} ...",
        )
    if idle:
        keys = {"--device": "train.device", "--transport": "layout.transport"}
        hint = (
            f"{keys[idle[0]]} says it: --set {keys[idle[0]]}=..."
            if idle[0] in keys
            else "leave it out, or the SPEC"
        )
        raise InputError(f"{idle[0]} is of collectives alone, and a SPEC is given", hint=hint)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given; the others get the defaults of `Sizes` and `Buckets`."""
    return {name: value for name, value in values.items() if value is not None}


def _bytes(text: str | None) -> int | None:
    from surefoot.core.units import parse_bytes

    return None if text is None else parse_bytes(text)


def _collectives(sizes: Sizes, is_first: bool, *, json: bool, tell: Callable[[str], None]) -> int:
    """Time the collectives as one rank of a group; the first rank prints the result."""
    from surefoot.prove.bench.collectives import fit, measure, on_ranks

    with on_ranks(sizes.device, sizes.transport) as group:
        rows = measure(group, sizes, tell=tell)
        where = str(group.device), group.transport
    links = fit(rows)
    if is_first and json:
        options.print_json(
            {
                **_where(rows[0].ranks, *where),
                "calls": sizes.calls,
                "warmup": sizes.warmup,
                "rows": [_row(each) for each in rows],
                "links": {name: _link(link) for name, link in links.items()},
            }
        )
    elif is_first:
        _print_collectives(rows, links)
        _print_where(rows[0].ranks, *where)
    return EXIT_OK


def _print_collectives(rows: Sequence[TimedCollective], links: Mapping[str, Link]) -> None:
    from surefoot.cli.table import print_table, print_text
    from surefoot.control.plan import bus_factor
    from surefoot.core.units import format_bits_per_s, format_bytes, format_percent, format_seconds

    headers = ["size", "median", "95 % of medians", "algorithm", "bus"]
    print_table(
        ["collective", *headers],
        [
            [
                each.collective,
                format_bytes(each.num_bytes),
                format_seconds(each.elapsed.estimate),
                _range(each.elapsed),
                format_bits_per_s(each.bytes_per_s),
                format_bits_per_s(each.bus_bytes_per_s),
            ]
            for each in rows
        ],
        right=headers,
    )
    if not links:
        return
    ranks = rows[0].ranks
    headers = [
        "latency",
        "bandwidth",
        "of the bus",
        "off by",
        "left out",
        f"{format_percent(SHARE)} of it from",
    ]
    print()
    print_table(
        ["collective", *headers],
        [
            [
                name,
                format_seconds(link.latency_s),
                format_bits_per_s(link.bytes_per_s),
                format_bits_per_s(
                    None if link.bytes_per_s is None else bus_factor(name, ranks) * link.bytes_per_s
                ),
                format_percent(link.off),
                str(link.num_left_out),
                format_bytes(link.size_for(SHARE)),
            ]
            for name, link in links.items()
        ],
        right=headers,
    )
    print()
    print_text(
        "seconds = latency + size / bandwidth, fitted to the medians; off by: "
        "their median distance from it, as a share"
    )


def _buckets(
    name: str,
    spec: RunSpec,
    asked: Buckets,
    is_first: bool,
    *,
    json: bool,
    tell: Callable[[str], None],
) -> int:
    """Time the gradient buckets of a SPEC as one rank; the first rank prints the result."""
    from surefoot.prove.bench.buckets import tune

    found = tune(spec, asked, tell=tell)
    if is_first and json:
        options.print_json(
            {
                "spec": name,
                **_where(found.ranks, found.device, found.transport),
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
                "best": _duel(found.best),
                "first": _duel(found.first),
            }
        )
    elif is_first:
        _print_buckets(found)
        _print_where(found.ranks, found.device, found.transport)
    return EXIT_OK


def _print_buckets(found: BucketTuning) -> None:
    from surefoot.cli.table import print_pairs, print_table, print_text
    from surefoot.core.units import format_bits_per_s, format_bytes, format_seconds

    alone, link = found.alone, found.link
    took = f"{format_seconds(alone.estimate)} ({_range(alone)}, n = {alone.count})"
    line = f"{format_seconds(link.latency_s)} + size / {format_bits_per_s(link.bytes_per_s)}"
    print_pairs(
        [
            (
                "gradients",
                f"{format_bytes(found.gradient_bytes)} in {_buckets_of(found.own_sizes)}",
            ),
            (
                "their sum alone",
                (
                    f"{took}, {format_bits_per_s(found.bytes_per_s)}, "
                    f"of the bus {format_bits_per_s(found.bus_bytes_per_s)}"
                ),
            ),
            ("an all-reduce", line),
            (
                "from that",
                (
                    f"{format_seconds(found.predicted_s)} for the gradients, "
                    f"and buckets of {format_bytes(found.advised_bytes)}"
                ),
            ),
        ]
    )
    print()
    headers = ["first bucket", "buckets", "a step", "95 % of medians"]
    print_table(
        ["bucket", *headers],
        [
            [
                format_bytes(each.laid.bucket_bytes),
                format_bytes(each.laid.first_bytes),
                str(len(each.bucket_sizes)),
                format_seconds(each.elapsed.estimate),
                _range(each.elapsed),
            ]
            for each in sorted(found.tried, key=lambda each: each.laid.bucket_bytes)
        ],
        right=("bucket", *headers),
    )
    print()
    for line in _verdict(found):
        print_text(line)


def _verdict(found: BucketTuning) -> list[str]:
    """Return the recommended settings as sentences, with the measurements behind them."""
    from surefoot.core.units import format_bytes

    if len(found.tried) == 1:
        lines = [
            (
                f"every size comes to the same {_buckets_of(found.own_sizes)}: "
                "there is nothing to choose"
            )
        ]
    elif found.best is None:
        lines = [
            f"buckets of {format_bytes(found.own.bucket_bytes)}, the spec's own, are the quickest"
        ]
    else:
        ratio = found.best.ratio
        quick, own = (
            format_bytes(found.best.laid.bucket_bytes),
            format_bytes(found.own.bucket_bytes),
        )
        said = f"with buckets of {quick} a step takes {ratio} of what it takes with {own}, in rounds of their own: "
        lines = [
            said
            + (
                f'layout.bucket = "{quick}"'
                if found.chosen != found.own
                else f"{VERDICTS[ratio.verdict]}, {own} stays"
            )
        ]
    if found.first is not None:
        ratio = found.first.ratio
        size = format_bytes(found.first.laid.first_bytes)
        lines.append(
            f"with a first bucket of {size} it takes {ratio} of what it takes without one: "
            f"{VERDICTS[ratio.verdict]}"
        )
    return lines


def _buckets_of(sizes: Sequence[int]) -> str:
    """Describe bucket sizes.

    >>> _buckets_of([1 << 20, 25 << 20, 3 << 20])
    '3 buckets of 1 MiB to 25 MiB'
    """
    from surefoot.core.units import format_bytes

    if len(sizes) == 1:
        return "1 bucket"
    return f"{len(sizes)} buckets of {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"


def _range(found: Interval) -> str:
    from surefoot.core.units import UNKNOWN, format_seconds

    return (
        UNKNOWN
        if found.low is None
        else f"{format_seconds(found.low)} to {format_seconds(found.high)}"
    )


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
    return {**asdict(link), "bytes_for_90_percent": link.size_for(SHARE)}


def _duel(duel: Duel | None) -> dict[str, Any] | None:
    if duel is None:
        return None
    return {**asdict(duel), "ratio": {**asdict(duel.ratio), "verdict": duel.ratio.verdict}}


def _where(ranks: int, device: str, transport: str) -> dict[str, Any]:
    """Return the number of ranks, their backend, transport and device, and the conditions."""
    from surefoot.core import place
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


def _print_where(ranks: int, device: str, transport: str) -> None:
    from surefoot.cli.table import print_text

    row = _where(ranks, device, transport)
    print_text(
        f"{ranks} ranks, {WORDS.get(transport, transport)}, {row['conditions']['processor']}, "
        f"torch {row['conditions']['torch']}"
    )
    if row["share_cores"]:
        print_text(
            f"{ranks} ranks on {row['conditions']['cores']} core(s) wait for each other: "
            "this is no link's speed"
        )
