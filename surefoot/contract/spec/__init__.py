"""The specification of a run as one value, with a table for each subject."""

from surefoot.contract.spec.execution import CompileTable, NcclTable, PrecisionTable
from surefoot.contract.spec.run_spec import (
    ALLOWED,
    RunSpec,
    explain,
    find_idle_keys,
    find_place,
    key_names,
    leave_out_idle,
    suggest_keys,
)
from surefoot.contract.spec.synonyms import as_value
from surefoot.contract.spec.training import CheckpointTable, OptimTable, StabilityTable
from surefoot.contract.spec.values import SpecTable

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
    "as_value",
    "explain",
    "find_idle_keys",
    "find_place",
    "key_names",
    "leave_out_idle",
    "suggest_keys",
]
