"""Rows of the planner's cost model against plans that it prices by itself."""

from __future__ import annotations

from itertools import product

import pytest

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.oracle.pricing import ClusterCosts, cluster_costs, forecast, limit_of, price_row
from galvatron_lite.oracle.request import graph_named
from galvatron_lite.oracle.rows import ForecastRow, Method, RowQuestion, balanced_runs
from galvatron_lite.oracle.strategies import (
    LayerChoice,
    allowed_degrees,
    choices_of,
    choose_strategies,
    degree_of,
    legal,
    redistribution_seconds,
    widest_strategies,
)
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.stacks.catalog import match_stack

SAMPLES, BATCH = 12_800, 16


@pytest.fixture(scope="module")
def machine() -> ClusterCosts:
    return cluster_costs(graph_named("resnet50", "fp32"), "abci", 64, "fp32", BATCH)


def plan(graph: ModelGraph, strategies: list[Strategy], batch: int, sizes: list[int], parts: int = 1) -> Plan:
    layers, stages = list(zip(graph.layers, strategies, strict=True)), []
    for size in sizes:
        runs = [LayerRun(layer.name, layer.name, 1, strategy) for layer, strategy in layers[:size]]
        stages.append(Stage(tuple(runs)))
        layers = layers[size:]
    devices = strategies[0].devices * len(sizes)
    return Plan(PLAN_VERSION, graph.name, devices, batch, parts, Schedule.GPIPE, "fp32", tuple(stages))


def compare(machine: ClusterCosts, row: ForecastRow, priced: Plan) -> None:
    assert priced.prediction is not None
    assert row.problem == ""
    assert row.iteration == pytest.approx(priced.prediction.step_seconds)
    assert row.memory == priced.prediction.peak_memory


@pytest.mark.parametrize("devices", [1, 4, 32])
def test_data_is_the_plan_of_replicas(machine: ClusterCosts, devices: int) -> None:
    row = price_row(machine, RowQuestion(Method.DATA, devices, BATCH, SAMPLES))
    layers = len(machine.graph.layers)
    plain = plan(machine.graph, [Strategy(data=devices)] * layers, BATCH * devices, [layers])
    compare(machine, row, evaluate(machine.pricer(devices).profile, plain))
    assert row.batch == BATCH * devices
    assert row.moved.gradients == row.moved.total


@pytest.mark.parametrize(
    "kind", [Method.SPATIAL, Method.FILTER, Method.CHANNEL, Method.DATA_FILTER, Method.DATA_SPATIAL]
)
def test_split_layers_are_the_plan_of_their_strategies(machine: ClusterCosts, kind: Method) -> None:
    """What the row says is what the planner's own road says of the same strategies."""

    devices = 4 if kind in (Method.SPATIAL, Method.FILTER, Method.CHANNEL) else 16
    question = RowQuestion(kind, devices, BATCH, SAMPLES)
    pricer, graph = machine.pricer(devices), machine.graph
    chosen = choose_strategies(pricer, question)
    assert all(choice.duplicates == 1 for choice in chosen)
    assert any(degree_of(kind, one.strategy) == 4 for one in chosen)
    strategies = [one.strategy for one in chosen]
    whole = plan(graph, strategies, question.global_batch, [len(graph.layers)])
    compare(machine, price_row(machine, question), evaluate(pricer.profile, whole))


def test_layers_are_split_so_that_all_together_cost_least() -> None:
    """Every combination of a short network's grids, by hand."""
    machine = cluster_costs(graph_named("alexnet", "fp32"), "abci", 8, "fp32", BATCH)
    pricer, graph = machine.pricer(8), machine.graph
    question = RowQuestion(Method.SPATIAL, 8, BATCH, SAMPLES)
    ways = [choices_of(pricer, question, layer.kind) for layer in graph.layers]
    sizes = {right: size for left, right, size in graph.exchanges(range(len(graph.layers))) if right == left + 1}

    def seconds(taken: tuple[tuple[float, LayerChoice], ...]) -> float:
        moved = [
            redistribution_seconds(pricer, question, sizes.get(place, 0), taken[place - 1][1], taken[place][1])
            for place in range(1, len(taken))
        ]
        return sum(own for own, _ in taken) + sum(moved)

    every = list(product(*ways))
    assert len(every) > 20
    best = min(every, key=seconds)
    found = tuple((next(cost for cost, way in ways[place] if way == one), one)
                  for place, one in enumerate(choose_strategies(pricer, question)))  # fmt: skip
    assert seconds(found) == pytest.approx(seconds(best))


def test_a_pipeline_is_the_plan_of_its_stages(machine: ClusterCosts) -> None:
    row = price_row(machine, RowQuestion(Method.PIPELINE, 4, BATCH, SAMPLES, segments=8))
    graph, profile = machine.graph, machine.pricer(4).profile
    costs = [machine.pricer(4).price(layer.kind, Strategy(), 2, 4) for layer in graph.layers]
    sizes = balanced_runs([cost.forward + cost.backward for cost in costs if cost], 4)
    compare(machine, row, evaluate(profile, plan(graph, [Strategy()] * len(graph.layers), BATCH, sizes, 8)))
    assert row.waiting > 0
    assert row.imbalance > 1
    in_turn = price_row(machine, RowQuestion(Method.LAYER, 4, BATCH, SAMPLES))
    assert in_turn.iteration > row.iteration
    assert in_turn.waiting > row.waiting


