"""Our default plans beside published recipes, by one cost model; run by ``scripts/recipes``.

A recipe is priced as a plan by hand on the stack that ``galvatron plan`` assumes; with ``--for`` on that of the
software which trained by it, and ours is what that software can be told. Ours is what the planner finds by
default within the memory of a device less its margin, or what the recipe is predicted to need where that is more.
By default that is the simplest plan within 1 % of the best: where the recipe is quicker, ours is the best itself.
Below the table: recipes that need more than a device has by our prices, and why ours is much quicker where it is.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from galvatron_lite.analysis.explanation import TimeAccount, TimeClass
from galvatron_lite.analysis.step_time import PricedStages, account, price_in_parts
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.graph import ModelGraph, Recompute, Role
from galvatron_lite.model.shapes import build_graph, load_shape
from galvatron_lite.model.shapes.registry import shape_from_data
from galvatron_lite.parallelism.backends import TARGETS, target_named
from galvatron_lite.parallelism.expert.cost import rank_load
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
EXPLAINED = 0.85  # ratio below which it is said why
Recipe = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A recipe with its price and ours."""

    recipe: Recipe  # of the file
    theirs: Plan  # priced plans; ``ours`` None where nothing fits
    ours: Plan | None
    budget: int  # bytes a device may take: its memory less the margin
    cpu: float  # seconds of the search
    exact: bool  # whether ours is the best plan itself
    why: str  # why ours is quicker; empty where it is not by much

    @property
    def ratio(self) -> float:
        """Predicted step of ours over theirs."""
        return seconds_of(self.ours) / seconds_of(self.theirs) if self.ours else float("inf")

    @property
    def name(self) -> str:
        """Of the recipe, with its GPUs."""
        return f"{self.recipe['name']} on {self.recipe['gpus']}"

    @property
    def notes(self) -> Iterator[str]:
        """Sentences without which the figures mislead."""
        peak = peak_of(self.theirs)
        if peak > self.budget:
            needs = f"needs {format_bytes(peak)} of {format_bytes(self.budget)} by our prices"
            yield f"{self.name}: {needs}: ours may take {format_bytes(peak)}, too."
        if self.why:
            yield f"{self.name}: {self.why}"


def graph_of(recipe: Recipe, models: Mapping[str, Recipe], stack: Stack | None = None) -> ModelGraph:
    """The model of a recipe, with the kernels of a stack, which also says whether embedding and head are split."""
    kernels = None if stack is None else stack.kernels
    changes = {name: recipe[name] for name in SHAPE if name in recipe}
    changes |= {"seq_len": recipe["seq"]} if "seq" in recipe else {}
    changes |= {} if stack is None else {"split_vocabulary": stack.parallel_vocabulary}
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
        tensor=tp, context=cp, expert=recipe.get("ep", 1), expert_tensor=recipe.get("etp", 0),
        sequence_parallel=tp > 1, recompute=Recompute(recipe.get("recompute", "none")),
    )  # fmt: skip
    edge = replace(block, recompute=Recompute.NONE, expert=1, expert_tensor=0, sequence_parallel=False)
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
    budget = int(cluster.device.memory * (1 - MARGIN))
    started = time.process_time()
    ours, tolerances = None, [TOLERANCE, 0.0]
    try:
        while tolerances and (ours is None or seconds_of(ours) > seconds_of(theirs)):
            ours = find_plan(
                profile, devices=recipe["gpus"], global_batch=recipe["batch"], session=session,
                tolerance=tolerances.pop(0), budget=max(budget, peak_of(theirs)), runners_up=3,
                backend=target_named(target) if target else "galvatron",
            )  # fmt: skip
    except InfeasibleError:
        ours = None
    cpu, why = time.process_time() - started, ""
    if ours is not None and seconds_of(ours) < EXPLAINED * seconds_of(theirs):
        why = why_quicker(price_in_parts(session.pricer, theirs), price_in_parts(session.pricer, ours))
    return Row(recipe, theirs, ours, budget, cpu, exact=not tolerances, why=why)


