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
               constraints (2) and (3) of ``chain`` for every (l, g): moments are linear in w but for the parameters
               prefetched for a layer of another stage, which e takes away again;
               layers that share parameters have one strategy, edges of a single stage one glue.

Where tensors skip layers, boundaries are fixed, and the flow f is one of every exchange inside a stage
(``ModelGraph.exchanges``): from each layout of the layer that makes what goes to each of the one that reads it.

Of a schedule that runs several stages on each group of devices boundaries are fixed, and so is which blocks have one
strategy: all, or those of two sets that only recompute differently. Time is added up by groups, and memory is that of
``cost.memory.group_memory``.

Where layer l is not in stage g, its moment is one that l's neighbours have too, or less (see ``MemoryTerms``: peak is
at least prefix and pending), so that the constraints of every (l, g) hold together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from galvatron_lite.cost.layer import ALONE, LayerPricer, ParameterSharing
from galvatron_lite.cost.memory import resting
from galvatron_lite.cost.stage import sharing_of, tied_groups, transfer_seconds
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes, chunks_in_flight
from galvatron_lite.parallelism.pipeline.schedule import group_of, stage_at
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.chain.chain import MEMORY
from galvatron_lite.search.problem import Problem, is_glued
from galvatron_lite.search.tables import PREFIX, REST, TICKS, StrategyTable, glue_of

Terms = dict[int, float]
"""A linear expression: a factor by number of the variable."""
SCALE = 1e4
"""Objective and memory are scaled to this, far above solvers' absolute tolerances (1e-6)."""


@dataclass(slots=True)
class IntegerProgramme:
    """A mixed-integer programme: variables are numbers, constraints ``expression <= bound`` or ``== bound``."""

    binary: list[bool] = field(default_factory=list)  # by variable: whether it is 0 or 1; else it is at least 0
    objective: Terms = field(default_factory=dict)  # to be minimised
    at_most: list[tuple[Terms, float]] = field(default_factory=list)
    equal: list[tuple[Terms, float]] = field(default_factory=list)

    def variable(self, binary: bool) -> int:
        """Add a variable; its number."""
        self.binary.append(binary)
        return len(self.binary) - 1


@dataclass(slots=True)
class _Stage:
    """What one stage takes: seconds of a micro-batch's passes, of gradients of weights and of the step; bytes of
    buffers."""

    forward: Terms = field(default_factory=dict)
    backward: Terms = field(default_factory=dict)
    weight: Terms = field(default_factory=dict)
    step: Terms = field(default_factory=dict)
    buffers: Terms = field(default_factory=dict)


