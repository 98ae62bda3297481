"""Shared pictures: memory, and bytes on the wire."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import LayerKind, ModelGraph, Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.base import DimensionContext, LayerWork, Moment
from galvatron_lite.parallelism.sharded.groups import ProcessAxisGroup
from galvatron_lite.parallelism.spatial.cost import SpatialDimension
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


SENT_SAMPLES, ITEM = 4, 4
SENT_BY: dict[str, dict[str, int]] = {
    "convnext-mini": {"image_height": 72, "image_width": 56},
    "resnet-mini": {"image_size": 88},
    "unet-mini": {"image_size": 44},
}
GRIDS = {
    "columns, data": Strategy(data=2, width=2),
    "grid": Strategy(height=2, width=2),
    "rows, states shared": Strategy(zero=2, zero_stage=3, height=2),
}

Message = tuple[str, int]
"""What was called, and bytes: sent, wanted, or gathered in all."""
Passes = tuple[list[Message], list[Message]]


def make_sending(network: str) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = build(network, **SENT_BY[network])
    return model, model.example_batch(SENT_SAMPLES)


@contextmanager
def noted(messages: list[Message]) -> Iterator[None]:
    """Note what goes through lines of processes."""
    exchange, gather = ProcessAxisGroup.exchange, ProcessAxisGroup.all_gather

    def exchanged(line: ProcessAxisGroup, sent: Sequence[Any], wanted: Sequence[Any]) -> Any:
        messages.append(("sent", sum(one.nbytes for _, one in sent)))
        messages.append(("wanted", sum(one.nbytes for _, one in wanted)))
        return exchange(line, sent, wanted)

    def gathered(line: ProcessAxisGroup, tensor: torch.Tensor, dim: int) -> Any:
        messages.append(("gathered", tensor.nbytes * line.size))
        return gather(line, tensor, dim)

    with patch.object(ProcessAxisGroup, "exchange", exchanged), patch.object(ProcessAxisGroup, "all_gather", gathered):
        yield


def step_messages(graphs: dict[str, ModelGraph]) -> dict[tuple[str, str], Passes]:
    """What this process sends in forward and in backward of a step, by grid and network."""
    return {
        (grid, network): _step_messages(network, graph, strategy)
        for grid, strategy in GRIDS.items()
        for network, graph in graphs.items()
    }


def _step_messages(network: str, graph: ModelGraph, strategy: Strategy) -> Passes:
    model, batch = make_sending(network)
    plan = uniform_plan(graph, strategy, strategy, batch=SENT_SAMPLES)
    parallel = ParallelModel(model, plan, discover_layers(model, batch), batch, device="cpu")
    forward: list[Message] = []
    with noted(forward):
        loss = parallel(batch)
    backward: list[Message] = []
    with noted(backward):
        loss.backward()
    return forward, backward


def most(ranks: Sequence[list[Message]], what: str) -> int:
    """Bytes of all calls of a kind, of each call the rank that has most; ranks call alike."""
    calls = [[size for name, size in one if name == what] for one in ranks]
    return sum(max(sizes) for sizes in zip(*calls, strict=True))


def priced(layers: Iterable[LayerKind], strategy: Strategy, moment: Moment, collective: Collective) -> float:
    """Bytes of all layers."""
    context = DimensionContext(strategy.devices, strategy.devices, ITEM, ITEM, ITEM, ITEM, 1)
    work = LayerWork(SENT_SAMPLES, 1, False, strategy.recompute, 0.0, 0.0, 0.0, 0.0)
    sent = (one for kind in layers for one in SpatialDimension().apply(work, kind, strategy, context).communications)
    return sum(one.size * one.count for one in sent if (one.moment, one.collective) == (moment, collective))


def test_borders_and_statistics_are_those_of_the_formulas(pool: WorkerPool) -> None:
    """Borders of every layer; statistics of batch normalisations, two figures a channel of every device."""
    graphs = {network: trace(*make_sending(network)) for network in SENT_BY}
    ranks = pool.run(4, step_messages, graphs=graphs)
    for (grid, strategy), (network, graph) in product(GRIDS.items(), graphs.items()):
        forward, backward = zip(*(one[grid, network] for one in ranks), strict=True)
        layers = [graph.kind_of(layer) for layer in graph.layers]
        borders = [
            priced(layers, strategy, moment, Collective.SEND_RECV) for moment in (Moment.FORWARD, Moment.BACKWARD)
        ]
        assert borders == [most(forward, "wanted"), most(backward, "sent")], (grid, network)
        assert min(borders) > 0
        statistics = priced(layers[:-1], strategy, Moment.FORWARD, Collective.ALL_GATHER)
        assert statistics == most(forward, "gathered"), (grid, network)
        assert (statistics > 0) == (network == "resnet-mini")
