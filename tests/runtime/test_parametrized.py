"""Weights computed from other parameters (weight_norm, spectral_norm, orthogonal), and complex ones beside others,
train as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import TraceError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

SAMPLES, WIDTH = 4, 8


class Filtered(nn.Module):
    """A linear layer behind a filter of complex numbers, in the frequencies of each sample."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.filter = linear, nn.Parameter(0.1 * torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.fft.irfft(torch.fft.rfft(hidden) * self.filter, WIDTH))
        return out


class Tempered(nn.Module):
    """A linear layer times a trained scalar, with a frozen scalar added."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.scale = linear, nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.tensor(0.1), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden) * self.scale + self.shift
        return out


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "complex": Filtered,
    "scalar": Tempered,
}
PLANS = {
    "data": [[Strategy(data=2)] * 4],
    "zero3": [[Strategy(zero=2, zero_stage=3)] * 4],
    "zero2": [[Strategy(zero=2, zero_stage=2, recompute=Recompute.SELECTIVE)] * 4],
    "pipeline": [[Strategy()] * 2, [Strategy()] * 2],
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = (KINDS[kind](nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.embed(values)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def made(kind: str, plan: list[list[Strategy]]) -> tuple[nn.Module, ParallelModel, Tensor]:
    torch.manual_seed(0)
    model, batch = Model(kind), torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    alone, layers = copy.deepcopy(model), discover_layers(model, batch)
    names = iter([layer.name for layer in layers])
    stages = [[next(names) for _ in stage] for stage in plan]
    return alone, ParallelModel(model, make_plan(stages, plan, SAMPLES), layers, batch, device="cpu"), batch


def errors_under(plan: str) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        alone, parallel, batch = made(kind, PLANS[plan])
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-4)
        sharded = parallel.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-4)
        for _ in range(3):
            alone(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            parallel.train_step(batch, sharded)
        state = parallel.full_state_dict()
        pairs = [(state[name], value) for name, value in alone.state_dict().items()]
        found[kind] = max(float((one - value).abs().max() / value.abs().max()) for one, value in pairs)
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_they_train_as_in_one_process(pool: WorkerPool, plan: str) -> None:
    for errors in pool.run(2, errors_under, plan=plan):
        assert {kind: error for kind, error in errors.items() if not error < 1e-4} == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "scalar"])
def test_tensor_parallelism_is_not_offered(kind: str) -> None:
    torch.manual_seed(0)
    graph = trace(Model(kind), torch.randn(SAMPLES, WIDTH))
    assert {graph.kinds[layer.kind].tensor_degrees for layer in graph.layers[1:-1]} == {1}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("old", [weight_norm, spectral_norm])
def test_hooks_of_old_are_refused(old: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(old(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1))
    with pytest.raises(TraceError, match="parametrizations"):
        trace(model, torch.randn(SAMPLES, WIDTH))
