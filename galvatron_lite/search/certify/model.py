"""One shape of plan as an integer programme: stage boundaries, layouts at them, and strategies all at once.

A plan is a path through nodes (layer l, stage g, layout a), one layer a step. Variables:

    w[l, g, s] in {0, 1}     layer l lies in stage g and takes strategy s
    f[l, g, a, b] >= 0       layers l-1 and l both lie in stage g, with layouts a and b
    e[l, g, v] >= 0          stage g ends before layer l, with layout v on both sides (the wire)
    T_k, U >= 0              the slowest stage in part k of a micro-batch's time, the longest step

    minimise   sum_k (ramp_k sum_g c_gk + rounds_k T_k) + U               (``cost.schedule.Form``; c: parts of a stage)
    subject to the flow of f and e through every node (l, g, a) = sum of w[l, g, s] over the strategies of that layout;
               the path starts in stage 0 and ends in the last; sum_l e[l, g, v] is the same for every g (one wire);
               T_k >= c_gk of every stage, U >= its step;
               constraints (2) and (3) of ``frontier`` for every (l, g): moments are linear in w but for the parameters
               prefetched for a layer of another stage, which e takes away again;
               layers that share parameters have one strategy, edges of a single stage one glue.

Where tensors skip layers, boundaries are given, and the flow f is one of every exchange inside a stage
(``ModelGraph.exchanges``): from each layout of the layer that makes what goes to each of the one that reads it.

Of a schedule that runs several stages on each group of devices boundaries are given, and so is which blocks have one
strategy: all, or those of two sets that only recompute differently. Time is added up by groups, and memory is that of
``cost.memory.group_memory``.

Where layer l is not in stage g, its moment is one that l's neighbours have too, or less (see ``MemoryTerms``: peak is
at least prefix and pending), so that the constraints of every (l, g) hold together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from galvatron_lite.cost.layer import ALONE, LayerPricer
from galvatron_lite.cost.memory import resting
from galvatron_lite.cost.stage import sharing_of, tied_groups, transfer_seconds
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes, chunks_in_flight
from galvatron_lite.parallelism.pipeline.schedule import group_of, stage_at
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import HostOverhead
from galvatron_lite.search.problem import Problem, is_glued
from galvatron_lite.search.tables import PREFIX, REST, TICKS, StrategyTable, glue_of

Terms = dict[int, float]
SCALE = 1e4
"""Objective and memory are scaled to this, far above solvers' absolute tolerances (1e-6)."""


@dataclass(slots=True)
class IntegerProgramme:
    """A mixed-integer programme: variables are numbers, constraints are ``expression <= bound`` or ``== bound``."""

    binary: list[bool] = field(default_factory=list)  # per variable, whether it is 0 or 1; else at least 0
    objective: dict[int, float] = field(default_factory=dict)  # to be minimised
    at_most: list[tuple[dict[int, float], float]] = field(default_factory=list)  # at_most, equal: constraints
    equal: list[tuple[dict[int, float], float]] = field(default_factory=list)

    def variable(self, binary: bool) -> int:
        """A new variable's number."""
        self.binary.append(binary)
        return len(self.binary) - 1


@dataclass(slots=True)
class _Stage:
    """Sums over one stage: seconds of a micro-batch's passes, of gradients of weights, of the step; buffers' bytes."""

    forward: Terms = field(default_factory=dict)
    backward: Terms = field(default_factory=dict)
    weight: Terms = field(default_factory=dict)
    step: Terms = field(default_factory=dict)
    buffers: Terms = field(default_factory=dict)

    @property
    def timed(self) -> list[int]:
        """Variables that a micro-batch's time depends on, in order."""
        return list(dict.fromkeys((*self.forward, *self.backward)))


