"""Whole convolutional networks over small pictures, trained under plans and by one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

STEPS, RATE = 3, 0.01
TOLERANCE = 1e-4
"""Of the largest entry of each tensor."""
SECONDS = 900.0


@dataclass(frozen=True)
class Network:
    """A network of the zoo over small pictures.

    Attributes:
        name: in the zoo.
        fields: of its config that differ.
        samples: of a batch.
        deep: blocks from this one on have pictures too small for their windows to be shared: they share samples.
        sides: which of depth, height and width are shared on 2 processes, and on 4.
    """

    name: str
    fields: Mapping[str, Any]
    samples: int = 4
    deep: str = ""
    sides: Mapping[int, Strategy] = field(
        default_factory=lambda: {2: Strategy(height=2), 4: Strategy(height=2, width=2)}
    )


NETWORKS = {
    one.name: one
    for one in (
        Network("resnet-50", {"image_size": 64}),
        Network("vgg-16", {"image_size": 64, "dropout": 0.0}, 2),
        Network("convnext-t", {"image_size": 64}, deep="downsamples.1"),
        Network("unet", {"image_size": 64}, 2),
        Network(
            "cosmoflow-256", {"image_size": 128, "strides": (1,) * 7}, 4, deep="convolutions.4",
            sides={2: Strategy(depth=2), 4: Strategy(data=2, width=2)},
        ),
    )
}  # fmt: skip


@dataclass
class Outcome:
    """Losses of the steps, and parameters after them."""

    losses: list[float]
    state: dict[str, Tensor]


def make_network(network: Network) -> tuple[nn.Module, Any]:
    """The network with random weights, and a batch; always the same.

    Residual branches of ResNet begin at zero, as Goyal et al. 2017 (arXiv:1706.02677) advise: with all its batch norms
    at one, rounding grows so much from layer to layer that float32 on one process is 100 % off float64 on the same.
    """
    torch.manual_seed(0)
    model = build(network.name, **network.fields).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bn3.weight"):
            nn.init.zeros_(parameter)
    return model, model.example_batch(network.samples)  # type: ignore[operator]


def train_network_alone(network: Network) -> Outcome:
    """Plain PyTorch, the whole batch at once."""
    model, batch = make_network(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Outcome(losses, dict(model.state_dict()))


def train_network(network: Network, degree: int) -> Outcome | None:
    """The same under a plan: pixels are shared, in deep layers samples."""
    model, batch = make_network(network)
    layers = discover_layers(model, batch)
    shared, data = network.sides[degree], Strategy(data=degree)
    names = [layer.name for layer in layers]
    first = names.index(network.deep) if network.deep else len(names)
    strategies = [
        shared if place < first or (layer.role is not Role.BLOCK and not network.deep) else data
        for place, layer in enumerate(layers)
    ]
    parallel = ParallelModel(model, make_plan([names], [strategies], network.samples), layers, batch, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=RATE)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(STEPS)]
    state = full_state_dict(parallel)
    return Outcome(losses, state) if parallel.runtime.meshes.rank == 0 else None


def errors(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """By tensor, the largest error relative to its largest entry."""
    off = {f"loss {n}": abs(a - b) / abs(b) for n, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True))}
    for name, tensor in wanted.state.items():
        wide = tensor.double()
        off[name] = float((found.state[name] - wide).abs().max() / wide.abs().max().clamp_min(1e-12))
    return off


def check_network(pool: WorkerPool, network: Network, world: int, wanted: Outcome) -> dict[str, float]:
    """Errors of training on so many processes."""
    found = pool.run(world, train_network, timeout=SECONDS, network=network, degree=world)[0]
    return errors(found, wanted)
