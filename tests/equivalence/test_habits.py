"""Models written in ways that few models are train under ordinary plans as on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.segments import make_skeleton
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from galvatron_lite.runtime.peers import broadcast_each
from galvatron_lite.verify.trial.check import try_model
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


class Noted(nn.Module):
    """Its blocks append to a list that they are given, or leave a term of the loss in an attribute; a buffer that
    averages its samples is replaced in every pass."""

    centre: Tensor

    def __init__(self, appends: bool) -> None:
        super().__init__()
        self.appends, self.head = appends, nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Noting() for _ in range(3))
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        terms: list[Tensor] = []
        for block in self.blocks:
            hidden = block(hidden, terms) if self.appends else block(hidden)
        if not self.appends:
            terms = [block.term for block in self.blocks]  # type: ignore[misc]
        loss: Tensor = self.head(hidden - self.centre).square().mean() + sum(terms)
        self.centre = 0.9 * self.centre + 0.1 * hidden.detach().mean(0)
        return loss


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.term = torch.zeros(())

    def forward(self, hidden: Tensor, terms: list[Tensor] | None = None) -> Tensor:
        self.term = self.aside(hidden).square().mean()
        if terms is not None:
            terms.append(self.term)
        mixed: Tensor = self.down(self.up(hidden).tanh())
        return hidden + mixed


class Frozen(nn.Sequential):
    """No layer of its first stage trains."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)), nn.Linear(WIDTH, 1))
        for parameter in (*self[0].parameters(), *self[1].parameters()):
            parameter.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        loss: Tensor = super().forward(hidden).square().mean()
        return loss


@dataclass(frozen=True)
class State:
    """What blocks hand on: plain dataclasses."""

    hidden: Tensor
    skip: Tensor | None = None


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        made: Tensor = self.down(self.up(state.hidden).tanh())
        return State(state.hidden + made, made if state.skip is None else state.skip + made)


class Written(nn.Module):
    """Code between blocks writes to what they return, also through views."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Stateful() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        state = State(self.start(hidden))
        for block in self.blocks:
            state = block(state)
            state.hidden[:, 0] = 0.5
            state.hidden.view(-1)[1::2].mul_(0.5)
        loss: Tensor = self.head(state.hidden + state.skip).square().mean()
        return loss


class Hooked(nn.Module):
    """A hook of the model keeps what a block returns, for code behind later blocks; blocks are parametrized."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.side, self.head, self.kept = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), dict[int, Tensor]()
        self.blocks[0].register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.kept[0] = output

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden).tanh()
        loss: Tensor = self.head(hidden + self.side(self.kept[0])).square().mean()
        return loss


class Sparse(nn.Module):
    """Its embedding asks for sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(WIDTH, WIDTH, sparse=True), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(hidden).square().mean()
        return loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lists": lambda: (Lists(), (torch.randn(SAMPLES, WIDTH),)),
    "around": lambda: (Around(), (torch.randn(SAMPLES, WIDTH),)),
    "kept": lambda: (Kept(), (torch.randn(SAMPLES, WIDTH, WIDTH),)),
    "appending": lambda: (Noted(True), (torch.randn(SAMPLES, WIDTH),)),
    "attribute": lambda: (Noted(False), (torch.randn(SAMPLES, WIDTH),)),
    "written": lambda: (Written(), (torch.randn(SAMPLES, WIDTH),)),
    "hooked": lambda: (Hooked(), (torch.randn(SAMPLES, WIDTH),)),
    "frozen": lambda: (Frozen(), (torch.randn(SAMPLES, WIDTH),)),
    "sparse": lambda: (Sparse(), (torch.randint(WIDTH, (SAMPLES, 3)),)),
}
CASES: list[tuple[str, list[int], Strategy]] = [
    ("lists", [1], Strategy()),
    ("lists", [], Strategy(zero=2, zero_stage=3)),
    ("around", [], Strategy(data=2)),
    ("kept", [], Strategy(context=2, recompute=Recompute.FULL)),
    ("appending", [], Strategy(data=2, recompute=Recompute.FULL)),
    ("attribute", [], Strategy(zero=2, zero_stage=1)),
    ("frozen", [3], Strategy()),
    ("hooked", [3], Strategy()),
    ("written", [], Strategy(tensor=2)),
    ("sparse", [], Strategy(data=2)),
    ("sparse", [], Strategy(zero=2, zero_stage=3)),
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
    edge = Strategy(data=2) if strategy.tensor > 1 else replace(strategy, recompute=Recompute.NONE)
    strategies = [[strategy if name.startswith("blocks") else edge for name in part] for part in parts]
    plan = make_plan(parts, strategies, SAMPLES)
    synced = {"centre": "mean"} if isinstance(model, Noted) else {}
    parallel = ParallelModel(model, plan, layers, batch, device="cpu", synced_buffers=synced)
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
    model, batch = made(name)
    layers = trace(model, batch).layers
    assert len(layers) == 5 + 2 * (name == "hooked")
    assert len(make_skeleton(model, layers, torch.device("cpu")).stubs) == len(layers) - 2


@pytest.mark.parametrize("name", MODELS)
def test_what_reaches_the_loss_aside_keeps_to_one_stage(name: str) -> None:
    model, batch = made(name)
    loss_of(call_model(model, batch), batch)  # what it leaves in attributes is no leaf
    findings = try_model(model, batch, discover_layers(model, batch))
    leaking = isinstance(model, Noted)
    assert findings.leaking == (("blocks.1", "blocks.0") if leaking else ())
    assert not findings.skipped
    if leaking:
        assert "pipeline" in findings.pins()["forbid"]


def halves_of_a_row() -> list[float]:
    half = torch.full((1, 4), float(dist.get_rank()))[:, 2:]
    broadcast_each([half], 1, torch.device("cpu"))
    return half.flatten().tolist()


def test_a_share_of_a_single_row_is_broadcast(pool: WorkerPool) -> None:
    assert pool.run(2, halves_of_a_row) == [[1.0, 1.0], [1.0, 1.0]]
