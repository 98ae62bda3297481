"""Every strategy that is offered has a price, on models of every family."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import log, sqrt

import numpy as np
import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.shapes import load_model
from galvatron_lite.model.shapes.fields import AUXILIARY_LOSS
from galvatron_lite.parallelism.backends import ANY
from galvatron_lite.parallelism.strategy import Offload
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Fixed

DEVICES = 32


@cache
def session(model: str) -> Session:
    graph = load_model(model, sequence=None, precision="bf16")
    return Session(estimate_profile(graph, load_cluster("a100-80gb", DEVICES), precision="bf16", name=model))


MODELS = ["llama3-8b", "mixtral-8x7b", "gpt2", "t5-3b", "vit-huge", "resnet50", "bert-large"]


@pytest.mark.parametrize("model", MODELS)
def test_every_strategy_offered_is_priced(model: str) -> None:
    asked = session(model)
    space, _ = asked.space(ANY)
    for kind in asked.profile.graph.kinds:
        for devices in (1, 8, DEVICES):
            offered = space.strategies(kind, devices, Fixed())
            costs = asked.pricer.price_many(kind, offered, DEVICES, DEVICES // devices)
            assert costs.valid.all()
            for seconds in (costs.forward_seconds, costs.backward_seconds):
                assert np.isfinite(seconds).all()
                assert (seconds > 0).all()
            assert (costs.step_seconds >= 0).all()
            assert all((getattr(costs, name) >= 0).all() for name in ("kept", "offloaded", "states", "parameters"))


def test_what_is_offered_depends_on_what_a_layer_is() -> None:
    def used(model: str, kind: str) -> set[str]:
        offered = session(model).space(ANY)[0].strategies(kind, DEVICES, Fixed())
        found = {"context": any(one.context > 1 for one in offered), "ulysses": any(one.ulysses for one in offered)}
        found |= {"expert": any(one.expert > 1 for one in offered), "tensor": any(one.tensor > 1 for one in offered)}
        found["offload"] = {one.offload for one in offered} == set(Offload)
        return {name for name, there in found.items() if there}

    assert used("mixtral-8x7b", "block") == {"context", "ulysses", "expert", "tensor", "offload"}
    assert used("llama3-8b", "block") == {"context", "ulysses", "tensor", "offload"}
    assert used("llama3-8b", "before") == {"context", "tensor", "offload"}
    assert used("vit-huge", "block") == {"tensor", "offload"}  # 257 tokens cannot be shared evenly
    assert used("resnet50", "stage0_block") == {"offload"}


def test_experts_that_are_spread_run_as_estimated_for_their_degree() -> None:
    asked = session("mixtral-8x7b")
    points = [point for point in asked.profile.layers if point.kind == "block"]
    assert {point.expert for point in points} == {1, 2, 4, 8}
    assert {point.expert for point in asked.profile.layers if point.kind != "block"} == {1}
    offered = asked.space(ANY)[0].strategies("block", 8, Fixed(strategy=(("tensor", 1), ("context", 1))))
    compute = {one.expert: asked.pricer.price("block", one, 32, 1) for one in offered if one.zero_stage == 2}
    # Fewer experts on a device, each with more tokens: less weight to read, and the same multiplications.
    # Those of the most loaded rank, so beside its excess over the mean.
    excess = {ranks: 1 + AUXILIARY_LOSS * sqrt(log(ranks) / log(8) * ranks / 8) for ranks in (1, 2, 4, 8)}
    times = [cost.forward / excess[ranks] for ranks in excess if (cost := compute.get(ranks)) is not None]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0.5 * times[0]


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2"])
def test_shares_of_a_sample_are_estimated(model: str) -> None:
    profile = session(model).profile
    tokens = profile.graph.sequence
    for kind in profile.graph.kinds:
        least = min(point.samples for point in profile.layers if point.kind == kind and point.tensor == 1)
        assert least * tokens == max(256, tokens / DEVICES)


def test_a_profile_without_spread_experts_prices_them_as_not_spread() -> None:
    asked = session("mixtral-8x7b").profile
    pricer = LayerPricer(replace(asked, layers=tuple(point for point in asked.layers if point.expert == 1)))
    offered = session("mixtral-8x7b").space(ANY)[0].strategies("block", 8, Fixed(strategy=(("expert", 4),)))
    costs = pricer.price_many("block", offered, 32, 1)
    whole = pricer.price_many("block", [replace(one, expert=1, expert_tensor=0) for one in offered], 32, 1)
    assert costs.valid.all()
    assert (costs.forward == whole.forward).all()
    assert (costs.states <= whole.states).all()
    alone = pricer.price("block", offered[0], 32, 1)
    assert alone is not None
    assert alone.forward == costs.forward[0]


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama3-8b"])
def test_every_strategy_has_its_own_text_and_is_read_back(model: str) -> None:
    offered = session(model).space(ANY)[0].strategies("block", DEVICES, Fixed())
    assert [parse_strategy(str(one)) for one in offered] == list(offered)
