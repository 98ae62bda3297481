"""What going from one plan to another while training costs: bytes over every level of the cluster, and seconds.

Every device is to hold its share of each layer's parameters and optimizer states under the new plan, and takes what it
does not hold yet from a nearest device that does. A share is taken as a rectangle: the slices of the tensor and channel
ranks one way, the shards of ZeRO the other, each an even part. With

- B(l, m): bytes that member m of level l (a device, a node, …) takes from, or gives to, other members of the level's
  block, the larger of the two; devices that hold the same give even parts,
- b(l), e(l), a(l): bandwidth, efficiency and latency of the level,
- C: bytes that a device holds afterwards, which it writes once and reads once at its memory's bandwidth w,

    seconds = FIXED + LAYER * layers + sum over levels l of (a(l) + max over m of B(l, m) / (b(l) e(l))) + 2 max C / w

Levels are taken one after the other, which is an upper bound of moving over all at once. Experts count as layers do
whose matmuls are split; buffers are left out. Where ZeRO-1 keeps masters of shards, those move, and are gathered in the
precision of compute. Where only recomputation or the schedule changes nothing moves, and where only the batch changes
nothing is done at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.step import strategies_of
from galvatron_lite.parallelism.axes import ALONE, RankLine
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.phases import SwitchCost, same_split
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import ITEM_BYTES

FIXED = 0.25
"""Estimated seconds of a switch whatever moves: agreeing, process groups, checking what arrived."""
LAYER = 0.01
"""Estimated seconds of splitting one layer's modules anew, and of its hooks."""
_ROWS = 512
"""Devices that are looked at together, so that arrays stay small."""


def boxes_of(strategy: Strategy, sharded: bool) -> tuple[FloatArray, FloatArray]:
    """Which rectangle of a layer each device of a stage holds: (n, 2) interval among the slices, and among the shards
    of states, of what is ``sharded`` as these are."""
    lines, place = lines_of(strategy), np.arange(strategy.devices)
    return _intervals(lines.weights, place), _intervals(lines.states.shards if sharded else ALONE, place)


def _intervals(line: RankLine, place: IntArray) -> FloatArray:
    index = line.index(place) + np.zeros_like(place)
    return np.stack([index / line.size, (index + 1) / line.size], axis=1)


@dataclass(frozen=True, slots=True)
class MovedLayers:
    """Layers that go from one strategy to another, and what of them."""

    before: Strategy  # before, after: strategies
    after: Strategy
    old: int  # old, new: first rank of the groups of devices
    new: int
    items: float  # parameters whose slices tensor ranks share
    replicated: float  # parameters that every tensor rank holds


def switch_cost(profile: Profile, before: Plan, after: Plan) -> SwitchCost:
    """What it costs to go on with ``after`` where a model is split for ``before``.

    Args:
        profile: of the model and the cluster, with the bytes of an optimizer state.
        before, after: plans of the same model and devices, in stages.

    Raises:
        InputError: a plan whose layers are not the profile's.
    """
    if same_split(before, after):
        return SwitchCost()
    cluster, device = profile.cluster, profile.cluster.device
    received, sent = (np.zeros((len(cluster.levels), after.devices)) for _ in range(2))
    held = np.zeros(after.devices)
    parameter, cast = ITEM_BYTES[profile.parameter_precision], profile.copied_bytes
    for part in _parts(profile, before, after):
        both = part.before, part.after
        former, ranks = part.old + np.arange(part.before.devices), part.new + np.arange(part.after.devices)
        # parameters at rest are shards, or have masters that are
        at_rest = [one.parameter_shards > 1 or (cast > 0 and one.keeps_masters) for one in both]
        for states, width in ((False, parameter), (True, profile.optimizer.state_bytes)):
            old, new = (boxes_of(one, states or sharded) for one, sharded in zip(both, at_rest, strict=True))
            _move(cluster, part, former, (old, new), width, received, sent, held)
        if cast and part.after.keeps_masters:
            gathered = boxes_of(part.after, True), boxes_of(part.after, False)
            _move(cluster, part, ranks, gathered, cast, received, sent, held)
    seconds = FIXED + LAYER * len(profile.graph.layers) + 2 * float(held.max()) / device.memory_bandwidth
    seconds += sum(_level_seconds(cluster, place, received[place], sent[place]) for place in range(len(received)))
    got = received.sum(axis=0)
    return SwitchCost(seconds, round(float(got.max())), round(float(got.sum())))


