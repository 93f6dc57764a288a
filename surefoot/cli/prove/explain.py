"""Command `surefoot explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    SeedOption,
    SetOption,
    SpecArgument,
    TracebackOption,
)
from surefoot.cli.table import print_table, print_text
from surefoot.core.errors import EXIT_OK, EXIT_VERDICT_FAILS, NumbersError
from surefoot.core.units import name_some

if TYPE_CHECKING:
    from surefoot.components.precision.policy import Policy
    from surefoot.components.precision.record import DtypeRecord


def explain(
    spec: SpecArgument,
    set_: SetOption = None,
    seed: SeedOption = None,
    data: DataOption = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> int:
    """Run the first step of a spec and show the dtypes of every parameter and operator.

    The dtypes are observed, not assumed: storage, compute, gradient, reduction, master weight and
    optimizer state. The exit code is 1 if the spec's `precision.contract` does not hold. Nothing is
    written.
    """
    from dataclasses import asdict

    from surefoot.components.precision.record import check_contract
    from surefoot.prove.bench.rehearsal import Rehearsal
    from surefoot.train.failure.blame import find_overflow

    origin = options.read_spec("explain", spec, options.overrides(set_, seed=seed, data=data))
    with Rehearsal(origin.spec, steps=1) as rehearsal:
        rehearsal.take("step")
        policy, record = (
            rehearsal.assembly.engine.policy,
            rehearsal.assembly.engine.steps.record.found,
        )
        notes = rehearsal.assembly.notes
        seen = find_overflow(rehearsal.assembly, 1)
    assert record is not None
    overflow = None
    # a forward overflow, which the loss scale cannot prevent
    if seen is not None and seen.direction == "forward":
        overflow = seen.words if seen.remedy is None else f"{seen.words}; set {seen.remedy}"
    breach = None
    try:
        check_contract(origin.spec.precision.contract, record.parameters)
    except NumbersError as error:
        breach = error.message
    contract = origin.spec.precision.contract
    row = {
        "spec": spec,
        "compute": policy.compute,
        "why": policy.why,
        "contract": contract,
        "breach": breach,
        "overflow": overflow,
        "notes": notes,
        "parameters": [asdict(each) for each in record.parameters],
        "operators": record.operators,
    }
    options.print_result(row, _print, policy, record, contract, breach, notes, overflow, json=json)
    return EXIT_OK if breach is None else EXIT_VERDICT_FAILS


def _print(
    policy: Policy,
    record: DtypeRecord,
    contract: Any,
    breach: str | None,
    notes: Sequence[str],
    overflow: str | None,
) -> None:
    from surefoot.components.precision.record import ROLES, group

    print_text(f"computing in {policy.compute}: {policy.why}")
    print()
    rows = [
        [
            name_some(row["names"], 3),
            f"{row['num_numbers']:,}",
            *(row[role] or "n/a" for role in ROLES),
        ]
        for row in group(record.parameters)
    ]
    print_table(["parameters", "elements", *ROLES], rows, right=["elements"])
    print()
    print_table(["operator", "input dtypes"], list(record.operators.items()))
    if contract:
        print()
        print_text(f"contract: {breach or 'holds'}")
    if notes:
        print()
    for note in notes:
        print_text(note)
    if overflow is not None:
        print(f"\noverflow: {overflow}")
