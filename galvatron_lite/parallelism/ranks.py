"""Which ranks of a stage work together in each dimension, and how far apart they lie. No torch here.

Ranks are row-major over (data, zero, context, tensor, spatial, channel), the last innermost: the ranks of a tensor
group lie next to one another, and so do those that share the pixels or the channels of a convolution (a layer has one
or the other: where pixels are shared, neither tokens nor matmuls are). ``Strategy.strided`` takes one dimension out of
that order and puts it outermost, so that its ranks lie as far apart as the stage allows and the others move inwards.
``strides_of`` is the one place that knows the order.

All but the tensor and channel ranks see other tokens or pixels, so gradients are summed over data x zero x context x
spatial. States are sharded over zero x context x spatial (Megatron-Core's distributed optimizer and torchtitan's
``dp_shard_cp`` mesh take context ranks in too) and replicated over data. A group over two dimensions that are not
neighbours in the order is made of runs.

Experts that are spread ``expert`` ways have an order of their own: they lie on the ranks next to one another above the
tensor slices (Megatron-Core's order ``tp-ep-dp`` of expert layers), so ``expert`` times fewer ranks hold the same ones:
innermost ranks of the shards are taken first. ``strided`` says nothing of them.

Every function takes one ``Strategy``, or ``Strategies`` and then gives arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import TypeVar

import numpy as np

from galvatron_lite.arrays import Real, Whole, is_option, largest, least, never, opposite, where
from galvatron_lite.cluster.cluster import Apart, RankGroup
from galvatron_lite.model.sides import SIDES
from galvatron_lite.parallelism.base import LayerWork
from galvatron_lite.parallelism.strategies import Strategies
from galvatron_lite.parallelism.strategy import Strategy, Strided

Either = Strategy | Strategies
T = TypeVar("T")
_WIDTH = 2**20
"""More than any figure of a group, so that three fit into a number."""


@dataclass(frozen=True, slots=True)
class RankAxis:
    """Ranks that differ in one dimension only."""

    size: Whole
    stride: Whole  # ranks from one to the next


@dataclass(frozen=True, slots=True)
class StateSpread:
    """How the states of some parameters lie on the ranks of a stage."""

    shards: RankGroup  # ranks that share them
    replicas: RankGroup  # ranks that hold the same shard and sum its gradients


def _remembered(make: Callable[[Either], T]) -> Callable[[Either], T]:
    """A function that is worked out once for each ``Strategies``."""

    @wraps(make)
    def remembered(strategy: Either) -> T:
        if isinstance(strategy, Strategy):
            return make(strategy)
        found: T = strategy.known[make] if make in strategy.known else strategy.known.setdefault(make, make(strategy))
        return found

    return remembered


def strides_of(strategy: Either) -> dict[str, Whole]:
    """Ranks from one member to the next in each dimension."""
    strides: dict[str, Whole] = {"channel": 1, "spatial": strategy.slices}
    inner: Whole = strategy.slices * strategy.spatial
    for name, option in (("tensor", None), ("context", Strided.CONTEXT), ("zero", Strided.ZERO)):
        degree = getattr(strategy, name)
        far = option is not None and is_option(strategy.strided, option)
        if never(far):
            strides[name], inner = inner, inner * degree
        else:
            strides[name] = where(far, strategy.devices // degree, inner)
            inner = where(far, inner, inner * degree)
    return {**strides, "data": inner}


@_remembered
def tensor_group(strategy: Either) -> RankGroup:
    """The ranks that share the matmuls of each sample."""
    return rank_group(strategy.tensor, strides_of(strategy)["tensor"], strategy.devices // strategy.tensor)


@_remembered
def context_group(strategy: Either) -> RankGroup:
    """The ranks that share the tokens of each sample."""
    return rank_group(strategy.context, strides_of(strategy)["context"], strategy.devices // strategy.context)


def side_group(strategy: Either, side: str) -> RankGroup:
    """The ranks that share one side of each picture: ``depth``, ``height`` or ``width``, the last innermost."""
    if isinstance(strategy, Strategy):
        return _side_group(strategy, side)
    key = ("side", side)
    if key not in strategy.known:
        strategy.known[key] = _side_group(strategy, side)
    found: RankGroup = strategy.known[key]
    return found


def _side_group(strategy: Either, side: str) -> RankGroup:
    inner = strategy.slices
    for name in reversed(SIDES[SIDES.index(side) + 1 :]):
        inner = inner * getattr(strategy, name)
    degree = getattr(strategy, side)
    return rank_group(degree, inner, strategy.devices // degree)


@_remembered
def channel_group(strategy: Either) -> RankGroup:
    """The ranks that share the channels of convolutions."""
    return rank_group(strategy.slices, 1, strategy.devices // strategy.slices)


@_remembered
def spread_of(strategy: Either) -> StateSpread:
    """Where the states of parameters lie that are not experts'."""
    strides, sharded = strides_of(strategy), strategy.state_shards > 1
    pixels = strategy.spatial > 1
    context = RankAxis(strategy.context * strategy.spatial, where(pixels, strides["spatial"], strides["context"]))
    zero, data = RankAxis(strategy.zero, strides["zero"]), RankAxis(strategy.data, strides["data"])
    far = is_option(strategy.strided, Strided.CONTEXT)
    split, whole = (RankAxis(where(mask, context.size, 1), context.stride) for mask in (sharded, opposite(sharded)))
    return StateSpread(_joined(split, zero, far, strategy.devices), _joined(whole, data, far, strategy.devices))