def why_quicker(theirs: PricedStages, ours: PricedStages) -> str:
    """The part of a step in which ours saves most, by what it is made of, and what the plans do otherwise there."""
    spent = account(theirs), account(ours)
    classes = {what: tuple(one.seconds_of(what) for one in spent) for what in TimeClass}
    what = max(classes, key=lambda name: classes[name][0] - classes[name][1])
    before, after = ({part.name: part.seconds for part in one.parts if part.what is what} for one in spent)
    changed = {name: (before.get(name, 0.0), after.get(name, 0.0)) for name in before | after}
    largest = sorted(changed.items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:2]
    words = ", ".join(f"{name} {old:.3g} to {new:.3g} s" for name, (old, new) in largest)
    saved, all_saved = classes[what][0] - classes[what][1], spent[0].step_seconds - spent[1].step_seconds
    return (
        f"ours takes {all_saved:.3g} s less a step, and {saved:.3g} s less in {what.value} ({words}). "
        f"Recipe: {doing(theirs, what, spent[0])}. Ours: {doing(ours, what, spent[1])}."
    )


def doing(priced: PricedStages, what: TimeClass, spent: TimeAccount) -> str:
    """What a plan does that the time of a class depends on."""
    graph, plan = priced.pricer.profile.graph, priced.plan
    blocks = [place for place, layer in enumerate(graph.layers) if layer.role is Role.BLOCK]
    if what is TimeClass.RECOMPUTE:
        kept = Counter(priced.strategies[place].recompute for place in blocks)
        return ", ".join(f"{count} blocks recompute {choice.value}" for choice, count in kept.most_common())
    if what is TimeClass.WAITING:
        each = f" of {plan.virtual_stages} stages each" * (plan.virtual_stages > 1)
        return f"pipeline {plan.pipeline}{each}, {plan.schedule}, {plan.microbatches} micro-batches"
    used = Counter((graph.layers[place].kind, priced.strategies[place]) for place in blocks)
    kind, strategy = used.most_common(1)[0][0]
    load = rank_load(graph.kinds[kind], strategy.expert)
    loaded = f" (its fullest rank of experts has {load:.3g} times the mean)" if load > 1.05 else ""
    samples = plan.microbatch // strategy.batch_degree
    words = f"{strategy}{loaded}, micro-batches of {samples} sample{'s' * (samples > 1)} a replica"
    if what is TimeClass.COMMUNICATION:
        hidden = sum(part.hidden_seconds for part in spent.parts if part.what is what)
        return f"{words}, {hidden:.3g} s more hidden behind compute"
    stages = priced.stages_of(spent.group)
    layers = [pair for stage in stages for pair in zip(priced.ranges[stage], priced.stages[stage].layers, strict=True)]
    ends = plan.microbatches * sum(cost.forward + cost.backward for place, cost in layers if place not in blocks)
    return f"{words}, {ends:.3g} s of the busiest devices' compute in embedding and head"


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
        "recipe", "GPUs", "batch", "recipe needs", "ours within", "recipe s", "ours s", "ours/recipe", "CPU s",
        "our plan", box=None, pad_edge=False,
    )  # fmt: skip
    notes: list[str] = []
    errors, worst = Console(stderr=True, highlight=False), 0.0
    for recipe in data["recipes"]:
        target = recipe.get("for", "") if chosen.target else ""
        if chosen.only not in recipe["name"] or (chosen.target not in (None, "all", target)):
            continue
        if chosen.target and not target:
            continue
        row = compare(recipe, data["models"], target)
        worst = max(worst, row.ratio)
        notes += row.notes
        needs, within = peak_of(row.theirs), format_bytes(max(peak_of(row.theirs), row.budget))
        exact = " (--tolerance 0)" * row.exact
        ours = (f"{seconds_of(row.ours):.4g}", summary(row.ours) + exact) if row.ours else ("nothing fits", "")
        table.add_row(
            recipe["name"], str(recipe["gpus"]), str(recipe["batch"]), format_bytes(needs),
            within + (" (its need)" if needs > row.budget else ""), f"{seconds_of(row.theirs):.4g}", ours[0],
            f"{row.ratio:.3f}", f"{row.cpu:.1f}", ours[1],
        )  # fmt: skip
        errors.print(f"{row.name}: {row.ratio:.3f}, {row.cpu:.1f} s", soft_wrap=True)
    printed = Console(highlight=False, width=240)
    printed.print(table)
    for note in notes:
        printed.print(note, soft_wrap=True, markup=False)
    raise SystemExit(worst > 1.0)


if __name__ == "__main__":
    main()
