"""The same draws under every plan; beside compiled blocks, half precision, switches and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer, Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.rng.modules import same_randomness
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.engine import ParallelModel
from tests.equivalence.compare import assert_equal_tensors
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool
from tests.runtime.examined import examined_once
from tests.runtime.plans import losses_alone, make_plan

SAMPLES, STEPS, SEED = 8, 2, 5
RATE = 0.3


def make() -> nn.Module:
    torch.manual_seed(0)
    return build("gpt-tiny", vocab=32, layers=2, hidden=16, heads=4, sequence=8, dropout=RATE).train()


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    names = ("tokens", "labels")
    return [{name: torch.randint(32, (SAMPLES, 8)) for name in names} for _ in range(STEPS)]


def train_alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    model, given = make(), batches()
    with same_randomness(model, given[0], SEED):
        losses = losses_alone(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
    return losses, model.state_dict()


def plans(layers: tuple[Layer, ...]) -> list[Plan]:
    names = [layer.name for layer in layers]
    shared, whole = Strategy(data=2, tensor=2, sequence_parallel=True), Strategy(data=2, tensor=2)
    recomputed = Strategy(zero=4, zero_stage=3, recompute=Recompute.FULL)
    apart = Strategy(data=2, context=2)
    mixed = [Strategy(data=4), shared, replace(whole, recompute=Recompute.SELECTIVE), Strategy(data=4)]
    edges = {names[0], names[-1]}
    plain = {name: whole if name in edges else shared for name in names}

    def one(strategies: dict[str, Strategy], microbatches: int) -> Plan:
        return write_plan([names], strategies, devices=4, batch=SAMPLES, microbatches=microbatches)

    cut = len(names) // 2
    two = write_plan(
        [names[:cut], names[cut:]],
        {name: Strategy(tensor=2) if name in names[1:-1] else Strategy(data=2) for name in names},
        devices=4, batch=SAMPLES, microbatches=4,
    )  # fmt: skip
    others = [one(plain, 2), one(dict(zip(names, mixed, strict=True)), 1), one(dict.fromkeys(names, apart), 2)]
    return [one(dict.fromkeys(names, recomputed), 1), two, *others]


@examined_once()
def train(layers: tuple[Layer, ...], every: list[Plan]) -> list[tuple[list[float], dict[str, Any]]]:
    given, found = batches(), []
    for plan in every:
        parallel = ParallelModel(make(), plan, layers, given[0], device="cpu", seed=SEED, randomness="same")
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        torch.manual_seed(torch.distributed.get_rank())  # nothing is drawn from torch's own generator
        losses = [float(parallel.train_step(batch, optimizer)) for batch in given]
        found.append((losses, parallel.full_state_dict()))
    return found


def test_plans_drop_what_one_process_drops(pool: WorkerPool) -> None:
    losses, state = train_alone()
    layers = discover_layers(make(), batches()[0])
    every = plans(layers)
    for found in pool.run(4, train, timeout=120.0, layers=layers, every=every):
        for seen, parameters in found:
            assert seen == pytest.approx(losses, rel=1e-5)
            assert_equal_tensors(parameters, state)


class Between(nn.Module):
    """Drops in code between blocks; its table is frozen, and the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.head.weight = self.table.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4))
        self.drop = nn.Dropout(RATE)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = hidden + functional.dropout(self.drop(block(hidden)), RATE, self.training)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


DECAYING = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, weight_decay=0.5)