def _joined(context: RankAxis, other: RankAxis, far: Whole, devices: Whole) -> RankGroup:
    """The group over the context ranks and those of a dimension that lies above them, below where context is far."""
    inner = RankAxis(where(far, other.size, context.size), where(far, other.stride, context.stride))
    outer = RankAxis(where(far, context.size, other.size), where(far, context.stride, other.stride))
    size = inner.size * outer.size
    plain = (inner.size == 1) | (outer.size == 1) | (outer.stride == inner.size * inner.stride)
    stride, siblings = where(inner.size == 1, outer.stride, inner.stride), devices // size
    if never(opposite(plain)):
        return rank_group(size, stride, siblings)
    run, gap = where(plain, 1, inner.size), where(plain, 1, inner.stride)
    return rank_group(size, where(plain, stride, outer.stride), siblings, run, gap)


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


def shared_items(work: LayerWork, strategy: Either) -> tuple[tuple[Real, StateSpread], ...]:
    """The parameters one device computes with, in parts of equal spread, experts last where there are any."""
    dense = (work.parameters - work.expert_items, spread_of(strategy))
    if never(work.expert_items):
        return (dense,)
    return (dense, (work.expert_items, expert_spread_of(strategy)))


def sharded_items(work: LayerWork, strategy: Either) -> Real:
    """How many of them ZeRO shards: not experts of which no other rank has a copy."""
    return sum((where(spread.shards.size > 1, items, 0.0) for items, spread in shared_items(work, strategy)), 0.0)


def rank_group(size: Whole, stride: Whole, siblings: Whole, run: Whole = 1, gap: Whole = 1) -> RankGroup:
    """A group, or an array of groups that are told apart at once."""
    group = RankGroup(size, stride, siblings, run, gap)
    return replace(group, apart=told_apart(group)) if isinstance(size, np.ndarray) else group


def told_apart(groups: RankGroup) -> Apart:
    """The groups that an array of them has."""
    codes = (groups.size + _WIDTH * (groups.stride + _WIDTH * groups.siblings), groups.run + _WIDTH * groups.gap)
    if isinstance(groups.run, np.ndarray):
        pairs = np.column_stack(np.broadcast_arrays(*codes))
        found, place = np.unique(pairs, axis=0, return_inverse=True)
        return Apart([_group_of(int(one), int(runs)) for one, runs in found], place.reshape(-1))
    found, place = np.unique(codes[0], return_inverse=True)
    return Apart([_group_of(int(one), int(codes[1])) for one in found], place)


def _group_of(code: int, runs: int) -> RankGroup:
    rest, size = divmod(code, _WIDTH)
    siblings, stride = divmod(rest, _WIDTH)
    gap, run = divmod(runs, _WIDTH)
    return RankGroup(size, stride, siblings, run, gap)
