"""The contract of table-batched embeddings: types, semantics, optimizers, tiers and routing. Needs torch only."""

from .backend import BAD_LOOKUPS, BAD_OFFSETS, Backend, Lookup, Training
from .config import DeviceConfig
from .layout import Group, Layout
from .optimizers import SGD, Optimizer, RowwiseAdagrad
from .plan import Absent, BackendError, Plan, Policy, Rejection, choose, other_vendor
from .quantized import QuantizedBackend, QuantizedLookup, QuantizedSpec
from .spec import Spec
from .tiers import Route, Tier, route, small_tables, takes_dense_tier, tier_of_run
from .types import Capabilities, Problem, Table

__all__ = [
    "BAD_LOOKUPS",
    "BAD_OFFSETS",
    "SGD",
    "Absent",
    "Backend",
    "BackendError",
    "Capabilities",
    "DeviceConfig",
    "Group",
    "Layout",
    "Lookup",
    "Optimizer",
    "Plan",
    "Policy",
    "Problem",
    "QuantizedBackend",
    "QuantizedLookup",
    "QuantizedSpec",
    "Rejection",
    "Route",
    "RowwiseAdagrad",
    "Spec",
    "Table",
    "Tier",
    "Training",
    "choose",
    "other_vendor",
    "route",
    "small_tables",
    "takes_dense_tier",
    "tier_of_run",
]
