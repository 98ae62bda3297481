"""The choice of strategies under one shape of plan: what each layer of a stage may take, and the best ways to run it.

A stage becomes a chain of layers with the figures of their strategies (``chain``), which is solved by bounds, quickly
and exactly. Answers are cached for all problems of one shape. Besides legality, the space is bounded by these rules;
the runtime relies on the first:

1. Layers that share parameters have the same strategy.
2. With a single stage, the layers before and after the blocks have equal batch, context and tensor degrees (the glue),
   where matmuls of some layer can be split. Convolutional layers move what they read to where they need it.
3. With several stages, all layers next to a stage boundary have one layout, the same at every boundary (the wire);
   ``simplify`` may change it where that spares a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import numpy as np

from galvatron_lite.arrays import FloatArray
from galvatron_lite.cost.layer import ALONE, LayerPricer, ParameterSharing
from galvatron_lite.cost.stage import Shape, sharing_of, transfer_seconds
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes, fills
from galvatron_lite.parallelism.pipeline.schedule import Figure, Form
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.chain.chain import MEMORY, Chain, ChainLayer, Path
from galvatron_lite.search.chain.net import Net, good_net_path, net_paths
from galvatron_lite.search.tables import Glue, Memo, StrategyTable, Tables, glue_of, remembered, ticks

_CANDIDATES, _LEAST_LABELS = 200_000, 128
"""Labels times strategies of a layer that are looked at, and labels that are kept of a layer at the least."""


@dataclass(frozen=True, slots=True)
class SharedChoice:
    """What is chosen once for all layers, besides the shape."""

    glue: Glue | None  # degrees of the layers before and after the blocks; None: not bound
    wire: Layout | None  # layout at stage boundaries; None without boundaries
    tied: tuple[tuple[int, Strategy], ...]  # layers that share parameters, and the strategy of each


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One way to run a stage."""

    bottleneck: tuple[int, ...]  # picoseconds a micro-batch, in the parts of the schedule's ``Form``
    step: int  # picoseconds once a step
    strategies: tuple[Strategy, ...]  # of its layers


@dataclass(frozen=True, slots=True)
class Partition:
    """A complete plan of one shape."""

    time: int  # picoseconds a step, without fixed host time
    cuts: tuple[int, ...]  # the first layer of each stage, and the number of layers: (0, ..., L)
    stages: tuple[StagePlan, ...]

    @property
    def strategies(self) -> list[Strategy]:
        """The strategy of every layer."""
        return [strategy for stage in self.stages for strategy in stage.strategies]


def step_time(stages: Sequence[StagePlan], form: Form) -> int:
    """Picoseconds of a step."""
    slowest = [max(parts) for parts in zip(*(stage.bottleneck for stage in stages), strict=True)]
    ramp = sum(weighted(form.ramp, stage.bottleneck) for stage in stages)
    return ramp + weighted(form.rounds, slowest) + max(stage.step for stage in stages)


def weighted(weights: Sequence[float], values: Sequence[int]) -> int:
    """Sum of values times weights, which are whole numbers."""
    return sum(int(weight) * value for weight, value in zip(weights, values, strict=True))


def even_cuts(graph: ModelGraph, stages: int) -> tuple[int, ...]:
    """Cuts (0, ..., L) into stages with equally many blocks, or with one fewer in the first and the last where that
    divides; empty where neither does."""
    blocks = [place for place, layer in enumerate(graph.layers) if layer.role is Role.BLOCK]
    fewer = int(len(blocks) % stages > 0)
    each, rest = divmod(len(blocks) + 2 * fewer, stages)
    if not blocks or rest or each == fewer:
        return ()
    return (0, *blocks[each - fewer :: each][: stages - 1], len(graph.layers))


def is_glued(graph: ModelGraph) -> bool:
    """Whether rule 2 binds a model: it has layers around its blocks, and matmuls that can be split."""
    edges = sum(layer.role is not Role.BLOCK for layer in graph.layers)
    return edges > 1 and any(kind.tensor_degrees > 1 for kind in graph.kinds.values())


