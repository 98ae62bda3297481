"""Our default plans beside published recipes, by one cost model; run by ``scripts/recipes``.

A recipe is priced as a plan by hand on the stack that ``galvatron plan`` assumes; with ``--for`` on that of the
software which trained by it, and ours is what that software can be told. Ours is what the planner finds by
default within the memory of a device less its margin, or what the recipe is predicted to need where that is more.
By default that is the simplest plan within 1 % of the best: where the recipe is quicker, ours is the best itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.model.shapes import build_graph, load_shape
from galvatron_lite.model.shapes.registry import shape_from_data
from galvatron_lite.parallelism.backends import TARGETS, target_named
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.problem import cuts_of
from galvatron_lite.search.result import plan_of, summary
from galvatron_lite.search.shapes import Session
from galvatron_lite.stacks.catalog import STACKS
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.units import format_bytes

FILE = Path(__file__).with_suffix(".yaml")
SHAPE = ("layers", "hidden", "heads", "vocab")
TOLERANCE, MARGIN = 0.01, 0.053  # of ``galvatron plan`` for estimated profiles
Recipe = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A recipe with its price and ours."""

    recipe: Recipe  # of the file
    theirs: Plan  # priced plans; ``ours`` None where nothing fits
    ours: Plan | None
    fits: bool  # whether theirs is within the memory of a device
    cpu: float  # seconds of the search
    exact: bool  # whether ours is the best plan itself

    @property
    def ratio(self) -> float:
        """Predicted step of ours over theirs."""
        return seconds_of(self.ours) / seconds_of(self.theirs) if self.ours else float("inf")


def graph_of(recipe: Recipe, models: Mapping[str, Recipe], stack: Stack | None = None) -> ModelGraph:
    """The model of a recipe, with the kernels of a stack."""
    kernels = None if stack is None else stack.kernels
    changes = {name: recipe[name] for name in SHAPE if name in recipe}
    changes |= {"seq_len": recipe["seq"]} if "seq" in recipe else {}
    own = models.get(recipe["model"])
    if own is None:
        return build_graph(load_shape(recipe["model"], overrides=changes), precision="bf16", kernels=kernels)
    shape = shape_from_data({"name": recipe["name"], **own, **changes})
    return build_graph(shape, precision="bf16", kernels=kernels)


def plan_by_hand(recipe: Recipe, graph: ModelGraph, target: str = "") -> Plan:
    """A recipe as a plan: embedding and head are split like blocks, but keep all that they make and, where it is not
    known what trains, whole sequences."""
    tp, pp, vp, cp = (recipe.get(name, 1) for name in ("tp", "pp", "vp", "cp"))
    replicas, stage = recipe["gpus"] // (tp * pp * cp), recipe.get("zero", 0)
    block = Strategy(
        data=1 if stage else replicas, zero=replicas if stage else 1, zero_stage=stage if replicas * cp > 1 else 0,
        tensor=tp, context=cp, expert=recipe.get("ep", 1), sequence_parallel=tp > 1,
        recompute=Recompute(recipe.get("recompute", "none")),
    )  # fmt: skip
    edge = replace(block, recompute=Recompute.NONE, expert=1, sequence_parallel=False)
    shared = replace(edge, sequence_parallel=bool(target) and tp > 1)
    plan = plan_of(
        graph, devices=recipe["gpus"], global_batch=recipe["batch"],
        microbatches=recipe["batch"] // (replicas * recipe.get("micro", 1)), cuts=cuts_of(graph, pp * vp)[0],
        strategies=[
            block if layer.role is Role.BLOCK else shared if graph.kind_of(layer).sequence_parallel else edge
            for layer in graph.layers
        ],
        schedule=Schedule.INTERLEAVED if vp > 1 else Schedule.ONE_F_ONE_B,
    )  # fmt: skip
    return replace(plan, virtual_stages=vp)


def compare(recipe: Recipe, models: Mapping[str, Recipe], target: str = "") -> Row:
    """Price a recipe and plan the same question, for the software that trained by it where one is given."""
    stack = STACKS[target_named(target).stack] if target else None
    graph, cluster = graph_of(recipe, models, stack), load_cluster(recipe["cluster"], recipe["gpus"])
    profile = estimate_profile(graph, cluster, precision="bf16", name=graph.name, stack=stack)
    session = Session(profile)
    theirs = price_plan(session.pricer, plan_by_hand(recipe, graph, target))
    memory, peak = cluster.device.memory, peak_of(theirs)
    started = time.process_time()
    ours, tolerances = None, [TOLERANCE, 0.0]
    try:
        while tolerances and (ours is None or seconds_of(ours) > seconds_of(theirs)):
            ours = find_plan(
                profile, devices=recipe["gpus"], global_batch=recipe["batch"], session=session,
                tolerance=tolerances.pop(0), budget=max(int(memory * (1 - MARGIN)), peak), runners_up=3,
                backend=target_named(target) if target else "galvatron",
            )  # fmt: skip
    except InfeasibleError:
        ours = None
    return Row(recipe, theirs, ours, peak <= memory, time.process_time() - started, exact=not tolerances)


def seconds_of(plan: Plan) -> float:
    """Predicted, a step."""
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def peak_of(plan: Plan) -> int:
    """Predicted bytes of the fullest device."""
    assert plan.prediction is not None
    return plan.prediction.peak_memory


def main() -> None:
    """Compare all recipes that are asked for; the exit status is 1 where one is quicker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="recipes whose name holds this text")
    parser.add_argument("--for", dest="target", choices=[*TARGETS, "all"], help="recipes of this software, as it runs")
    chosen = parser.parse_args()
    data = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    table = Table(
        "recipe", "GPUs", "batch", "needs", "recipe s", "ours s", "ours/recipe", "CPU s", "our plan", box=None,
        pad_edge=False,
    )  # fmt: skip
    errors, worst = Console(stderr=True, highlight=False), 0.0
    for recipe in data["recipes"]:
        target = recipe.get("for", "") if chosen.target else ""
        if chosen.only not in recipe["name"] or (chosen.target not in (None, "all", target)):
            continue
        if chosen.target and not target:
            continue
        row = compare(recipe, data["models"], target)
        worst = max(worst, row.ratio)
        needs = f"{format_bytes(peak_of(row.theirs))}{'' if row.fits else ' (too much)'}"
        exact = " (--tolerance 0)" * row.exact
        ours = (f"{seconds_of(row.ours):.4g}", summary(row.ours) + exact) if row.ours else ("nothing fits", "")
        table.add_row(
            recipe["name"], str(recipe["gpus"]), str(recipe["batch"]), needs, f"{seconds_of(row.theirs):.4g}", ours[0],
            f"{row.ratio:.3f}", f"{row.cpu:.1f}", ours[1],
        )  # fmt: skip
        errors.print(f"{recipe['name']} {recipe['gpus']}: {row.ratio:.3f}, {row.cpu:.1f} s", soft_wrap=True)
    Console(highlight=False, width=240).print(table)
    raise SystemExit(worst > 1.0)


if __name__ == "__main__":
    main()
