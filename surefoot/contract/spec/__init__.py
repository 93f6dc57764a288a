"""The spec: a whole run as one value, table by table."""

from surefoot.contract.spec.run_spec import RunSpec, explain, find_place, key_names
from surefoot.contract.spec.tables import (
    CheckpointTable,
    CompileTable,
    LaterTable,
    NcclTable,
    OptimTable,
    PrecisionTable,
    StabilityTable,
    Table,
)

__all__ = [
    "CheckpointTable", "CompileTable", "LaterTable", "NcclTable", "OptimTable", "PrecisionTable", "RunSpec", "StabilityTable", "Table",
    "explain", "find_place", "key_names",
]  # fmt: skip