def train_between(layers: tuple[Layer, ...], plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    given = batches()
    parallel = ParallelModel(Between(), plan, layers, given[0], device="cpu", seed=SEED, randomness="same")
    optimizer = parallel.optimizer(DECAYING)
    return [float(parallel.train_step(batch, optimizer)) for batch in given], parallel.full_state_dict()


def test_stages_drop_between_blocks_and_keep_what_is_frozen(pool: WorkerPool) -> None:
    model, given = Between(), batches()
    with same_randomness(model, given[0], SEED):
        losses = losses_alone(model, DECAYING(p for p in model.parameters() if p.requires_grad), given)
    layers = discover_layers(Between(), given[0])
    names = [layer.name for layer in layers]
    plan = write_plan(
        [names[:3], names[3:]], dict.fromkeys(names, Strategy()), devices=2, batch=SAMPLES, microbatches=2
    )
    for seen, parameters in pool.run(2, train_between, layers=layers, plan=plan):
        assert seen == pytest.approx(losses, rel=1e-5)
        assert_equal_tensors(parameters, model.state_dict())


def test_steps_and_seeds_draw_unlike() -> None:
    model, (batch, *_) = make(), batches()
    with same_randomness(model, batch, SEED):
        first, second = (float(model(**batch)) for _ in range(2))
    with same_randomness(model, batch, SEED):
        again = float(model(**batch))
    with same_randomness(model, batch, SEED + 1):
        other = float(model(**batch))
    assert first == again
    assert len({first, second, other, float(model.eval()(**batch))}) == 4


class Strange(nn.Module):
    """Draws in a way that cannot be shared."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.5)) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs.mean()


def test_what_cannot_be_shared_is_refused() -> None:
    model = Strange()
    with pytest.raises(InputError, match=r"alpha_dropout.*randomness='own'"), same_randomness(model, torch.rand(4, 4)):
        pass
    assert "forward" not in vars(model.blocks[0])


PAIR, ZERO, HALF = Strategy(data=2), Strategy(zero=2, zero_stage=3), Strategy(tensor=2)
DRAWN = 5
PLAIN, MIXED = [PAIR] * 5, [PAIR, ZERO, HALF, ZERO, PAIR]
ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
Run = tuple[ParallelModel, torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(rate), nn.Linear(16, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.drop(self.up(hidden).relu()))


class Tower(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.last(hidden) ** 2).mean()


def batch_of(step: int) -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(step)),)


def layers_of(model: nn.Module) -> Any:
    return discover_layers(model, batch_of(0), blocks=[f"blocks.{number}" for number in range(3)])


def planned(strategies: list[Strategy], precision: str) -> Any:
    names = [layer.name for layer in layers_of(Tower())]
    return make_plan([names], [strategies], 8, precision=precision)


def begun(strategies: list[Strategy], precision: str, seed: int = 0, rate: float = 0.0, **options: Any) -> Run:
    torch.manual_seed(seed)
    model, options = Tower(rate), {"seed": DRAWN} | options
    plan = planned(strategies, precision)
    parallel = ParallelModel(model, plan, layers_of(model), batch_of(0), device="cpu", **options)
    return parallel, parallel.optimizer(ADAM)


def steps(run: Run, *numbers: int) -> list[float]:
    parallel, optimizer = run
    return [float(parallel.train_step(batch_of(number), optimizer)) for number in numbers]


WAYS: dict[str, dict[str, Any]] = {
    "compile": {"compile": "aot_eager"},
    "fp16": {"precision": "fp16"},
    "same draws": {"randomness": "same", "rate": 0.3},
}


def changed(folder: str) -> dict[str, list[list[float]]]:
    """By way: losses under one plan all along, with switches between, resumed under the same plan, and another."""
    return {name: _changed(f"{folder}/{number}", **way) for number, (name, way) in enumerate(WAYS.items())}


def _changed(place: str, precision: str = "fp32", **way: Any) -> list[list[float]]:
    make = partial(begun, precision=precision, **way)
    whole, live = make(PLAIN), make(PLAIN)
    first = steps(whole, 0, 1)
    whole[0].save(place, whole[1])
    switched = steps(live, 0)
    for number, strategies in enumerate((MIXED, PLAIN, MIXED), start=1):
        live[0].switch(planned(strategies, precision), live[1])
        switched += steps(live, number)
    resumed = []
    for strategies in (PLAIN, MIXED):
        other = make(strategies, seed=5)
        steps(other, 7)
        other[0].load(place, other[1])
        resumed.append(first + steps(other, 2, 3))
    return [first + steps(whole, 2, 3), switched, *resumed]


def alone(rate: float) -> list[float]:
    """What one process computes."""
    torch.manual_seed(0)
    model = Tower(rate)
    with same_randomness(model, batch_of(0), DRAWN):
        return losses_alone(model, ADAM(model.parameters()), map(batch_of, range(4)))


def test_switches_and_checkpoints(pool: WorkerPool, tmp_path: Path) -> None:
    """Beside compiled blocks, half precision, and draws as in one process."""
    for found in pool.run(2, changed, folder=str(tmp_path)):
        for name, (whole, switched, resumed, other) in found.items():
            off = 2e-3 if name == "fp16" else 1e-5
            wanted = alone(WAYS[name].get("rate", 0.0))
            assert whole == pytest.approx(wanted, rel=off), name
            assert switched == pytest.approx(whole, rel=off), name
            assert resumed == whole, name
            assert other == pytest.approx(whole, rel=off), name
