"""Memory of ZeRO-3 where all blocks share a small module: FSDP gathers all of them at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.api import plan as find
from galvatron_lite.api_plans import verify_plan
from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.step import device_memory
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.verify.schema import Verdict

HIDDEN, BLOCKS = 256, 6


class Block(nn.Module):
    """An MLP whose input a module of all blocks scales."""

    def __init__(self, scale: nn.Module) -> None:
        super().__init__()
        self.scale, self.up, self.down = scale, nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.scale(hidden))))


class Network(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(64, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(Block(self.scale if shared else nn.LayerNorm(HIDDEN)) for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.scale(self.embed(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_gathered_at_once_is_priced_at_once(shared: bool) -> None:
    model, batch = Network(shared), torch.zeros(8, 16, dtype=torch.long)
    graph = trace(model, batch)
    profile = estimate_profile(graph, load_cluster("a100-80gb", 2), precision="fp32", name="shared")
    plan = find(profile, batch=8, fix=("zero=3", "dp=2", "pp=1", "microbatches=1"), forbid="recompute")
    report = verify_plan(plan, model, batch, checks="dry", profile=profile)
    (predicted,) = device_memory(plan)
    for run in report.roles:
        peak, expected = (one.total - one.context for one in (run.peak, predicted))
        assert 0.9 <= peak / expected <= 1.01
    assert [check for check in report.checks if check.verdict is Verdict.FAILED] == []
