"""Comparison of runs: what `surefoot compare` prints, and the same as one object.

It shows differences and draws no conclusion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefoot.cli.look.past import Past, format_metric
from surefoot.cli.table import print_table, shorten
from surefoot.core.errors import SpecError
from surefoot.core.units import UNKNOWN, format_bytes, format_number, format_seconds, name_some

NUM_EQUAL_STEPS = 5
DIGESTS = ("code", "commit", "data")
Row = tuple[str, list[Any]]


def print_comparison(runs: Sequence[Past]) -> None:
    """Print the comparison, a column for each run."""
    headers = ["", *(str(each.folder) for each in runs)]
    spec, circumstances = spec_differences(runs), circumstance_differences(runs)
    has_specs = any(each.started.spec for each in runs)
    same = "the specs are equal" if has_specs else "no run has a spec: nothing was compared"
    _print_rows(
        "Spec", headers, [(key, [_text(value) for value in values]) for key, values in spec], same
    )
    _print_rows("Outcome", headers, list(_outcomes(runs)), "")
    losses = losses_at_equal_steps(runs)
    rows: list[Row] = [
        (f"loss at step {step:,}", [format_number(loss) for loss in values])
        for step, values in losses
    ]
    uneven = describe_uneven_spans(runs)
    _print_rows(
        "Training loss at equal steps", headers, rows, uneven or "the runs have no step in common"
    )
    if rows and uneven:
        print(f"  {uneven}\n")
    texts: list[Row] = [
        (key, [shorten(_text(value), 15 if key in DIGESTS else 24) for value in values])
        for key, values in circumstances
    ]
    unknown = find_unrecorded(runs)
    left = f"; not recorded, and not compared: {', '.join(unknown)}" if unknown else ""
    _print_rows(
        "Versions and machine",
        headers,
        texts,
        f"what is recorded of versions, machine, code and data is equal{left}",
    )
    if texts and left:
        print(f"  {left.removeprefix('; ')}\n")


def _print_rows(title: str, headers: Sequence[str], rows: Sequence[Row], otherwise: str) -> None:
    print(title)
    if rows:
        print_table(headers, [(f"  {name}", *values) for name, values in rows])
    else:
        print(f"  {otherwise}")
    print()


def _text(value: Any) -> str:
    return "-" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)


def _outcomes(runs: Sequence[Past]) -> Iterator[Row]:
    yield "state", [each.state for each in runs]
    yield (
        "score",
        [
            UNKNOWN
            if (last := each.last) is None
            else f"{last.score} {format_metric(last.score, last)}"
            for each in runs
        ],
    )
    yield (
        "best",
        [
            UNKNOWN
            if (best := each.best) is None
            else f"{format_metric(best.score, best)} at step {best.step:,}"
            for each in runs
        ],
    )
    yield "steps", [f"{each.num_steps:,}" for each in runs]
    yield "time", [format_seconds(each.elapsed_s) for each in runs]
    yield "throughput", [each.throughput for each in runs]
    yield "peak memory", [format_bytes(each.peak_bytes) for each in runs]


def spec_differences(runs: Sequence[Past]) -> list[Row]:
    """Return every spec key whose values differ, defaults included; None for a key a run lacks."""
    rows = _differences([_flatten_tables(_with_defaults(each.started.spec)) for each in runs])
    # the threads that a run used are in its machine.threads
    return [row for row in rows if row[0] != "train.threads"]


def circumstance_differences(runs: Sequence[Past]) -> list[Row]:
    """Return the entries for versions, machine, code and data that differ."""
    return [
        (key, values)
        for key, values in _find_circumstances(runs).items()
        if any(value != values[0] for value in values)
    ]


def find_unrecorded(runs: Sequence[Past]) -> list[str]:
    """Return which of code, commit and data cannot be compared, since no run has a digest."""
    found = _find_circumstances(runs)
    return [name for name in DIGESTS if all(value in (None, "") for value in found[name])]


def _find_circumstances(runs: Sequence[Past]) -> dict[str, list[Any]]:
    """Return versions, machine, code and data of each run, by key."""
    return _rows_of_tables(
        [
            {
                **each.started.versions,
                **{f"machine.{name}": value for name, value in each.started.machine.items()},
                "host": each.started.place.get("host"),
                "ranks": each.started.place.get("world_size"),
                "code": each.started.code_digest,
                "commit": each.started.commit,
                "uncommitted changes": each.started.is_dirty,
                **{f"module {name}": digest for name, digest in each.started.modules.items()},
                "data": each.started.data.get("digest"),
                "parameters": each.started.num_parameters,
            }
            for each in runs
        ]
    )


def _differences(tables: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [
        (key, values)
        for key, values in _rows_of_tables(tables).items()
        if any(value != values[0] for value in values)
    ]


def _rows_of_tables(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each key with its value in every table."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: [table.get(key) for table in tables] for key in keys}


def _with_defaults(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a run's spec with every default; unchanged if this version cannot read it."""
    from surefoot.contract.spec import RunSpec

    try:
        spec = RunSpec.of_record(stated)
    except SpecError:
        return stated
    tables, use = spec.model_dump(mode="python"), spec.task.use
    if use is not None and use.rpartition(":")[0].endswith(".py"):
        # the path of a task file is not compared; its code is, by digest
        use = use.rpartition("/")[2]
    return {
        **tables,
        "task": {"use": use, **spec.task.parameters},
        "schedule": spec.schedule.used_keys(),
    }


