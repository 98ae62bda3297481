"""Models that listen inside their blocks: losses made of what routers compute there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph, Recompute
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.space import Fixed
from tests.model.models import LAYERS, TOKENS, hugging_face

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral(balanced: bool) -> ModelGraph:
    return trace(*hugging_face("Mixtral", output_router_logits=balanced, **EXPERTS))


@pytest.fixture(scope="module")
def balanced() -> ModelGraph:
    return mixtral(True)


def test_a_loss_that_balances_experts_is_captured(balanced: ModelGraph) -> None:
    plain = mixtral(False)
    assert balanced.kinds["block"] == plain.kinds["block"]
    assert balanced.tensors == ()
    kept, before = (graph.kinds["after"].kept[Recompute.NONE].total for graph in (balanced, plain))
    assert kept >= before + 2 * LAYERS * TOKENS * EXPERTS["num_local_experts"] * 4  # shares of experts, for backward
    assert "mlp.gate" in balanced.whole
    assert (plain.whole, plain.undivided) == ("", "")


def test_it_is_planned_with_one_stage_and_one_micro_batch_unless_more_are_asked_for(balanced: ModelGraph) -> None:
    profile = estimate_profile(balanced, load_cluster("v100"), precision="fp32", name="balanced")
    asked = partial(find_plan, profile, devices=4, global_batch=8, budget=10**9)
    plan = asked()
    assert (len(plan.stages), plan.microbatches) == (1, 1)
    assert asked(fixed=Fixed(microbatches=2)).microbatches == 2
    with pytest.raises(InputError, match=r"mlp\.gate"):
        asked(fixed=Fixed(pipeline=2))


class Listening(nn.Module):
    """Adds to its loss what a hook of its own hears of each block's inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        heard: list[Tensor] = []
        hooks = [block[0].register_forward_hook(lambda *call: heard.append(call[-1])) for block in self.blocks]
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        for hook in hooks:
            hook.remove()
        return self.end(x).mean() + torch.stack(heard).square().mean()


def test_any_hook_of_the_model_hears_of_blocks_that_are_left_out() -> None:
    graph = trace(Listening(), torch.zeros(2, 4), loss_fn=lambda output, _: output)
    assert [layer.name for layer in graph.layers][1:-1] == [f"blocks.{place}" for place in range(LAYERS)]
    assert "blocks." in graph.whole
