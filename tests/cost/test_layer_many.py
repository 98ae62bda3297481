"""Prices of many strategies at once: those of single ones to the last bit, and those that were recorded."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import terms
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategies, Strategy
from tests.cost.priced import Case, cases

RECORDED = Path(__file__).with_name("priced.json")
NAMES = [item.name for item in fields(LayerCost) if item.name != "valid"]
SUMS = ("forward_seconds", "backward_seconds", "step_seconds")


def many(case: Case) -> LayerCost:
    pricer = LayerPricer(case.profile)
    return pricer.price_many(case.kind, case.strategies, case.microbatch, case.stages, case.sharing)


def singles(case: Case) -> list[LayerCost | None]:
    pricer = LayerPricer(case.profile)
    return [pricer.price(case.kind, one, case.microbatch, case.stages, case.sharing) for one in case.strategies]


def test_figures_are_those_recorded_one_strategy_at_a_time() -> None:
    """``priced.json``: the figures that a program with a branch for each choice gave for the same cases."""
    for case, recorded in zip(cases(7, 44, 9), json.loads(RECORDED.read_text()), strict=True):
        costs = many(case)
        assert list(costs.valid) == [row is not None for row in recorded]
        for place, row in enumerate(recorded):
            if row is not None:
                assert costs.weight_copies[place] == 0, "profiles of weights that are not cast"
                recent = {"accumulated", "weight_copies", "frozen_copies", "new_gradient", "cast_gradient"}
                recent |= {"bucket_copy", "weight", "split_host", "weight_working"}
                names = [name for name in NAMES if name not in recent]
                own = [getattr(costs, name)[place] for name in names]
                # experts that ZeRO does not shard were priced as if their gradients formed in backward
                lasting = own[names.index("gradients")] if case.strategies[place].zero_stage > 1 else 0
                own[names.index("gradients")] -= lasting
                own[names.index("formed_gradients")] += lasting
                # a backward that computes again was recorded as quicker than one that does not, and hides less
                keeping = replace(case.strategies[place], recompute=Recompute.NONE)
                plain = LayerPricer(case.profile).price(case.kind, keeping, case.microbatch, case.stages, case.sharing)
                if plain is not None and row[names.index("backward")] < plain.backward:
                    assert costs.backward[place] == pytest.approx(plain.backward, rel=1e-12)
                    continue
                assert own == pytest.approx(row, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_many_are_priced_as_each_alone_to_the_last_bit(seed: int) -> None:
    seen = 0
    for case in cases(100 + seed, 16, 40):
        costs, alone = many(case), singles(case)
        assert list(costs.valid) == [cost is not None for cost in alone]
        found = terms(costs, 2, 1)
        for place, cost in enumerate(alone):
            if cost is not None:
                seen += 1
                assert {name: getattr(costs, name)[place] for name in NAMES} | {"valid": True} == asdict(cost)
                assert [getattr(costs, name)[place] for name in SUMS] == [getattr(cost, name) for name in SUMS]
                expected = terms(cost, 2, 1)
                assert all(getattr(found, own)[place] == getattr(expected, own) for own in expected.__slots__)
    assert seen > 200


def test_micro_batches_may_differ_between_strategies() -> None:
    for case in cases(5, 12, 20):
        pricer, factors = LayerPricer(case.profile), np.arange(1, len(case.strategies) + 1)
        batches = case.microbatch * factors
        costs = pricer.price_many(case.kind, Strategies.of(case.strategies), batches, case.stages, case.sharing)
        for place, strategy in enumerate(case.strategies):
            alone = pricer.price(case.kind, strategy, int(batches[place]), case.stages, case.sharing)
            if alone is not None:
                assert {name: getattr(costs, name)[place] for name in NAMES} | {"valid": True} == asdict(alone)


def test_no_strategies_and_no_points() -> None:
    case = next(cases(1, 1, 4))
    pricer = LayerPricer(case.profile)
    assert len(pricer.price_many("block", [], 8, 1).valid) == 0
    assert not pricer.price_many("block", [Strategy(tensor=5)], 8, 1).valid.any()
