"""Every plan of a small space, priced: the independent check of the search.

Written from the rules of the space alone; shares no code with the search beyond the list of legal strategies and the
pricing of a layer. Each (layer, strategy) is priced once; then every combination of a stage's layers is added up by
numpy, and every combination of stages. ``priced`` has the evaluator itself price a plan, to hold the sums against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer
from galvatron_lite.cost.memory import group_memory, terms
from galvatron_lite.cost.stage import Shape, StageCost, price_stage, sharing_of, transfer_seconds
from galvatron_lite.cost.step import bound_seconds, price_stages, shape_of, straggling, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.layout import Layout, layout_of
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes, buffer_bytes, chunks_in_flight
from galvatron_lite.parallelism.pipeline.schedule import group_of, stage_at
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.space import Fixed, Space
from tests.search.instances import Instance

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Key = tuple[Layout | None, tuple[tuple[int, Strategy], ...]]
"""What the stages of a plan must agree on: the layout at boundaries, and strategies of layers that share parameters."""


@dataclass(frozen=True)
class Options:
    """Ways to run a stage, or several: figures of n of them.

    Attributes:
        ramp: (n,) seconds that add up over stages.
        parts: (n, parts) seconds of which the greatest of all stages counts.
        step: (n,) seconds once a step, of which the greatest counts.
        peak: (n,) bytes.
        rows: (n, layers) the strategy of each layer, by its number.
    """

    ramp: Floats
    parts: Floats
    step: Floats
    peak: Ints
    rows: Ints

    def at(self, rows: NDArray[np.int64]) -> Options:
        return Options(self.ramp[rows], self.parts[rows], self.step[rows], self.peak[rows], self.rows[rows])

    @property
    def seconds(self) -> Floats:
        return self.ramp + self.parts.sum(axis=1) + self.step

    def within(self, budget: int) -> Options:
        """Those that fit, without any that another one equals or beats in every figure of time."""
        fit = self.at(np.flatnonzero(self.peak <= budget))
        figures = np.column_stack((fit.ramp, fit.parts, fit.step))
        kept: list[int] = []
        for row in np.lexsort(figures.T[::-1]):
            if not kept or not (figures[kept] <= figures[row]).all(axis=1).any():
                kept.append(int(row))
        return fit.at(np.array(kept, dtype=np.int64))

    def then(self, after: Options) -> Options:
        """Every one of these before every one of the others."""
        a, b = (grid.ravel() for grid in np.indices((len(self.ramp), len(after.ramp))))
        return Options(
            self.ramp[a] + after.ramp[b],
            np.maximum(self.parts[a], after.parts[b]),
            np.maximum(self.step[a], after.step[b]),
            np.maximum(self.peak[a], after.peak[b]),
            np.concatenate((self.rows[a], after.rows[b]), axis=1),
        )


@dataclass(frozen=True)
class BrutePlan:
    """One plan: its shape, layers of each stage, strategies, and what it costs by this module's sums."""

    shape: Shape
    sizes: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    seconds: float
    peak: int


