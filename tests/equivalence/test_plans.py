"""Any plan of the planner's space trains like one process: same losses, gradients and weights in float32.

Sampled plans draw pipeline degree and boundaries, a strategy for every layer, micro-batches and schedule at random,
from a fixed seed. ``scripts/check_equivalence --plans N`` runs as many as you like.
"""

from __future__ import annotations

from functools import cache

import pytest

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.plans.schema import Plan
from tests.equivalence.families import BATCH_NORMS, FAMILIES, PICTURES, build_family
from tests.equivalence.features import counts
from tests.equivalence.plans import sample_plan
from tests.equivalence.training import (
    SAMPLES,
    Case,
    Reference,
    curve_alone,
    curve_under_plan,
    make_case,
    train_alone,
    train_families,
)
from tests.pool import WorkerPool

WORLDS = {1: 1, 2: 4, 4: 2}
"""Plans a family, by world size."""
OTHER_WORLDS = {"pictures": {2: 2, 4: 3}, "mixtures": {2: 1, 4: 2, 8: 1}, "encoder-decoder": {2: 1, 4: 2}}
"""The same of groups that take longer."""
GROUPS = {
    "zoo": ("plain", "zoo-gpt", "zoo-llama", "vit"),
    "transformers": ("gpt2", "llama", "qwen2", "bert"),
    "mixtures": ("mixtral", "qwen2-moe"),
    "pictures": PICTURES,
    "encoder-decoder": ("t5",),
}
"""Families that are trained in the same processes, one after another."""
MOST = 2
"""Micro-batches for each group of devices of a pipeline: enough for every pass of a schedule; more at night."""
SAMPLED = [(group, world, count) for group in GROUPS for world, count in OTHER_WORLDS.get(group, WORLDS).items()]


@cache
def graph_of(family: str) -> ModelGraph:
    model, batch, _ = build_family(family, SAMPLES)
    return trace(model, batch, name=family)


@cache
def case_of(family: str) -> Case:
    return make_case(family)


@cache
def reference_of(family: str) -> Reference:
    return train_alone(family)


@cache
def sampled(family: str, world: int, count: int, first: int = 0, most: int = 4) -> tuple[Plan, ...]:
    graph, whole, seeds = graph_of(family), family in BATCH_NORMS, range(first, first + count)
    return tuple(sample_plan(graph, world, SAMPLES, seed, whole, most=most) for seed in seeds)


@pytest.mark.parametrize(("group", "world", "count"), SAMPLED)
def test_sampled_plans(pool: WorkerPool, group: str, world: int, count: int) -> None:
    work = [
        (case_of(family), sampled(family, world, count, most=MOST), reference_of(family)) for family in GROUPS[group]
    ]
    results = pool.run(world, train_families, timeout=600.0, work=work)
    assert [wrong for rank in results for wrong in rank] == []


def test_samples_contain_every_dimension_many_times() -> None:
    found = counts(
        plan
        for group, world, count in SAMPLED
        for family in GROUPS[group]
        for plan in sampled(family, world, count, most=MOST)
    )
    asked = {"zero 1", "context", "ulysses", "expert", "offload states", "offload activations", "interleaved"}
    assert asked | {"zero-bubble", "spatial", "filters", "channels", "selective", "full"} <= found.keys()
    assert min(found.values()) >= 3, found


def test_many_plans_are_sampled() -> None:
    assert sum(count * len(GROUPS[group]) for group, _, count in SAMPLED) >= 90
    assert {family for group in GROUPS.values() for family in group} == {*FAMILIES, *PICTURES, "t5"}


@pytest.mark.parametrize(("family", "world"), [pytest.param("zoo-gpt", 4, marks=pytest.mark.study), ("llama", 2)])
def test_loss_curve_of_ten_steps(pool: WorkerPool, family: str, world: int) -> None:
    expected = curve_alone(family, steps=10)
    assert min(expected) < 0.98 * expected[0]
    for plan in sampled(family, world, count=1, first=100):
        for losses in pool.run(world, curve_under_plan, case=case_of(family), plan=plan, steps=10):
            assert losses == pytest.approx(expected, rel=1e-4)
