from __future__ import annotations

import random
from dataclasses import replace
from math import fsum

import pytest

from galvatron_lite.analysis.explanation import TimeClass
from galvatron_lite.analysis.step_time import BUBBLE, SLOWEST, PricedStages, account, taken_apart
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.result import plan_of
from tests.factories import random_profile

WAYS = (
    Strategy(data=2), Strategy(zero=2, zero_stage=3), Strategy(zero=2, zero_stage=1, recompute=Recompute.FULL),
    Strategy(tensor=2), Strategy(tensor=2, sequence_parallel=True),
)  # fmt: skip


def random_plan(seed: int) -> PricedStages:
    """A random plan of two stages, with all kinds of communication in it, as priced by a random profile."""
    draw = random.Random(seed)
    profile = random_profile(draw, devices=4, blocks=4, tied=seed % 2 == 0)
    profile = replace(profile, straggling=0.02, sharing=0.01, hidden={"pipeline": 0.4} if seed % 3 == 0 else {})
    pricer = LayerPricer(profile)
    offered = [
        [one for one in WAYS if pricer.covers(layer.kind, one)] for layer in profile.graph.layers
    ]  # fmt: skip
    ways = [draw.choice(own) for own in offered]
    schedule = draw.choice([Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P])
    plan = plan_of(
        profile.graph, devices=4, global_batch=8, microbatches=4, cuts=(0, 3, 6), strategies=ways, schedule=schedule
    )
    return taken_apart(pricer, plan)


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_add_up_to_the_step(seed: int) -> None:
    priced = random_plan(seed)
    told = account(priced)
    assert told.step_seconds == priced.prediction.step_seconds
    assert fsum(part.seconds for part in told.parts) == pytest.approx(told.step_seconds, rel=1e-12)
    assert all(part.seconds >= 0 and part.hidden_seconds >= 0 for part in told.parts)


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_are_those_of_the_prediction(seed: int) -> None:
    """``cost.step.breakdown`` adds the same seconds up in another way."""
    priced = random_plan(seed)
    told, whole = account(priced), priced.prediction.time
    assert told.seconds_of(TimeClass.COMPUTE) == pytest.approx(whole.forward + whole.backward, rel=1e-9)
    assert told.seconds_of(TimeClass.RECOMPUTE) == pytest.approx(whole.recompute, rel=1e-9)
    assert told.seconds_of(TimeClass.OPTIMIZER) == pytest.approx(whole.optimizer, rel=1e-9)
    sends = sum(part.seconds for part in told.parts if part.name == "pipeline")
    assert told.seconds_of(TimeClass.COMMUNICATION) - sends == pytest.approx(whole.communication, rel=1e-9)
    names = {part.name for part in told.parts}
    assert SLOWEST in names
    assert BUBBLE in names


def test_hidden_and_exposed_are_all_that_is_sent() -> None:
    """Without mutual slow-down, what compute hides of a communication and what it does not are its seconds alone."""
    from galvatron_lite.profiler.schema import Overlap

    draw = random.Random(5)
    profile = replace(random_profile(draw, devices=2, blocks=3), overlap=Overlap(1.0, 1.0))
    pricer = LayerPricer(profile)
    ways = [Strategy(zero=2, zero_stage=3)] * 5
    priced = taken_apart(
        pricer, plan_of(profile.graph, devices=2, global_batch=8, microbatches=2, cuts=(0, 5), strategies=ways)
    )
    told = {part.name: part for part in account(priced).parts}
    alone = 0.0
    for layer, way in zip(profile.graph.layers, ways, strict=True):
        sent = pricer.work(profile.graph.kinds[layer.kind], way, 4).communications
        times = [1 if one.moment == "step" else 2 for one in sent]
        alone += sum(time * float(own) for time, own in zip(times, pricer.links.timed(sent), strict=True))
    assert told["zero"].seconds + told["zero"].hidden_seconds == pytest.approx(alone, rel=1e-9)
    assert told["zero"].hidden_seconds > 0
