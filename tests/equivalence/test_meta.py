"""A model built on the meta device gets the same weights, and trains the same, under every plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_lite.model.zoo.gpt import initialise
from galvatron_lite.plans.schema import Plan
from tests.equivalence.families import build_model, make_batches
from tests.equivalence.plans import describe
from tests.equivalence.test_plans import case_of, sampled
from tests.equivalence.training import SAMPLES, Case
from tests.pool import WorkerPool


def train_from_meta(case: Case, plans: list[Plan]) -> list[list[float]]:
    """Losses of three steps under each plan."""
    return [_losses(case, plan) for plan in plans]


def _losses(case: Case, plan: Plan) -> list[float]:
    with torch.device("meta"):
        model: nn.Module = build_model(case.family)
    own_rule = hasattr(model, "_init_weights")
    parallel = case.parallel(plan, model, seed=3, init_fn=None if own_rule else initialise)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    return [float(parallel.train_step(batch, optimizer)) for batch in make_batches(case.family, SAMPLES, 3)]


@pytest.mark.parametrize("family", ["zoo-gpt", "qwen2", "bert"])
def test_training_from_meta(pool: WorkerPool, family: str) -> None:
    case = case_of(family)
    ((expected,),) = pool.run(1, train_from_meta, case=case, plans=sampled(family, 1, 1))
    for world in (2, 4):
        plans = sampled(family, world, 3, first=200)
        for results in pool.run(world, train_from_meta, case=case, plans=plans):
            for plan, losses in zip(plans, results, strict=True):
                assert losses == pytest.approx(expected, rel=1e-5), describe(plan)
