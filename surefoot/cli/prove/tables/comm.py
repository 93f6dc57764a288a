"""Tables that `surefoot bench comm` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.cli.table import print_pairs, print_table, print_text
from surefoot.core.units import (
    UNKNOWN,
    format_bits_per_s,
    format_bytes,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from surefoot.control.plan import Link
    from surefoot.core.statistics import Interval
    from surefoot.prove.bench.buckets import BucketTuning
    from surefoot.prove.bench.collectives import TimedCollective

WORDS = {"shared_memory": "shared memory (broadcast, all-to-all, send: gloo)"}
SHARE = 0.9  # share of the bandwidth that a bucket should reach
VERDICTS = {
    "lower": "a faster step",
    "higher": "a slower step",
    "no effect": "no effect",
    "too few": "too few rounds to decide",
}


def print_collectives(
    rows: Sequence[TimedCollective], links: Mapping[str, Link], where: Mapping[str, Any]
) -> None:
    """Print the time of each collective and tensor size, and the fitted latency and bandwidth."""
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
    if links:
        _print_links(links, rows[0].ranks)
    _print_where(where)


def _print_links(links: Mapping[str, Link], ranks: int) -> None:
    from surefoot.control.plan import bus_factor

    headers = [
        "latency",
        "bandwidth",
        "bus bandwidth",
        "error",
        "excluded",
        f"{format_percent(SHARE)} from size",
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


def print_buckets(found: BucketTuning, where: Mapping[str, Any]) -> None:
    """Print the step time with each gradient bucket size, and the recommended size."""
    alone, link = found.alone, found.link
    took = f"{format_seconds(alone.estimate)} ({_range(alone)}, n = {alone.count})"
    line = f"{format_seconds(link.latency_s)} + size / {format_bits_per_s(link.bytes_per_s)}"
    gradients, predicted = format_bytes(found.gradient_bytes), format_seconds(found.predicted_s)
    speed, bus_speed = map(format_bits_per_s, (found.bytes_per_s, found.bus_bytes_per_s))
    advised = format_bytes(found.advised_bytes)
    print_pairs(
        [
            ("gradients", f"{gradients} in {_buckets_of(found.own_sizes)}"),
            ("reduction alone", f"{took}, {speed}, bus {bus_speed}"),
            ("an all-reduce", line),
            ("predicted", f"{predicted} for the gradients; best buckets {advised}"),
        ]
    )
    print()
    headers = ["first bucket", "buckets", "step", "95 % of medians"]
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
    _print_where(where)


def _verdict(found: BucketTuning) -> list[str]:
    """Return sentences with the recommended bucket sizes and the measurements behind them."""
    own = format_bytes(found.own.bucket_bytes)
    if len(found.tried) == 1:
        same = _buckets_of(found.own_sizes)
        lines = [f"every size gives the same {same}: there is nothing to choose"]
    elif found.best is None:
        lines = [f"buckets of {own}, as in the spec, are fastest"]
    else:
        ratio, quick = found.best.ratio, format_bytes(found.best.laid.bucket_bytes)
        gain = f"a step takes {ratio} of the time with {own}, in separate rounds"
        is_better = found.chosen != found.own
        advice = (
            f'layout.bucket_size = "{quick}"'
            if is_better
            else f"{VERDICTS[ratio.verdict]}, keep {own}"
        )
        lines = [f"with buckets of {quick} {gain}: {advice}"]
    if found.first is not None:
        ratio = found.first.ratio
        size = format_bytes(found.first.laid.first_bytes)
        lines.append(
            f"with a first bucket of {size} a step takes {ratio} of the time without "
            f"one: {VERDICTS[ratio.verdict]}"
        )
    return lines


def _buckets_of(sizes: Sequence[int]) -> str:
    """Describe the number and the range of bucket sizes, which are in bytes.

    >>> _buckets_of([1 << 20, 25 << 20, 3 << 20])
    '3 buckets of 1 MiB to 25 MiB'
    """
    if len(sizes) == 1:
        return "1 bucket"
    return f"{len(sizes)} buckets of {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"


def _range(found: Interval) -> str:
    return (
        UNKNOWN
        if found.low is None
        else f"{format_seconds(found.low)} to {format_seconds(found.high)}"
    )


def _print_where(row: Mapping[str, Any]) -> None:
    """Print the number of ranks, the transport and the machine of a measurement."""
    ranks, transport, machine = row["ranks"], row["transport"], row["conditions"]
    print_text(
        f"{ranks} ranks, {WORDS.get(transport, transport)}, {machine['processor']}, "
        f"torch {machine['torch']}"
    )
    if row["share_cores"]:
        print_text(
            f"{ranks} ranks on {machine['cores']} core(s) wait for each other: "
            "this is not the speed of a link"
        )
