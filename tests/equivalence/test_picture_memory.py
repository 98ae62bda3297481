"""Memory of a real training step where processes share pictures, against what is predicted of it."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.measure import measure_profile
from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.timing import TimingRule
from galvatron_lite.runtime.engine import ParallelModel
from tests.equivalence.plans import uniform_plan
from tests.pool import WorkerPool

SAMPLES, SIDE = 2, 128
ONCE = TimingRule(warmup=0, least=1, most=1, seconds=0.0)
NETWORKS: dict[str, dict[str, int]] = {
    "convnext-mini": {"image_height": SIDE, "image_width": SIDE},
    "resnet-mini": {"image_size": SIDE},
    "unet-mini": {"image_size": SIDE},
}
WITHIN = 0.10


def make(network: str) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = build(network, **NETWORKS[network])
    return model, model.example_batch(SAMPLES)


def peak(network: str, plan: Plan) -> int:
    """Bytes at the worst moment of this process's second step, the user's whole batch apart."""
    _, batch = make(network)
    gc.collect()
    with track_peak("cpu") as tracked:
        model, own = make(network)
        if plan.devices == 1:
            batch = own  # otherwise each process makes a copy of its share
        del own
        parallel = ParallelModel(model, plan, discover_layers(model, batch), batch, device="cpu")
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
        parallel.train_step(batch, optimizer)
        tracked.mark()
        parallel.train_step(batch, optimizer)
    return tracked.phases[-1].peak


@cache
def profile_of(network: str, folder: Path) -> Profile:
    """What one process measures of the network's layers; only the bytes are used."""
    model, batch = make(network)
    return measure_profile(model, batch, folder=folder, device="cpu", rule=ONCE)


def predicted(profile: Profile, plan: Plan) -> int:
    """Bytes, from the memory that was measured of layers, on as many devices as the plan takes."""
    cluster = load_cluster("v100", plan.devices)
    sheet = estimate_profile(profile.graph, cluster, precision="fp32", name="x", samples=(1,))
    (memory,) = device_memory(evaluate(replace(sheet, layers=profile.layers), plan))
    return memory.total - memory.context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.mark.parametrize(
    ("network", "recompute"),
    [("convnext-mini", Recompute.NONE), ("resnet-mini", Recompute.NONE), ("unet-mini", Recompute.FULL)],
)
def test_memory_falls_as_predicted(pool: WorkerPool, folder: Path, network: str, recompute: Recompute) -> None:
    profile, peaks = profile_of(network, folder), []
    for grid in ((1, 1), (1, 2), (2, 2)):
        block = Strategy(height=grid[0], width=grid[1], recompute=recompute)
        plan = uniform_plan(profile.graph, block, replace(block, recompute=Recompute.NONE), batch=SAMPLES)
        found = max(pool.run(block.devices, peak, network=network, plan=plan))
        assert predicted(profile, plan) == pytest.approx(found, rel=WITHIN)
        peaks.append(found)
    whole, half, quarter = peaks
    assert half < 0.6 * whole
    assert quarter < 0.6 * half
