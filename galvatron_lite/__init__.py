"""Plans how a PyTorch model is split over many devices, layer by layer, and trains it that way.

The public names are imported on first use, so that planning from files does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from galvatron_lite.api import best_batch, cheapest, evaluate, fewest_devices, pareto_front, plan, profile
    from galvatron_lite.api_plans import compare, explain, verify_plan
    from galvatron_lite.auto import auto_parallelize
    from galvatron_lite.cluster.cluster import Cluster
    from galvatron_lite.frameworks.one_process import as_one_process
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.parallelism.rng.modules import same_randomness
    from galvatron_lite.plans.io import read_plan
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.runtime.monitor.schema import Adapt

__version__ = "0.1.0"

_HOMES = {
    "Adapt": "galvatron_lite.runtime.monitor.schema",
    "Cluster": "galvatron_lite.cluster.cluster",
    "ModelGraph": "galvatron_lite.model.graph",
    "Plan": "galvatron_lite.plans.schema",
    "Profile": "galvatron_lite.profiler.schema",
    "as_one_process": "galvatron_lite.frameworks.one_process",
    "auto_parallelize": "galvatron_lite.auto",
    "best_batch": "galvatron_lite.api",
    "cheapest": "galvatron_lite.api",
    "compare": "galvatron_lite.api_plans",
    "evaluate": "galvatron_lite.api",
    "explain": "galvatron_lite.api_plans",
    "fewest_devices": "galvatron_lite.api",
    "pareto_front": "galvatron_lite.api",
    "plan": "galvatron_lite.api",
    "profile": "galvatron_lite.api",
    "read_plan": "galvatron_lite.plans.io",
    "same_randomness": "galvatron_lite.parallelism.rng.modules",
    "verify_plan": "galvatron_lite.api_plans",
}

__all__ = [
    "Adapt",
    "Cluster",
    "ModelGraph",
    "Plan",
    "Profile",
    "as_one_process",
    "auto_parallelize",
    "best_batch",
    "cheapest",
    "compare",
    "evaluate",
    "explain",
    "fewest_devices",
    "pareto_front",
    "plan",
    "profile",
    "read_plan",
    "same_randomness",
    "verify_plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
