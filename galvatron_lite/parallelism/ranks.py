"""Sizes and strides of the groups of a stage's ranks, as costs need them. No torch here.

Ranks are row-major over the axes of ``strategy.degree_names``, the last innermost: ranks of a tensor group are
adjacent, and so are ranks that share the pixels or channels of a convolution (a layer that shares pixels shares neither
tokens nor matmuls). Only ``strides_of`` depends on this order; ``lines`` derives process groups from it.

Experts have an order of their own: experts spread ``expert`` ways lie on adjacent ranks above the tensor slices
(Megatron-Core's order ``tp-ep-dp`` of expert layers), so that ``expert`` times fewer ranks hold the same experts, first
of the innermost ranks of the shards.

All functions take a ``Strategy``, or ``Strategies`` and then return arrays.
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
_RADIX = 2**20
"""More than any figure of a group, so that three of them are the digits of one number."""


@dataclass(frozen=True, slots=True)
class StateSpread:
    """The ranks of a stage that hold the states of some parameters."""

    shards: RankGroup  # ranks that shard them
    replicas: RankGroup  # ranks that hold the same shard and sum its gradients


def _cached(function: Callable[Concatenate[Either, P], T]) -> Callable[Concatenate[Either, P], T]:
    """Call a function once for each ``Strategies``."""

    @wraps(function)
    def cached(strategy: Either, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(strategy, Strategy):
            return function(strategy, *args, **kwargs)
        key = (function, *args)
        if key not in strategy.cache:
            strategy.cache[key] = function(strategy, *args, **kwargs)
        result: T = strategy.cache[key]
        return result

    return cast("Callable[Concatenate[Either, P], T]", cached)


@_cached
def strides_of(strategy: Either) -> dict[str, Whole]:
    """Return the difference of neighbouring ranks along each axis, by its degree, the innermost first."""
    strides: dict[str, Whole] = {}
    inner: Whole = 1
    for name in reversed(degree_names()):
        strides[name], inner = inner, inner * getattr(strategy, name)
    return strides


@_cached
def group_along(strategy: Either, *degrees: str) -> RankGroup:
    """Return the group of ranks along the axis of a degree, or of several adjacent ones, the innermost last."""
    size = prod((getattr(strategy, name) for name in degrees[1:]), start=getattr(strategy, degrees[0]))
    return rank_group(size, strides_of(strategy)[degrees[-1]], strategy.devices // size)


@_cached
def spread_of(strategy: Either) -> StateSpread:
    """Return the ranks that hold the states of parameters other than experts."""
    strides, sharded = strides_of(strategy), strategy.state_shards > 1
    pixels = strategy.spatial > 1
    context = RankAxis(strategy.context * strategy.spatial, where(pixels, strides["width"], strides["context"]))
    zero, data = RankAxis(strategy.zero, strides["zero"]), RankAxis(strategy.replicas, strides["data"])
    split, replicated = (
        RankAxis(where(mask, context.size, 1), context.stride) for mask in (sharded, opposite(sharded))
    )
    return StateSpread(_joined(split, zero, strategy.devices), _joined(replicated, data, strategy.devices))


def _joined(inner: RankAxis, outer: RankAxis, devices: Whole) -> RankGroup:
    """The group along two adjacent axes."""
    size = inner.size * outer.size
    return rank_group(size, where(inner.size == 1, outer.stride, inner.stride), devices // size)


@_cached
def expert_spread_of(strategy: Either) -> StateSpread:
    """Return the ranks that hold the states of experts: devices / (expert degree x slices) hold the same experts."""
    stride = expert_slices(strategy) * strategy.expert
    holders = largest(strategy.devices // stride, 1)
    beyond = largest(stride // strategy.tensor, 1)
    shards = largest(strategy.state_shards // beyond, 1)
    replicas = largest(holders // shards, 1)
    return StateSpread(
        rank_group(shards, stride, strategy.devices // shards),
        rank_group(replicas, stride * shards, strategy.devices // replicas),
    )


@_cached
def expert_slices(strategy: Either) -> Whole:
    """Return how many devices share the matmuls of an expert; see ``Strategy.expert_tensor``."""
    tensor = strategy.tensor
    slices = where(strategy.expert_tensor > 0, least(strategy.expert_tensor, tensor), tensor)
    return largest(least(slices, strategy.devices // strategy.expert), 1)


@_cached
def expert_group(strategy: Either) -> RankGroup:
    """Return the group of ranks that exchange tokens for experts."""
    return rank_group(strategy.expert, expert_slices(strategy), strategy.devices // strategy.expert)


def shared_items(work: LayerWork, strategy: Either, *, trained: bool = False) -> tuple[tuple[Real, StateSpread], ...]:
    """Return the items of parameters that a device computes with, and where their states lie; experts last, if any.

    ``trained``: count only parameters with a gradient.
    """
    experts = work.expert_items - work.frozen_experts * trained
    dense = (work.parameters - work.frozen_items * trained - experts, spread_of(strategy))
    if never(work.expert_items):
        return (dense,)
    return (dense, (experts, expert_spread_of(strategy)))


def sharded_items(work: LayerWork, strategy: Either, *, trained: bool = False) -> Real:
    """Return the items of ``shared_items`` that ZeRO shards: all but experts that no other rank holds."""
    parts = shared_items(work, strategy, trained=trained)
    return sum((where(spread.shards.size > 1, items, 0.0) for items, spread in parts), 0.0)


def rank_group(size: Whole, stride: Whole, siblings: Whole) -> RankGroup:
    """Return a group, or an array of groups with the distinct ones among them."""
    groups = RankGroup(size, stride, siblings)
    return replace(groups, apart=distinct_groups(groups)) if isinstance(size, np.ndarray) else groups


def distinct_groups(groups: RankGroup) -> DistinctGroups:
    """Return the distinct groups of an array of them."""
    codes = groups.size + _RADIX * (groups.stride + _RADIX * groups.siblings)
    codes, indices = np.unique(codes, return_inverse=True)
    distinct = [RankGroup(code % _RADIX, code // _RADIX % _RADIX, code // _RADIX**2) for code in codes.tolist()]
    return DistinctGroups(distinct, indices)