@dataclass(slots=True)
class ShapeModel:
    """The programme of a shape."""

    problem: Problem  # its shape, tables and budget; its ``choice`` is made anew
    unit: float  # seconds that stand for one of the objective
    cuts: Sequence[int] | None = None  # stage boundaries (0, ..., L), where they are fixed; None: chosen
    programme: IntegerProgramme = field(default_factory=IntegerProgramme)
    # by layer and stage: the layer's table there, and the variable of each of its rows
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
        if self.problem.graph.tensors:
            self._add_exchanges()
        else:
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
            options = []
            for stage in self._stages_of(place):
                table, variables = self.layers[place, stage]
                rows = zip(variables, table.strategies, strict=True)
                options += [(values[variable], stage, strategy) for variable, strategy in rows]
            _, stage, strategy = max(options, key=lambda option: option[0])
            sizes[stage] += 1
            strategies.append(strategy)
        return sizes, strategies

    def _group(self, stage: int) -> int:
        return group_of(self.problem.shape.schedule, self.problem.shape.stages, stage)

    def _pricer(self, stage: int) -> LayerPricer:
        return self.problem.tables[self._group(stage)].pricer

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

    def _by_layout(self, place: int, stage: int) -> dict[Layout, list[int]]:
        """The variables of a layer in a stage by layout; empty where it cannot lie there."""
        variables: dict[Layout, list[int]] = {}
        if (place, stage) in self.layers:
            table, numbers = self.layers[place, stage]
            for number, layout in zip(numbers, table.layouts, strict=True):
                variables.setdefault(layout, []).append(number)
        return variables

    def _add_flows(self) -> None:
        programme, by_layout = self.programme, self._by_layout
        for place, stage in self.layers:
            for a, numbers in by_layout(place, stage).items() if place + 1 < self.count else ():
                leaving = dict.fromkeys(numbers, -1.0)
                for b in by_layout(place + 1, stage):
                    leaving[self._flow(place + 1, stage, a, b)] = 1.0
                for b in self._across(a, by_layout(place + 1, stage + 1)):
                    leaving[self._edge(place + 1, stage, a, b)] = 1.0
                programme.equal.append((leaving, 0.0))
            for b, numbers in by_layout(place, stage).items() if place else ():
                coming = dict.fromkeys(numbers, -1.0)
                for a in by_layout(place - 1, stage):
                    coming[self._flow(place, stage, a, b)] = 1.0
                for a in self._across(b, by_layout(place - 1, stage - 1)):
                    coming[self._edge(place, stage - 1, a, b)] = 1.0
                programme.equal.append((coming, 0.0))
        programme.equal.append((dict.fromkeys(self.layers[0, 0][1], 1.0), 1.0))

    def _add_exchanges(self) -> None:
        """``_add_flows`` where tensors skip layers: boundaries are fixed, and every exchange inside a stage has its
        flow."""
        programme, cuts = self.programme, self.cuts or (0, self.count)
        for _, numbers in self.layers.values():
            programme.equal.append((dict.fromkeys(numbers, 1.0), 1.0))
        for stage, ends in enumerate(pairwise(cuts)):
            for left, right, size in self.problem.graph.exchanges(range(*ends)):
                self._add_exchange(stage, left, right, size)
        for stage, cut in enumerate(cuts[1:-1]):
            before, after = self._by_layout(cut - 1, stage), self._by_layout(cut, stage + 1)
            for a, numbers in before.items():
                through = {self._edge(cut, stage, a, b): -1.0 for b in self._across(a, after)}
                programme.equal.append((dict.fromkeys(numbers, 1.0) | through, 0.0))
            for b, numbers in after.items():
                through = {self._edge(cut, stage, a, b): -1.0 for a in self._across(b, before)}
                programme.equal.append((dict.fromkeys(numbers, 1.0) | through, 0.0))

    def _add_exchange(self, stage: int, left: int, right: int, size: int) -> None:
        """What goes between two layers of a stage, from each layout to each."""
        ends = self._by_layout(left, stage), self._by_layout(right, stage)
        flow = {(a, b): self._moving(stage, size, a, b) for a in ends[0] for b in ends[1]}
        for side, by_layout in enumerate(ends):
            for layout, numbers in by_layout.items():
                through = {number: 1.0 for layouts, number in flow.items() if layouts[side] == layout}
                self.programme.equal.append((through | dict.fromkeys(numbers, -1.0), 0.0))

    def _flow(self, place: int, stage: int, a: Layout, b: Layout) -> int:
        key = (place, stage, a, b)
        if key not in self._flows:
            self._flows[key] = self._moving(stage, self.problem.graph.crossing(place), a, b)
        return self._flows[key]

    def _moving(self, stage: int, size: int, a: Layout, b: Layout) -> int:
        """A variable that stands for redistribution in both passes of a stage."""
        number, seconds = self.programme.variable(binary=False), self._moved(size, stage, a, b)
        self._stages[stage].forward[number] = self._stages[stage].backward[number] = seconds
        return number

    def _moved(self, size: int, stage: int, a: Layout, b: Layout) -> float:
        return self._pricer(stage).redistribution(
            size, self.problem.shape.microbatch, strategy_with(a), strategy_with(b)
        )

    def _across(self, layout: Layout, others: Iterable[Layout]) -> list[Layout]:
        """Layouts that the other side of a boundary may have: the same."""
        return [layout] if layout in others else []

    def _edge(self, place: int, stage: int, wire: Layout, right: Layout) -> int:
        """The boundary between a stage and a layer that begins the next one: both sides pay for what they send, and
        hold its buffers; its layout behind it is ``right``."""
        key = (place, stage, wire, right)
        if key in self._edges:
            return self._edges[key]
        number = self._edges[key] = self.programme.variable(binary=False)
        sender, left_stage, right_stage = strategy_with(wire), self._stages[stage], self._stages[stage + 1]
        shape, pricer, crossing = self.problem.shape, self.problem.pricer, self.problem.graph.crossing(place)
        groups = (self._group(stage), self._group(stage + 1))
        apart = groups[0] != groups[1]
        size = boundary_bytes(crossing, shape.microbatch, sender) if apart else 0
        seconds = transfer_seconds(pricer, size, sender, shape, groups) if apart else 0.0
        moved = self._moved(crossing, stage + 1, wire, right)
        before, behind = (self._pricer(side).profile.overhead.pipeline for side in (stage, stage + 1))
        left_stage.forward[number] = seconds + before
        left_stage.backward[number] = before
        right_stage.backward[number] = seconds + behind + moved
        right_stage.forward[number] = behind + moved
        counted, messages = not pricer.profile.unbuffered, (shape.microbatches, shape.schedule)
        left_stage.buffers[number] = buffer_bytes(0, size, *messages, counted=counted)
        received = buffer_bytes(size, 0, *messages, counted=counted)
        right_stage.buffers[number] = received + self._copies(stage + 1, sender)
        return number

    def _copies(self, stage: int, sender: Strategy) -> int:
        """Bytes that a stage keeps of tensors made before it; boundaries are fixed where there are such tensors."""
        if self.cuts is None:
            return 0
        problem, inside = self.problem, range(self.cuts[stage], self.cuts[stage + 1])
        borrowed = boundary_bytes(problem.graph.borrowed(inside), problem.shape.microbatch, sender)
        return problem.in_flight(stage) * borrowed

    def _add_agreements(self) -> None:
        """One wire; one strategy for layers that share parameters; one glue."""
        self._add_wire()
        graph = self.problem.graph
        for group in tied_groups(graph):
            self._agree(group, lambda table, row: table.strategies[row])
        edges = [place for place, layer in enumerate(graph.layers) if layer.role is not Role.BLOCK]
        if self.problem.shape.stages == 1 and is_glued(graph):
            self._agree(edges, lambda table, row: glue_of(table.layouts[row]))

    def _add_wire(self) -> None:
        for boundary in range(self.chunks - 2):
            for wire in sorted({key[2] for key in self._edges}):
                terms = {
                    number: sign
                    for side, sign in ((boundary, 1.0), (boundary + 1, -1.0))
                    for (_, stage, layout, _), number in self._edges.items()
                    if (stage, layout) == (side, wire)
                }
                self.programme.equal.append((terms, 0.0))

    def _agree(self, places: Iterable[int], trait: Callable[[StrategyTable, int], object]) -> None:
        """Layers whose strategies must have a trait in common."""
        sums: list[dict[object, Terms]] = []
        for place in places:
            terms: dict[object, Terms] = {}
            for stage in self._stages_of(place):
                table, numbers = self.layers[place, stage]
                for row, number in enumerate(numbers):
                    terms.setdefault(trait(table, row), {})[number] = 1.0
            sums.append(terms)
        for left, right in pairwise(sums):
            for value in dict.fromkeys((*left, *right)):
                minus = dict.fromkeys(right.get(value, {}), -1.0)
                self.programme.equal.append((left.get(value, {}) | minus, 0.0))

    def _add_times(self) -> None:
        for (_, stage), (table, numbers) in self.layers.items():
            sums, figures = self._stages[stage], table.figures
            for name in ("forward", "backward", "weight", "step"):
                getattr(sums, name).update(terms_of(numbers, getattr(figures, name) / TICKS))

    def _add_objective(self) -> None:
        """What stages add to the ramp, and the slowest of each part; ``offset`` is what no variable stands for."""
        programme, form = self.programme, self.problem.form
        tops = [programme.variable(binary=False) for _ in (*form.ramp, 1)]
        programme.objective.update(dict(zip(tops, (*form.rounds, 1.0), strict=True)))
        for group in range(self.problem.shape.stages):
            stages = [stage for stage in range(self.chunks) if self._group(stage) == group]
            half = sum(self._pricer(stage).profile.overhead.microbatch for stage in stages) / 2
            constants = form.parts(half, half, 0.0)
            columns = self._part_columns([self._stages[stage] for stage in stages])
            for ramp, top, constant, column in zip(form.ramp, tops, constants, columns, strict=False):
                for number, value in column.items():
                    programme.objective[number] = programme.objective.get(number, 0.0) + ramp * value
                programme.at_most.append((column | {top: -1.0}, -constant / self.unit))
                self.offset += ramp * constant
            step = added(*((self._stages[stage].step, 1 / self.unit) for stage in stages))
            programme.at_most.append((step | {tops[-1]: -1.0}, 0.0))

    def _part_columns(self, stages: Sequence[_Stage]) -> list[Terms]:
        """The parts of a micro-batch's time in the stages of a group, in units of the objective."""
        form = self.problem.form
        columns: list[Terms] = [{} for _ in form.ramp]
        for sums in stages:
            for number in dict.fromkeys((*sums.forward, *sums.backward)):
                passes = sums.forward.get(number, 0.0), sums.backward.get(number, 0.0)
                parts = form.parts(*passes, form.freed * sums.weight.get(number, 0.0))
                for column, part in zip(columns, parts, strict=True):
                    column[number] = column.get(number, 0.0) + part / self.unit
        return columns

    def _add_memory(self, group: int) -> None:
        """Every moment of a group of devices, which runs one stage, within its room."""
        problem, buffers = self.problem, self._stages[group].buffers
        room = problem.budgets[group] - self._pricer(group).profile.cluster.device.context
        places = [place for place, stage in self.layers if stage == group]
        self._within([buffers, *(self._column(place, group, "updated") for place in places)], room)
        self._add_moments(group, problem.in_flight(group), [buffers], room, filled=problem.filled(group))

    def _add_moments(
        self, stage: int, in_flight: int, beside_it: Sequence[Terms], room: int, *, filled: bool = False
    ) -> None:
        """Every moment at which a stage computes, with so many micro-batches in flight and other bytes beside it."""
        places = [place for place, layer_stage in self.layers if layer_stage == stage]
        memory = {place: self.layers[place, stage][0].memory(in_flight, filled) for place in places}
        rest: Terms = {}
        for place in places:
            rest |= terms_of(self.layers[place, stage][1], memory[place][:, REST])
        start = added((rest, 1.0), *((terms, 1.0) for terms in beside_it))
        for place in places:
            numbers = self.layers[place, stage][1]
            prefetched, middle = self._prefetched(place, stage), self._column(place, stage, "middle")
            peak = {number: max(value, middle[number]) for number, value in self._column(place, stage, "peak").items()}
            self._within([start, prefetched, peak], room)
            if (place + 1, stage) in self.layers:
                self._within([start, prefetched, middle, self._column(place + 1, stage, "pending")], room)
            start = added((start, 1.0), (terms_of(numbers, memory[place][:, PREFIX]), 1.0))

    def _column(self, place: int, stage: int, name: str) -> Terms:
        """Bytes of a layer by strategy; ``name``: one of ``MEMORY``."""
        table, numbers = self.layers[place, stage]
        return terms_of(numbers, table.figures.memory[:, MEMORY.index(name)])

    def _prefetched(self, place: int, stage: int) -> Terms:
        """What the layer before has gathered ahead, if it lies in the same stage."""
        if (place - 1, stage) not in self.layers:
            return {}
        terms = self._column(place - 1, stage, "prefetched")
        for layout, numbers in self._by_layout(place - 1, stage).items():
            number = self._edges.get((place, stage, layout, layout))
            if number is not None:
                terms[number] = -max(terms[other] for other in numbers)
        return terms

    def _within(self, terms: Sequence[Terms], room: int) -> None:
        """In ten-thousandths of the room: the solver's tolerance is then about a ten-billionth of it."""
        unit = max(room, 1) / SCALE
        total = added(*((term, 1.0) for term in terms))
        self.programme.at_most.append(({n: v / unit for n, v in total.items() if v}, room / unit))


