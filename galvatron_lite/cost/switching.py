"""The cost of a switch from one plan to another during training: bytes over every level of the cluster, and seconds.

Under the new plan every device holds its share of each layer's parameters and optimizer states. It takes what it lacks
from a nearest device that has it. A share is a rectangle: the slices of the tensor and channel ranks are one side, the
shards of ZeRO the other, each an even part. With

- B(l, m): bytes that member m of level l (a device, a node, …) takes from, or gives to, other members of the level's
  block, the larger of the two; devices that hold the same give even parts,
- b(l), e(l), a(l): bandwidth, efficiency and latency of the level,
- C: bytes that a device holds afterwards, which it writes once and reads once at its memory's bandwidth w,

    seconds = FIXED + LAYER * layers + sum over levels l of (a(l) + max over m of B(l, m) / (b(l) e(l))) + 2 max C / w

Levels are used one after another, an upper bound of using all at once. Experts count like layers with split matmuls;
buffers are left out. Where ZeRO-1 keeps masters of shards, these move, and are gathered in the precision of compute. If
only recomputation or the schedule changes, nothing moves; if only the batch changes, a switch costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.step import strategies_of
from galvatron_lite.parallelism.axes import ALONE
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.phases import SwitchCost, same_split
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import ITEM_BYTES

FIXED = 0.25
"""Estimated seconds of any switch: agreement, process groups, checksums."""
LAYER = 0.01
"""Estimated seconds of splitting one layer's modules again, and of its hooks."""
_ROWS = 512
"""Devices that are processed together, so that arrays stay small."""

Rectangles = FloatArray
"""(n, 4) start and stop among the slices, then among the shards, of what each of n devices holds of a layer."""


@dataclass(frozen=True, slots=True)
class LayerMove:
    """Layers that change from one strategy to another on the same devices."""

    before: Strategy
    after: Strategy
    old_first: int  # old_first, new_first: first rank of the stage
    new_first: int
    items: float  # parameters whose slices tensor ranks share
    replicated: float  # parameters that every tensor rank holds


def switch_cost(profile: Profile, before: Plan, after: Plan) -> SwitchCost:
    """Estimate the cost of a switch between two plans.

    Args:
        profile: of the model and the cluster, with the bytes of an optimizer state.
        before, after: plans of the same model and devices, in stages.

    Raises:
        InputError: a plan's layers are not the profile's.
    """
    if same_split(before, after):
        return SwitchCost()
    transfers = _Transfers(profile.cluster, after.devices)
    parameter, cast = ITEM_BYTES[profile.parameter_precision], profile.copied_bytes

    def shards_parameters(strategy: Strategy) -> bool:
        """Whether parameters at rest are shards, or have masters that are."""
        return strategy.parameter_shards > 1 or (cast > 0 and strategy.keeps_masters)

    for move in _layer_moves(profile, before, after):
        holders = move.old_first + np.arange(move.before.devices)
        old, new = (
            _rectangles(strategy, sharded=shards_parameters(strategy)) for strategy in (move.before, move.after)
        )
        transfers.add(move, holders, old, new, parameter)
        old, new = _rectangles(move.before, sharded=True), _rectangles(move.after, sharded=True)
        transfers.add(move, holders, old, new, profile.optimizer.state_bytes)
        if cast and move.after.keeps_masters:
            gathered = _rectangles(move.after, sharded=False)
            transfers.add(move, move.new_first + np.arange(move.after.devices), new, gathered, cast)
    seconds = FIXED + LAYER * len(profile.graph.layers)
    seconds += 2 * float(transfers.held.max()) / profile.cluster.device.memory_bandwidth
    seconds += sum(transfers.level_seconds(level) for level in range(len(profile.cluster.levels)))
    received = transfers.received.sum(axis=0)
    return SwitchCost(seconds, round(float(received.max())), round(float(received.sum())))


def _layer_moves(profile: Profile, before: Plan, after: Plan) -> Iterator[LayerMove]:
    """The moves of all layers, with equal ones joined."""
    graph = profile.graph
    split_items: Counter[tuple[Strategy, Strategy, int, int]] = Counter()
    replicated: Counter[tuple[Strategy, Strategy, int, int]] = Counter()
    strategies = zip(strategies_of(before, profile), strategies_of(after, profile), strict=True)
    firsts = zip(_first_ranks(before), _first_ranks(after), strict=True)
    for layer, pair, ranks in zip(graph.layers, strategies, firsts, strict=True):
        parameters = graph.kind_of(layer).parameters
        split_items[*pair, *ranks] += parameters.tensor
        replicated[*pair, *ranks] += parameters.total - parameters.tensor
    for key, items in split_items.items():
        yield LayerMove(*key, items, replicated[key])