def test_parts_add_up(machine: ClusterCosts) -> None:
    for kind in Method:
        row = price_row(machine, RowQuestion(kind, 1 if kind is Method.SERIAL else 8, BATCH, SAMPLES))
        parts = row.compute + row.update + row.waiting + row.other + row.moved.total
        assert row.epoch == pytest.approx(parts)
        assert row.epoch / row.iterations == row.iteration
        assert row.fits


def test_too_small_a_batch_is_worked_through_alike() -> None:
    """One sample a group: what cannot be split is done by all of them."""
    machine = cluster_costs(graph_named("vgg16", "fp32"), "abci", 8, "fp32", 1)
    row = price_row(machine, RowQuestion(Method.DATA_SPATIAL, 8, 1, SAMPLES))
    assert row.problem == ""
    assert 0 < row.duplicated < 1
    assert row.moved.gather > 0
    several = price_row(machine, RowQuestion(Method.DATA_SPATIAL, 8, 4, SAMPLES))
    assert several.duplicated == 0


def test_a_given_strategy(machine: ClusterCosts) -> None:
    given = parse_strategy("data8 spatial2x1")
    row = price_row(machine, RowQuestion(Method.SERIAL, 16, BATCH, SAMPLES, text=given))
    assert (row.batch, row.strategy) == (128, "data8 spatial2x1")
    same = price_row(machine, RowQuestion(Method.DATA_SPATIAL, 16, BATCH, SAMPLES, group=2))
    assert row.iteration == pytest.approx(same.iteration, rel=0.05)  # rows or columns, whichever is cheaper
    sharded = price_row(machine, RowQuestion(Method.SERIAL, 4, BATCH, SAMPLES, text=parse_strategy("zero3x4")))
    plain = price_row(machine, RowQuestion(Method.DATA, 4, BATCH, SAMPLES))
    assert sharded.memory < plain.memory


def test_the_table_of_strategies_and_their_texts(machine: ClusterCosts) -> None:
    question = RowQuestion(Method.SERIAL, 1, BATCH, SAMPLES)
    texts = (parse_strategy("data2 spatial2x1"),)
    found = forecast(machine, question, (Method.DATA, Method.FILTER), texts, (1, 4, 6, 64))
    data, filters, text = found.lines
    assert [row.devices for row in data.complete] == [1, 4, 64]  # no half node: 6 says why
    assert "fills whole ones" in data.rows[2].problem
    assert filters.rows[3].problem == ""
    assert filters.rows[3].congested > 0
    assert data.rows[1].congested == 0  # within a node
    assert [row.devices for row in text.complete] == [4, 64]
    assert "takes 4 devices or a multiple" in text.rows[0].problem
    assert found.origin.startswith("estimated")


def test_limits_of_strategies(machine: ClusterCosts) -> None:
    def most(kind: Method) -> int | None:
        return limit_of(machine, RowQuestion(kind, 1, BATCH, SAMPLES)).devices

    assert most(Method.DATA) == SAMPLES // BATCH
    assert most(Method.PIPELINE) == len(machine.graph.layers)
    assert most(Method.FILTER) == 64
    assert most(Method.DATA_FILTER) == SAMPLES // BATCH * 4
    rows = forecast(machine, RowQuestion(Method.SERIAL, 1, BATCH, SAMPLES), (Method.PIPELINE,), (), (32,)).lines[0].rows
    assert rows[0].problem == "beyond its limit of 18 GPUs"


def test_degrees_that_layers_allow(machine: ClusterCosts) -> None:
    block = machine.graph.kinds["stage0_block"]
    assert {one.filters for one in widest_strategies(block, Method.FILTER, 4, 1)} == {4}
    assert all(one.spatial == 4 for one in widest_strategies(block, Method.SPATIAL, 4, 1))
    assert legal(block, parse_strategy("data3 filters4"))
    assert not legal(block, parse_strategy("tensor2"))
    assert "filters up to 64" in allowed_degrees(block)
    row = price_row(machine, RowQuestion(Method.SERIAL, 2, BATCH, SAMPLES, text=parse_strategy("tensor2")))
    assert "--strategy: 'tensor2'" in row.problem


def test_the_first_process_of_a_group_reads_for_all_of_it() -> None:
    stack = match_stack("Chainer/ChainerMN")
    abci = cluster_costs(graph_named("resnet50", "fp32"), "abci", 8, "fp32", 256, stack)
    row = price_row(abci, RowQuestion(Method.DATA_SPATIAL, 8, 256, 256 * 20))
    assert row.iteration == pytest.approx(256 / 335)
    alone = price_row(abci, RowQuestion(Method.DATA, 8, 64, 64 * 80))
    assert alone.iteration > 64 / 335