def choosable(problem: Problem) -> bool:
    """Whether what layers and stages cost does not depend on boundaries: no two layers that share parameters may meet
    in a stage, and no tensor skips layers: what goes straight to its reader is what lies in the same stage."""
    far = (0, len(problem.graph.layers) - 1)
    apart = all(group == far for group in tied_groups(problem.graph))
    return problem.shape.stages == 1 or (not problem.graph.tensors and apart)


def terms_of(numbers: Sequence[int], values: Iterable[float]) -> Terms:
    """A value for each of a layer's variables."""
    return {number: float(value) for number, value in zip(numbers, values, strict=True)}


def added(*terms: tuple[Terms, float]) -> Terms:
    """Sum of expressions, each times a factor."""
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

    first: frozenset[int] = frozenset()  # blocks that may have another strategy than the others

    def _sharing(self, place: int, stage: int) -> ParameterSharing:
        """Sharing of parameters among all layers of a group of devices."""
        group = self._group(stage)
        places = [other for other in range(self.count) if self._group(next(self._stages_of(other))) == group]
        return sharing_of(self.problem.graph, places).get(place, ALONE)

    def _table(self, place: int, stage: int) -> StrategyTable:
        layer = self.problem.graph.layers[place]
        tables = self.problem.tables[self._group(stage)]
        return tables.unpruned(layer.kind, layer.name, self._sharing(place, stage))

    def _across(self, layout: Layout, others: Iterable[Layout]) -> list[Layout]:  # noqa: ARG002
        """Any: what arrives is redistributed."""
        return list(others)

    def _add_wire(self) -> None:
        """None is needed."""

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
        moments = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
        buffers = added(*((self._stages[stage].buffers, 1.0) for stage in stages))
        room = self.problem.budgets[group] - self._pricer(stages[0]).profile.cluster.device.context
        updated = [self._column(place, stage, "updated") for place, stage in self.layers if stage in stages]
        self._within([buffers, *updated], room)
        for computing, counts in moments:
            others = (chunk for chunk in range(shape.virtual) if chunk != computing)
            at_rest = [self._resting(stages[chunk], counts[chunk]) for chunk in others]
            self._add_moments(stages[computing], max(counts[computing], 1), [buffers, *at_rest], room)

    def _resting(self, stage: int, count: int) -> Terms:
        """Bytes of a stage while another one computes, with so many micro-batches in flight."""
        total: Terms = {}
        shape = self.problem.shape
        for place in (place for place, layer_stage in self.layers if layer_stage == stage):
            table, numbers = self.layers[place, stage]
            layer, sharing = self.problem.graph.layers[place], self._sharing(place, stage)
            cost = self._pricer(stage).price_many(layer.kind, table.strategies, shape.microbatch, shape.stages, sharing)
            bytes_ = resting(cost, shape.microbatches) + count * cost.kept
            total |= terms_of(numbers, np.asarray(bytes_ + (cost.gathered if count else 0)))
        return total