@dataclass
class Brute:
    """Every plan of a question.

    Attributes:
        profile, devices, batch, schedules, fixed, space: as the search is asked.
        runs: of equal strategies that a part of the model (before, among, behind the blocks) may have in a stage.
    """

    profile: Profile
    devices: int
    batch: int
    schedules: Sequence[Schedule]
    fixed: Fixed
    space: Space
    runs: int | None = None
    _stages: dict[tuple[Shape, int, int, int], dict[Key, Options]] = field(default_factory=dict)
    _uniform: dict[Shape, list[BrutePlan]] = field(default_factory=dict)
    _fitting: dict[tuple[Shape, int, int, int, int], dict[Key, Options]] = field(default_factory=dict)

    @cached_property
    def pricer(self) -> LayerPricer:
        return LayerPricer(self.profile)

    @cached_property
    def shapes(self) -> list[Shape]:
        return [shape for shape in self._every_shape() if self._wanted(shape)]

    def _every_shape(self) -> Iterator[Shape]:
        for stages, count in product(range(1, self.devices + 1), range(1, self.batch + 1)):
            if self.devices % stages or self.batch % count or stages > len(self.profile.graph.layers):
                continue
            for schedule in self.schedules if stages > 1 else (Schedule.ONE_F_ONE_B,):
                for virtual in self._virtual(schedule, stages, count):
                    yield Shape(self.devices, stages, count, self.batch // count, schedule, virtual)

    def _virtual(self, schedule: Schedule, stages: int, count: int) -> list[int]:
        """How many stages a group may run: one, but where the schedule asks for more; each holds a block, or what is
        before or after all of them."""
        blocks = sum(layer.role is Role.BLOCK for layer in self.profile.graph.layers)
        if schedule is Schedule.INTERLEAVED:
            most = len({layer.role for layer in self.profile.graph.layers}) - 1 + blocks
            return [v for v in range(2, most + 1) if v * stages <= most and stages <= blocks and count % stages == 0]
        if schedule is Schedule.ZERO_BUBBLE_V:
            return [2] if 2 * stages <= blocks else []
        return [1]

    def _wanted(self, shape: Shape) -> bool:
        fixed = self.fixed
        if "pipeline" in fixed.forbidden and shape.stages > 1:
            return False
        if shape.stages > 1 and fixed.schedule not in (None, shape.schedule):
            return False
        if fixed.virtual not in (None, shape.virtual):
            return False
        return fixed.pipeline in (None, shape.stages) and fixed.microbatches in (None, shape.microbatches)

    @cached_property
    def number(self) -> dict[Strategy, int]:
        every = (s for shape in self.shapes for layer in self.profile.graph.layers for s in self.offered(shape, layer))
        return {strategy: number for number, strategy in enumerate(sorted(set(every)))}

    def offered(self, shape: Shape, layer: Layer) -> list[Strategy]:
        """What is pinned for a layer counts as if pinned for all where it is asked what there is."""
        offered = self.space.strategies(layer.kind, shape.stage_devices, self.fixed.at_layer(layer.name))
        return [strategy for strategy in offered if shape.microbatch % strategy.batch_degree == 0]

    @cached_property
    def ties(self) -> list[set[int]]:
        """Places of layers that share parameters, directly or not."""
        place = {layer.name: index for index, layer in enumerate(self.profile.graph.layers)}
        groups: list[set[int]] = []
        for tie in self.profile.graph.ties:
            own = {place[tie.first], place[tie.second]}
            for group in [group for group in groups if group & own]:
                groups.remove(group)
                own |= group
            groups.append(own)
        return groups

    def peaks(self) -> list[int]:
        """Every peak of a stage at which a plan may just fit, from the least of any plan on."""
        every = {int(peak) for shape in self.shapes for peak in self._peaks(shape)}
        low, high = 0, max(every, default=0)
        ordered = sorted(every)
        if self.best(high) is None:
            return []
        low, top = 0, len(ordered) - 1
        while low < top:
            middle = (low + top) // 2
            low, top = (low, middle) if self.best(ordered[middle]) is not None else (middle + 1, top)
        return ordered[low:]

    def _peaks(self, shape: Shape) -> Iterator[int]:
        layers = len(self.profile.graph.layers)
        yield from (plan.peak for plan in self.uniform(shape))
        if shape.virtual > 1:
            return
        for stage, (start, stop) in product(range(shape.stages), combinations(range(layers + 1), 2)):
            if (start == 0) == (stage == 0) and (stop == layers) == (stage == shape.stages - 1):
                for options in self.stage(shape, stage, start, stop).values():
                    yield from np.unique(options.peak).tolist()

    def best(self, budget: int) -> BrutePlan | None:
        """The quickest plan that fits."""
        plans = [plan for shape in self.shapes for plan in self.best_of(shape, budget)]
        return min(plans, key=lambda plan: plan.seconds, default=None)

    def best_of(self, shape: Shape, budget: int) -> Iterator[BrutePlan]:
        """The quickest plans of a shape, one for each choice of boundaries and of what stages agree on."""
        layers = len(self.profile.graph.layers)
        yield from (plan for plan in self.uniform(shape) if plan.peak <= budget)
        if shape.virtual > 1:
            return
        for inner in combinations(range(1, layers), shape.stages - 1):
            cuts = (0, *inner, layers)
            for options in self._whole(shape, cuts, budget).values():
                row = int(np.argmin(options.seconds))
                yield self._plan(shape, cuts, options.at(np.array([row])))

    def _plan(self, shape: Shape, cuts: Sequence[int], option: Options) -> BrutePlan:
        names = list(self.number)
        alone = float(option.seconds[0]) + self.profile.overhead.step
        return BrutePlan(
            shape,
            tuple(b - a for a, b in pairwise(cuts)),
            tuple(names[number] for number in option.rows[0]),
            alone * straggling(self.profile, self.devices),
            int(option.peak[0]),
        )

    def _whole(self, shape: Shape, cuts: Sequence[int], budget: int) -> dict[Key, Options]:
        """All stages together, by what they agree on."""
        known: dict[Key, Options] = {}
        for stage in range(shape.stages):
            own = self._fit(shape, stage, cuts[stage], cuts[stage + 1], budget)
            known = own if stage == 0 else _joined(known, own)
        return known

    def _fit(self, shape: Shape, stage: int, start: int, stop: int, budget: int) -> dict[Key, Options]:
        """The ways to run a stage that fit and may be of use."""
        place = (shape, stage, start, stop, budget)
        if place not in self._fitting:
            fits = {key: options.within(budget) for key, options in self.stage(shape, stage, start, stop).items()}
            self._fitting[place] = {key: options for key, options in fits.items() if len(options.ramp)}
        return self._fitting[place]

    def uniform(self, shape: Shape) -> list[BrutePlan]:
        """Every plan of a schedule that runs several stages a group; empty for others.

        Blocks are shared out evenly; all layers before them have one strategy, all blocks (or, of those of each group,
        the first so many eighths have another one that only recomputes differently), and all layers after them. Each
        plan is priced as a whole by the evaluator.
        """
        if shape not in self._uniform:
            self._uniform[shape] = list(self._every_uniform(shape)) if shape.virtual > 1 else []
        return self._uniform[shape]

    def _every_uniform(self, shape: Shape) -> Iterator[BrutePlan]:
        layers = self.profile.graph.layers
        roles = [layer.role for layer in layers]
        offered = [
            set.intersection(*({*self.offered(shape, one)} for one in layers if one.role is role))
            for role in dict.fromkeys(roles)
        ]
        for sizes, chosen in product(self._even(shape), product(*map(sorted, offered))):
            own = dict(zip(dict.fromkeys(roles), chosen, strict=True))
            for first, inside in self._mixed(shape, sizes, own[Role.BLOCK], offered[roles.index(Role.BLOCK) > 0]):
                strategies = tuple(first if place in inside else own[role] for place, role in enumerate(roles))
                pairs = zip(layers, strategies, strict=True)
                pinned = all(self.fixed.allows_in(layer.name, one) for layer, one in pairs)
                shared = all(len({strategies[place] for place in group}) == 1 for group in self.ties)
                if pinned and shared:
                    with suppress(InputError):
                        yield BrutePlan(shape, sizes, strategies, *_priced(self, shape, sizes, strategies))

    def _mixed(
        self, shape: Shape, sizes: tuple[int, ...], block: Strategy, offered: set[Strategy]
    ) -> Iterator[tuple[Strategy, set[int]]]:
        """Another strategy for blocks, and which of them have it: none first, and alone where runs are limited to 1."""
        yield block, set()
        if self.runs == 1:
            return
        layers = self.profile.graph.layers
        blocks = [place for place, layer in enumerate(layers) if layer.role is Role.BLOCK]
        groups = [
            group_of(shape.schedule, shape.stages, chunk) for chunk, size in enumerate(sizes) for _ in range(size)
        ]
        held = [[place for place in blocks if groups[place] == group] for group in range(shape.stages)]
        kinds = {(layers[place].kind, self.fixed.pins_of(layers[place].name)) for place in blocks}
        if len(kinds) > 1 or {place for tied in self.ties for place in tied} & {*blocks}:
            return
        parts = min(8, *map(len, held))
        for other in sorted(offered - {block}):
            if replace(other, recompute=Recompute.NONE) == replace(block, recompute=Recompute.NONE):
                for count in range(1, parts):
                    inside = {place for own in held for n, place in enumerate(own) if n * parts // len(own) < count}
                    yield other, inside

    def _even(self, shape: Shape) -> list[tuple[int, ...]]:
        """Layers of each chunk: blocks evenly, the first chunks one more, and what is before and after at the ends; or,
        where that is uneven, each of these two counts as a block, and the chunk after the first has one more first."""
        roles = [layer.role for layer in self.profile.graph.layers]
        chunks, blocks = shape.stages * shape.virtual, roles.count(Role.BLOCK)
        before = roles.index(Role.BLOCK)
        after = len(roles) - before - blocks
        found = []
        for ends in ((False, False), (before > 0, after > 0)):
            start = ends[0]
            each, left = divmod(blocks + sum(ends), chunks)
            if each and (blocks % chunks or not found):
                sizes = [each + (start <= chunk < start + left) for chunk in range(chunks)]
                sizes[0] += before - ends[0]
                sizes[-1] += after - ends[1]
                found.append(tuple(sizes))
        return found

    def stage(self, shape: Shape, stage: int, start: int, stop: int) -> dict[Key, Options]:
        """Every way to run a stage that keeps the rules, by what it must agree on with others."""
        key = (shape, stage, start, stop)
        if key not in self._stages:
            self._stages[key] = self._stage(shape, stage, range(start, stop))
        return self._stages[key]

    def _stage(self, shape: Shape, stage: int, inside: range) -> dict[Key, Options]:
        layers = [self._layer(shape, place, inside) for place in inside]
        if not all(layers):
            return {}
        grid = np.indices([len(layer) for layer in layers]).reshape(len(layers), -1)
        names = [[strategy for strategy, _ in layer] for layer in layers]
        result: dict[Key, Options] = {}
        for key, columns in self._by_key(shape, inside, names, grid):
            result[key] = self._figures(shape, stage, inside, layers, columns, key[0])
        return result

    def _layer(self, shape: Shape, place: int, inside: range) -> list[tuple[Strategy, LayerCost]]:
        layer = self.profile.graph.layers[place]
        sharing = sharing_of(self.profile.graph, inside).get(place, ALONE)
        found = []
        for strategy in self.offered(shape, layer):
            cost = self.pricer.price(layer.kind, strategy, shape.microbatch, shape.stages, sharing)
            if cost is not None and self.fixed.allows_in(layer.name, strategy):
                if shape.schedule.splits_backward:
                    cost = replace(cost, host=cost.host + cost.split_host)
                found.append((strategy, cost))
        return found

    def _by_key(
        self, shape: Shape, inside: range, names: list[list[Strategy]], grid: Ints
    ) -> Iterator[tuple[Key, Ints]]:
        """The combinations that keep the rules, by what stages must agree on."""
        end = len(self.profile.graph.layers)
        ends = [place for place, there in ((0, inside.start > 0), (-1, inside.stop < end)) if there]
        groups = [sorted(group & {*inside}) for group in self.ties]
        groups = [group for group in groups if group]
        glued = [place for place in inside if self.profile.graph.layers[place].role is not Role.BLOCK]
        if shape.stages > 1 or not self._matmuls():
            glued = []
        keys: dict[Key, list[int]] = {}
        for column, choice in enumerate(grid.T.tolist()):
            own = [names[place][row] for place, row in enumerate(choice)]
            wires = {layout_of(own[place]) for place in ends}
            glue = {layout_of(own[place - inside.start]).replicated("sequence") for place in glued}
            tied = [{own[place - inside.start] for place in group} for group in groups]
            if self.runs is not None and self._runs(inside, own) > self.runs:
                continue
            if len(wires) <= 1 and len(glue) <= 1 and all(len(one) == 1 for one in tied):
                same = tuple((group[0], one.pop()) for group, one in zip(self._whole_groups(groups), tied, strict=True))
                keys.setdefault((wires.pop() if wires else None, same), []).append(column)
        for key, columns in keys.items():
            yield key, grid[:, columns]

    def _runs(self, inside: range, own: list[Strategy]) -> int:
        """The most runs of any part of the model in a stage."""
        roles = [self.profile.graph.layers[place].role for place in inside]
        first = roles.index(Role.BLOCK) if Role.BLOCK in roles else len(roles)
        parts = [1 if role is Role.BLOCK else 2 * (place > first) for place, role in enumerate(roles)]
        changes = [a == b and x != y for (a, b), (x, y) in zip(pairwise(parts), pairwise(own), strict=True)]
        return 1 + max(
            sum(changed for changed, part in zip(changes, parts, strict=False) if part == k) for k in range(3)
        )

    def _whole_groups(self, groups: list[list[int]]) -> list[list[int]]:
        """The first place of the whole group names it in every stage."""
        return [sorted(next(whole for whole in self.ties if group[0] in whole)) for group in groups]

    def _figures(
        self, shape: Shape, stage: int, inside: range, layers: list[list[tuple[Strategy, LayerCost]]],
        grid: Ints, wire: Layout | None,
    ) -> Options:  # fmt: skip
        def summed(figure: str) -> Floats:
            columns = [np.array([getattr(cost, figure) for _, cost in layer]) for layer in layers]
            return np.sum([column[own] for column, own in zip(columns, grid, strict=True)], axis=0)

        moving = self._moving(shape, inside, layers, grid)
        sends, buffers = self._sends(shape, stage, inside, wire)
        host = (inside.start > 0) + (inside.stop < len(self.profile.graph.layers))
        fixed = moving + host * self.profile.overhead.pipeline + self.profile.overhead.microbatch / 2
        forward = summed("forward_seconds") + fixed + sends[1]
        backward = summed("backward_seconds") + fixed + sends[0]
        ramp, parts = _closed(shape, forward, backward, _weights(layers, grid), self.profile.steps_overlap)
        names = [np.array([self.number[strategy] for strategy, _ in layer]) for layer in layers]
        rows = np.column_stack([name[own] for name, own in zip(names, grid, strict=True)])
        peak = _peak(shape, stage, layers, grid) + buffers + self.profile.cluster.device.context
        return Options(ramp, parts, summed("step_seconds"), peak, rows)

    def _moving(
        self, shape: Shape, inside: range, layers: list[list[tuple[Strategy, LayerCost]]], grid: Ints
    ) -> Floats:
        total = np.zeros(grid.shape[1])
        for place in range(1, len(layers)):
            output = self.profile.graph.crossing(inside[place])
            table = np.array(
                [
                    [self.pricer.redistribution(output, shape.microbatch, a, b) for b, _ in layers[place]]
                    for a, _ in layers[place - 1]
                ]
            )
            total += table[grid[place - 1], grid[place]]
        return total

    def _sends(self, shape: Shape, stage: int, inside: range, wire: Layout | None) -> tuple[tuple[float, float], int]:
        """Seconds of the gradient sent back and of the output sent on, and bytes of the buffers for both."""
        sizes, seconds = [0, 0], [0.0, 0.0]
        if wire is not None:
            # as large as under a strategy that shares tokens where this one shares pixels, or channels
            shared, tokens = wire.sequence * wire.channels > 1, wire.tokens * wire.planes * wire.rows * wire.columns
            tensor = wire.sequence * wire.channels * wire.copies
            sender = Strategy(data=wire.batch, context=tokens, tensor=tensor, sequence_parallel=shared)
            for side, cut in enumerate((inside.start, inside.stop)):
                if 0 < cut < len(self.profile.graph.layers):
                    output = self.profile.graph.crossing(cut)
                    sizes[side] = boundary_bytes(output, shape.microbatch, sender)
                    ends = (stage - 1 + side, stage + side)
                    seconds[side] = transfer_seconds(self.pricer, sizes[side], sender, shape, ends)
        return (seconds[0], seconds[1]), buffer_bytes(
            *sizes, shape.microbatches, shape.schedule, counted=not self.profile.unbuffered
        )

    def allowed(self, cuts: Sequence[int], strategies: Sequence[Strategy]) -> bool:
        """Whether one complete choice keeps the rules: pins, one strategy a tied group, one glue, one wire."""
        layers = self.profile.graph.layers
        if not all(self.fixed.allows_in(layer.name, own) for layer, own in zip(layers, strategies, strict=True)):
            return False
        if any(len({strategies[place] for place in group}) > 1 for group in self.ties):
            return False
        if len(cuts) == 2:
            edges = [own for own, layer in zip(strategies, layers, strict=True) if layer.role is not Role.BLOCK]
            return not self._matmuls() or len({layout_of(own).replicated("sequence") for own in edges}) <= 1
        return len({layout_of(strategies[index]) for cut in cuts[1:-1] for index in (cut - 1, cut)}) == 1

    def _matmuls(self) -> bool:
        """Whether the matmuls of some layer can be split."""
        return any(kind.tensor_degrees > 1 for kind in self.profile.graph.kinds.values())

    def priced(self, plan: BrutePlan) -> tuple[float, int]:
        """Seconds and peak of a plan by the evaluator."""
        return _priced(self, plan.shape, plan.sizes, plan.strategies)


def brute_of(asked: Instance) -> Brute:
    """Every plan of a random question."""
    return Brute(asked.profile, asked.devices, asked.batch, asked.schedules, asked.fixed, asked.space)


def _joined(known: dict[Key, Options], own: dict[Key, Options]) -> dict[Key, Options]:
    """Every pair of entries that agree."""
    result: dict[Key, list[Options]] = {}
    for (wire, tied), options in known.items():
        for (other, also), after in own.items():
            both = {**dict(tied), **dict(also)}
            agree = both == {**dict(also), **dict(tied)}
            if agree and (wire is None or other is None or wire == other):
                key = (wire if other is None else other, tuple(sorted(both.items())))
                result.setdefault(key, []).append(options.then(after))
    return {key: _stacked(options) for key, options in result.items()}


def _stacked(options: list[Options]) -> Options:
    if len(options) == 1:
        return options[0]
    names = ("ramp", "parts", "step", "peak", "rows")
    return Options(*(np.concatenate([getattr(one, name) for one in options]) for name in names))


def _weights(layers: list[list[tuple[Strategy, LayerCost]]], grid: Ints) -> Floats:
    """Seconds of the gradients of weights: what backward takes longer than forward, at most as long as forward.

    None of layers under ZeRO-2 and 3, which reduce gradients when backward ends.
    """
    columns = [
        np.array([min(max(c.backward - c.forward, 0.0), c.forward) * (s.parameter_shards == 1) for s, c in layer])
        for layer in layers
    ]
    return np.sum([column[own] for column, own in zip(columns, grid, strict=True)], axis=0)


def _closed(shape: Shape, forward: Floats, backward: Floats, weight: Floats, overlap: bool) -> tuple[Floats, Floats]:
    """What of a stage adds up, and the parts whose greatest counts: T = sum ramp + sum of max parts (+ max step)."""
    count, both = shape.microbatches, forward + backward
    if shape.schedule is Schedule.GPIPE:
        return both, (count - 1) * np.column_stack((forward, backward))
    most = {Schedule.ZERO_BUBBLE_1P: 1.0, Schedule.ZERO_BUBBLE_2P: 2.0 if overlap else 1.0}.get(shape.schedule)
    saved = 0.0 if most is None else 1.0 + min(most, (count - 1) / (shape.stages - 1))
    ramp = both - saved * weight
    return ramp, (count * both - ramp)[:, None]


def _peak(shape: Shape, stage: int, layers: list[list[tuple[Strategy, LayerCost]]], grid: Ints) -> Ints:
    """Bytes at the worst moment: of every layer's own passes, and of the optimizer."""
    stages = shape.stages
    ahead = {Schedule.ONE_F_ONE_B: stages - stage, Schedule.ZERO_BUBBLE_1P: stages, Schedule.ZERO_BUBBLE_2P: 2 * stages}
    held = min(shape.microbatches, ahead.get(shape.schedule, shape.microbatches))
    count, filled = shape.microbatches, _filled(shape, held)
    figures = [[terms(cost, held, count, filled=filled) for _, cost in layer] for layer in layers]

    def of(name: str, place: int) -> Ints:
        return np.array([getattr(one, name) for one in figures[place]])[grid[place]]

    places = range(len(layers))
    everything = np.sum([of("rest", place) for place in places], axis=0)
    worst = np.sum([of("updated", place) for place in places], axis=0)
    before = np.zeros(grid.shape[1], dtype=np.int64)
    for place in places:
        after = of("pending", place + 1) if place + 1 < len(layers) else 0
        beside = of("prefetched", place - 1) if place else 0
        moment = everything + before + beside + np.maximum(of("peak", place), of("middle", place) + after)
        worst = np.maximum(worst, moment)
        before = before + of("prefix", place)
    return worst


def _filled(shape: Shape, held: int) -> bool:
    """Whether a stage's first backward begins with all of several micro-batches in memory."""
    split = shape.schedule in (Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P, Schedule.ZERO_BUBBLE_V)
    return shape.microbatches > 1 and held == shape.microbatches and not split


def bound_of(profile: Profile, plan: Plan) -> float:
    """What the search minimises, of a whole plan."""
    strategies = strategies_of(plan, profile)
    shape = shape_of(plan, strategies)
    sizes = [sum(run.count for run in stage.runs) for stage in plan.stages]
    return bound_seconds(profile, shape, price_stages(LayerPricer(profile), shape, sizes, strategies))


def every_plan(brute: Brute) -> Iterator[tuple[float, int]]:
    """Seconds and peak of every plan, each priced as a whole by the evaluator: what the sums are checked against."""
    layers = brute.profile.graph.layers
    for shape in brute.shapes:
        options = [brute.offered(shape, layer) for layer in layers]
        for inner in combinations(range(1, len(layers)), shape.stages - 1):
            cuts = (0, *inner, len(layers))
            for strategies in product(*options):
                if brute.allowed(cuts, strategies):
                    sizes = [b - a for a, b in pairwise(cuts)]
                    with suppress(InputError):
                        yield _priced(brute, shape, sizes, strategies)


def _priced(brute: Brute, shape: Shape, sizes: Sequence[int], strategies: Sequence[Strategy]) -> tuple[float, int]:
    """By stages, each with the micro-batches in flight that its schedule is limited to."""
    ends = [0, *accumulate(sizes)]
    ranges = [range(*pair) for pair in pairwise(ends)]
    groups = [[stage_at(shape.schedule, shape.stages, g, c) for c in range(shape.virtual)] for g in range(shape.stages)]
    costs: dict[int, StageCost] = {}
    peaks = []
    for group, own in enumerate(groups):
        beside = [place for stage in own for place in ranges[stage]]
        for stage in own:
            costs[stage] = price_stage(brute.pricer, shape, stage, ranges[stage], strategies, beside)
        held = chunks_in_flight(shape.schedule, shape.stages, group, shape.microbatches, shape.virtual)
        buffers = sum(costs[stage].buffers for stage in own)
        context = brute.profile.cluster.device.context
        chunks, filled = [costs[stage].layers for stage in own], len(own) == 1 and _filled(shape, held[0][1][0])
        peaks.append(group_memory(chunks, held, shape.microbatches, buffers, context, filled=filled).total)
    return bound_seconds(brute.profile, shape, [costs[stage] for stage in sorted(costs)]), max(peaks)
