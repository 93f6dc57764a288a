"""The specification of a run as one value, a table per subject."""

from surefoot.contract.spec.run_spec import (
    ALLOWED,
    RunSpec,
    explain,
    find_idle_keys,
    find_place,
    key_names,
    leave_out_idle,
)
from surefoot.contract.spec.tables import (
    CheckpointTable,
    CompileTable,
    NcclTable,
    OptimTable,
    PrecisionTable,
    SpecTable,
    StabilityTable,
)

__all__ = [
    "ALLOWED",
    "CheckpointTable",
    "CompileTable",
    "NcclTable",
    "OptimTable",
    "PrecisionTable",
    "RunSpec",
    "StabilityTable",
    "SpecTable",
    "explain",
    "find_idle_keys",
    "find_place",
    "key_names",
    "leave_out_idle",
]
