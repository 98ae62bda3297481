"""One shape of plan as chains: which strategies each layer of a stage may take, and what they cost.

Besides legality, the space is bounded by these rules, which the runtime relies on:

1. Layers that share parameters have the same strategy.
2. With a single stage, the layers before and after the blocks have equal batch, context and tensor degrees (the glue).
3. With several stages, all layers next to a stage boundary have one layout, the same at every boundary (the wire).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.cost.layer import Sharing
from galvatron_lite.cost.sharing import sharing_of
from galvatron_lite.cost.stage import Shape, transfer_seconds
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes, in_flight
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.chain import Chain
from galvatron_lite.search.frontier import Front, Path, pareto_paths
from galvatron_lite.search.tables import Glue, Layout, Table, Tables, glue_of, ticks

IntArray = NDArray[np.int64]
_MOST_CANDIDATES, _LEAST_LABELS = 200_000, 128


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen once for all layers, besides the shape.

    Attributes:
        glue: degrees of the layers before and after the blocks; None: not bound.
        wire: layout at stage boundaries; None without boundaries.
        tied: strategy by place of layers that share parameters.
    """

    glue: Glue | None
    wire: Layout | None
    tied: tuple[tuple[int, Strategy], ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A way to run one stage.

    Attributes:
        bottleneck: picoseconds a micro-batch, in as many parts as the schedule tells apart.
        step: picoseconds once a step.
        strategies: of its layers.
    """

    bottleneck: tuple[int, ...]
    step: int
    strategies: tuple[Strategy, ...]


@dataclass(slots=True)
class Problem:
    """The choice of strategies under one shape of plan and one ``Choice``.

    Attributes:
        graph: the model.
        shape: of the plan.
        tables: figures under that shape.
        choice: what is settled.
        budget: bytes a device.
        work: labels looked at so far.
    """

    graph: ModelGraph
    shape: Shape
    tables: Tables
    choice: Choice
    budget: int
    work: int = 0
    _tied: Mapping[int, Strategy] = field(init=False)
    _filtered: dict[tuple[int, object], Table] = field(default_factory=dict)
    _plans: dict[tuple[object, ...], tuple[list[StagePlan], float]] = field(default_factory=dict)
    _sharings: dict[tuple[int, int], dict[int, Sharing]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Indexes the tied layers."""
        self._tied = dict(self.choice.tied)

    @property
    def overlapped(self) -> bool:
        """Whether forward and backward passes of a stage take turns (one bottleneck) or not (two)."""
        return self.shape.schedule is Schedule.ONE_F_ONE_B

    @property
    def weights(self) -> tuple[int, ...]:
        """What turns a stage's figures into the time it needs alone: (micro-batch parts..., step)."""
        return (self.shape.microbatches,) * (1 if self.overlapped else 2) + (1,)

    def layer_table(self, place: int, inside: range) -> Table:
        """The strategies one layer of a stage may take, and their figures."""
        layer = self.graph.layers[place]
        whole = self.tables.table(layer.kind, self._sharing(inside).get(place, Sharing()))
        ends = (inside.start > 0 and place == inside.start) or (inside.stop < self._end and place == inside.stop - 1)
        wire = self.choice.wire if ends else None
        glue = self.choice.glue if layer.role is not Role.BLOCK else None
        tied = self._tied.get(place)
        if wire is None and glue is None and tied is None:
            return whole
        key = (id(whole), (wire, glue, tied))
        if key not in self._filtered:
            rows = [row for row in range(len(whole.strategies)) if self._may(whole, row, wire, glue, tied)]
            self._filtered[key] = whole.at(np.array(rows, dtype=np.int64))
        return self._filtered[key]

    @staticmethod
    def _may(table: Table, row: int, wire: Layout | None, glue: Glue | None, tied: Strategy | None) -> bool:
        own = table.layouts[row]
        fits = (wire is None or own == wire) and (glue is None or glue_of(own) == glue)
        return fits and (tied is None or table.strategies[row] == tied)

    @property
    def _end(self) -> int:
        return len(self.graph.layers)

    def _sharing(self, inside: range) -> dict[int, Sharing]:
        key = (inside.start, inside.stop)
        if key not in self._sharings:
            self._sharings[key] = sharing_of(self.graph, inside) if self.graph.ties else {}
        return self._sharings[key]

    def fixed_costs(self, stage: int, inside: range) -> tuple[int, int, int]:
        """What a stage costs whatever its strategies: ticks of forward and backward sends, bytes throughout."""
        pricer, ends = self.tables.pricer, (inside.start > 0, inside.stop < self._end)
        left, right = (
            self._boundary(side, cut) if there else (0, 0.0)
            for side, cut, there in zip((stage, stage + 1), _cuts(inside), ends, strict=True)
        )
        overhead = pricer.profile.overhead
        host = sum(ends) * overhead.pipeline + overhead.microbatch / 2
        context = pricer.profile.cluster.device.context
        return ticks(right[1] + host), ticks(left[1] + host), buffer_bytes(left[0], right[0]) + context

    def _boundary(self, stage: int, cut: int) -> tuple[int, float]:
        data, context, tensor, shared = self.choice.wire or (1, 1, self.shape.stage_devices, True)
        sender = Strategy(data=data, context=context, tensor=tensor, sequence_parallel=shared)
        output = self.graph.kind_of(self.graph.layers[cut - 1]).output_bytes
        size = boundary_bytes(output, self.shape.microbatch, sender)
        return size, transfer_seconds(self.tables.pricer, size, sender, self.shape, (stage - 1, stage))

    def held(self, stage: int) -> int:
        """Micro-batches in flight in a stage."""
        return in_flight(self.shape.schedule, self.shape.stages, stage, self.shape.microbatches)

    def chain(self, stage: int, inside: range, scalar: bool) -> tuple[Chain, list[Table]] | None:
        """The chain of one stage; None where some layer has no strategy left.

        Args:
            stage: its number.
            inside: places of its layers.
            scalar: one time criterion (what the stage needs alone) instead of one a bottleneck and the step's.
        """
        tables = [self.layer_table(place, inside) for place in inside]
        if any(not table.strategies for table in tables):
            return None
        held, count = self.held(stage), self.shape.microbatches
        layers = []
        for place, table in enumerate(tables):
            move = self.tables.moves(tables[max(place - 1, 0)], table)
            layers.append(table.chain_layer(held, self._columns(table, scalar), move))
        moves = [2 * count] if scalar else [2, 0] if self.overlapped else [1, 1, 0]
        weights = (1,) if scalar else self.weights
        room = self.budget - self.fixed_costs(stage, inside)[2]
        return Chain(tuple(layers), np.array(moves), np.array(weights), room), tables

    def _columns(self, table: Table, scalar: bool) -> Sequence[IntArray]:
        both = table.forward + table.backward
        if scalar:
            return (self.shape.microbatches * both + table.step,)
        return (both, table.step) if self.overlapped else (table.forward, table.backward, table.step)

    def key(self, stage: int, inside: range) -> tuple[object, ...]:
        """Equal for stages that pose the same problem."""
        tables = tuple(id(self.layer_table(place, inside)) for place in inside)
        return (self.held(stage), tables, self.fixed_costs(stage, inside))

    def plans(self, stage: int, inside: range, cap: int) -> tuple[list[StagePlan], float]:
        """Every Pareto-best way to run a stage that fits the budget and alone takes at most ``cap`` picoseconds, and a
        time alone that no way left out beats (infinite where none was).

        Answers are remembered for the first cap asked for; later caps must not be greater.
        """
        key = self.key(stage, inside)
        if key not in self._plans:
            built = self.chain(stage, inside, scalar=False)
            sends = self.fixed_costs(stage, inside)[:2]
            alone = cap - self.shape.microbatches * sum(sends)
            found = Front(()) if built is None else pareto_paths(built[0], alone, widest(built[0]))
            tables = [] if built is None else built[1]
            self.work += found.work
            options = [self._stage_plan(path, tables, sends) for path in found.paths]
            self._plans[key] = (options, found.dropped + self.shape.microbatches * sum(sends))
        return self._plans[key]

    def quickest(
        self, stage: int, inside: range, cap: int | None, beam: int | None = None
    ) -> tuple[StagePlan | None, float]:
        """The way to run a stage that takes least time alone, and a time that no other way beats.

        None where none fits or none is within the cap. With a beam a good way, soon, and None where none is met.
        """
        built = self.chain(stage, inside, scalar=True)
        if built is None:
            return None, np.inf
        sends = self.fixed_costs(stage, inside)[:2]
        fixed = self.shape.microbatches * sum(sends)
        front = pareto_paths(built[0], None if cap is None else cap - fixed, beam or widest(built[0]))
        self.work += front.work
        if not front.paths:
            return None, front.dropped + fixed
        best, tables = front.paths[0], built[1]
        forward, backward, step = self._times(best.choices, tables)
        time = (forward + backward, step) if self.overlapped else (forward, backward, step)
        least = min(front.dropped, best.time[0]) + fixed
        return self._stage_plan(Path(time, best.choices), tables, sends), least

    def _times(self, choices: Sequence[int], tables: Sequence[Table]) -> tuple[int, int, int]:
        groups = [int(table.groups[choice]) for table, choice in zip(tables, choices, strict=True)]
        moving = sum(
            int(self.tables.moves(tables[place - 1], tables[place])[groups[place - 1], groups[place]])
            for place in range(1, len(tables))
        )
        pairs = list(zip(choices, tables, strict=True))
        forward = sum(int(table.forward[choice]) for choice, table in pairs)
        backward = sum(int(table.backward[choice]) for choice, table in pairs)
        return forward + moving, backward + moving, sum(int(table.step[choice]) for choice, table in pairs)

    def _stage_plan(self, path: Path, tables: Sequence[Table], sends: tuple[int, int]) -> StagePlan:
        own = path.time[:-1]
        bottleneck = (own[0] + sum(sends),) if self.overlapped else (own[0] + sends[0], own[1] + sends[1])
        strategies = tuple(table.strategies[choice] for table, choice in zip(tables, path.choices, strict=True))
        return StagePlan(bottleneck, path.time[-1], strategies)


def widest(chain: Chain) -> int:
    """How many labels of a layer are kept at most: what one core works through in some milliseconds a layer."""
    return max(_LEAST_LABELS, _MOST_CANDIDATES // max(len(layer.rest) for layer in chain.layers))


def _cuts(inside: range) -> tuple[int, int]:
    return inside.start, inside.stop
