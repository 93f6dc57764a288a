"""Optimizers: parameter groups, the fused update with its non-finite check, Muon for filters, LARS
and LAMB, 8-bit Adam, EMA."""

from surefoot.components.optim.average import WeightAverage
from surefoot.components.optim.backward import backward
from surefoot.components.optim.buffers import LiveBuffers
from surefoot.components.optim.build import (
    OWN_KEYS,
    Built,
    build,
    check_effects,
    make_average,
    table_of,
)
from surefoot.components.optim.groups import (
    GroupedParameter,
    build_groups,
    check_cover,
    check_shaped,
    find_sparse,
    find_trained,
    freeze,
)
from surefoot.components.optim.in_backward import UpdateInBackward
from surefoot.components.optim.kinds.eight_bits import Adam8bit, load_codes
from surefoot.components.optim.kinds.layerwise import Lamb, Lars
from surefoot.components.optim.kinds.muon import FlatMuon
from surefoot.components.optim.learning_rates import (
    apply_batch_scaling,
    describe_scaling,
    warn_of_large_batch,
    warn_of_no_rate,
)
from surefoot.components.optim.masters import find_norms, keep_on_host, publish, store_narrow
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.state import leaf_of, master_of

__all__ = [
    "Adam8bit",
    "Built",
    "OWN_KEYS",
    "FlatMuon",
    "GuardedUpdate",
    "Lamb",
    "Lars",
    "LiveBuffers",
    "GroupedParameter",
    "UpdateInBackward",
    "WeightAverage",
    "apply_batch_scaling",
    "backward",
    "build",
    "build_groups",
    "check_cover",
    "check_effects",
    "find_norms",
    "check_shaped",
    "describe_scaling",
    "find_sparse",
    "find_trained",
    "freeze",
    "leaf_of",
    "keep_on_host",
    "load_codes",
    "make_average",
    "master_of",
    "publish",
    "table_of",
    "store_narrow",
    "warn_of_large_batch",
    "warn_of_no_rate",
]
