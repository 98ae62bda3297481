"""Published recipes are plans whose numbers go together, and why ours is quicker is told by what differs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from galvatron_lite.analysis.step_time import PricedStages, price_in_parts
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.plans.io import check_plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.search.shapes import Session

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """``scripts/recipes.py``."""
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "scripts" / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_numbers_of_recipes_are_consistent(script: ModuleType) -> None:
    data = yaml.safe_load(script.FILE.read_text(encoding="utf-8"))
    for recipe in data["recipes"]:
        plan = check_plan(script.plan_by_hand(recipe, script.graph_of(recipe, data["models"])))
        assert plan.microbatches * plan.microbatch == recipe["batch"], recipe["name"]


RECIPE = {"name": "small", "model": "llama2-7b", "cluster": "a100-80gb", "gpus": 16, "batch": 16, "zero": 1}


def priced(script: ModuleType, **changes: object) -> PricedStages:
    recipe = {**RECIPE, **changes}
    graph = script.graph_of(recipe, {})
    profile = estimate_profile(graph, load_cluster("a100-80gb", 16), precision="bf16", name=graph.name)
    return price_in_parts(Session(profile).pricer, script.plan_by_hand(recipe, graph))


def test_the_largest_saving_is_named_with_its_seconds(script: ModuleType) -> None:
    """Against the breakdown that plans hold, for what both count alike."""
    plain = priced(script)
    again = priced(script, recompute="full")
    saved = again.prediction.time.recompute - plain.prediction.time.recompute
    words = script.why_quicker(again, plain)
    assert f"{saved:.3g} s less in recompute" in words
    assert "Recipe: 32 blocks recompute full. Ours: 32 blocks recompute none." in words
    sliced = priced(script, tp=16)
    assert "less in communication (tensor " in script.why_quicker(sliced, plain)
    staged = priced(script, pp=16, batch=2)
    assert "Recipe: pipeline 16, 1f1b, 2 micro-batches" in script.why_quicker(
        staged, priced(script, tp=2, pp=4, batch=2)
    )
