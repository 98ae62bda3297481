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


def train_from_meta(work: list[tuple[Case, list[Plan]]]) -> list[list[list[float]]]:
    """Losses of three steps under each plan of each family."""
    return [[_losses(case, plan) for plan in plans] for case, plans in work]


def _losses(case: Case, plan: Plan) -> list[float]:
    with torch.device("meta"):
        model: nn.Module = build_model(case.family)
    own_rule = hasattr(model, "_init_weights")
    parallel = case.parallel(plan, model, seed=3, init_fn=None if own_rule else initialise)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    return [float(parallel.train_step(batch, optimizer)) for batch in make_batches(case.family, SAMPLES, 3)]


def test_training_from_meta(pool: WorkerPool) -> None:
    families = ("zoo-gpt", "qwen2")
    alone = [(case_of(family), sampled(family, 1, 1)) for family in families]
    expected = [losses for (losses,) in pool.run(1, train_from_meta, work=alone)[0]]
    for world, count in ((2, 1), (4, 1)):
        work = [(case_of(family), sampled(family, world, count, first=200)) for family in families]
        for results in pool.run(world, train_from_meta, work=work):
            for (_, plans), found, wanted in zip(work, results, expected, strict=True):
                for plan, losses in zip(plans, found, strict=True):
                    assert losses == pytest.approx(wanted, rel=1e-5), describe(plan)