def _first_ranks(plan: Plan) -> list[int]:
    """The first rank of the devices of every layer."""
    return [
        group_of(plan.schedule, plan.pipeline, index) * plan.stage_devices
        for index, stage in enumerate(plan.stages)
        for run in stage.runs
        for _ in range(run.count)
    ]


def _rectangles(strategy: Strategy, *, sharded: bool) -> Rectangles:
    """What each device of a stage holds of a layer; ``sharded``: of tensors sharded like optimizer states."""
    lines, ranks = lines_of(strategy), np.arange(strategy.devices)
    intervals: list[FloatArray] = []
    for line in (lines.weights, lines.states.shards if sharded else ALONE):
        index = line.index(ranks) + np.zeros_like(ranks)
        intervals += [index / line.size, (index + 1) / line.size]
    return np.stack(intervals, axis=1)


class _Transfers:
    """Bytes that every device takes and gives over each level, and holds afterwards."""

    def __init__(self, cluster: Cluster, devices: int) -> None:
        self.cluster = cluster
        self.received = np.zeros((len(cluster.levels), devices))
        self.sent = np.zeros((len(cluster.levels), devices))
        self.held = np.zeros(devices)

    def add(self, move: LayerMove, holders: IntArray, sources: Rectangles, targets: Rectangles, width: int) -> None:
        """Add one kind of tensors of some layers.

        Args:
            move: the layers.
            holders: (n,) ranks that hold the tensors.
            sources: what each holder holds.
            targets: what each device of the new stage is to hold.
            width: bytes of an item.
        """
        boxes, box_of = np.unique(sources, axis=0, return_inverse=True)
        box_of = box_of.reshape(-1)
        ranks = move.new_first + np.arange(move.after.devices)
        slices, shards = targets[:, 1] - targets[:, 0], targets[:, 3] - targets[:, 2]
        self.held[ranks] += (slices * move.items + move.replicated) * shards * width
        for start in range(0, len(ranks), _ROWS):
            rows = slice(start, start + _ROWS)
            target = targets[rows]
            items = _common_lengths(target[:, :2], boxes[:, :2]) * move.items
            items = items + move.replicated * _supplies_replicated(boxes, target)
            wanted = items * _common_lengths(target[:, 2:], boxes[:, 2:]) * width
            self._route(ranks[rows], wanted, holders, box_of)

    def _route(self, ranks: IntArray, wanted: FloatArray, holders: IntArray, box_of: IntArray) -> None:
        """Add (n, m) bytes that n devices want of m boxes, over the level of a nearest holder."""
        count = wanted.shape[1]
        holding = np.zeros((len(self.held), count))
        holding[holders, box_of] = 1.0
        left = np.where(holding[ranks] > 0, 0.0, wanted)
        block = 1
        for index, level in enumerate(self.cluster.levels):
            block *= level.size
            blocks = np.arange(len(holding)) // block
            holders_inside = np.zeros((blocks[-1] + 1, count))
            np.add.at(holders_inside, blocks, holding)
            near = holders_inside[blocks[ranks]] > 0
            taken = np.where(near, left, 0.0)
            self.received[index, ranks] += taken.sum(axis=1)
            demand = np.zeros_like(holders_inside)
            np.add.at(demand, blocks[ranks], taken)
            by_holder = demand / np.maximum(holders_inside, 1.0)
            self.sent[index] += (holding * by_holder[blocks]).sum(axis=1)
            left = np.where(near, 0.0, left)

    def level_seconds(self, index: int) -> float:
        """Return the seconds of all transfers over a level."""
        levels = self.cluster.levels
        level, member = levels[index], int(np.prod([inner.size for inner in levels[:index]], dtype=int))
        starts = np.arange(0, len(self.held), member)
        most = max(float(np.add.reduceat(side[index], starts).max()) for side in (self.received, self.sent))
        return level.latency + most / (level.bandwidth * level.efficiency) if most else 0.0


def _supplies_replicated(boxes: Rectangles, targets: Rectangles) -> FloatArray:
    """(n, m) 1 if a device takes replicated parameters from a box: that of its slice, or else of the nearest below."""
    starts = np.unique(boxes[:, 0])
    nearest = starts[np.searchsorted(starts, targets[:, 0], side="right") - 1]
    matches: FloatArray = (boxes[None, :, 0] == nearest[:, None]).astype(float)
    return matches


def _common_lengths(left: FloatArray, right: FloatArray) -> FloatArray:
    """(n, m) lengths that intervals (n, 2) and (m, 2) have in common."""
    low = np.maximum(left[:, None, 0], right[None, :, 0])
    high = np.minimum(left[:, None, 1], right[None, :, 1])
    length: FloatArray = np.maximum(high - low, 0.0)
    return length
