"""Which ranks of a stage work together, and how far apart they lie, as costs need it. No torch here.

Ranks are row-major over the axes of ``strategy.degree_names``, the last innermost: the ranks of a tensor group lie next
to one another, and so do those that share the pixels or the channels of a convolution (a layer has one or the other:
where pixels are shared, neither tokens nor matmuls are). ``strides_of`` is the one place that knows the order; what the
ranks along each axis share is said by its dimension (``lines``).

Experts that are spread ``expert`` ways have an order of their own: they lie on the ranks next to one another above the
tensor slices (Megatron-Core's order ``tp-ep-dp`` of expert layers), so ``expert`` times fewer ranks hold the same ones:
innermost ranks of the shards are taken first.

Every function takes one ``Strategy``, or ``Strategies`` and then gives arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from math import prod
from typing import Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from galvatron_lite.arrays import Real, Whole, largest, least, never, opposite, where
from galvatron_lite.cluster.cluster import DistinctGroups, RankGroup
from galvatron_lite.parallelism.axes import RankAxis
from galvatron_lite.parallelism.base import LayerWork
from galvatron_lite.parallelism.strategy import Strategies, Strategy, degree_names

Either = Strategy | Strategies
T = TypeVar("T")
P = ParamSpec("P")
_WIDTH = 2**20
"""More than any figure of a group, so that three fit into a number."""


@dataclass(frozen=True, slots=True)
class StateSpread:
    """How the states of some parameters lie on the ranks of a stage."""

    shards: RankGroup  # ranks that share them
    replicas: RankGroup  # ranks that hold the same shard and sum its gradients


def _remembered(make: Callable[Concatenate[Either, P], T]) -> Callable[Concatenate[Either, P], T]:
    """A function that is worked out once for each ``Strategies``."""

    @wraps(make)
    def remembered(strategy: Either, /, *more: P.args, **named: P.kwargs) -> T:
        if isinstance(strategy, Strategy):
            return make(strategy, *more, **named)
        key = (make, *more)
        if key not in strategy.known:
            strategy.known[key] = make(strategy, *more, **named)
        result: T = strategy.known[key]
        return result

    return cast("Callable[Concatenate[Either, P], T]", remembered)


@_remembered
def strides_of(strategy: Either) -> dict[str, Whole]:
    """Ranks from one to the next along each axis, by its degree; the innermost first."""
    strides: dict[str, Whole] = {}
    inner: Whole = 1
    for name in reversed(degree_names()):
        strides[name], inner = inner, inner * getattr(strategy, name)
    return strides


@_remembered
def group_along(strategy: Either, *degrees: str) -> RankGroup:
    """The ranks along the axis of a degree, or of several that follow one another, the innermost last."""
    size = prod((getattr(strategy, name) for name in degrees[1:]), start=getattr(strategy, degrees[0]))
    return rank_group(size, strides_of(strategy)[degrees[-1]], strategy.devices // size)


@_remembered
def spread_of(strategy: Either) -> StateSpread:
    """Where the states of parameters lie that are not experts'."""
    strides, sharded = strides_of(strategy), strategy.state_shards > 1
    pixels = strategy.spatial > 1
    context = RankAxis(strategy.context * strategy.spatial, where(pixels, strides["width"], strides["context"]))
    zero, data = RankAxis(strategy.zero, strides["zero"]), RankAxis(strategy.replicas, strides["data"])
    split, replicated = (
        RankAxis(where(mask, context.size, 1), context.stride) for mask in (sharded, opposite(sharded))
    )
    return StateSpread(_joined(split, zero, strategy.devices), _joined(replicated, data, strategy.devices))


def _joined(inner: RankAxis, outer: RankAxis, devices: Whole) -> RankGroup:
    """The group over two dimensions, of which ``outer`` lies right above ``inner``."""
    size = inner.size * outer.size
    return rank_group(size, where(inner.size == 1, outer.stride, inner.stride), devices // size)


@_remembered
def expert_spread_of(strategy: Either) -> StateSpread:
    """Where the states of experts lie: devices / (expert degree x slices of an expert) ranks hold the same."""
    stride = expert_slices(strategy) * strategy.expert
    holders = largest(strategy.devices // stride, 1)
    beyond = largest(stride // strategy.tensor, 1)
    shards = largest(strategy.state_shards // beyond, 1)
    replicas = largest(holders // shards, 1)
    return StateSpread(
        rank_group(shards, stride, strategy.devices // shards),
        rank_group(replicas, stride * shards, strategy.devices // replicas),
    )


@_remembered
def expert_slices(strategy: Either) -> Whole:
    """Devices that share the matmuls of one expert: the tensor group, or what of it expert parallelism leaves."""
    tensor = strategy.tensor
    wanted = where(strategy.expert_tensor > 0, least(strategy.expert_tensor, tensor), tensor)
    return largest(least(wanted, strategy.devices // strategy.expert), 1)


@_remembered
def expert_group(strategy: Either) -> RankGroup:
    """The ranks that exchange tokens with one another."""
    return rank_group(strategy.expert, expert_slices(strategy), strategy.devices // strategy.expert)


def shared_items(work: LayerWork, strategy: Either, *, trained: bool = False) -> tuple[tuple[Real, StateSpread], ...]:
    """The parameters one device computes with, in parts of equal spread, experts last where there are any.

    ``trained``: only those that get a gradient.
    """
    experts = work.expert_items - work.frozen_experts * trained
    dense = (work.parameters - work.frozen_items * trained - experts, spread_of(strategy))
    if never(work.expert_items):
        return (dense,)
    return (dense, (experts, expert_spread_of(strategy)))


def sharded_items(work: LayerWork, strategy: Either, *, trained: bool = False) -> Real:
    """How many of them ZeRO shards: not experts of which no other rank has a copy."""
    parts = shared_items(work, strategy, trained=trained)
    return sum((where(spread.shards.size > 1, items, 0.0) for items, spread in parts), 0.0)


def rank_group(size: Whole, stride: Whole, siblings: Whole) -> RankGroup:
    """A group, or an array of groups that are told apart at once."""
    group = RankGroup(size, stride, siblings)
    return replace(group, apart=distinct_groups(group)) if isinstance(size, np.ndarray) else group


def distinct_groups(groups: RankGroup) -> DistinctGroups:
    """The groups that an array of them has."""
    codes = groups.size + _WIDTH * (groups.stride + _WIDTH * groups.siblings)
    distinct, place = np.unique(codes, return_inverse=True)
    return DistinctGroups([_group_of(int(code)) for code in distinct], place)


def _group_of(code: int) -> RankGroup:
    rest, size = divmod(code, _WIDTH)
    siblings, stride = divmod(rest, _WIDTH)
    return RankGroup(size, stride, siblings)
