from __future__ import annotations

import pytest

from galvatron_lite.analysis.sweeps import device_seconds, least_seconds
from galvatron_lite.api import find_profile
from galvatron_lite.model.graph import Recompute
from galvatron_lite.profiler.schema import LayerPoint, OptimizerCost, Overlap
from galvatron_lite.search.planner import find_plan
from tests.analysis.cases import asked, seconds_of, small
from tests.factories import make_cluster, make_graph, make_kind, make_profile


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_beats_the_bound(seed: int) -> None:
    setting = small(seed)
    for devices in (1, 2, 4):
        for batch in (4, 24):
            plan = asked(setting, devices, batch)
            assert plan is not None
            assert seconds_of(plan) >= least_seconds(setting.profile, devices, batch) * (1 - 1e-9)


@pytest.mark.parametrize("backend", ["galvatron", "any"])
def test_no_plan_of_an_estimated_model_beats_the_bound(backend: str) -> None:
    known = find_profile(model="gpt2", cluster="a100-40gb", gpus=4)
    plan = find_plan(
        known, devices=4, global_batch=64, budget=30 * 10**9, backend=backend, runners_up=0
    )  # fmt: skip
    assert seconds_of(plan) >= least_seconds(known, 4, 64) > 0.5 * seconds_of(plan)


def test_compute_alone_reaches_it() -> None:
    """Two layers of 3 and 6 seconds a sample on one device, and nothing else to do."""
    kind = make_kind("block", 0)
    points = [LayerPoint("block", n, 1, False, Recompute.NONE, 1.0 * n, 2.0 * n, 0, 0, 0) for n in (1, 2)]
    profile = make_profile(
        make_graph([kind], ["block", "block"]), points, make_cluster(1),
        optimizer=OptimizerCost("sgd", 0, 0.0), overlap=Overlap(),
    )  # fmt: skip
    plan = find_plan(profile, devices=1, global_batch=5, budget=2**30, runners_up=0)
    assert least_seconds(profile, 1, 5) == pytest.approx(30.0)
    assert seconds_of(plan) == pytest.approx(30.0)


def test_larger_samples_on_a_device_may_be_quicker_each() -> None:
    """f + b = 2 + n seconds for n samples: 3 a sample alone, 1.25 each in a batch of 8, which no point holds."""
    kind = make_kind("block", 0)
    points = [LayerPoint("block", n, 1, False, Recompute.NONE, 1.0, 1.0 + n, 0, 0, 0) for n in (1, 2, 4)]
    profile = make_profile(make_graph([kind], ["block"]), points, make_cluster(2))
    assert device_seconds(profile, 1) == pytest.approx(3.0)
    assert device_seconds(profile, 8) == pytest.approx(1.25)