def _parts(profile: Profile, before: Plan, after: Plan) -> Iterator[MovedLayers]:
    """Every layer, those that do the same together."""
    graph = profile.graph
    counted: Counter[tuple[Strategy, Strategy, int, int]] = Counter()
    totals: Counter[tuple[Strategy, Strategy, int, int]] = Counter()
    ways = zip(
        graph.layers, strategies_of(before, profile), _firsts(before), strategies_of(after, profile), _firsts(after),
        strict=True,
    )  # fmt: skip
    for layer, one, old, other, new in ways:
        split = graph.kind_of(layer).parameters
        counted[one, other, old, new] += split.tensor
        totals[one, other, old, new] += split.total - split.tensor
    for key, items in counted.items():
        yield MovedLayers(*key, items, totals[key])


def _firsts(plan: Plan) -> list[int]:
    """First rank of the devices of every layer."""
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    return [
        group_of(plan.schedule, plan.pipeline, stage) * plan.stage_devices
        for stage, size in enumerate(sizes)
        for _ in range(size)
    ]


def _move(
    cluster: Cluster,
    part: MovedLayers,
    holders: IntArray,
    rectangles: tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]],
    width: int,
    received: FloatArray,
    sent: FloatArray,
    held: FloatArray,
) -> None:
    """Add a part's parameters (or optimizer states) to what each device takes over each level, gives, and holds;
    ``rectangles``: of the devices that hold them, and of those that are to."""
    sources, targets = rectangles
    boxes, box_of = np.unique(np.concatenate(sources, axis=1), axis=0, return_inverse=True)
    box_of = box_of.reshape(-1)
    ranks = part.new + np.arange(part.after.devices)
    slices, shards = (side[:, 1] - side[:, 0] for side in targets)
    held[ranks] += (slices * part.items + part.replicated) * shards * width
    for start in range(0, len(ranks), _ROWS):
        rows = slice(start, start + _ROWS)
        across = _covered(targets[0][rows], boxes[:, :2]) * part.items
        across = across + part.replicated * _first_slice(boxes, targets, rows)
        wanted = across * _covered(targets[1][rows], boxes[:, 2:]) * width
        _route(cluster, ranks[rows], wanted, holders, box_of, received, sent)


def _first_slice(boxes: FloatArray, targets: tuple[FloatArray, FloatArray], rows: slice) -> FloatArray:
    """(n, m) 1 where a box is the one that a device takes parameters from that every slice holds: its own, or the
    nearest below."""
    starts = np.unique(boxes[:, 0])
    wanted = starts[np.searchsorted(starts, targets[0][rows, 0], side="right") - 1]
    matches: FloatArray = (boxes[None, :, 0] == wanted[:, None]).astype(float)
    return matches


def _covered(these: FloatArray, those: FloatArray) -> FloatArray:
    """(n, m) length that intervals (n, 2) and (m, 2) share."""
    low = np.maximum(these[:, None, 0], those[None, :, 0])
    high = np.minimum(these[:, None, 1], those[None, :, 1])
    length: FloatArray = np.maximum(high - low, 0.0)
    return length


def _route(
    cluster: Cluster, ranks: IntArray, wanted: FloatArray, holders: IntArray, box_of: IntArray,
    received: FloatArray, sent: FloatArray,
) -> None:  # fmt: skip
    """Add (n, m) bytes that n devices want of m boxes to what is taken and given over the level of a nearest holder."""
    count = wanted.shape[1]
    holding = np.zeros((len(received[0]), count))
    holding[holders, box_of] = 1.0
    left = np.where(holding[ranks] > 0, 0.0, wanted)
    block = 1
    for place, level in enumerate(cluster.levels):
        block *= level.size
        blocks = np.arange(len(holding)) // block
        inside = np.zeros((blocks[-1] + 1, count))
        np.add.at(inside, blocks, holding)
        near = inside[blocks[ranks]] > 0
        taken = np.where(near, left, 0.0)
        received[place, ranks] += taken.sum(axis=1)
        demand = np.zeros_like(inside)
        np.add.at(demand, blocks[ranks], taken)
        each = demand / np.maximum(inside, 1.0)
        sent[place] += (holding * each[blocks]).sum(axis=1)
        left = np.where(near, 0.0, left)


def _level_seconds(cluster: Cluster, place: int, received: FloatArray, sent: FloatArray) -> float:
    """Seconds of what goes over a level."""
    level, member = cluster.levels[place], int(np.prod([level.size for level in cluster.levels[:place]], dtype=int))
    starts = np.arange(0, len(received), member)
    most = max(float(np.add.reduceat(side, starts).max()) for side in (received, sent))
    return level.latency + most / (level.bandwidth * level.efficiency) if most else 0.0