def _flatten_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    named = {table: keys for table, keys in tables.items() if isinstance(keys, Mapping)}
    return {
        f"{table}.{key}": _listed(value)
        for table, keys in named.items()
        for key, value in keys.items()
    }


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, list | tuple) else value


def losses_at_equal_steps(runs: Sequence[Past]) -> list[tuple[int, list[float | None]]]:
    """Return the training loss at up to 5 steps that every run recorded, the last one included.

    Every run must have recorded the mean over the same steps.
    """
    equal = sorted({step for step, _ in set.intersection(*map(_spans, runs))})
    if len(equal) > NUM_EQUAL_STEPS:
        equal = [
            equal[round(index * (len(equal) - 1) / (NUM_EQUAL_STEPS - 1))]
            for index in range(NUM_EQUAL_STEPS)
        ]
    return [(step, [run.loss_at(step) for run in runs]) for step in equal]


def describe_uneven_spans(runs: Sequence[Past]) -> str:
    """Return which steps are left out: the runs recorded means over different numbers of steps."""
    spans = [dict(_spans(run)) for run in runs]
    uneven = [
        step
        for step in sorted(set.intersection(*map(set, spans)))
        if len({each[step] for each in spans}) > 1
    ]
    if not uneven:
        return ""
    named = name_some(
        [f"{step:,} ({', '.join(str(each[step]) for each in spans)})" for step in uneven],
        NUM_EQUAL_STEPS,
    )
    return (
        "not compared, because the runs recorded means over different numbers of steps (in "
        f"brackets): step {named}"
    )


def _spans(run: Past) -> set[tuple[int, int]]:
    """Return each recorded step with the number of steps whose losses its record averages."""
    return {(each.step, each.num_steps) for each in run.steps}


def as_row(runs: Sequence[Past]) -> dict[str, Any]:
    """Return the comparison as one object: each list holds a value per run, in the order given."""
    return {
        "runs": [
            {
                **each.as_row(),
                "samples_per_s": each.samples_per_s,
                "items_per_s": each.items_per_s,
                "unit": each.started.unit,
                "peak_bytes": each.peak_bytes,
            }
            for each in runs
        ],
        "spec": [{"key": key, "values": values} for key, values in spec_differences(runs)],
        "losses": [
            {"step": step, "values": values} for step, values in losses_at_equal_steps(runs)
        ],
        "circumstances": [
            {"key": key, "values": values} for key, values in circumstance_differences(runs)
        ],
    }
