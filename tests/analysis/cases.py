"""Small settings for tests, and the plan of any point of them by a search of its own."""

from __future__ import annotations

import random
from dataclasses import replace

from galvatron_lite.analysis.setting import PlanSetting
from galvatron_lite.cluster.cluster import Cluster, DeviceGroup, Level
from galvatron_lite.errors import GalvatronError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.search.planner import find_plan
from tests.factories import random_profile

BUDGET = 2**30


def small(seed: int, devices: int = 4, nodes: int = 1, budget: int = BUDGET) -> PlanSetting:
    """A random model on nodes of equal devices."""
    profile = random_profile(random.Random(seed), devices=devices, blocks=2)
    return PlanSetting(replace(profile, cluster=with_nodes(profile.cluster, nodes)), budget)


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """So many nodes of the cluster's one."""
    if nodes == 1:
        return cluster
    group = cluster.groups[0]
    levels = (*cluster.levels, Level("cluster", nodes, 1e8, 1e-5))
    return replace(cluster, groups=(DeviceGroup(group.device, group.count * nodes),), levels=levels)


def plan_at(setting: PlanSetting, devices: int, batch: int, budget: int | None = None) -> Plan | None:
    """The plan of one point, on a cluster built here; None where there is none."""
    cluster = setting.profile.cluster
    node = cluster.levels[0].size
    levels = (
        (replace(cluster.levels[0], size=devices),)
        if devices <= node
        else (cluster.levels[0], replace(cluster.levels[1], size=devices // node))
    )
    own = replace(cluster, groups=(DeviceGroup(cluster.device, devices),), levels=levels)
    try:
        return find_plan(
            replace(setting.profile, cluster=own),
            devices=devices,
            global_batch=batch,
            budget=setting.budget if budget is None else budget,
            runners_up=0,
        )
    except GalvatronError:
        return None


def seconds_of(plan: Plan | None) -> float:
    return float("inf") if plan is None or plan.prediction is None else plan.prediction.step_seconds


def peak_of(plan: Plan) -> int:
    return plan.prediction.peak_memory
