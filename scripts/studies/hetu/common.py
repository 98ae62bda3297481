"""The space that Hetu-Galvatron's files and formulas can say too, for our search.

Even splits, one strategy for embedding and head, no rings, no replicas of shards, Ulysses or tensor groups but not
both, no selective recomputation, no offload; and what a recorded search was told to leave out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from galvatron_lite.model.graph import Recompute, Tie
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.peers.hetu.model import Engine
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.space import Fixed

if TYPE_CHECKING:
    from galvatron_lite.profiler.schema import Profile
    from studies.hetu.recorded import RecordedSearch

DEGREES = (1, 2, 4, 8)  # of its tensor and Ulysses groups


def backend_of(search: RecordedSearch) -> Backend:
    """What its engine chooses from, as a backend of ours."""
    off = search.off
    zero2 = 1 if search.async_reduce else 2
    values: dict[str, tuple[object, ...]] = {
        "data": (1,),
        "zero_stage": (0, zero2) if "fsdp" in off else (0, zero2, 3),
        "tensor": (1,) if "tp" in off else tuple(degree for degree in DEGREES if degree <= search.most_tensor),
        "context": (1,) if "sp" in off or not search.tables else DEGREES,
        "sequence_parallel": (False, True),
        "expert": (1,),
        "recompute": (Recompute.NONE,) if "ckpt" in off else (Recompute.NONE, Recompute.FULL),
        "offload": (Offload.NONE,),
    }
    lone = search.engine == Engine.V240.value
    return Backend(
        "hetu-galvatron",
        lambda schedule: schedule is Schedule.ONE_F_ONE_B,
        values,
        rule=_whole_groups if lone else _replicas,
    )


def _replicas(strategy: Strategy) -> bool:
    """Whether only replicas shard states, and a layer's groups are of one kind."""
    return _whole_groups(strategy) and (strategy.zero_stage > 0) == (strategy.zero > 1)


def _whole_groups(strategy: Strategy) -> bool:
    """Whether a layer has tensor or Ulysses groups, not both, and shards states wherever there are ranks for that."""
    several = strategy.zero * strategy.context > 1
    alike = strategy.ulysses == (strategy.context > 1) and min(strategy.tensor, strategy.context) == 1
    return alike and (strategy.zero_stage == 0 or several) and (strategy.zero == 1 or strategy.zero_stage > 0)


def pins_of(search: RecordedSearch) -> Fixed:
    """What else its engine was told, and that stages are even."""
    stages = 1 if "pp" in search.off or len(search.layers) > 1 else None
    return Fixed(pipeline=stages, microbatches=search.chunks or None, even=True)


def with_edges_alike(profile: Profile) -> Profile:
    """The profile of the same model, whose embedding and head have one strategy."""
    return replace(profile, graph=replace(profile.graph, ties=(Tie("embed", "head", 0),)))
