"""Figures of every strategy of a kind of layer as whole numbers, for the frontier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer, Sharing, layout
from galvatron_lite.cost.memory import terms
from galvatron_lite.cost.stage import Shape
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.search.chain import ChainLayer
from galvatron_lite.search.pareto import pareto_rows
from galvatron_lite.search.space import Fixed, Space

IntArray = NDArray[np.int64]
Layout = tuple[int, int, int, bool]
"""How boundary tensors lie on a stage's devices, see ``cost.layer.layout``."""
Glue = tuple[int, int, int]
"""A layout without the choice of tensor groups to share tokens."""
TICKS = 10**12
"""Search counts time in picoseconds, so that sums do not depend on their order."""


def ticks(seconds: float) -> int:
    """Seconds as whole picoseconds."""
    return round(seconds * TICKS)


def glue_of(own: Layout) -> Glue:
    """What layouts must have in common to be glued: batch, context and tensor degree."""
    return own[:3]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """What every strategy of one kind of layer costs under one shape of plan.

    Attributes:
        strategies: S of them.
        layouts: of their boundary tensors.
        forward, backward, step: (S,) picoseconds a micro-batch and a step.
        kept: (S,) bytes.
        memory: (S, 7) bytes with one micro-batch in flight, columns as ``MemoryTerms``.
        output_bytes: of the layer, per sample.
    """

    strategies: tuple[Strategy, ...]
    layouts: tuple[Layout, ...]
    forward: IntArray
    backward: IntArray
    step: IntArray
    kept: IntArray
    memory: IntArray
    output_bytes: int

    def where(self, wanted: Callable[[Strategy], bool]) -> Table:
        """Only the strategies that are wanted."""
        rows = np.array([row for row, strategy in enumerate(self.strategies) if wanted(strategy)], dtype=np.int64)
        return self.at(rows)

    def at(self, rows: IntArray) -> Table:
        """Only some of the strategies."""
        return Table(
            tuple(self.strategies[row] for row in rows),
            tuple(self.layouts[row] for row in rows),
            self.forward[rows],
            self.backward[rows],
            self.step[rows],
            self.kept[rows],
            self.memory[rows],
            self.output_bytes,
        )

    @property
    def groups(self) -> IntArray:
        """(S,): a number for each layout."""
        numbers = {own: number for number, own in enumerate(dict.fromkeys(self.layouts))}
        return np.array([numbers[own] for own in self.layouts], dtype=np.int64)

    @property
    def keys(self) -> IntArray:
        """Everything a strategy is judged by, apart from its layout: (S, figures)."""
        return np.column_stack((self.forward, self.backward, self.step, self.kept, self.memory))

    def undominated(self, others: Sequence[Table] = ()) -> Table:
        """Without strategies that another one of the same layout equals or beats in every figure.

        Args:
            others: tables with the same strategies that must agree (layers with shared parameters).
        """
        keys = np.column_stack([table.keys for table in (self, *others)])
        groups: dict[Layout, list[int]] = {}
        for row, own in enumerate(self.layouts):
            groups.setdefault(own, []).append(row)
        kept = [np.array(rows)[pareto_rows(keys[rows])] for rows in groups.values()]
        return self.at(np.sort(np.concatenate(kept)) if kept else np.array([], dtype=np.int64))

    def chain_layer(self, in_flight: int, columns: Sequence[IntArray], move: IntArray) -> ChainLayer:
        """The layer as the frontier takes it, with so many micro-batches in flight and these time criteria."""
        rest, prefix, peak, middle, prefetched, pending, updated = self.memory.T
        held = rest + (in_flight - 1) * self.kept
        return ChainLayer(
            np.column_stack(list(columns)), held, prefix, peak, middle, prefetched, pending, updated, move, self.groups
        )


@dataclass(slots=True)
class Tables:
    """Tables of all kinds of layers under one shape of plan; made when asked for.

    Attributes:
        pricer: of the profile.
        shape: of the plan.
        fixed: what the user pinned.
        space: the strategies to choose from.
    """

    pricer: LayerPricer
    shape: Shape
    fixed: Fixed
    space: Space
    _known: dict[tuple[str, Sharing, bool], Table] = field(default_factory=dict)
    _moves: dict[tuple[int, int], IntArray] = field(default_factory=dict)
    _alive: list[Table] = field(default_factory=list)

    def table(self, kind: str, sharing: Sharing = ALONE, thinned: bool = True) -> Table:
        """The table of a kind of layer.

        Args:
            kind: key into the graph's kinds.
            sharing: of parameters; with any, no strategy is left out, because another layer has a say.
            thinned: whether strategies that never help are left out where nothing is shared.
        """
        key = (kind, sharing, thinned and sharing == ALONE)
        if key not in self._known:
            whole = self._whole(kind, sharing)
            self._known[key] = whole.undominated() if key[2] else whole
        return self._known[key]

    def _whole(self, kind: str, sharing: Sharing) -> Table:
        known, microbatch = self.pricer.profile.graph.kinds[kind], self.shape.microbatch
        every = self.space.strategies(kind, self.shape.stage_devices, self.fixed)
        options = [strategy for strategy in every if microbatch % strategy.batch_degree == 0]
        priced = [(s, self.pricer.price(kind, s, microbatch, self.shape.stages, sharing)) for s in options]
        offered = [(strategy, cost) for strategy, cost in priced if cost is not None]
        return _table(offered, self.shape.microbatches, known.output_bytes)

    def moves(self, left: Table, right: Table) -> IntArray:
        """Picoseconds of redistribution in one pass between every layout of one table and of the next, in the
        order in which the tables' strategies first show them."""
        key = (id(left), id(right))
        if key not in self._moves:
            self._alive += [left, right]
            self._moves[key] = self._moved(left, right)
        return self._moves[key]

    def _moved(self, left: Table, right: Table) -> IntArray:
        samples = dict(zip(left.layouts, left.strategies, strict=True))
        others = dict(zip(right.layouts, right.strategies, strict=True))
        seconds = {
            (a, b): ticks(self.pricer.redistribution(left.output_bytes, self.shape.microbatch, x, y))
            for a, x in samples.items()
            for b, y in others.items()
        }
        rows = [[seconds[a, b] for b in others] for a in samples]
        return np.array(rows, dtype=np.int64).reshape(len(samples), len(others))


def _table(offered: Sequence[tuple[Strategy, LayerCost]], microbatches: int, output_bytes: int) -> Table:
    memory = [terms(cost, 1, microbatches) for _, cost in offered]
    columns = [
        (t.rest, t.prefix, t.peak, t.middle, t.prefetched, t.pending, t.updated) for t in memory
    ]  # fmt: skip
    return Table(
        tuple(strategy for strategy, _ in offered),
        tuple(layout(strategy) for strategy, _ in offered),
        np.array([ticks(cost.forward_seconds) for _, cost in offered], dtype=np.int64),
        np.array([ticks(cost.backward_seconds) for _, cost in offered], dtype=np.int64),
        np.array([ticks(cost.step_seconds) for _, cost in offered], dtype=np.int64),
        np.array([cost.kept for _, cost in offered], dtype=np.int64),
        np.array(columns, dtype=np.int64).reshape(len(offered), 7),
        output_bytes,
    )
