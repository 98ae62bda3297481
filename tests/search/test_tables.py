"""Tables of what strategies cost: with pins, and without what never helps; first bounds' seconds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.points import Curves, figures_at
from galvatron_lite.cost.stage import Shape
from galvatron_lite.model.graph import ModelGraph, Recompute
from galvatron_lite.parallelism.backends import ANY, GALVATRON, Backend
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import LayerPoint
from galvatron_lite.search.refusals import unprofiled
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import UNPINNED, Fixed, Space
from galvatron_lite.search.tables import Store, pareto_rows, pareto_within
from tests.factories import random_profile
from tests.search.test_strategies import ATTENTION, BARE, MIXTURE, PLAIN

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
