"""Dtypes observed in the first step of an attempt: log record and check against the contract."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from surefoot.components.precision.record import ParameterDtypes, check_contract, group
from surefoot.contract import events
from surefoot.core.errors import SpecError
from surefoot.train.assemble import Assembly
from surefoot.train.record.telling import Telling

NUM_NAMED = 4  # names per group of parameters


def tell_dtypes(assembly: Assembly, telling: Telling, step: int) -> None:
    """Record the dtypes that were observed in `step`.

    Raises NumbersError for a parameter that violates `precision.contract`. Raises SpecError if
    train.attention is "fused" but step 1 called no fused kernel.
    """
    record = assembly.engine.steps.record.found
    if record is None:
        return
    rows = tuple(summarize_dtypes(record.parameters))
    telling.write(
        events.Dtypes(
            generation=telling.generation,
            time_s=time.time(),
            step=step,
            parameters=rows,
            operators=record.operators,
        )
    )
    check_contract(assembly.spec.precision.contract, record.parameters)
    # only step 1 is observed: a step after a resume must run exactly as in the uninterrupted run
    looked = step == 1
    if (
        looked
        and assembly.spec.train.attention == "fused"
        and not any(map(_is_fused_attention, record.operators))
    ):
        raise SpecError(
            'train.attention is "fused", and step 1 called no fused kernel of '
            "scaled_dot_product_attention",
            hint=(
                "the model may not call it, or calls it with a dropout, mask or dtype that has no "
                'fused kernel on this device: set train.attention = "auto"'
            ),
        )


def _is_fused_attention(operator: str) -> bool:
    return operator.startswith("_scaled_dot_product_") and "math" not in operator


def summarize_dtypes(parameters: Iterable[ParameterDtypes]) -> list[dict[str, Any]]:
    """Return one row per group of parameters with the same dtypes, with the first four names."""
    return [
        {**row, "names": row["names"][:NUM_NAMED], "num_parameters": len(row["names"])}
        for row in group(parameters)
    ]
