"""Pipelines of models whose layers read more than what the layer before them made; a whole network on shares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from tests.equivalence.networks import NETWORKS, TOLERANCE, check_network, train_network_alone
from tests.equivalence.plans import write_plan
from tests.equivalence.training import SAMPLES, make_case, train_alone, train_under_plans
from tests.pool import WorkerPool

ROWS, COLUMNS, SAMPLED, SHARED = Strategy(height=2), Strategy(width=2), Strategy(data=2), Strategy(zero=2, zero_stage=3)
MATMULS = Strategy(tensor=2)


def cut_plan(
    names: Sequence[str],
    cuts: Sequence[int],
    strategies: Sequence[Strategy],
    microbatches: int = 1,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    virtual: int = 1,
) -> Plan:
    """Stages that begin at the cuts; strategies go round the layers, groups of devices round the stages."""
    stages = [names[start:stop] for start, stop in pairwise([0, *cuts, len(names)])]
    chosen = {name: strategies[place % len(strategies)] for place, name in enumerate(names)}
    sizes = {"devices": len(stages) // virtual * strategies[0].devices, "virtual": virtual}
    return write_plan(stages, chosen, batch=SAMPLES, microbatches=microbatches, schedule=schedule, **sizes)


def test_skip_connections(pool: WorkerPool) -> None:
    """Each skip connection in the layout of the layer that made it."""
    case = make_case("unet")
    names = [layer.name for layer in case.layers]
    plans = [
        cut_plan(names, (3,), [ROWS, SAMPLED]),
        cut_plan(names, (2,), [COLUMNS, SHARED, ROWS]),
        cut_plan(names, (4,), [SAMPLED, COLUMNS]),
        cut_plan(names, (1, 3, 5), [Strategy()]),
        # the layers of the last stage, and of the one before it, lie alike; what the first ones made does not
        cut_plan(names, (1, 2, 3), [ROWS, ROWS, *[SHARED] * 4], schedule=Schedule.INTERLEAVED, virtual=2),
    ]
    results = pool.run(4, train_under_plans, case=case, plans=plans, reference=train_alone("unet"))
    assert [wrong for rank in results for wrong in rank] == []


def test_encoder_and_decoder(pool: WorkerPool) -> None:
    case = make_case("t5")
    names = [layer.name for layer in case.layers]
    plans = [
        cut_plan(names, (3,), [SAMPLED, SHARED, SHARED, SAMPLED], microbatches=4),
        cut_plan(names, (6,), [SAMPLED, MATMULS, MATMULS, SAMPLED], microbatches=2),
        cut_plan(names, (3, 4, 6), [Strategy()], microbatches=2, schedule=Schedule.GPIPE),
    ]
    results = pool.run(4, train_under_plans, case=case, plans=plans, reference=train_alone("t5"))
    assert [wrong for rank in results for wrong in rank] == []


@pytest.mark.study
def test_resnet_50_on_halves_of_its_pictures(pool: WorkerPool) -> None:
    network = NETWORKS["resnet-50"]
    off = check_network(pool, network, 2, train_network_alone(network))
    assert {name: error for name, error in off.items() if not error <= TOLERANCE} == {}
    # all of its state, and three losses
    assert len(off) > 300