@dataclass(slots=True)
class ShapeModel:
    """The programme of a shape."""

    problem: Problem  # its shape, tables and budget; what it has settled otherwise is not looked at
    unit: float  # seconds that stand for one of the objective
    cuts: Sequence[int] | None = None  # stage boundaries, where they are given; None: chosen
    programme: IntegerProgramme = field(default_factory=IntegerProgramme)  # what a solver takes
    # per (layer, stage) its table and the variable of each of its rows
    layers: dict[tuple[int, int], tuple[StrategyTable, list[int]]] = field(default_factory=dict)
    offset: float = 0.0  # seconds of a step that no variable stands for
    _edges: dict[tuple[int, int, Layout, Layout], int] = field(default_factory=dict)
    _flows: dict[tuple[int, int, Layout, Layout], int] = field(default_factory=dict)
    _stages: list[_Stage] = field(default_factory=list)

    def __post_init__(self) -> None:
        for place in range(self.count):
            for stage in self._stages_of(place):
                table = self._table(place, stage)
                self.layers[place, stage] = (table, [self.programme.variable(binary=True) for _ in table.strategies])
        self._stages = [_Stage() for _ in range(self.chunks)]
        self._add_flows()
        self._add_agreements()
        self._add_times()
        self._add_objective()
        for group in range(self.problem.shape.stages):
            self._add_memory(group)

    @property
    def chunks(self) -> int:
        """Stages, all those counted that a group of devices runs."""
        return self.problem.shape.stages * self.problem.shape.virtual

    def _group(self, stage: int) -> int:
        return group_of(self.problem.shape.schedule, self.problem.shape.stages, stage)

    @property
    def count(self) -> int:
        """Layers of the model."""
        return len(self.problem.graph.layers)

    def path(self, values: Sequence[float]) -> tuple[list[int], list[Strategy]]:
        """Layers of each stage and the strategy of every layer, from the greatest variable of each layer.

        Solvers return 0.9999999 for 1.
        """
        sizes, strategies = [0] * self.chunks, []
        for place in range(self.count):
            options = [
                (values[number], stage, strategy)
                for stage in self._stages_of(place)
                for number, strategy in zip(
                    self.layers[place, stage][1], self.layers[place, stage][0].strategies, strict=True
                )
            ]
            _, stage, strategy = max(options, key=lambda option: option[0])
            sizes[stage] += 1
            strategies.append(strategy)
        return sizes, strategies

    def _stages_of(self, place: int) -> Iterator[int]:
        """The stages that a layer may lie in: every stage has a layer at least."""
        for stage in range(self.chunks):
            if self.cuts is None:
                within = stage <= place <= self.count - (self.chunks - stage)
            else:
                within = self.cuts[stage] <= place < self.cuts[stage + 1]
            if within:
                yield stage

    def _table(self, place: int, stage: int) -> StrategyTable:
        """The figures of a layer in a stage; they must not depend on the boundaries that are chosen (``choosable``)."""
        layer = self.problem.graph.layers[place]
        inside = range(place, place + 1) if self.problem.shape.stages > 1 else range(self.count)
        if self.cuts is not None:
            inside = next(range(*ends) for ends in pairwise(self.cuts) if ends[0] <= place < ends[1])
        sharing = sharing_of(self.problem.graph, inside).get(place, ALONE)
        tied = any(place in group for group in tied_groups(self.problem.graph))
        tables = self.problem.tables[stage]
        return (tables.unpruned if tied else tables.table)(layer.kind, layer.name, sharing)

    def _pricer(self, stage: int) -> LayerPricer:
        return self.problem.tables[self._group(stage)].pricer

    def _add_flows(self) -> None:
        if self.problem.graph.tensors:
            self._add_net()
            return
        programme, rows = self.programme, self._by_layout
        for place, stage in self.layers:
            for a, held in rows(place, stage).items():
                leaving = dict.fromkeys(held, -1.0)
                for b in rows(place + 1, stage):
                    leaving[self._flow(place + 1, stage, a, b)] = 1.0
                for b in self._across(a, rows(place + 1, stage + 1)):
                    leaving[self._edge(place + 1, stage, a, b)] = 1.0
                if place + 1 < self.count:
                    programme.equal.append((leaving, 0.0))
            for b, held in rows(place, stage).items():
                coming = dict.fromkeys(held, -1.0)
                for a in rows(place - 1, stage):
                    coming[self._flow(place, stage, a, b)] = 1.0
                for a in self._across(b, rows(place - 1, stage - 1)):
                    coming[self._edge(place, stage - 1, a, b)] = 1.0
                if place:
                    programme.equal.append((coming, 0.0))
        programme.equal.append((dict.fromkeys(self.layers[0, 0][1], 1.0), 1.0))

    def _add_net(self) -> None:
        """The same where tensors skip layers: boundaries are given, and every exchange inside a stage has its flow."""
        programme, cuts = self.programme, self.cuts or (0, self.count)
        for _, choices in self.layers.values():
            programme.equal.append((dict.fromkeys(choices, 1.0), 1.0))
        for stage, ends in enumerate(pairwise(cuts)):
            for left, right, size in self.problem.graph.exchanges(range(*ends)):
                self._add_exchange(stage, left, right, size)
        for stage, cut in enumerate(cuts[1:-1]):
            before, after = self._by_layout(cut - 1, stage), self._by_layout(cut, stage + 1)
            for a, held in before.items():
                through = {self._edge(cut, stage, a, b): -1.0 for b in self._across(a, after)}
                programme.equal.append((dict.fromkeys(held, 1.0) | through, 0.0))
            for b, held in after.items():
                through = {self._edge(cut, stage, a, b): -1.0 for a in self._across(b, before)}
                programme.equal.append((dict.fromkeys(held, 1.0) | through, 0.0))

    def _add_exchange(self, stage: int, left: int, right: int, size: int) -> None:
        """What goes between two layers of a stage, from each layout to each."""
        rows = self._by_layout(left, stage), self._by_layout(right, stage)
        flow = {(a, b): self.programme.variable(binary=False) for a in rows[0] for b in rows[1]}
        for (a, b), number in flow.items():
            seconds = self._moved(size, stage, a, b)
            for terms in (self._stages[stage].forward, self._stages[stage].backward):
                terms[number] = seconds
        for side, row in enumerate(rows):
            for layout, held in row.items():
                through = {number: 1.0 for ends, number in flow.items() if ends[side] == layout}
                self.programme.equal.append((through | dict.fromkeys(held, -1.0), 0.0))

    def _by_layout(self, place: int, stage: int) -> dict[Layout, list[int]]:
        result: dict[Layout, list[int]] = {}
        if (place, stage) in self.layers:
            table, choices = self.layers[place, stage]
            for number, layout in zip(choices, table.layouts, strict=True):
                result.setdefault(layout, []).append(number)
        return result

    def _flow(self, place: int, stage: int, a: Layout, b: Layout) -> int:
        key = (place, stage, a, b)
        if key not in self._flows:
            self._flows[key] = self.programme.variable(binary=False)
            seconds = self._moved(self.problem.graph.crossing(place), stage, a, b)
            for terms in (self._stages[stage].forward, self._stages[stage].backward):
                terms[self._flows[key]] = seconds
        return self._flows[key]

    def _moved(self, size: int, stage: int, a: Layout, b: Layout) -> float:
        return self._pricer(stage).redistribution(
            size, self.problem.shape.microbatch, strategy_with(a), strategy_with(b)
        )

    def _across(self, layout: Layout, others: Iterable[Layout]) -> list[Layout]:
        """Layouts that the other side of a boundary may have: the same."""
        return [layout] if layout in others else []

    def _edge(self, place: int, stage: int, wire: Layout, right: Layout) -> int:
        """The boundary before a layer: both sides pay for what they send, and hold its buffers; its layout behind it is
        ``right``."""
        key = (place, stage, wire, right)
        if key not in self._edges:
            number = self._edges[key] = self.programme.variable(binary=False)
            sender = strategy_with(wire)
            shape, pricer = self.problem.shape, self.problem.pricer
            groups = (self._group(stage), self._group(stage + 1))
            apart = groups[0] != groups[1]
            size = boundary_bytes(self.problem.graph.crossing(place), shape.microbatch, sender) if apart else 0
            seconds = transfer_seconds(pricer, size, sender, shape, groups) if apart else 0.0
            moved = self._moved(self.problem.graph.crossing(place), stage + 1, wire, right)
            before, behind = (self._host(side).pipeline for side in (stage, stage + 1))
            self._stages[stage].forward[number] = seconds + before
            self._stages[stage].backward[number] = before
            self._stages[stage + 1].backward[number] = seconds + behind + moved
            self._stages[stage + 1].forward[number] = behind + moved
            counted, held = not pricer.profile.unbuffered, (shape.microbatches, shape.schedule)
            self._stages[stage].buffers[number] = buffer_bytes(0, size, *held, counted=counted)
            received = buffer_bytes(size, 0, *held, counted=counted)
            self._stages[stage + 1].buffers[number] = received + self._copies(stage + 1, sender)
        return self._edges[key]

    def _copies(self, stage: int, sender: Strategy) -> int:
        """Bytes that a stage keeps of tensors made before it; boundaries are given where there are such tensors."""
        if self.cuts is None:
            return 0
        problem, inside = self.problem, range(self.cuts[stage], self.cuts[stage + 1])
        return problem.held(stage) * boundary_bytes(problem.graph.borrowed(inside), problem.shape.microbatch, sender)

    def _add_agreements(self) -> None:
        """One wire; one strategy for layers that share parameters; one glue."""
        self._add_wire()
        graph, stages = self.problem.graph, self.problem.shape.stages
        for group in tied_groups(graph):
            self._agree(group, lambda table, row: table.strategies[row])
        edges = [place for place, layer in enumerate(graph.layers) if layer.role is not Role.BLOCK]
        if stages == 1 and is_glued(graph):
            self._agree(edges, lambda table, row: glue_of(table.layouts[row]))

    def _add_wire(self) -> None:
        for first, second in pairwise(range(self.chunks - 1)):
            for wire in sorted({key[2] for key in self._edges}):
                every = {
                    n: 1.0 for (_, stage, edge_wire, _), n in self._edges.items() if (stage, edge_wire) == (first, wire)
                }
                every |= {
                    n: -1.0
                    for (_, stage, edge_wire, _), n in self._edges.items()
                    if (stage, edge_wire) == (second, wire)
                }
                self.programme.equal.append((every, 0.0))

    def _agree(self, places: Iterable[int], what: object) -> None:
        """Layers that must have something of their strategies in common."""
        sums: list[dict[object, Terms]] = []
        for place in places:
            terms: dict[object, Terms] = {}
            for stage in self._stages_of(place):
                table, numbers = self.layers[place, stage]
                for row, number in enumerate(numbers):
                    terms.setdefault(what(table, row), {})[number] = 1.0  # type: ignore[operator]
            sums.append(terms)
        for left, right in pairwise(sums):
            for value in dict.fromkeys((*left, *right)):
                minus = dict.fromkeys(right.get(value, {}), -1.0)
                self.programme.equal.append((left.get(value, {}) | minus, 0.0))

    def _host(self, stage: int) -> HostOverhead:
        return self._pricer(stage).profile.overhead

    def _add_times(self) -> None:
        for (_, stage), (table, choices) in self.layers.items():
            sums, figures = self._stages[stage], table.figures
            for row, number in enumerate(choices):
                sums.forward[number] = float(figures.forward[row]) / TICKS
                sums.backward[number] = float(figures.backward[row]) / TICKS
                sums.weight[number] = float(figures.weight[row]) / TICKS
                sums.step[number] = float(figures.step[row]) / TICKS

    def _add_objective(self) -> None:
        """What stages add to the ramp, and the slowest of each part; ``offset`` is what no variable stands for."""
        programme, form = self.programme, self.problem.form
        tops = [programme.variable(binary=False) for _ in (*form.ramp, 1)]
        programme.objective.update(dict(zip(tops, (*form.rounds, 1.0), strict=True)))
        for group in range(self.problem.shape.stages):
            stages = [stage for stage in range(self.chunks) if self._group(stage) == group]
            half = sum(self._host(stage).microbatch for stage in stages) / 2
            constants = form.parts(half, half, 0.0)
            for part, ramp, top, constant in zip(range(len(form.ramp)), form.ramp, tops, constants, strict=False):
                columns = [{n: self._parts(sums, n)[part] / self.unit for n in sums.timed} for sums in self._of(stages)]
                column = added(*((column, 1.0) for column in columns))
                for number, value in column.items():
                    programme.objective[number] = programme.objective.get(number, 0.0) + ramp * value
                programme.at_most.append((column | {top: -1.0}, -constant / self.unit))
                self.offset += ramp * constant
            below = added(*((sums.step, 1 / self.unit) for sums in self._of(stages)))
            programme.at_most.append((below | {tops[-1]: -1.0}, 0.0))

    def _of(self, stages: Iterable[int]) -> list[_Stage]:
        return [self._stages[stage] for stage in stages]

    def _parts(self, sums: _Stage, number: int) -> tuple[float, ...]:
        form = self.problem.form
        passes = (sums.forward.get(number, 0.0), sums.backward.get(number, 0.0))
        return form.parts(*passes, form.freed * sums.weight.get(number, 0.0))

    def _add_memory(self, group: int) -> None:
        """Every moment of a group of devices, which runs one stage, within its room."""
        problem, buffers = self.problem, self._stages[group].buffers
        room = problem.budgets[group] - self._pricer(group).profile.cluster.device.context
        places = [place for place, stage_group in self.layers if stage_group == group]
        self._within([buffers, *(self._column(place, group, 6) for place in places)], room)
        self._add_moments(group, problem.held(group), [buffers], room, filled=problem.filled(group))

    def _add_moments(
        self, stage: int, held: int, beside_it: Sequence[Terms], room: int, *, filled: bool = False
    ) -> None:
        """Every moment at which a stage computes, with so many micro-batches in flight and other bytes beside it."""
        places = [place for place, choices in self.layers if choices == stage]
        rest: Terms = {}
        for place in places:
            table, choices = self.layers[place, stage]
            rest |= row_of(choices, table.held(held, filled)[:, REST])
        start = added((rest, 1.0), *((terms, 1.0) for terms in beside_it))
        for place in places:
            table, choices = self.layers[place, stage]
            beside = self._prefetched(place, stage)
            peak = table.figures.memory[:, 2:4].max(axis=1)
            self._within([start, beside, row_of(choices, peak)], room)
            if (place + 1, stage) in self.layers:
                middle, pending = self._column(place, stage, 3), self._column(place + 1, stage, 5)
                self._within([start, beside, middle, pending], room)
            start = added((start, 1.0), (row_of(choices, table.held(held, filled)[:, PREFIX]), 1.0))

    def _column(self, place: int, stage: int, column: int) -> Terms:
        table, choices = self.layers[place, stage]
        return row_of(choices, table.figures.memory[:, column])

    def _prefetched(self, place: int, stage: int) -> Terms:
        """What the layer before has gathered ahead, if it lies in the same stage."""
        if (place - 1, stage) not in self.layers:
            return {}
        table, choices = self.layers[place - 1, stage]
        result = row_of(choices, table.figures.memory[:, 4])
        for layout in dict.fromkeys(table.layouts):
            number = self._edges.get((place, stage, layout, layout))
            if number is not None:
                rows = [row for row, other in enumerate(table.layouts) if other == layout]
                result[number] = -float(table.figures.memory[rows, 4].max())
        return result

    def _within(self, terms: Sequence[Terms], room: int) -> None:
        """In ten-thousandths of the room: the solver's tolerance is then about a ten-billionth of it."""
        unit = max(room, 1) / SCALE
        total = added(*((term, 1.0) for term in terms))
        self.programme.at_most.append(({n: v / unit for n, v in total.items() if v}, room / unit))


