"""ZeRO-3 of a layer whose last module to run is frozen: what it gives takes no gradient, the others' backward does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.state import full_gradients
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool

LAYERS = (
    Layer("before", "before", Role.BEFORE, ("first", "second", "places")),
    Layer("blocks.0", "block", Role.BLOCK, ("blocks.0",)),
    Layer("after", "after", Role.AFTER, ("end",)),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.places = nn.Embedding(6, 4)
        self.places.requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.end = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).square()).transpose(1, 2)
        hidden = self.blocks[0](hidden + self.places(torch.arange(6)))
        return self.end(hidden).square().mean()


def gradients() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    batch, alone = torch.randn(4, 3, 6), Model()
    alone(batch).backward()
    strategies = {layer.name: Strategy(zero=2, zero_stage=3) for layer in LAYERS}
    plan = write_plan([list(strategies)], strategies, devices=2, batch=4, microbatches=1)
    model = ParallelModel(Model(), plan, LAYERS, batch, loss_fn=lambda output, _: output, device="cpu")
    model.backward_step(batch)
    return full_gradients(model), {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def test_a_frozen_module_is_gathered_by_itself(pool: WorkerPool) -> None:
    for found, expected in pool.run(2, gradients):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)
