"""With ``randomness="same"`` every plan drops what one process drops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with same_randomness(model, given[0], SEED):
        for batch in given:
            optimizer.zero_grad()
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
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
    model, given, losses = Between(), batches(), []
    optimizer = DECAYING(p for p in model.parameters() if p.requires_grad)
    with same_randomness(model, given[0], SEED):
        for batch in given:
            optimizer.zero_grad()
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
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
