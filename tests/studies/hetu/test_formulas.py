"""Hetu-Galvatron's formulas against what its own searches print."""

from dataclasses import replace

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.peers.hetu.plan import DataType, from_plan
from studies.hetu.compare import backend_of, bench_for, pins_of
from studies.hetu.formulas import iteration, memory_mb, overlapped, price, step_ms, usable_mb

from .cases import FOLDER, FOUND, SEARCHES, found, profiles


def test_every_kind_of_search_is_there() -> None:
    assert (len(SEARCHES), len(FOUND)) == (55, 45)
    assert {(one.engine, one.model) for one in FOUND} == {
        ("main", "llama2-7b"), ("main", "bert-large"), ("v240", "llama2-7b"), ("v240", "bert-large"),
        ("v240", "t5-3B"), ("v240", "swin-huge"),
    }  # fmt: skip
    assert {one.hetu_plan().pipeline for one in FOUND} == {1, 2, 4, 8}
    assert {one.devices for one in FOUND} == {8, 16}


@pytest.mark.parametrize("place", range(len(FOUND)), ids=lambda place: f"{place}-{FOUND[place].name}")
def test_the_recorded_plan_costs_what_was_recorded(place: int) -> None:
    search, (model, hardware) = FOUND[place], profiles(place)
    cost = price(model, hardware, search.hetu_plan(), search.rules)
    assert cost.seconds == pytest.approx(search.seconds, rel=1e-9)
    assert search.batch / cost.seconds == pytest.approx(search.throughput, rel=1e-9)
    reserved = search.budget_gb * 1024 - search.usable
    assert tuple(memory + reserved for memory in cost.memory) == search.memory_mb
    assert max(cost.memory) <= search.usable


def test_budgets_above_20_gb_keep_a_fifth_back() -> None:
    assert [usable_mb(size) for size in (8, 20, 24, 36)] == [8192, 20480, 19661, 29492]


@pytest.mark.parametrize(("compute", "traffic"), [(4.0, 1.0), (1.0, 4.0), (2.0, 2.0)])
def test_both_run_slower_while_they_overlap(compute: float, traffic: float) -> None:
    # simulated: both advance at 1 / 1.25 until one ends
    short = min(compute, traffic)
    assert overlapped(compute, traffic, 1.25) == pytest.approx(1.25 * short + max(compute, traffic) - short)


def test_even_pipelines_take_the_textbook_time() -> None:
    assert iteration([0.0] * 4, [3.0] * 4, 16) == pytest.approx(3.0 * (16 + 4 - 1))
    assert iteration([5.0], [3.0], 4) == pytest.approx(3 * 4 + 2)


def test_sharded_states_take_less_and_gathering_takes_longer() -> None:
    search, model, hardware = found("llama2-7b")
    plan = next(one for one in FOUND if one.hetu_plan().pipeline == 1 and one.engine == "main").hetu_plan()
    cheap, sharded = (
        replace(plan, layers=tuple(replace(layer, kind=kind) for layer in plan.layers))
        for kind in (DataType.ZERO2, DataType.ZERO3)
    )
    assert memory_mb(model, sharded, search.rules) < memory_mb(model, cheap, search.rules)
    assert step_ms(model, hardware, sharded, search.rules) > step_ms(model, hardware, cheap, search.rules)


def test_a_plan_of_another_model_or_cluster_is_refused() -> None:
    search, model, hardware = found("llama2-7b")
    plan = search.hetu_plan()
    with pytest.raises(InputError, match="has 32 layers"):
        price(model, hardware, replace(plan, layers=plan.layers[1:]))
    with pytest.raises(InputError, match="of 8 GPUs"):
        price(model, hardware, replace(plan, devices=16))


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Strategy(zero=8, zero_stage=1), True),
        (Strategy(zero=2, zero_stage=3, context=4, ulysses=True), True),
        (Strategy(tensor=8, sequence_parallel=True), True),
        (Strategy(zero=2, zero_stage=3, context=4), False),
        (Strategy(zero_stage=3, context=8, ulysses=True), False),
        (Strategy(data=2, zero=4, zero_stage=3), False),
        (Strategy(zero=2, zero_stage=1, tensor=2, context=2, ulysses=True), False),
        (Strategy(zero=8, zero_stage=2), False),
    ],
)
def test_strategies(strategy: Strategy, said: bool) -> None:
    assert backend_of(found("llama2-7b")[0]).runs(strategy) == said


def test_what_was_left_out() -> None:
    search = next(one for one in FOUND if one.off == ("ckpt", "fsdp", "sp"))
    values = backend_of(search).values
    assert (values["zero_stage"], values["context"], len(values["recompute"])) == ((0, 1), (1,), 1)
    assert pins_of(search).even
    assert pins_of(found("t5-3B", "v240")[0]).pipeline == 1


@pytest.mark.parametrize("degree", [1, 2])
def test_their_files_can_say_what_our_search_finds(degree: int) -> None:
    search = next(one for one in FOUND if one.off == ("ckpt", "fsdp", "sp") and one.budget_gb == 36)
    found = bench_for(search, FOLDER).found(degree, search.usable)
    theirs = from_plan(found[0])
    assert theirs.division == (32 // degree,) * degree
    assert theirs.chunks * theirs.pipeline > 1
