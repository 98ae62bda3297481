"""The search along a chain finds what looking at every sequence finds; tables of what strategies cost."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.points import Curves, figures_at
from galvatron_lite.cost.stage import Shape
from galvatron_lite.model.graph import ModelGraph, Recompute
from galvatron_lite.parallelism.backends import ANY, GALVATRON, Backend
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import LayerPoint
from galvatron_lite.search.chain.chain import Chain, ChainFront, ChainLayer, best_of_parts, strategies_of_parts
from galvatron_lite.search.chain.labels import good_path, pareto_paths
from galvatron_lite.search.chain.pareto import pareto_rows, pareto_within
from galvatron_lite.search.refusals import unprofiled
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import UNPINNED, Fixed, Space
from galvatron_lite.search.tables import Store
from tests.factories import random_profile
from tests.search.test_strategies import ATTENTION, BARE, MIXTURE, PLAIN

NEAR = 0.05
QUIET = {"deadline": None, "derandomize": True}
Times = tuple[int, ...]


def random_figures(draw: random.Random, count: int, groups: int, criteria: int, top: int) -> dict[str, np.ndarray]:
    """The figures of a layer's choices; what only some layers need is often nothing."""

    def whole(low: int, high: int) -> np.ndarray:
        return np.array([draw.randint(low, high) for _ in range(count)], dtype=np.int64)

    prefix = whole(-min(top // 3, 2), top)
    return {
        "time": np.array([whole(0, top) for _ in range(criteria)], dtype=np.int64).T.reshape(count, criteria),
        "rest": np.maximum(whole(0, top), -prefix),
        "prefix": prefix,
        "peak": whole(0, top * draw.choice([1, 3])),
        "middle": whole(0, top),
        "prefetched": whole(0, draw.choice([0, top // 4, top])),
        "pending": whole(0, draw.choice([0, top // 4, top])),
        "updated": whole(0, top * draw.choice([1, 3])),
        "group": whole(0, groups - 1),
    }


def random_chain(draw: random.Random, layers: int, choices: int, criteria: int, equal: bool) -> Chain:
    """A chain without room, of few kinds of layers in runs if ``equal``, else of unlike layers."""
    groups, top = draw.randint(1, 3), draw.choice([3, 10, 1000, 10**6])
    kinds = [
        random_figures(draw, draw.randint(1, choices), groups, criteria, top)
        for _ in range(draw.randint(1, 2) if equal else layers)
    ]
    moves = [
        np.array([[draw.choice([0, draw.randint(0, top)]) for _ in range(groups)] for _ in range(groups)])
        for _ in range(1 if equal else layers)
    ]
    made, kind = [], 0
    for place in range(layers):
        kind = place if not equal else kind if draw.random() < 0.85 else draw.randrange(len(kinds))
        made.append(ChainLayer(**kinds[kind], move=moves[place % len(moves)]))
    weights = [1] if criteria == 1 else [draw.randint(1, 4) for _ in range(criteria)]
    return Chain(tuple(made), np.array([draw.randint(0, 3) for _ in range(criteria)]), np.array(weights), 0)


def with_room(chain: Chain, room: int) -> Chain:
    return Chain(chain.layers, chain.moves, chain.weights, room)


def path_time(chain: Chain, choices: tuple[int, ...]) -> Times:
    total = sum(layer.time[choice] for layer, choice in zip(chain.layers, choices, strict=True))
    for place in range(1, len(choices)):
        before, layer = chain.layers[place - 1], chain.layers[place]
        total = total + chain.moves * layer.move[before.group[choices[place - 1]], layer.group[choices[place]]]
    return tuple(int(value) for value in total)


def moments_peak(chain: Chain, choices: tuple[int, ...]) -> int:
    """The worst moment by its definition, one layer after the other."""
    names = ("rest", "prefix", "peak", "middle", "prefetched", "pending", "updated")
    rows = [
        {name: int(getattr(layer, name)[choice]) for name in names}
        for layer, choice in zip(chain.layers, choices, strict=True)
    ]
    rest = sum(row["rest"] for row in rows)
    moments = [sum(row["updated"] for row in rows)]
    for place, row in enumerate(rows):
        beside = rows[place - 1]["prefetched"] if place else 0
        pending = rows[place + 1]["pending"] if place + 1 < len(rows) else 0
        held = rest + sum(before["prefix"] for before in rows[:place])
        moments.append(held + beside + max(row["peak"], row["middle"] + pending))
    return max(moments)


def every_path(chain: Chain) -> list[tuple[Times, int]]:
    paths = itertools.product(*(range(len(layer.rest)) for layer in chain.layers))
    return [(path_time(chain, path), moments_peak(chain, path)) for path in paths]


def weighted(chain: Chain, time: Times) -> int:
    return sum(int(weight) * value for weight, value in zip(chain.weights, time, strict=True))


def beats(one: Times, other: Times) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def pareto(times: list[Times]) -> list[Times]:
    distinct = sorted(set(times))
    return [time for time in distinct if not any(other != time and beats(other, time) for other in distinct)]


def check(chain: Chain, front: ChainFront, best: list[Times]) -> None:
    """The front is the Pareto set ``best``, or what it lacks is no better than it says; its paths are as they say."""
    times = [path.time for path in front.paths]
    for path in front.paths:
        assert moments_peak(chain, path.choices) <= chain.room
        assert path_time(chain, path.choices) == path.time
    if front.complete:
        assert times == best
    for time in best:
        assert weighted(chain, time) >= front.dropped or any(beats(other, time) for other in times)


def check_good(chain: Chain, best: list[Times]) -> None:
    """A path that is met soon fits and is what it says; the bound beside it holds."""
    path, least = good_path(chain)
    assert not best or least <= weighted(chain, best[0])
    if path is not None:
        assert moments_peak(chain, path.choices) <= chain.room
        assert path_time(chain, path.choices) == path.time
        assert weighted(chain, path.time) >= least


def check_near(chain: Chain, best: list[Times], cap: float) -> None:
    """A path that may be beaten by a share is beaten by no more, and what is said to beat it is a bound."""
    front = pareto_paths(chain, cap, near=NEAR)
    check(chain, front, best)
    assert bool(front.paths) == bool(best)
    if best:
        assert weighted(chain, front.paths[0].time) * (1 - NEAR) <= weighted(chain, best[0])


@settings(max_examples=120, **QUIET)
@given(st.integers(0, 10**9))
def test_the_chain_search_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    equal, criteria = draw.random() < 0.6, draw.choice([1, 1, 1, 2, 3])
    layers = draw.randint(1, 7 if equal else 5)
    chain = random_chain(draw, layers, 4 if layers < 6 else 2, criteria, equal)
    paths = every_path(chain)
    peaks = sorted({peak for _, peak in paths})
    for room in (peaks[0] - 1, peaks[0], draw.choice(peaks), peaks[-1]):
        own = with_room(chain, room)
        fitting = [time for time, peak in paths if peak <= room]
        cap = weighted(chain, draw.choice(fitting)) if fitting and draw.random() < 0.5 else math.inf
        best = pareto([time for time in fitting if weighted(chain, time) <= cap])
        check(own, pareto_paths(own, cap, draw.choice([None, None, 1, 2, 5])), best)
        if criteria == 1:
            check_good(own, best)
            check_near(own, best, cap)


def test_a_moment_that_never_fits_is_found_before_labels_whichever_bounds_best() -> None:
    """The last layer's moment bounds best, as layers choose between time and bytes; the first one needs a byte too many
    under every choice."""

    def layer(times: list[int], prefix: list[int], peak: int) -> ChainLayer:
        ones = np.ones(len(times), dtype=np.int64)
        zeros = 0 * ones
        time, kept = np.array(times)[:, None], np.array(prefix)
        return ChainLayer(
            time, ones, kept, peak * ones, zeros, zeros, zeros, ones, np.zeros((1, 1), dtype=np.int64), zeros
        )

    block = layer([10, 11], [4, 1], 6)
    chain = Chain((layer([1], [0], 100), *[block] * 40), np.array([1]), np.array([1]), 140)
    assert moments_peak(chain, (0, *[1] * 40)) == 141
    assert good_path(chain) == (None, math.inf)
    assert pareto_paths(chain, near=NEAR).work == 0
    path, _ = good_path(with_room(chain, 141))
    assert path is not None


def plain_labels(chain: Chain) -> list[Times]:
    """The Pareto set by labels over prefixes, without any bound: what is compared is all that later layers can see."""
    labels: dict[int, list[tuple[int, ...]]] = {-1: [(*([0] * len(chain.moves)), 0, -(10**12), 0, 0)]}
    for place, layer in enumerate(chain.layers):
        grown: dict[int, list[tuple[int, ...]]] = {}
        for last, before in labels.items():
            for choice in range(len(layer.rest)):
                grown.setdefault(choice, []).extend(_longer(chain, place, last, choice, label) for label in before)
        labels = {choice: pareto(found) for choice, found in grown.items()}
    ends = [label for found in labels.values() for label in found]
    return pareto([label[:-4] for label in ends if max(label[-4], label[-1]) <= chain.room])


def _longer(chain: Chain, place: int, last: int, choice: int, label: tuple[int, ...]) -> tuple[int, ...]:
    layer, (*time, worst, waiting, start, updated) = chain.layers[place], label
    rest, middle, beside, moved = int(layer.rest[choice]), start + int(layer.middle[choice]), 0, 0
    if last >= 0:
        before = chain.layers[place - 1]
        beside = int(before.prefetched[last])
        moved = int(layer.move[before.group[last], layer.group[choice]])
    spent = [int(own + a + moved * b) for own, a, b in zip(time, layer.time[choice], chain.moves, strict=True)]
    worst = max(worst, waiting + int(layer.pending[choice]), start + int(layer.peak[choice]) + beside, middle + beside)
    start += rest + int(layer.prefix[choice])
    return (*spent, worst + rest, middle + beside + rest, start, updated + int(layer.updated[choice]))


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_equal_layers(seed: int) -> None:
    draw = random.Random(seed)
    chain = random_chain(draw, draw.randint(10, 16), 3, 1 if seed % 4 else 2, equal=True)
    roomy = with_room(chain, 10**12)
    (quick, *_), lean = (
        pareto_paths(roomy).paths,
        tuple(int(np.argmin(layer.rest + layer.prefix)) for layer in chain.layers),
    )
    low, high = sorted((moments_peak(chain, lean), moments_peak(chain, quick.choices)))
    for share in (0.0, 0.3, 0.7):
        own = with_room(chain, int(low + share * (high - low)))
        best = plain_labels(own)
        check(own, pareto_paths(own), best)
        if len(own.weights) == 1:
            check_good(own, best)


@pytest.mark.parametrize("seed", range(20))
def test_one_strategy_a_part_equals_every_choice_of_one(seed: int) -> None:
    """Three parts, whose layers have their strategies in any order."""
    draw = random.Random(seed)
    count, top = draw.randint(1, 4), draw.choice([3, 1000])
    layers = []
    for place in range(6):
        strategy = np.array(draw.sample(range(count), count))
        figures = random_figures(draw, count, 2, 1, top) | {"group": strategy % 2}  # the layout is the strategy's
        move = np.array([[0, draw.randint(1, top)], [draw.randint(1, top), 0]])
        layers.append(ChainLayer(**figures, move=move, strategy=strategy, part=place // 2))
    chain = Chain(tuple(layers), np.array([draw.randint(1, 3)]), np.array([1]), 0, runs=1)
    paths = {}
    for chosen in itertools.product(range(count), repeat=3):
        path = tuple(list(layer.strategy).index(chosen[layer.part]) for layer in layers)
        paths[path] = path_time(chain, path)[0], moments_peak(chain, path)
    common = strategies_of_parts(chain)
    for room in sorted({peak for _, peak in paths.values()}):
        least = min(time for time, peak in paths.values() if peak <= room)
        found = best_of_parts(replace(chain, room=room), common, float(least))
        assert (found.time[0], paths[found.choices][0]) == (least, least)
        assert paths[found.choices][1] <= room
        assert best_of_parts(replace(chain, room=room), common, least - 0.5) is None


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)), max_size=40)


@given(ROWS)
def test_rows_are_pareto_best_within_their_group_alone(rows: list[tuple[int, ...]]) -> None:
    values = np.array(rows, dtype=np.int64).reshape(-1, 3)
    groups, figures = values[:, 0], values[:, 1:]
    own = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    alone = sorted(int(row) for places in own for row in places[pareto_rows(figures[places])])
    assert list(pareto_within(figures, groups)) == alone


@pytest.mark.parametrize("pins", [(("zero_stage", 3),), (("tensor", 2),), (("recompute", Recompute.FULL), ("zero", 1))])
@pytest.mark.parametrize("seed", range(4))
def test_pinned_tables_are_the_same_beside_those_without_pins(seed: int, pins: tuple[tuple[str, object], ...]) -> None:
    profile = random_profile(random.Random(seed), devices=4, blocks=2)
    pricer, fixed = LayerPricer(profile), Fixed(strategy=pins)
    shape, later = (Shape(4, 1, count, 8 // count, Schedule.ONE_F_ONE_B, 1) for count in (1, 2))
    for kind in profile.graph.kinds:
        alone, beside = (Store(pricer, Space(profile.graph, 4)) for _ in range(2))
        beside.table(kind, shape, UNPINNED)
        for asked in (shape, later):
            one, other = alone.table(kind, asked, fixed), beside.table(kind, asked, fixed)
            assert one.strategies == other.strategies
            assert one.layouts == other.layouts
            assert np.array_equal(one.figures.memory, other.figures.memory)
            assert np.array_equal(one.both, other.both)


@pytest.mark.parametrize("backend", [ANY, GALVATRON], ids=lambda backend: backend.name)
@pytest.mark.parametrize(("devices", "node"), [(8, 4), (12, 8), (12, 4), (6, 8)])
def test_work_without_figures_is_named_as_if_every_stage_were_looked_at(
    devices: int, node: int, backend: Backend
) -> None:
    profile = random_profile(random.Random(devices), devices=devices, blocks=13)
    graph = _graph_of(profile.graph)
    pricer = LayerPricer(replace(profile, graph=graph, layers=()))
    space = Space(graph, node, backend, tokens=1)
    request = Request(graph, devices, 24, 10**9, Fixed(), backend.schedules, space)
    own = {
        line.split(": ")[1]: set(line.split("no figures for ")[1].split(", ")) for line in unprofiled(request, pricer)
    }
    for name in graph.kinds:
        stages = [replace(request, fixed=Fixed(pipeline=degree)) for degree in request.pipelines]
        lines = [line for one in stages for line in unprofiled(one, pricer) if f" {name}: " in line]
        assert own[name] == {work for line in lines for work in line.split("no figures for ")[1].split(", ")}


def _graph_of(graph: ModelGraph) -> ModelGraph:
    """The same layers, of four kinds that are split in all ways."""
    kinds = {
        own.name: own for own in (replace(one, name=str(n)) for n, one in enumerate((PLAIN, ATTENTION, MIXTURE, BARE)))
    }
    layers = tuple(replace(layer, kind=str(place % len(kinds))) for place, layer in enumerate(graph.layers))
    return replace(graph, kinds=kinds, layers=layers, ties=())


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5, unique=True), min_size=1, max_size=4),
       st.floats(0.1, 80.0), st.randoms())  # fmt: skip
def test_seconds_of_many_curves_are_those_of_each(samples: list[list[int]], asked: float, draw: random.Random) -> None:
    rows = [
        tuple(
            LayerPoint("one", at, 1, False, Recompute.NONE, draw.uniform(0.0, 9.0), draw.uniform(0.0, 9.0), 1, 2, 3)
            for at in sorted(own)
        )
        for own in samples
    ]  # fmt: skip
    forward, backward = Curves.stacked(range(len(rows)), rows).seconds(asked)
    for row, points in enumerate(rows):
        figures = figures_at(points, asked)
        assert (forward[row], backward[row]) == pytest.approx((figures.forward, figures.backward), rel=1e-12)
