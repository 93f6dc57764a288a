"""Precision: which dtype computes what, and the loss scale that fp16 needs."""

from surefoot.components.precision.keep import keep_in_fp32
from surefoot.components.precision.policy import (
    HALVES,
    PLAIN,
    Compute,
    Policy,
    Units,
    build,
    choose,
    compute_context,
    find_units,
    set_products,
)
from surefoot.components.precision.record import ROLES, DtypeRecord, ParameterDtypes, check_contract, group
from surefoot.components.precision.scaler import LossScaler

__all__ = [
    "HALVES",
    "PLAIN",
    "ROLES",
    "Compute",
    "DtypeRecord",
    "LossScaler",
    "ParameterDtypes",
    "Policy",
    "Units",
    "build",
    "check_contract",
    "choose",
    "compute_context",
    "find_units",
    "group",
    "keep_in_fp32",
    "set_products",
]
