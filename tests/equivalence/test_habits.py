"""Models written in ways that few models are train under ordinary plans as on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

SAMPLES, WIDTH, STEPS = 4, 8, 2


class Mixer(nn.Module):
    """Takes a list of several hidden states, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, several: list[Tensor]) -> list[Tensor]:
        first, second = (way(hidden).tanh() for way, hidden in zip(self.ways, several, strict=True))
        return [first + second, first - second]


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks, self.head = nn.Sequential(*(Mixer() for _ in range(3))), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        first = self.left(hidden)
        loss: Tensor = self.head(sum(self.blocks([first, self.right(first)]))).square().mean()
        return loss


class Around(nn.Module):
    """A parameter is read before the blocks and behind them, to where a skip connection leads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.bias, self.head = nn.Embedding(1, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = first = (hidden * self.bias.weight).sin()
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(hidden + first + self.bias.weight).square().mean()
        return loss


class Kept(nn.Module):
    """Its blocks keep, for backward, shares of tokens that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.start(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(hidden).square().mean()
        return loss


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        keep = (hidden.detach() > 0).float()
        mixed: Tensor = self.mix(self.norm(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + mixed * keep


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lists": lambda: (Lists(), (torch.randn(SAMPLES, WIDTH),)),
    "around": lambda: (Around(), (torch.randn(SAMPLES, WIDTH),)),
    "kept": lambda: (Kept(), (torch.randn(SAMPLES, WIDTH, WIDTH),)),
}
CASES: list[tuple[str, list[int], Strategy]] = [
    ("lists", [1], Strategy()),
    ("lists", [], Strategy(zero=2, zero_stage=3)),
    ("around", [], Strategy(data=2)),
    ("kept", [], Strategy(context=2, recompute=Recompute.FULL)),
]
"""A model, at which layer each stage but the first begins, and the strategy of every layer."""


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


def trained_alone(name: str) -> dict[str, Tensor]:
    model, batch = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(call_model(model, batch), batch).backward()
        optimizer.step()
    return dict(model.state_dict())


def trained(name: str, cuts: list[int], strategy: Strategy) -> dict[str, Tensor]:
    model, batch = made(name)
    layers = discover_layers(model, batch)
    names = [layer.name for layer in layers]
    parts = [names[start:stop] for start, stop in zip([0, *cuts], [*cuts, None], strict=True)]
    edge = replace(strategy, recompute=Recompute.NONE)
    plan = make_plan(
        parts, [[strategy if name.startswith("blocks") else edge for name in part] for part in parts], SAMPLES
    )
    parallel = ParallelModel(model, plan, layers, batch, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.5)
    parallel.train_step(batch, optimizer)
    for _ in range(1, STEPS):
        optimizer.zero_grad()
        parallel(batch).backward()
        optimizer.step()
    return full_state_dict(parallel)


def each_trained() -> list[dict[str, Tensor]]:
    return [trained(*case) for case in CASES]


def test_weights_are_those_of_one_process(pool: WorkerPool) -> None:
    for (name, *how), state in zip(CASES, pool.run(2, each_trained)[0], strict=True):
        for path, tensor in trained_alone(name).items():
            torch.testing.assert_close(state[path], tensor, rtol=1e-5, atol=1e-6, msg=f"{name}, {how}: {path}")


@pytest.mark.parametrize("name", MODELS)
def test_they_are_traced(name: str) -> None:
    assert len(trace(*made(name)).layers) == 5
