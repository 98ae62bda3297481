"""A tiny network over pictures with code between its layers, trained under plans and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_gradients, full_state_dict
from tests.runtime.examined import Examined
from tests.runtime.plans import make_plan
from tests.runtime.training import Trained

SAMPLES, CLASSES, WIDTH, SIDES = 4, 5, 8, (9, 7)


class Block(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH) if norm == "group" else nn.BatchNorm2d(WIDTH)
        self.point = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, picture: Tensor, scale: Tensor) -> Tensor:
        """``scale``: one figure a sample, made by the model's own code."""
        inside = functional.relu(self.norm(self.conv(picture)), inplace=True)
        return picture + self.point(inside) * scale[:, None, None, None]


class Net(nn.Module):
    """A functional stem, a skip connection over two blocks, pooling between blocks, labels of samples or of pixels."""

    def __init__(self, norm: str, dense: bool, chain: bool) -> None:
        super().__init__()
        self.chain = chain
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=1, padding=1)
        self.tint = nn.Parameter(torch.randn(WIDTH, 1, 1))
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
        self.head = nn.Conv2d(2 * WIDTH, CLASSES, 1) if dense else nn.Linear(2 * WIDTH, CLASSES)
        self.dense = dense

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        picture = functional.relu(self.stem(image) + self.tint)
        scale = image.flatten(1).mean(1)
        skip = self.blocks[0](picture, scale)
        if self.chain:
            deep = self.blocks[2](self.blocks[1](skip, scale), scale)
            return functional.cross_entropy(self.head(torch.cat([deep, deep.relu()], 1).mean((2, 3))), label)
        deep = functional.max_pool2d(skip, 2, ceil_mode=True)
        deep = self.blocks[2](self.blocks[1](deep, scale), scale=scale)
        deep = functional.interpolate(deep, size=skip.shape[-2:], mode="nearest")
        both = torch.cat([skip, deep], 1)
        scores = self.head(both if self.dense else both.mean((2, 3)))
        return functional.cross_entropy(scores, label)


@dataclass(frozen=True)
class Pictures:
    """The strategies of before, three blocks, after; ``cuts`` are where stages end; ``chain``: no skip connection."""

    strategies: Sequence[Strategy]
    norm: str = "group"
    dense: bool = False
    chain: bool = False
    microbatches: int = 1
    cuts: Sequence[int] = ()
    max_grad_norm: float | None = None


def make_net(case: Pictures) -> nn.Module:
    torch.manual_seed(0)
    return Net(case.norm, case.dense, case.chain).double()


def make_pictures(case: Pictures) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (SAMPLES, *SIDES) if case.dense else (SAMPLES,)
    image = torch.randn(SAMPLES, 3, *SIDES, generator=generator, dtype=torch.float64)
    return image, torch.randint(0, CLASSES, size, generator=generator)


@cache
def layers_of(norm: str, dense: bool, chain: bool) -> tuple[Layer, ...]:
    case = Pictures([], norm=norm, dense=dense, chain=chain)
    return discover_layers(make_net(case), make_pictures(case), blocks=[f"blocks.{number}" for number in range(3)])


def make_parallel_net(case: Pictures, **options: Any) -> ParallelModel:
    model, batch, layers = make_net(case), make_pictures(case), layers_of(case.norm, case.dense, case.chain)
    bounds = [0, *case.cuts, len(layers)]
    names = [[layer.name for layer in layers[a:b]] for a, b in pairwise(bounds)]
    strategies = [list(case.strategies[a:b]) for a, b in pairwise(bounds)]
    plan = make_plan(names, strategies, SAMPLES, case.microbatches)
    with _examined(case.norm, case.dense, case.chain).taken():
        return ParallelModel(model, plan, layers, batch, device="cpu", **options)


@cache
def _examined(_norm: str, _dense: bool, _chain: bool) -> Examined:
    return Examined()


def train_net(case: Pictures, steps: int = 2) -> Trained:
    """Gradients of the first step, losses of all, state after the last."""
    parallel, batch = make_parallel_net(case, max_grad_norm=case.max_grad_norm), make_pictures(case)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    parallel.backward_step(batch)
    gradients = full_gradients(parallel)
    optimizer.zero_grad()
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return Trained(losses, gradients, full_state_dict(parallel))


def train_net_alone(case: Pictures, shares: int = 1, steps: int = 2) -> Trained:
    """One process that works through shares of the samples one after the other, and tracks statistics of the first."""
    model, (image, label) = make_net(case), make_pictures(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward() -> float:
        optimizer.zero_grad()
        total, tracked = 0.0, dict[str, Tensor]()
        for part in zip(image.chunk(shares), label.chunk(shares), strict=True):
            loss = model(*part) / shares
            loss.backward()
            total += float(loss.detach())
            tracked = tracked or {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.load_state_dict(tracked, strict=False)
        return total

    backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    losses = []
    for _ in range(steps):
        losses.append(backward())
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        optimizer.step()
    return Trained(losses, gradients, dict(model.state_dict()))
