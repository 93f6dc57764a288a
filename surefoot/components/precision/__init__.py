"""Precision: the dtypes of computation, the loss scale for fp16, float8 layers, and checks for
overflow and underflow."""

from surefoot.components.precision.float8 import Float8Layers, convert, find_linear, to_float8
from surefoot.components.precision.formats import Format, find_formats, round_to_tf32
from surefoot.components.precision.instability import (
    Overflow,
    UnderflowShare,
    Watch,
    advise_scale,
    count_lost,
    total,
    was_clipped_first,
)
from surefoot.components.precision.keep import keep_in_fp32
from surefoot.components.precision.policy import (
    HALVES,
    PLAIN,
    Compute,
    FormatSupport,
    Policy,
    build,
    choose,
    compute_context,
    find_units,
    set_products,
)
from surefoot.components.precision.record import (
    ROLES,
    DtypeRecord,
    ParameterDtypes,
    check_contract,
    group,
)
from surefoot.components.precision.scaler import LossScaler

__all__ = [
    "HALVES",
    "PLAIN",
    "ROLES",
    "Compute",
    "Float8Layers",
    "DtypeRecord",
    "UnderflowShare",
    "Format",
    "LossScaler",
    "Overflow",
    "ParameterDtypes",
    "Policy",
    "FormatSupport",
    "Watch",
    "advise_scale",
    "build",
    "check_contract",
    "choose",
    "compute_context",
    "convert",
    "count_lost",
    "find_formats",
    "find_linear",
    "find_units",
    "group",
    "keep_in_fp32",
    "round_to_tf32",
    "set_products",
    "to_float8",
    "total",
    "was_clipped_first",
]
