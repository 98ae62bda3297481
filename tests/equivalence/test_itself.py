"""The equivalence tests would notice: what a plan uses is told, and small differences are found."""

from __future__ import annotations

import pytest
import torch

from galvatron_lite.parallelism.strategy import Offload, Strategy
from tests.equivalence.compare import assert_equal_tensors
from tests.equivalence.features import features
from tests.equivalence.plans import uniform_plan
from tests.equivalence.test_plans import graph_of


def test_a_plan_is_known_by_what_it_uses() -> None:
    """Every name is told of a plan that uses it, and not of one that splits nothing."""
    graph = graph_of("plain")
    ring = Strategy(zero=2, zero_stage=1, context=2, offload=Offload.STATES)
    assert features(uniform_plan(graph, Strategy(), batch=4)) == set()
    found = features(uniform_plan(graph, ring, ring, batch=4, microbatches=2))
    assert found == {"zero 1", "context", "offload states", "micro-batches"}
    heads = Strategy(context=2, ulysses=True, expert=2, offload=Offload.ALL)
    assert features(uniform_plan(graph, heads, heads, batch=4)) == {
        "ulysses", "expert", "offload states", "offload activations",
    }  # fmt: skip


def test_small_differences_are_found() -> None:
    reference = {"a": torch.tensor([1.0, 100.0]), "b": torch.tensor([0.01, 0.002])}
    assert_equal_tensors({name: tensor.clone() for name, tensor in reference.items()}, reference)
    assert_equal_tensors(reference | {"a": reference["a"] + 9e-4}, reference)
    with pytest.raises(AssertionError, match="a: off by"):
        assert_equal_tensors(reference | {"a": reference["a"] + 2e-3}, reference)
    with pytest.raises(AssertionError, match="b: off by"):
        assert_equal_tensors(reference | {"b": reference["b"] * 1.01}, reference)
    with pytest.raises(AssertionError, match="b: off by"):
        assert_equal_tensors(reference | {"b": reference["b"] * float("nan")}, reference)
    with pytest.raises(AssertionError, match="names"):
        assert_equal_tensors({"a": reference["a"]}, reference)