def parts_of(graph: ModelGraph) -> tuple[range, range, range]:
    """The layers before the blocks, from the first block to the last (all, where there are no blocks), and after
    them."""
    count = len(graph.layers)
    blocks = [place for place, layer in enumerate(graph.layers) if layer.role is Role.BLOCK] or range(count)
    return range(blocks[0]), range(blocks[0], blocks[-1] + 1), range(blocks[-1] + 1, count)


def part_of(graph: ModelGraph) -> list[int]:
    """By layer: whether it is before, among or after the blocks (0, 1, 2)."""
    return [part for part, places in enumerate(parts_of(graph)) for _ in places]


def cuts_of(graph: ModelGraph, chunks: int) -> list[tuple[int, ...]]:
    """The cuts (0, ..., L) into chunks of about equal size that are searched, see ``uniform``."""
    start, layers = parts_of(graph)[1].start, len(graph.layers)
    return [(0, *list(accumulate(sizes, initial=start))[1:-1], layers) for sizes in blocks_of(graph, chunks)]


def blocks_of(graph: ModelGraph, chunks: int) -> tuple[list[int], ...]:
    """The number of blocks of each chunk, for each of ``cuts_of``."""
    before, blocks, after = parts_of(graph)
    return _chunk_sizes(len(blocks), bool(before), bool(after), chunks)


