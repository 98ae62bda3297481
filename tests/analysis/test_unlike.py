"""Clusters of two types of devices: every point of a question answers as a plan of its own does."""

from __future__ import annotations

from typing import Any

import pytest

from galvatron_lite import api
from galvatron_lite.analysis.sweeps import ParetoFront
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.shapes import build_graph, shape_from_flags

MIXED: dict[str, Any] = {"model": "gpt2", "cluster": "a100-v100", "sequence": 128, "forbid": ("tensor", "recompute")}


def planned(**setup: Any) -> Any:
    try:
        return api.plan(runners_up=0, tolerance=0, **(MIXED | setup))
    except GalvatronError:
        return None


def test_every_number_of_devices_has_its_own_budget_and_precision() -> None:
    told = api.cheapest(price=1.0, batch=16, **MIXED)
    plans = {cost.point.devices: cost.point.plan for cost in told.costs}
    assert {8, 16} <= set(plans)
    for devices, plan in plans.items():
        assert plan == planned(gpus=devices, batch=16)
    assert (plans[8].precision, plans[16].precision) == ("bf16", "fp16")  # type: ignore[union-attr]
    assert plans[8].provenance.budget > 32e9  # type: ignore[union-attr]


def test_a_budget_that_only_some_devices_have_is_each_number_of_devices_own() -> None:
    told = api.fewest_devices(samples=1e9, batch=16, mem="40GB", **MIXED)
    for point in told.points:
        assert point.plan == planned(gpus=point.devices, batch=16, mem="40GB")
    assert any(point.plan is not None for point in told.points)
    assert "V100" in told.points[-1].reason
    for asked in (api.plan, api.best_batch, api.pareto_front):
        with pytest.raises(InputError, match="V100"):
            asked(mem="40GB", **MIXED)


def test_batches_and_the_front_start_from_the_budgets_of_a_single_plan() -> None:
    flags = {"layers": "2", "hidden": "256", "heads": "4", "vocab": "1000", "seq": "64"}
    tiny = {"model": build_graph(shape_from_flags(flags), precision="fp16"), "cluster": "a100-v100"}
    best = api.best_batch(max_batch=16, **tiny)  # type: ignore[arg-type]
    assert best.best is not None
    assert best.best.plan == planned(batch=best.best.batch, sequence=None, **tiny)
    front: ParetoFront = api.pareto_front(batch=16, memory_step="8GB", **tiny)  # type: ignore[arg-type]
    assert front.points[0].plan == planned(batch=16, sequence=None, **tiny)
