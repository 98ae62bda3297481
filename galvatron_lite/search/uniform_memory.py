"""Bytes on the devices of a group for all uniform plans at once: ``cost.memory.group_memory`` in arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, chunks_in_flight, held_messages
from galvatron_lite.parallelism.pipeline.schedule import Moments, group_of, most_of
from galvatron_lite.search.chain import worst_moment
from galvatron_lite.search.figures import REST, UPDATED
from galvatron_lite.search.problem import Problem
from galvatron_lite.search.tables import StrategyTable

IntArray = NDArray[np.int64]
Run = tuple[int, StrategyTable, int]
"""Axis, table and number of neighbouring layers with one table."""
Kind = tuple[tuple[int, int, int], ...]
"""What chunks of equal layers have in common: axis, identity of the table and number of each of their runs."""


def along(values: IntArray, axis: int) -> IntArray:
    """Values along one of three axes: strategies before the blocks, of blocks, after them."""
    shape = [1, 1, 1]
    shape[axis] = len(values)
    return values.reshape(shape)


def group_bytes(
    problem: Problem, parts: Sequence[Mapping[int, StrategyTable]], group: int, chunks: Mapping[int, range]
) -> IntArray:
    """(E, B, H): bytes on each device of a group, for every candidate; axes of length 1 where alike.

    Args:
        problem: the shape.
        parts: figures by layer, of layers before the blocks, of blocks, after them.
        group: its number.
        chunks: the layers of each of its stages.
    """
    shape = problem.shape
    runs = [list(_runs(parts, inside)) for inside in chunks.values()]
    kinds: list[Kind] = [tuple((axis, id(table), count) for axis, table, count in own) for own in runs]
    of = dict(zip(kinds, runs, strict=True))
    sums = {kind: [_column(own, figure) for figure in _FIGURES] for kind, own in of.items()}
    held = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
    peak = sum((sums[kind][0] for kind in kinds), start=_ZERO)
    worst = {pair: _worst(of[pair[0]], pair[1]) for pair in {(kinds[own], max(counts[own], 1)) for own, counts in held}}
    for own, counts in held:
        moment = worst[kinds[own], max(counts[own], 1)]
        for kind, (_, states, kept, gathered) in sums.items():
            waiting = [count for other, count in enumerate(counts) if other != own and kinds[other] == kind]
            in_flight, busy = sum(waiting), len(waiting) - waiting.count(0)
            moment = moment + len(waiting) * states + in_flight * kept + busy * gathered
        peak = np.maximum(peak, moment)
    context = problem.tables[group].pricer.profile.cluster.device.context
    return peak + _around(problem, parts, chunks, held) + context


_ZERO = np.zeros((1, 1, 1), dtype=np.int64)
_FIGURES: tuple[Callable[[StrategyTable], IntArray], ...] = (
    lambda table: table.figures.memory[:, UPDATED],
    lambda table: table.figures.resting[:, 0],
    lambda table: table.figures.kept,
    lambda table: table.figures.resting[:, 1],
)
"""Bytes of a layer: while the optimizer runs, at rest, of each micro-batch in flight, with any in flight besides."""


def _runs(parts: Sequence[Mapping[int, StrategyTable]], inside: range) -> Iterator[Run]:
    own = [(axis, part[place]) for place in inside for axis, part in enumerate(parts) if place in part]
    for (axis, _), same in groupby(own, key=lambda pair: (pair[0], id(pair[1]))):
        layers = list(same)
        yield axis, layers[0][1], len(layers)


def _column(runs: Sequence[Run], figure: Callable[[StrategyTable], IntArray]) -> IntArray:
    """A figure of all layers of a chunk, added up."""
    total = _ZERO
    for axis, table, count in runs:
        total = total + along(count * figure(table), axis)
    return total


def _worst(runs: Sequence[Run], held: int) -> IntArray:
    """The worst moment of a chunk that computes (``cost.memory.worst_moment``), the optimizer's aside."""
    figures = [([along(column, axis) for column in table.figures.memory.T], count) for axis, table, count in runs]
    rest = _column(runs, lambda own: own.figures.memory[:, REST] + (held - 1) * own.figures.kept)
    return rest + worst_moment(figures)


def _around(
    problem: Problem, parts: Sequence[Mapping[int, StrategyTable]], chunks: Mapping[int, range], held: Moments
) -> IntArray:
    """Buffers of the boundaries, by their senders' strategies, and copies of tensors made before, by the readers'."""
    shape, store = problem.shape, problem.tables[0].store
    counted = not problem.pricer.profile.unbuffered
    total = _ZERO
    for (stage, inside), count in zip(chunks.items(), most_of(held), strict=True):
        cuts = [_sent_over(problem, side, cut) for side, cut in ((stage, inside.start), (stage + 1, inside.stop))]
        left, right = (_boundary(problem, parts, cut - 1, store.crossing[cut]) if cut else _ZERO for cut in cuts)
        ahead, behind = held_messages(shape.microbatches)
        total = total + counted * (ahead * left + behind * right)
        borrowed = store.borrowed(inside)
        if borrowed:
            total = total + count * _boundary(problem, parts, inside.start, borrowed)
    return total


def _boundary(problem: Problem, parts: Sequence[Mapping[int, StrategyTable]], place: int, size: int) -> IntArray:
    """``boundary_bytes`` of so many bytes a sample, by the strategies of a layer."""
    axis, table = next((axis, part[place]) for axis, part in enumerate(parts) if place in part)
    own = np.zeros(len(table.options.samples), dtype=np.int64)
    for code in table.present:
        own[code] = boundary_bytes(size, problem.shape.microbatch, table.options.samples[code])
    return along(own[table.codes], axis)


def _sent_over(problem: Problem, stage: int, cut: int) -> int:
    """The place before which a stage begins, 0 where nothing is sent there."""
    shape = problem.shape
    if cut in (0, len(problem.graph.layers)):
        return 0
    left, right = (group_of(shape.schedule, shape.stages, side) for side in (stage - 1, stage))
    return 0 if left == right else cut