@lru_cache(maxsize=4096)
def _chunk_sizes(blocks: int, before: bool, after: bool, chunks: int) -> tuple[list[int], ...]:
    def shares(count: int, first: int) -> list[int]:  # chunks from ``first`` on have one more where that is needed
        return [count // chunks + (first <= chunk < first + count % chunks) for chunk in range(chunks)]

    sizes = [shares(blocks, 0)] if blocks >= chunks else []
    if blocks % chunks and blocks + before + after >= chunks:
        with_edges = shares(blocks + before + after, int(before))
        sizes.append([with_edges[0] - before, *with_edges[1:-1], with_edges[-1] - after])
    return tuple(sizes)


@dataclass(slots=True)
class Answers:
    """What is known of the stages and the time of one shape, for all its problems."""

    averaged: float = 0.0  # averaged, relaxed: picoseconds that no plan beats (``bounds``); 0.0: not computed
    relaxed: float = 0.0
    # by problem of a stage, the greatest cap it was asked with and the answer of ``pareto_plans``, ``quickest_plan``
    pareto: dict[tuple[object, ...], tuple[float, list[StagePlan], float]] = field(default_factory=dict)
    quickest: dict[tuple[object, ...], tuple[float, StagePlan | None, float]] = field(default_factory=dict)
    best: dict[tuple[object, ...], StagePlan] = field(default_factory=dict)  # the last plan of ``quickest_plan``
    memo: Memo = field(default_factory=Memo)


@dataclass(frozen=True, slots=True, eq=False)
class StageChain:
    """One stage as a chain of layers."""

    net: Net
    tables: list[StrategyTable]  # of its layers
    sends: tuple[int, int]  # picoseconds of a micro-batch's sends, forward and backward


@dataclass(slots=True)
class Problem:
    """The choice of strategies under one shape of plan and one ``SharedChoice``."""

    graph: ModelGraph
    pricer: LayerPricer  # of the profile, for what lies between stages
    shape: Shape
    tables: tuple[Tables, ...]  # by stage; the same for all stages where all devices are alike
    choice: SharedChoice
    budgets: tuple[int, ...]  # bytes a device, by stage
    work: int = 0  # labels looked at so far
    answers: Answers = field(default_factory=Answers)  # shared by all problems of one shape
    runs: int | None = None  # of equal strategies that a part of the model may have in a stage; None: any
    hidden: float = 0.0  # share of a send that costs nothing; 0: as the closed form has it
    _tied: Mapping[int, Strategy] = field(init=False)
    _memo: Memo = field(init=False, default_factory=Memo)

    def __post_init__(self) -> None:
        self._tied = dict(self.choice.tied)

    @property
    def form(self) -> Form:
        """The closed form of the shape's schedule."""
        return self.tables[0].form

    @property
    def weights(self) -> tuple[int, ...]:
        """What turns a stage's figures into the time it needs alone: (micro-batch parts..., step)."""
        return (*(int(weight) for weight in self.form.alone), 1)

    @property
    def ramp(self) -> tuple[int, ...]:
        """How often each part of a micro-batch counts, in whole numbers, where another stage is the slowest."""
        return tuple(int(ramp) for ramp in self.form.ramp)

    @property
    @remembered
    def _parts_are_alike(self) -> bool:
        """Whether the layers before, among and after the blocks are of one kind each."""
        kinds = {*zip(part_of(self.graph), (layer.kind for layer in self.graph.layers), strict=True)}
        return len(kinds) == len({part for part, _ in kinds})

    @remembered
    def layer_tables(self, stage: int, inside: range) -> list[StrategyTable]:
        """The strategies that each layer of a stage may take, with their figures."""
        key = ("inner", id(self.tables[stage]), self.choice.glue, self.choice.tied, self.runs is None)
        tables = self.answers.memo.once(key, lambda: self._inner_tables(stage))[inside.start : inside.stop]
        sharings, last = sharing_of(self.graph, inside), len(self.graph.layers)
        ends = {*([inside.start] if inside.start else ()), *([inside.stop - 1] if inside.stop < last else ())}
        for place in ends | sharings.keys():
            sharing = sharings.get(place, ALONE)
            tables[place - inside.start] = self._layer_table(stage, place, sharing, at_end=place in ends)
        return tables

    def _inner_tables(self, stage: int) -> list[StrategyTable]:
        """The table of each layer of the model where it is next to no boundary and shares nothing."""
        by_name, memo, tables = bool(self.tables[stage].fixed.layers), Memo(), list[StrategyTable]()
        for place, layer in enumerate(self.graph.layers):
            key = (layer.kind, layer.name if by_name else "", layer.role is Role.BLOCK, self._tied.get(place))
            if key not in memo:
                memo[key] = self._layer_table(stage, place, ALONE, at_end=False)
            tables.append(memo[key])
        return tables

    def _layer_table(self, stage: int, place: int, sharing: ParameterSharing, *, at_end: bool) -> StrategyTable:
        layer, tied, tables = self.graph.layers[place], self._tied.get(place), self.tables[stage]
        # A layer that shares parameters, or a run, takes the strategy of all of them, dominated for this one or not.
        free = tied is None and (self.runs is None or self._parts_are_alike)
        offered = (tables.table if free else tables.unpruned)(layer.kind, layer.name, sharing)
        wire = self.choice.wire if at_end else None
        glue = None if layer.role is Role.BLOCK else self.choice.glue
        if wire is None and glue is None and tied is None:
            return offered

        def restricted() -> StrategyTable:
            table = offered.with_layouts(
                lambda layout: (wire is None or layout == wire) and (glue is None or glue_of(layout) == glue)
            )
            return table if tied is None else table.only(tied)

        return self.answers.memo.once((id(offered), wire, glue, tied), restricted)

    def fixed_costs(self, stage: int, inside: range) -> tuple[int, int, int]:
        """What a stage costs under any strategies: ticks of forward and of backward sends, bytes throughout."""
        pricer, store = self.tables[stage].pricer, self.tables[stage].store
        ends = inside.start > 0, inside.stop < len(self.graph.layers)
        left, right = (
            self.send(side, self.tables[0].store.crossing[cut]) if is_boundary else (0, 0.0)
            for side, cut, is_boundary in zip((stage, stage + 1), (inside.start, inside.stop), ends, strict=True)
        )
        overhead = pricer.profile.overhead
        host = sum(ends) * overhead.pipeline + overhead.microbatch / 2
        buffers = buffer_bytes(
            left[0], right[0], self.shape.microbatches, self.shape.schedule, counted=not pricer.profile.unbuffered
        )
        borrowed = store.borrowed(inside)  # tensors made before the stage, as they lie at its entry
        copies = boundary_bytes(borrowed, self.shape.microbatch, self._sender) if borrowed else 0
        context = pricer.profile.cluster.device.context
        return ticks(right[1] + host), ticks(left[1] + host), buffers + context + self.in_flight(stage) * copies

    @property
    def _sender(self) -> Strategy:
        """A strategy of the layout at boundaries; where that is open, the one that sends least."""
        return strategy_with(self.choice.wire or Layout(sequence=self.shape.stage_devices))

    def send(self, stage: int, output: int) -> tuple[int, float]:
        """Bytes on a device of a boundary tensor before a stage, and the seconds of sending it."""

        def sent() -> tuple[int, float]:
            sender = self._sender
            size = boundary_bytes(output, self.shape.microbatch, sender)
            seconds = transfer_seconds(self.pricer, size, sender, self.shape, (stage - 1, stage))
            return size, (1.0 - self.hidden) * seconds

        return self.answers.memo.once(("send", self.choice.wire, stage, output), sent)

    def least_sends(self) -> list[int]:
        """By stage: picoseconds that sends and host work add to a micro-batch at the least."""

        def least() -> list[int]:
            smallest, totals = min(self.tables[0].store.crossing[1:-1], default=0), list[int]()
            for stage in range(self.shape.stages):
                sides = [side for side in (stage, stage + 1) if 0 < side < self.shape.stages]
                overhead = self.tables[stage].pricer.profile.overhead
                total = ticks(len(sides) * overhead.pipeline + overhead.microbatch / 2) * 2 - 2
                if self.choice.wire is not None:
                    total += sum(ticks(self.send(side, smallest)[1]) - 1 for side in sides)
                totals.append(max(total, 0))
            return totals

        return self.answers.memo.once(("least", self.choice.wire), least)

    def more_sends(self) -> list[FloatArray]:
        """By boundary of stages, the ends included, and layer behind it: picoseconds by which its send takes longer
        than in ``least_sends``; empty where all boundaries between layers send as much or layouts there are open."""
        crossing = self.tables[0].store.crossing
        if self.choice.wire is None or len({*crossing[1:-1]}) < 2:
            return []

        def more() -> list[FloatArray]:
            totals, smallest = [np.zeros(len(crossing)) for _ in range(self.shape.stages + 1)], min(crossing[1:-1])
            for side in range(1, self.shape.stages):
                least = ticks(self.send(side, smallest)[1])
                taken = {size: ticks(self.send(side, size)[1]) - least for size in {*crossing[1:-1]}}
                totals[side][1:-1] = [taken[size] for size in crossing[1:-1]]
            return totals

        return self.answers.memo.once(("more", self.choice.wire), more)

    def allows_at_ends(self, layout: Layout) -> bool:
        """Whether layers at the ends of a stage may have a layout."""
        choice = self.choice
        return choice.wire == layout if choice.wire is not None else choice.glue in (None, glue_of(layout))

    def in_flight(self, stage: int) -> int:
        """Micro-batches in flight in a stage."""
        return self.shape.schedule.in_flight(self.shape.stages, stage, self.shape.microbatches)

    def filled(self, stage: int) -> bool:
        """Whether so many are in flight in the first backward alone, see ``cost.memory.terms``."""
        return fills(self.shape.schedule, self.in_flight(stage), self.shape.microbatches)

    def _chain(self, stage: int, inside: range, scalar: bool) -> StageChain | None:
        """The chain of one stage; None where some layer has no strategy left.

        ``scalar``: with one time criterion (what the stage needs alone) instead of one a part and the step's.
        """
        tables = self.layer_tables(stage, inside)
        if not all(len(table) for table in tables):
            return None
        stage_tables, parts, memo, layers = self.tables[stage], part_of(self.graph), Memo(), list[ChainLayer]()
        store, sizes = stage_tables.store, self._passed_on(stage, inside)
        for place, before, table in zip(inside, [tables[0], *tables], tables, strict=False):
            # Moves to the first layer do not count: the next one's make the two layers equal.
            size, part = sizes[max(place, inside.start + 1)], parts[place]
            key = (id(before), id(table), size, part)
            if key not in memo:
                memo[key] = self._chain_layer(stage, before, table, size, part, scalar)
            layers.append(memo[key])
        moves = [2 * self.shape.microbatches] if scalar else self._criteria(self.form.parts(1, 1, 0), 0)
        weights = (1,) if scalar else (*(w - r for w, r in zip(self.weights[:-1], self.ramp, strict=True)), 1)
        fixed = self.fixed_costs(stage, inside)
        room = self.budgets[stage] - fixed[2]
        chain = Chain(tuple(layers), np.array(moves), np.array(weights), room, self.runs)
        far = ((a, b, size) for a, b, size in store.exchanges(inside) if b > a + 1) if self.graph.tensors else ()
        skips = {(a, b): stage_tables.moves(tables[a], tables[b], size) for a, b, size in far}
        return StageChain(Net(chain, skips), tables, fixed[:2])

    def _chain_layer(
        self, stage: int, before: StrategyTable, table: StrategyTable, size: int | None, part: int, scalar: bool
    ) -> ChainLayer:
        tables, form = self.tables[stage], self.form
        columns = (table.theta(form),) if scalar else self._criteria(table.parts(form), table.figures.step)
        memory = dict(zip(MEMORY, table.memory(self.in_flight(stage), self.filled(stage)).T, strict=True))
        return ChainLayer(
            np.column_stack(list(columns)), **memory, move=tables.moves(before, table, size), group=table.groups,
            strategy=tables.store.numbers(table), part=part,
        )  # fmt: skip

    def _passed_on(self, stage: int, inside: range) -> Sequence[int | None]:
        """By layer: bytes a sample that go to it from the layer before it in its stage; None: nothing does."""
        store = self.tables[stage].store
        if not self.graph.tensors:
            return store.crossing
        sizes = {inside.start + b: size for a, b, size in store.exchanges(inside) if b == a + 1}
        return [sizes.get(place) for place in range(inside.stop + 1)]

    def _criteria(self, parts: Sequence[Figure], step: Figure) -> tuple[Figure, ...]:
        """Time in the parts of a micro-batch; and once a step, to which is added what the parts take in the ramp.

        A way to run a stage that is no slower in any of these is no worse: what it takes longer once a step, it takes
        less in the ramp, for certain. With ``step`` itself as the criterion fewer ways would be dominated.
        """
        criteria: list[Figure] = list(parts)
        for ramp, part in zip(self.ramp, parts, strict=True):
            step = step + ramp * part
        criteria.append(step)
        return tuple(criteria)

    def _key(self, stage: int, inside: range) -> tuple[object, ...]:
        """Equal for stages that pose the same problem."""
        tables = tuple(map(id, self.layer_tables(stage, inside)))
        store = self.tables[stage].store
        between = store.exchanges(inside) if self.graph.tensors else store.crossing[inside.start + 1 : inside.stop]
        return (self.in_flight(stage), tables, between, self.fixed_costs(stage, inside), self.budgets[stage], self.runs)

    def pareto_plans(self, stage: int, inside: range, cap: float) -> tuple[list[StagePlan], float]:
        """Every Pareto-best plan of a stage that fits the budget and alone takes at most ``cap`` picoseconds, and a
        time alone that no plan left out beats (infinite where none was)."""
        key, answers = self._key(stage, inside), self.answers.pareto
        if key not in answers or answers[key][0] < cap:
            front, dropped = self._front(stage, inside, cap, scalar=False)
            answers[key] = (cap, [plan for _, plan in front], dropped)
        return answers[key][1:]

    def quickest_plan(self, stage: int, inside: range, cap: float, near: float = 0.0) -> tuple[StagePlan | None, float]:
        """The plan of a stage that takes least time alone, and a time that no other plan beats; None where none takes
        at most ``cap`` picoseconds. Another plan may be quicker by the share ``near``."""
        key, answers = (*self._key(stage, inside), near), self.answers.quickest
        if key not in answers or (answers[key][1] is None and answers[key][0] < cap):
            front, least = self._front(stage, inside, cap, near, scalar=True)
            plan = None
            for time, plan in front:  # one at the most
                self.answers.best[key[:-1]] = plan
                least = min(least, time)
            answers[key] = (cap, plan, least)
        _, plan, least = answers[key]
        return (None, np.inf) if least > cap else (plan, least)

    def good_plan(self, stage: int, inside: range) -> tuple[StagePlan | None, float]:
        """A good plan of a stage, quickly, None where none is met; and a time alone that no plan beats."""

        def good() -> tuple[StagePlan | None, float]:
            chain = self._chain(stage, inside, scalar=True)
            if chain is None:
                return None, np.inf
            path, least = good_net_path(chain.net)
            plan = None if path is None else self._planned(path, chain)
            return plan, least + self.shape.microbatches * sum(chain.sends)

        return self.answers.memo.once(("good", *self._key(stage, inside)), good)

    def best_plan_met(self, stage: int, inside: range) -> StagePlan | None:
        """The best plan of a stage that ``quickest_plan`` or ``good_plan`` has returned so far."""
        key = self._key(stage, inside)
        return self.answers.best.get(key) or self.answers.memo.get(("good", *key), (None, 0.0))[0]

    def _front(
        self, stage: int, inside: range, cap: float, near: float = 0.0, *, scalar: bool
    ) -> tuple[list[tuple[int, StagePlan]], float]:
        """Pareto-best plans of a stage, with the time of each in the first criterion; and a time that no plan left out
        beats."""
        chain = self._chain(stage, inside, scalar)
        if chain is None:
            return [], np.inf
        sends = self.shape.microbatches * sum(chain.sends)
        most_labels = max(_LEAST_LABELS, _CANDIDATES // max(len(layer.rest) for layer in chain.net.chain.layers))
        front = net_paths(chain.net, cap - sends, most_labels, near)
        self.work += front.work
        planned = self._planned if scalar else self._stage_plan
        return [(path.time[0] + sends, planned(path, chain)) for path in front.paths], front.dropped + sends

    def _planned(self, path: Path, chain: StageChain) -> StagePlan:
        """The plan of a path of one criterion."""
        forward = backward = chain.net.moved(path.choices)
        freed = step = 0
        for table, choice in zip(chain.tables, path.choices, strict=True):
            forward += int(table.figures.forward[choice])
            backward += int(table.figures.backward[choice])
            freed += round(self.form.freed * int(table.figures.weight[choice]))
            step += int(table.figures.step[choice])
        time = self._criteria(self.form.parts(forward, backward, freed), step)
        return self._stage_plan(Path(time, path.choices), chain)

    def _stage_plan(self, path: Path, chain: StageChain) -> StagePlan:
        *parts, last = path.time
        step = last - sum(ramp * part for ramp, part in zip(self.ramp, parts, strict=True))
        pairs = zip(parts, self.form.parts(*chain.sends, 0), strict=True)
        bottleneck = tuple(computed + sent for computed, sent in pairs)
        strategies = tuple(table.strategies[choice] for table, choice in zip(chain.tables, path.choices, strict=True))
        return StagePlan(bottleneck, step, strategies)
