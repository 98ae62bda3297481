"""Plans to report: small ones of random models, hostile names, and a very large pipeline."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

from galvatron_lite.analysis.report.page import PlanView, page, with_timeline
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Alternative, Plan, Proof, Provenance, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.result import plan_of
from tests.factories import random_profile

HOSTILE = """<script>alert(1)</script>"'&]]><!--</style></svg>{{ 7*7 }}<img src=x onerror=alert(2)>"""
BUDGET = 40_000


def provenance(budget: int = BUDGET, text: str = "test") -> Provenance:
    return Provenance("0", text, "0", f"estimated: {text}", text, {}, budget, Proof.GIVEN, notes=(text,))


def priced(profile: Profile, plan: Plan, text: str = "test", budget: int = BUDGET) -> Plan:
    other = Alternative(text, 1.0, 2 * budget, fits=False)
    found = replace(evaluate(profile, plan), provenance=provenance(budget, text))
    return replace(found, alternatives=(other,), left_out=(text,))


@cache
def small(schedule: Schedule = Schedule.ONE_F_ONE_B, count: int = 4) -> PlanView:
    """Four stages of two devices."""
    profile = random_profile(random.Random(3), devices=8, blocks=6)
    virtual = 2 if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V) else 1
    pipeline, layers = 4 // virtual, len(profile.graph.layers)
    size = 8 // pipeline
    plan = plan_of(
        profile.graph, devices=8, global_batch=size * count, microbatches=count, cuts=(0, 2, 4, 6, layers),
        strategies=[Strategy(data=size)] * 3 + [Strategy(zero=size, zero_stage=3)] * (layers - 3), schedule=schedule,
    )  # fmt: skip
    plan = replace(plan, virtual_stages=virtual)
    return with_timeline(PlanView("plan.yaml", priced(profile, plan), profile))


@cache
def hostile() -> PlanView:
    """The same with names that would end texts, attributes and scripts."""
    own = small()
    graph = own.profile.graph
    layers = tuple(replace(layer, name=f"{layer.name}{HOSTILE}") for layer in graph.layers)
    named = replace(own.profile, graph=replace(graph, name=HOSTILE, layers=layers))
    names = {old.name: new.name for old, new in zip(graph.layers, layers, strict=True)}
    stages = tuple(
        replace(stage, runs=tuple(replace(run, first=names[run.first], last=names[run.last]) for run in stage.runs))
        for stage in own.plan.stages
    )
    plan = priced(named, replace(own.plan, model=HOSTILE, stages=stages), HOSTILE)
    return with_timeline(PlanView(HOSTILE, plan, named, missing=(HOSTILE,)))


@cache
def large() -> PlanView:
    """128 stages and 512 micro-batches."""
    profile = random_profile(random.Random(1), devices=128, blocks=126, alike=True)
    plan = plan_of(
        profile.graph, devices=128, global_batch=512, microbatches=512, cuts=tuple(range(129)),
        strategies=[Strategy()] * 128,
    )  # fmt: skip
    return with_timeline(PlanView("large.yaml", priced(profile, plan), profile))


@cache
def large_page() -> str:
    return page([large()])


def written(folder: Path, name: str, html: str) -> Path:
    path = folder / f"{name}.html"
    path.write_text(html, encoding="utf-8")
    return path
