"""The least memory of one problem: its layers cut into stages, a strategy each, so that the fullest stage is leanest.

Time plays no part, so that strategies of a layer which need no less memory than another one are left out. A stage of
layers i..j-1 needs at least, with r, q, w, v, u of ``cost.memory`` and what its boundaries take,

    sum_{l<j-1} min (r_l + q_l) + min (r_{j-1} + max(w_{j-1}, v_{j-1})),      sum_l min u_l

where layers next to a boundary have the layout that is settled for it. The best cut by these bounds (a bottleneck
dynamic programme) is taken, the stages it uses are made exact (``frontier.least_room``), and so on until none is
better. Stages that pose the same question are asked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from galvatron_lite.cost.sharing import tied_groups
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, held_messages
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.chains.chain import Chain, ChainLayer
from galvatron_lite.search.chains.frontier import least_room
from galvatron_lite.search.chains.pareto import pareto_rows
from galvatron_lite.search.problem import Problem
from galvatron_lite.search.shapes import tables_by_stage
from galvatron_lite.search.tables import Layout, StrategyTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_NOTHING = np.zeros((1, 1), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Lean:
    """The plan that needs least memory."""

    # bytes on its fullest device; where devices have budgets of their own, as if all had the greatest of them
    peak: int
    problem: Problem  # its shape
    cuts: tuple[int, ...]  # (0, ..., L)
    strategies: tuple[Strategy, ...]  # of every layer
    peaks: tuple[int, ...]  # bytes, by stage


@dataclass(frozen=True, slots=True, eq=False)
class _Light:
    """The strategies of a layer that are worth a look, and the least of their figures."""

    table: StrategyTable  # where they are from
    rows: IntArray  # which of its strategies
    layer: ChainLayer  # their figures, without time
    least: tuple[float, float, float]  # of r + q, of r + max(w, v), and of u


@dataclass(slots=True)
class Memory:
    """What is known of the least memory of layers and stages, whatever the budget."""

    # by table, micro-batches in flight, and whether those are there in the first backward alone
    lights: dict[tuple[int, int, bool], _Light] = field(default_factory=dict)
    # by table and layout, the table and its strategies of that layout
    laid: dict[tuple[int, Layout], tuple[StrategyTable, StrategyTable]] = field(default_factory=dict)
    # by the layers of a stage: bytes that it does not need, bytes that it needs, and its strategies
    stages: dict[tuple[int, ...], tuple[int, tuple[int, tuple[int, ...]] | None]] = field(default_factory=dict)

    def light(self, table: StrategyTable, held: int, filled: bool = False) -> _Light:
        """A layer with so many micro-batches in flight, see ``Table.held``."""
        key = (id(table), held, filled)
        if key not in self.lights:
            self.lights[key] = _light(table, held, filled)
        return self.lights[key]

    def wired(self, table: StrategyTable, wire: Layout) -> StrategyTable:
        """The strategies of a table that have a layout."""
        key = (id(table), wire)
        if key not in self.laid:
            self.laid[key] = (table, table.lay_out_model(lambda own: own == wire))
        return self.laid[key][1]

    def least(self, layers: Sequence[_Light], room: int | None) -> tuple[int, tuple[int, ...]] | None:
        """``frontier.least_room`` of a stage, remembered."""
        key = tuple(id(layer) for layer in layers)
        most, found = self.stages.get(key, (-1, None))
        if found is None and (room is None or room > most):
            chain = Chain(
                tuple(layer.layer for layer in layers), np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), 0
            )
            found = least_room(chain, room)
            self.stages[key] = (most if room is None else room, found)
        return found if found is None or room is None or found[0] <= room else None


def least_share(problem: Problem, memory: Memory) -> float:
    """Bytes that the fullest stage of any plan needs at the least, quickly: its share of the layers.

    With one micro-batch in flight: what a stage of several lacks in its first backward is less than those.
    """
    own = tables_by_stage(problem)
    totals = [
        [memory.light(table, 1).least[0] for table in tables] for tables in {id(one): one for one in own}.values()
    ]
    return float(np.min(totals, axis=0).sum()) / problem.shape.stages


def _light(table: StrategyTable, held: int, filled: bool) -> _Light:
    own = table.held(held, filled)
    _, first = np.unique(own, axis=0, return_index=True)
    distinct = np.sort(first)
    rows = np.sort(distinct[pareto_rows(own[distinct])]) if len(distinct) else distinct
    rest, prefix, peak, middle, prefetched, pending, updated = own[rows].T
    time, group = np.zeros((len(rows), 1), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    layer = ChainLayer(time, rest, prefix, peak, middle, prefetched, pending, updated, _NOTHING, group)
    figures = (rest + prefix, rest + np.maximum(peak, middle), updated)
    low, end, update = (float(own.min(initial=2**61)) if len(own) else np.inf for own in figures)
    return _Light(table, rows, layer, (low, end, update))


@dataclass(slots=True)
class Stages:
    """The stages of one problem."""

    problem: Problem  # with or without layouts at the edges and strategies of tied layers settled
    memory: Memory  # what is known of layers and stages
    scales: tuple[float, ...]  # by stage, what bytes are multiplied by to compare them
    # by stage (L + 1, L + 1): scaled bytes that layers i..j-1 need at the least
    need: list[FloatArray] = field(init=False)
    always: list[FloatArray] = field(init=False)  # by stage (L + 1, L + 1): bytes of what is there besides the layers

    def __post_init__(self) -> None:
        """Bounds of all ranges."""
        self.need, self.always = [], []
        copies, sent = self._copies(), self._sent()
        for stage, own in enumerate(tables_by_stage(self.problem)):
            before, behind = held_messages(self.problem.shape.microbatches)
            left, right = sent * before * (stage > 0), sent * behind * (stage + 1 < self.problem.shape.stages)
            context = self.problem.tables[stage].pricer.profile.cluster.device.context
            around = left[:, None] + right[None, :] + context
            self.always.append(around + self.problem.held(stage) * copies)
            self.need.append((self._layers(stage, own) + self.always[stage]) * self.scales[stage])

    @property
    def bound(self) -> float:
        """Scaled bytes that no plan needs less of."""
        return _bottleneck(self.need)[0]

    def best(self, limit: float, slack: float) -> Lean | None:
        """The leanest plan of less than ``limit`` scaled bytes, to that share; None where there is none."""
        best = None
        while True:
            bound, cuts = _bottleneck(self.need)
            if not bound < limit:
                return best
            found = [self._exact(stage, range(*ends), limit) for stage, ends in enumerate(pairwise(cuts))]
            whole = [one for one in found if one is not None]
            if len(whole) < len(found):
                continue
            peak = max(own * scale for (own, _), scale in zip(whole, self.scales, strict=True))
            if peak < limit:
                strategies = tuple(strategy for _, own in whole for strategy in own)
                best = Lean(round(peak), self.problem, tuple(cuts), strategies, tuple(own for own, _ in whole))
                limit = (1.0 - slack) * peak

    def _exact(self, stage: int, inside: range, limit: float) -> tuple[int, tuple[Strategy, ...]] | None:
        """Bytes and strategies of the leanest way to run a stage; None where it needs ``limit`` scaled bytes."""
        always, scale = int(self.always[stage][inside.start, inside.stop]), self.scales[stage]
        layers = self._chain(stage, inside)
        room = None if limit == np.inf else ceil(limit / scale) - 1 - always
        found = self.memory.least(layers, room) if all(len(own.rows) for own in layers) else None
        exact = np.inf if found is None else (found[0] + always) * scale
        self._learn(stage, inside, always, exact)
        if found is None:
            return None
        pairs = zip(layers, found[1], strict=True)
        return found[0] + always, tuple(own.table.strategies[own.rows[choice]] for own, choice in pairs)

    def _chain(self, stage: int, inside: range) -> list[_Light]:
        tables = (self.problem.layer_table(stage, place, inside) for place in inside)
        return [self._light(stage, table) for table in tables]

    def _light(self, stage: int, table: StrategyTable) -> _Light:
        return self.memory.light(table, self.problem.held(stage), self.problem.filled(stage))

    def _learn(self, stage: int, inside: range, always: int, exact: float) -> None:
        """What a stage needs, of all ranges of equal layers and boundaries."""
        need, length = self.need[stage], len(inside)
        need[inside.start, inside.stop] = exact
        if stage == 0 or stage + 1 == self.problem.shape.stages:
            return
        which = np.array(which_of(self.problem))
        like = (sliding_window_view(which, length) == which[inside.start : inside.stop]).all(axis=1)
        like[0] = like[-1] = False
        starts = np.flatnonzero(like)
        starts = starts[self.always[stage][starts, starts + length] == always]
        need[starts, starts + length] = np.maximum(need[starts, starts + length], exact)

    def _layers(self, stage: int, tables: Sequence[StrategyTable]) -> FloatArray:
        """(L + 1, L + 1): what layers i..j-1 need at the least."""
        wire, count = self.problem.choice.wire, len(tables)
        distinct = {id(table): table for table in tables}
        places = {key: place for place, key in enumerate(distinct)}
        which = np.array([places[id(table)] for table in tables])
        free = laid = np.array([self._light(stage, table).least for table in distinct.values()]).T[:, which]
        if wire is not None:
            wired = [self.memory.wired(table, wire) for table in distinct.values()]
            laid = np.array([self._light(stage, table).least for table in wired]).T[:, which]
        if not np.isfinite(free).all():
            return np.full((count + 1, count + 1), np.inf)
        total = np.concatenate(([0.0], np.cumsum(free[0])))
        starts = np.concatenate((laid[0] - free[0] if stage > 0 else np.zeros(count), [0.0]))
        ends = np.array([*laid[1][:-1], free[1][-1]]) if stage + 1 < self.problem.shape.stages else free[1]
        through = np.concatenate(([0.0], total[:-1] + ends))[None, :] - total[:, None]
        through += np.where(np.tri(count + 1, k=1, dtype=bool), 0.0, starts[:, None])
        updates = np.concatenate(([0.0], np.cumsum(free[2])))
        found = np.maximum(through, updates[None, :] - updates[:, None])
        return np.where(np.tri(count + 1, dtype=bool), np.inf, found)

    def _sent(self) -> FloatArray:
        """(L + 1,): bytes of what goes over a boundary before each place; none where no buffers are counted."""
        if self.problem.pricer.profile.unbuffered:
            return np.zeros(len(self.problem.graph.layers) + 1)
        sender, size = self.problem.sender, self.problem.shape.microbatch
        crossing = self.problem.tables[0].store.crossing
        known = {own: boundary_bytes(own, size, sender) for own in {*crossing[1:-1]}}
        return np.array([0, *(known[own] for own in crossing[1:-1]), 0], dtype=np.float64)

    def _copies(self) -> FloatArray:
        """(L + 1, L + 1): bytes of one micro-batch that a stage keeps of tensors made before it."""
        store, count = self.problem.tables[0].store, len(self.problem.graph.layers)
        found = np.zeros((count + 1, count + 1))
        if self.problem.graph.tensors and self.problem.shape.stages > 1:
            size, sender = self.problem.shape.microbatch, self.problem.sender
            for start in range(1, count):
                for stop in range(start + 1, count + 1):
                    borrowed = store.borrowed(range(start, stop))
                    found[start, stop] = boundary_bytes(borrowed, size, sender) if borrowed else 0.0
        return found


def which_of(problem: Problem) -> list[int]:
    """A number for each layer, equal for layers of one kind with the same pins that share no parameters."""
    numbers: dict[tuple[object, ...], int] = {}
    fixed, tied = problem.tables[0].fixed, {place for group in tied_groups(problem.graph) for place in group}
    return [
        numbers.setdefault(
            (layer.kind, fixed.pins_of(layer.name), layer.role, place if place in tied else -1), len(numbers)
        )
        for place, layer in enumerate(problem.graph.layers)
    ]


def _bottleneck(need: Sequence[FloatArray]) -> tuple[float, list[int]]:
    """The partition with the least greatest need, and that need."""
    best = [need[0][0]]
    for stage in need[1:]:
        best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
    stop = len(best[-1]) - 1
    cuts = [stop]
    for place in range(len(need) - 1, 0, -1):
        stop = int(np.argmin(np.maximum(best[place - 1], need[place][:, stop])))
        cuts.append(stop)
    return float(best[-1][-1]), [0, *reversed(cuts)]
