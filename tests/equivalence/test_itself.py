"""The equivalence tests would notice: the samples contain every dimension, and small differences are found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from galvatron_lite.model.graph import Recompute
from galvatron_lite.plans.schema import Plan, Schedule
from tests.equivalence.compare import assert_equal_tensors
from tests.equivalence.families import FAMILIES
from tests.equivalence.test_plans import WORLDS, sampled


def features(plan: Plan) -> Iterator[str]:
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    sizes = {len(stage.runs) for stage in plan.stages}
    told = {
        "data": any(s.data > 1 for s in strategies),
        "zero 2": any(s.zero_stage == 2 for s in strategies),
        "zero 3": any(s.zero_stage == 3 for s in strategies),
        "data and zero": any(s.data > 1 and s.zero > 1 for s in strategies),
        "tensor": any(s.tensor > 1 and not s.sequence_parallel for s in strategies),
        "sequence": any(s.sequence_parallel for s in strategies),
        "zero and tensor": any(s.zero > 1 and s.tensor > 1 for s in strategies),
        "selective": any(s.recompute is Recompute.SELECTIVE for s in strategies),
        "full": any(s.recompute is Recompute.FULL for s in strategies),
        "unlike layers": len(set(strategies)) > 2,
        "unequal stages": len(sizes) > 1,
        "four stages": len(plan.stages) == 4,
        "micro-batches": plan.microbatches > 1,
        "fewer micro-batches than stages": plan.microbatches < len(plan.stages),
        "1f1b": len(plan.stages) > 1 and plan.schedule is Schedule.ONE_F_ONE_B,
        "gpipe": len(plan.stages) > 1 and plan.schedule is Schedule.GPIPE,
    }
    return (name for name, present in told.items() if present)


def test_samples_contain_every_dimension_many_times() -> None:
    plans = [plan for family in FAMILIES for world, count in WORLDS.items() for plan in sampled(family, world, count)]
    found = [name for plan in plans for name in features(plan)]
    counts = {name: found.count(name) for name in found}
    assert len(counts) == 16
    assert min(counts.values()) >= 5, counts


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