def choosable(problem: Problem) -> bool:
    """Whether what layers and stages cost does not depend on boundaries: no two layers that share parameters may meet
    in a stage, and no tensor skip layers: what goes straight to its reader is what lies in the same stage."""
    far = (0, len(problem.graph.layers) - 1)
    apart = all(group == far for group in tied_groups(problem.graph))
    return problem.shape.stages == 1 or (not problem.graph.tensors and apart)


def row_of(columns: Sequence[int], values: Iterable[float]) -> Terms:
    """A value for each of a layer's variables."""
    return {number: float(value) for number, value in zip(columns, values, strict=True)}


def added(*terms: tuple[Terms, float]) -> Terms:
    """Sums, each times a factor, as one."""
    total: Terms = {}
    for term, factor in terms:
        for number, value in term.items():
            total[number] = total.get(number, 0.0) + factor * value
    return total


def first_blocks(graph: ModelGraph, strategies: Sequence[Strategy]) -> frozenset[int]:
    """The blocks of a plan that have the strategy of the first."""
    blocks = [place for place, layer in enumerate(graph.layers) if layer.role is Role.BLOCK]
    return frozenset(place for place in blocks if strategies[place] == strategies[blocks[0]])


@dataclass(slots=True)
class UniformModel(ShapeModel):
    """``ShapeModel`` of a schedule with virtual stages; ``cuts`` must be given."""

    first: frozenset[int] = frozenset()  # blocks that have a strategy of their own

    def _places(self, group: int) -> list[int]:
        return [place for place, stage in self.layers_in_order if self._group(stage) == group]

    @property
    def layers_in_order(self) -> list[tuple[int, int]]:
        """(layer, its stage)."""
        return [(place, next(self._stages_of(place))) for place in range(self.count)]

    def _table(self, place: int, stage: int) -> StrategyTable:
        layer = self.problem.graph.layers[place]
        sharing = sharing_of(self.problem.graph, self._places(self._group(stage))).get(place, ALONE)
        return self.problem.tables[self._group(stage)].unpruned(layer.kind, layer.name, sharing)

    def _across(self, layout: Layout, others: Iterable[Layout]) -> list[Layout]:  # noqa: ARG002
        """Any: what arrives is redistributed."""
        return list(others)

    def _add_wire(self) -> None:
        """None is asked for."""

    def _add_agreements(self) -> None:
        """As for every shape; and one strategy for all layers of a role, or of two sets of them."""
        super(UniformModel, self)._add_agreements()
        layers = self.problem.graph.layers
        for role in Role:
            places = [place for place, layer in enumerate(layers) if layer.role is role]
            self._agree(places, lambda table, row: table.strategies[row].split)
            for inside in (True, False):
                same = [place for place in places if (place in self.first) is inside]
                self._agree(same, lambda table, row: table.strategies[row])

    def _add_memory(self, group: int) -> None:
        shape = self.problem.shape
        stages = [stage_at(shape.schedule, shape.stages, group, chunk) for chunk in range(shape.virtual)]
        held = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
        buffers = added(*((self._stages[stage].buffers, 1.0) for stage in stages))
        room = self.problem.budgets[group] - self._pricer(stages[0]).profile.cluster.device.context
        self._within([buffers, *(self._column(place, stage, 6) for place, stage in self._in(stages))], room)
        for variable, counts in held:
            resting = [self._resting(stage, counts[at]) for at, stage in enumerate(stages) if at != variable]
            self._add_moments(stages[variable], max(counts[variable], 1), [buffers, *resting], room)

    def _in(self, stages: list[int]) -> list[tuple[int, int]]:
        return [(place, stage) for place, stage in self.layers_in_order if stage in stages]

    def _resting(self, stage: int, count: int) -> Terms:
        total: Terms = {}
        shape = self.problem.shape
        for place, _ in self._in([stage]):
            table, numbers = self.layers[place, stage]
            layer = self.problem.graph.layers[place]
            sharing = sharing_of(self.problem.graph, self._places(self._group(stage))).get(place, ALONE)
            cost = self._pricer(stage).price_many(layer.kind, table.strategies, shape.microbatch, shape.stages, sharing)
            bytes_ = resting(cost, shape.microbatches) + count * cost.kept
            total |= row_of(numbers, np.asarray(bytes_ + (cost.gathered if count else 0)))
        return total
