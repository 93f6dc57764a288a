"""Comparison of runs for `surefoot compare`, as text and as a JSON object.

It shows the differences between the runs, but draws no conclusion from them.
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
    """Print the comparison as tables, with one column per run."""
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
    """Return the spec keys whose values differ between the runs, with the value of each run.

    Keys that a spec omits have their defaults. A value is None if the run's spec does not have the
    key. `train.threads` is excluded, because the number of threads is compared with the machine.
    """
    rows = _differences([_flatten_tables(_with_defaults(each.started.spec)) for each in runs])
    # the threads that a run used are in its machine.threads
    return [row for row in rows if row[0] != "train.threads"]


def circumstance_differences(runs: Sequence[Past]) -> list[Row]:
    """Return the differences between the runs in versions, machine, code and data.

    Each entry is a key with the value of each run.
    """
    return [
        (key, values)
        for key, values in _find_circumstances(runs).items()
        if any(value != values[0] for value in values)
    ]


def find_unrecorded(runs: Sequence[Past]) -> list[str]:
    """Return those of "code", "commit" and "data" that no run recorded.

    They cannot be compared.
    """
    found = _find_circumstances(runs)
    return [name for name in DIGESTS if all(value in (None, "") for value in found[name])]


def _find_circumstances(runs: Sequence[Past]) -> dict[str, list[Any]]:
    """Map each key about versions, machine, code or data to its values in the runs."""
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
    """Map each key to its values in all tables; the value is None if a table lacks the key."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: [table.get(key) for table in tables] for key in keys}


def _with_defaults(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recorded spec with defaults for the keys that it omits.

    The path of a task file is reduced to its name, because its code is compared by digest. A spec
    that this version of surefoot cannot read is returned unchanged.
    """
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
    """Return the training losses of the runs at up to 5 common steps, including the last one.

    A recorded loss is a mean over several steps. A step is common if every run has a record at this
    step whose mean covers the same number of steps.
    """
    equal = sorted({step for step, _ in set.intersection(*map(_spans, runs))})
    if len(equal) > NUM_EQUAL_STEPS:
        equal = [
            equal[round(index * (len(equal) - 1) / (NUM_EQUAL_STEPS - 1))]
            for index in range(NUM_EQUAL_STEPS)
        ]
    return [(step, [run.loss_at(step) for run in runs]) for step in equal]


def describe_uneven_spans(runs: Sequence[Past]) -> str:
    """Describe the steps whose losses are not compared; return "" if there are none.

    At these steps, the runs recorded means over different numbers of steps.
    """
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
    """Return each recorded step with the number of steps over which its loss was averaged."""
    return {(each.step, each.num_steps) for each in run.steps}


def as_row(runs: Sequence[Past]) -> dict[str, Any]:
    """Return the comparison as a JSON-compatible dict.

    Each list of values has one entry per run, in the order of `runs`.
    """
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
