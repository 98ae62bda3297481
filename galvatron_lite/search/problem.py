"""One shape of plan as chains: which strategies each layer of a stage may take, and what they cost.

Besides legality, the space is bounded by these rules; the runtime relies on the first:

1. Layers that share parameters have the same strategy.
2. With a single stage, the layers before and after the blocks have equal batch, context and tensor degrees (the glue),
   where matmuls of some layer can be split. Convolutional layers move what they read to where they need it.
3. With several stages, all layers next to a stage boundary have one layout, the same at every boundary (the wire);
   ``simplify`` may change it where that spares a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import numpy as np

from galvatron_lite.cost.layer import ALONE, LayerPricer, ParameterSharing
from galvatron_lite.cost.stage import Shape, sharing_of, transfer_seconds
from galvatron_lite.model.graph import Layer, ModelGraph, Role
from galvatron_lite.parallelism.layout import Layout, strategy_with
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes, fills
from galvatron_lite.parallelism.pipeline.schedule import Figure, Form
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.chain.chain import MEMORY, Chain, ChainFront, ChainLayer, Path
from galvatron_lite.search.chain.labels import Net, good_net_path, net_paths
from galvatron_lite.search.tables import Glue, Memo, StrategyTable, Tables, glue_of, remembered, ticks

_MOST_CANDIDATES, _LEAST_LABELS = 200_000, 128


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen once for all layers, besides the shape."""

    glue: Glue | None  # degrees of the layers before and after the blocks; None: not bound
    wire: Layout | None  # layout at stage boundaries; None without boundaries
    tied: tuple[tuple[int, Strategy], ...]  # strategy by place of layers that share parameters


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A way to run one stage."""

    bottleneck: tuple[int, ...]  # picoseconds a micro-batch, in the parts of the schedule's ``Form``
    step: int  # picoseconds once a step
    strategies: tuple[Strategy, ...]  # of its layers


@dataclass(frozen=True, slots=True)
class Partition:
    """A complete plan of one shape."""

    time: int  # picoseconds a step, without fixed host time
    cuts: tuple[int, ...]  # (0, ..., L)
    stages: tuple[StagePlan, ...]


def step_time(stages: Sequence[StagePlan], form: Form) -> int:
    """Picoseconds of a step."""
    slowest = [max(parts) for parts in zip(*(stage.bottleneck for stage in stages), strict=True)]
    ramp = sum(weighted(form.ramp, stage.bottleneck) for stage in stages)
    return ramp + weighted(form.rounds, slowest) + max(stage.step for stage in stages)


def weighted(weights: Sequence[float], values: Sequence[int]) -> int:
    """Sum of whole weights times values."""
    return sum(int(weight) * value for weight, value in zip(weights, values, strict=True))


def even_cuts(graph: ModelGraph, stages: int) -> tuple[int, ...]:
    """Boundaries (0, ..., L) of stages with equally many blocks, where they do not divide with one fewer at each end;
    empty where neither divides."""
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


def part_of(graph: ModelGraph) -> list[int]:
    """Of each layer: whether it is before, among or after the blocks (0, 1, 2)."""
    return [part for part, places in enumerate(parts_of(graph)) for _ in places]


def parts_of(graph: ModelGraph) -> tuple[range, range, range]:
    """Places of the layers before the blocks, from the first to the last block (all, where there are no blocks), and
    after them."""
    count = len(graph.layers)
    blocks = [place for place, layer in enumerate(graph.layers) if layer.role is Role.BLOCK] or range(count)
    return range(blocks[0]), range(blocks[0], blocks[-1] + 1), range(blocks[-1] + 1, count)


def cuts_of(graph: ModelGraph, chunks: int) -> list[tuple[int, ...]]:
    """Where chunks begin, and the number of layers: the ways to share layers out, see the module."""
    start, layers = parts_of(graph)[1].start, len(graph.layers)
    return [(0, *list(accumulate(choice, initial=start))[1:-1], layers) for choice in blocks_of(graph, chunks)]


def blocks_of(graph: ModelGraph, chunks: int) -> tuple[list[int], ...]:
    """Blocks of each chunk under each of the ways to share layers out."""
    before, blocks, after = parts_of(graph)
    return _sizes(len(blocks), bool(before), bool(after), chunks)


@lru_cache(maxsize=4096)
def _sizes(blocks: int, before: bool, after: bool, chunks: int) -> tuple[list[int], ...]:
    def shares(count: int, first: int) -> list[int]:  # those from a place on are one larger where that is needed
        return [count // chunks + (first <= chunk < first + count % chunks) for chunk in range(chunks)]

    sizes = [shares(blocks, 0)] if blocks >= chunks else []
    if blocks % chunks and blocks + before + after >= chunks:
        own = shares(blocks + before + after, int(before))
        sizes.append([own[0] - before, *own[1:-1], own[-1] - after])
    return tuple(sizes)


@dataclass(slots=True)
class Answers:
    """What is known of stages under one shape, whatever else is settled."""

    averaged: float = 0.0  # averaged, relaxed: bounds of all plans of the shape (``bounds``), once known
    relaxed: float = 0.0
    # by problem of a stage, the greatest cap it was asked with and the answer of ``Problem.plans``, ``quickest``
    plans: dict[tuple[object, ...], tuple[float, list[StagePlan], float]] = field(default_factory=dict)
    quickest: dict[tuple[object, ...], tuple[float, StagePlan | None, float]] = field(default_factory=dict)
    best: dict[tuple[object, ...], StagePlan] = field(default_factory=dict)  # the last answer of ``quickest``
    memo: Memo = field(default_factory=Memo)


@dataclass(frozen=True, slots=True, eq=False)
class StageChain:
    """One stage as a chain of layers."""

    net: Net
    tables: list[StrategyTable]  # of its layers
    sends: tuple[int, int]  # picoseconds of a micro-batch's sends, forward and backward


@dataclass(slots=True)
class Problem:
    """The choice of strategies under one shape of plan and one ``Choice``."""

    graph: ModelGraph  # the model
    pricer: LayerPricer  # of the profile, for what lies between stages
    shape: Shape  # of the plan
    # figures under that shape, by stage; the same for all stages where all devices are alike
    tables: tuple[Tables, ...]
    choice: Choice  # what is settled
    budgets: tuple[int, ...]  # bytes a device, by stage
    work: int = 0  # labels looked at so far
    answers: Answers = field(default_factory=Answers)  # shared by all problems of one shape
    runs: int | None = None  # of equal strategies that a part of the model may have in a stage; None: any
    _tied: Mapping[int, Strategy] = field(init=False)
    _memo: Memo = field(init=False, default_factory=Memo)

    def __post_init__(self) -> None:
        self._tied = dict(self.choice.tied)

    @property
    @remembered
    def alike_parts(self) -> bool:
        """Whether the layers before, among and after the blocks are of one kind each."""
        kinds = {*zip(part_of(self.graph), (layer.kind for layer in self.graph.layers), strict=True)}
        return len(kinds) == len({part for part, _ in kinds})

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
        """How often each part of a micro-batch counts where another stage is the slowest; shares of one not at all."""
        return tuple(int(ramp) for ramp in self.form.ramp)

    @remembered
    def layer_tables(self, stage: int, inside: range) -> list[StrategyTable]:
        """Of each layer of a stage, the strategies it may take and their figures."""
        key = ("inner", id(self.tables[stage]), self.choice.glue, self.choice.tied, self.runs is None)
        tables = self.answers.memo.once(key, lambda: self._inner_tables(stage))[inside.start : inside.stop]
        sharings = sharing_of(self.graph, inside)
        ends = {*([inside.start] if inside.start else ()), *([inside.stop - 1] if inside.stop < self._end else ())}
        for place in ends | sharings.keys():
            sharing = sharings.get(place, ALONE)
            tables[place - inside.start] = self._layer_table(stage, place, sharing, at_end=place in ends)
        return tables

    def _inner_tables(self, stage: int) -> list[StrategyTable]:
        """The table of each layer of the model where it is next to no boundary and shares nothing."""
        named, memo = bool(self.tables[stage].fixed.layers), Memo()

        def table(place: int, layer: Layer) -> StrategyTable:
            key = (layer.kind, layer.name if named else "", layer.role is Role.BLOCK, self._tied.get(place))
            return memo.once(key, lambda: self._layer_table(stage, place, ALONE, at_end=False))

        return [table(place, layer) for place, layer in enumerate(self.graph.layers)]

    def _layer_table(self, stage: int, place: int, sharing: ParameterSharing, *, at_end: bool) -> StrategyTable:
        layer, tied = self.graph.layers[place], self._tied.get(place)
        # A layer that shares parameters, or a run, takes what is settled for all of them, be it of no help to this one.
        free = tied is None and (self.runs is None or self.alike_parts)
        tables = self.tables[stage]
        offered = (tables.table if free else tables.unpruned)(layer.kind, layer.name, sharing)
        wire = self.choice.wire if at_end else None
        glue = None if layer.role is Role.BLOCK else self.choice.glue
        if wire is None and glue is None and tied is None:
            return offered
        key = (id(offered), wire, glue, tied)
        return self.answers.memo.once(key, lambda: _fitting(offered, wire, glue, tied))

    @property
    def _end(self) -> int:
        return len(self.graph.layers)

    def fixed_costs(self, stage: int, inside: range) -> tuple[int, int, int]:
        """What a stage costs whatever its strategies: ticks of forward and backward sends, bytes throughout."""
        pricer, ends = self.tables[stage].pricer, (inside.start > 0, inside.stop < self._end)
        left, right = (
            self.send(side, self.tables[0].store.crossing[cut]) if there else (0, 0.0)
            for side, cut, there in zip((stage, stage + 1), (inside.start, inside.stop), ends, strict=True)
        )
        overhead = pricer.profile.overhead
        host = sum(ends) * overhead.pipeline + overhead.microbatch / 2
        context = pricer.profile.cluster.device.context
        copies = self.held(stage) * self._copies(stage, inside)
        held, counted = (self.shape.microbatches, self.shape.schedule), not pricer.profile.unbuffered
        buffers = buffer_bytes(left[0], right[0], *held, counted=counted)
        return ticks(right[1] + host), ticks(left[1] + host), buffers + context + copies

    def room(self, stage: int, inside: range) -> int:
        """Bytes that the layers of a stage may take on each of its devices."""
        return self.budgets[stage] - self.fixed_costs(stage, inside)[2]

    def _copies(self, stage: int, inside: range) -> int:
        """Bytes of one micro-batch that a stage keeps of tensors made before it, as they lie at its entry."""
        borrowed = self.tables[stage].store.borrowed(inside)
        return boundary_bytes(borrowed, self.shape.microbatch, self.sender) if borrowed else 0

    @property
    def sender(self) -> Strategy:
        """A strategy of the layout at boundaries; where that is open, the one that sends least."""
        return strategy_with(self.choice.wire or Layout(sequence=self.shape.stage_devices))

    def send(self, stage: int, output: int) -> tuple[int, float]:
        """Bytes of a boundary tensor on a device before a stage, and the seconds of sending it."""

        def sent() -> tuple[int, float]:
            sender = self.sender
            size = boundary_bytes(output, self.shape.microbatch, sender)
            return size, transfer_seconds(self.pricer, size, sender, self.shape, (stage - 1, stage))

        return self.answers.memo.once(("send", self.choice.wire, stage, output), sent)

    def least_sends(self) -> list[int]:
        """Picoseconds that sends and host work add to a micro-batch of each stage at the least."""
        return self.answers.memo.once(("least", self.choice.wire), lambda: list(self._least_sends()))

    def _least_sends(self) -> Iterator[int]:
        smallest = min(self.tables[0].store.crossing[1:-1], default=0)
        for stage in range(self.shape.stages):
            sides = [side for side in (stage, stage + 1) if 0 < side < self.shape.stages]
            overhead = self.tables[stage].pricer.profile.overhead
            total = ticks(len(sides) * overhead.pipeline + overhead.microbatch / 2) * 2 - 2
            if self.choice.wire is not None:
                total += sum(ticks(self.send(side, smallest)[1]) - 1 for side in sides)
            yield max(total, 0)

    def at_ends(self, layout: Layout) -> bool:
        """Whether layers at the ends of a stage may have a layout."""
        choice = self.choice
        return choice.wire == layout if choice.wire is not None else choice.glue in (None, glue_of(layout))

    def held(self, stage: int) -> int:
        """Micro-batches in flight in a stage."""
        return self.shape.schedule.in_flight(self.shape.stages, stage, self.shape.microbatches)

    def filled(self, stage: int) -> bool:
        """Whether so many are in flight in the first backward alone, see ``cost.memory.terms``."""
        return fills(self.shape.schedule, self.held(stage), self.shape.microbatches)

    def chain(self, stage: int, inside: range, scalar: bool) -> StageChain | None:
        """The chain of one stage; None where some layer has no strategy left.

        Args:
            stage: its number.
            inside: places of its layers.
            scalar: one time criterion (what the stage needs alone) instead of one a bottleneck and the step's.
        """
        tables = self.layer_tables(stage, inside)
        if not all(len(table) for table in tables):
            return None
        parts, own, layers, sizes = part_of(self.graph), self.tables[stage], [], self._passed_on(stage, inside)
        memo = Memo()
        for place, before, table in zip(inside, [tables[0], *tables], tables, strict=False):
            # The first layer's moves mean nothing: as the next one's they make it equal to it.
            size, part = sizes[max(place, inside.start + 1)], parts[place]
            key = (id(before), id(table), size, part)
            layers.append(memo.once(key, lambda: self._chain_layer(stage, before, table, size, part, scalar)))  # noqa: B023
        moves = [2 * self.shape.microbatches] if scalar else self._criteria(self.form.parts(1, 1, 0), 0)
        weights = (1,) if scalar else (*(w - r for w, r in zip(self.weights[:-1], self.ramp, strict=True)), 1)
        room = self.room(stage, inside)
        chain = Chain(tuple(layers), np.array(moves), np.array(weights), room, self.runs)
        far = ((a, b, size) for a, b, size in own.store.exchanges(inside) if b > a + 1) if self.graph.tensors else ()
        skips = {(a, b): own.moves(tables[a], tables[b], size) for a, b, size in far}
        return StageChain(Net(chain, skips), tables, self.fixed_costs(stage, inside)[:2])

    def _chain_layer(
        self, stage: int, before: StrategyTable, table: StrategyTable, size: int | None, part: int, scalar: bool
    ) -> ChainLayer:
        tables, form = self.tables[stage], self.form
        columns = (table.theta(form),) if scalar else self._criteria(table.parts(form), table.figures.step)
        memory = dict(zip(MEMORY, table.held(self.held(stage), self.filled(stage)).T, strict=True))
        return ChainLayer(
            np.column_stack(list(columns)), **memory, move=tables.moves(before, table, size), group=table.groups,
            strategy=tables.store.numbers(table), part=part,
        )  # fmt: skip

    def _passed_on(self, stage: int, inside: range) -> Sequence[int | None]:
        """Bytes a sample that go to each layer of a stage from the one before it, by place; None: nothing does."""
        store = self.tables[stage].store
        if not self.graph.tensors:
            return store.crossing
        sizes = {inside.start + b: size for a, b, size in store.exchanges(inside) if b == a + 1}
        return [sizes.get(place) for place in range(inside.stop + 1)]

    def _criteria(self, parts: Sequence[Figure], step: Figure) -> tuple[Figure, ...]:
        """Time in the parts of a micro-batch; and once a step, to which is added what the parts take in the ramp.

        A way to run a stage that is no slower in any of these is no worse: what it takes longer once a step, it takes
        less in the ramp, for certain. Held against ``step`` itself fewer ways would be beaten.
        """
        criteria: list[Figure] = list(parts)
        criteria.append(step)
        for ramp, part in zip(self.ramp, parts, strict=True):
            criteria[-1] = criteria[-1] + ramp * part
        return tuple(criteria)

    def key(self, stage: int, inside: range) -> tuple[object, ...]:
        """Equal for stages that pose the same problem."""
        tables = tuple(map(id, self.layer_tables(stage, inside)))
        store = self.tables[stage].store
        between = store.exchanges(inside) if self.graph.tensors else store.crossing[inside.start + 1 : inside.stop]
        return (self.held(stage), tables, between, self.fixed_costs(stage, inside), self.budgets[stage], self.runs)

    def plans(self, stage: int, inside: range, cap: float) -> tuple[list[StagePlan], float]:
        """Every Pareto-best way to run a stage that fits the budget and alone takes at most ``cap`` picoseconds, and a
        time alone that no way left out beats (infinite where none was)."""
        key, answers = self.key(stage, inside), self.answers.plans
        if key not in answers or answers[key][0] < cap:
            built, options, dropped = self.chain(stage, inside, scalar=False), list[StagePlan](), np.inf
            if built is not None:
                fixed = self.shape.microbatches * sum(built.sends)
                front = self._front(built, cap - fixed)
                options = [self._stage_plan(path, built) for path in front.paths]
                dropped = front.dropped + fixed
            answers[key] = (cap, options, dropped)
        return answers[key][1:]

    def _front(self, built: StageChain, cap: float, near: float = 0.0) -> ChainFront:
        front = net_paths(built.net, cap, widest(built.net.chain), near)
        self.work += front.work
        return front

    def good(self, stage: int, inside: range) -> tuple[StagePlan | None, float]:
        """A good way to run a stage, soon, and a time that no way takes less than alone; None where none is met."""
        return self.answers.memo.once(("good", *self.key(stage, inside)), lambda: self._good(stage, inside))

    def _good(self, stage: int, inside: range) -> tuple[StagePlan | None, float]:
        built = self.chain(stage, inside, scalar=True)
        if built is None:
            return None, np.inf
        path, least = good_net_path(built.net)
        plan = None if path is None else self._planned(path, built)
        return plan, least + self.shape.microbatches * sum(built.sends)

    def quickest(self, stage: int, inside: range, cap: float, near: float = 0.0) -> tuple[StagePlan | None, float]:
        """The way to run a stage that takes least time alone, and a time that no other way beats.

        None where none fits or none is within the cap. A way will do that some other may beat by the share ``near``.
        """
        key, answers = (*self.key(stage, inside), near), self.answers.quickest
        if key not in answers or (answers[key][1] is None and answers[key][0] < cap):
            built, plan, least = self.chain(stage, inside, scalar=True), None, np.inf
            if built is not None:
                fixed = self.shape.microbatches * sum(built.sends)
                front = self._front(built, cap - fixed, near)
                least = front.dropped + fixed
                for best in front.paths[:1]:
                    plan = self.answers.best[key[:-1]] = self._planned(best, built)
                    least = min(least, best.time[0] + fixed)
            answers[key] = (cap, plan, least)
        _, plan, least = answers[key]
        return (None, np.inf) if least > cap else (plan, least)

    def met(self, stage: int, inside: range) -> StagePlan | None:
        """The best answer of ``quickest`` and ``good`` that is known."""
        key = self.key(stage, inside)
        return self.answers.best.get(key) or self.answers.memo.get(("good", *key), (None, 0.0))[0]

    def _planned(self, path: Path, built: StageChain) -> StagePlan:
        """The way of a path of one criterion."""
        forward = backward = built.net.moved(path.choices)
        saved = step = 0
        for table, choice in zip(built.tables, path.choices, strict=True):
            forward += int(table.figures.forward[choice])
            backward += int(table.figures.backward[choice])
            saved += round(self.form.freed * int(table.figures.weight[choice]))
            step += int(table.figures.step[choice])
        time = self._criteria(self.form.parts(forward, backward, saved), step)
        return self._stage_plan(Path(time, path.choices), built)

    def _stage_plan(self, path: Path, built: StageChain) -> StagePlan:
        *parts, last = path.time
        step = last - sum(ramp * part for ramp, part in zip(self.ramp, parts, strict=True))
        pairs = zip(parts, self.form.parts(*built.sends, 0), strict=True)
        bottleneck = tuple(computed + sent for computed, sent in pairs)
        strategies = tuple(table.strategies[choice] for table, choice in zip(built.tables, path.choices, strict=True))
        return StagePlan(bottleneck, step, strategies)


def _fitting(table: StrategyTable, wire: Layout | None, glue: Glue | None, tied: Strategy | None) -> StrategyTable:
    laid_out = table.lay_out_model(
        lambda layout: (wire is None or layout == wire) and (glue is None or glue_of(layout) == glue)
    )  # fmt: skip
    return laid_out if tied is None else laid_out.only(tied)


def widest(chain: Chain) -> int:
    """How many labels of a layer are kept at most: what one core works through in some milliseconds a layer."""
    return max(_LEAST_LABELS, _MOST_CANDIDATES // max(len(layer.rest) for layer in chain.layers))
