"""Bytes that processes really send in a whole training step of networks over pictures, against the formulas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import LayerKind, ModelGraph
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.base import DimensionContext, LayerWork, Moment
from galvatron_lite.parallelism.sharded.groups import ProcessAxisGroup
from galvatron_lite.parallelism.spatial.cost import SpatialDimension
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from tests.equivalence.plans import uniform_plan
from tests.pool import WorkerPool

SAMPLES, ITEM = 4, 4
NETWORKS: dict[str, dict[str, int]] = {
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


def make(network: str) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = build(network, **NETWORKS[network])
    return model, model.example_batch(SAMPLES)


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
    model, batch = make(network)
    plan = uniform_plan(graph, strategy, strategy, batch=SAMPLES)
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
    work = LayerWork(SAMPLES, 1, False, strategy.recompute, 0.0, 0.0, 0.0, 0.0)
    sent = (one for kind in layers for one in SpatialDimension().apply(work, kind, strategy, context).communications)
    return sum(one.size * one.count for one in sent if (one.moment, one.collective) == (moment, collective))


def test_borders_and_statistics_are_those_of_the_formulas(pool: WorkerPool) -> None:
    """Borders of every layer; statistics of batch normalisations, two figures a channel of every device."""
    graphs = {network: trace(*make(network)) for network in NETWORKS}
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
