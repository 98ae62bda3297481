"""Shrunken plans are legal and trained for real; verification that is launched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import galvatron_lite.runtime.engine
from galvatron_lite.errors import LaunchError, VerificationError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Role
from galvatron_lite.model.shapes import load_model
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_plan, check_runs
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.runtime.branches.transfer import BranchTransfer
from galvatron_lite.search.space import Narrowed, strategies_for
from galvatron_lite.verify.launched import Verifier, without_world
from galvatron_lite.verify.numbers.check import check_numbers, training_fork
from galvatron_lite.verify.numbers.shrink import (
    LargeLayer,
    choose_size,
    features,
    legal_for,
    select_layers,
    shrink_strategy,
    small_plan,
    smaller_strategies,
)
from galvatron_lite.verify.schema import Check, Verdict
from galvatron_lite.verify.source import ModelSource, factory_source, named_source
from tests.equivalence.families import PlainModel
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool
from tests.runtime.branches.jobs import Case, make_batch, make_model, make_plan
from tests.schedules import ZERO_BUBBLE

GRAPH = load_model("mixtral-8x7b")
BLOCK = GRAPH.kind_of(GRAPH.layers[1])
LEGAL = {
    devices: [
        one for one in strategies_for(BLOCK, devices, narrowed=Narrowed(GALVATRON.values)) if GALVATRON.combines(one)
    ]
    for devices in (1, 2, 4, 8, 16)
}

SETS = {devices: frozenset(legal) for devices, legal in LEGAL.items()}


def any_strategy(devices: int) -> st.SearchStrategy[Strategy]:
    return st.sampled_from(LEGAL[devices])


@settings(max_examples=60, deadline=None)
@given(any_strategy(16), st.sampled_from([1, 2, 4, 8]))
def test_a_smaller_strategy_uses_nothing_new(strategy: Strategy, devices: int) -> None:
    for one in smaller_strategies(strategy, devices):
        assert one.devices == devices
        assert features(one) <= features(strategy)
        assert all(getattr(strategy, name) % getattr(one, name) == 0 for name in ("data", "zero", "tensor", "context"))


@settings(max_examples=60, deadline=None)
@given(any_strategy(16))
def test_some_smaller_strategy_is_legal_and_keeps_what_there_is_room_for(strategy: Strategy) -> None:
    smaller = shrink_strategy(strategy, 8, SETS[8].__contains__)
    assert smaller is not None
    assert smaller in LEGAL[8]
    ways = sum(getattr(strategy, name) > 1 for name in ("data", "zero", "tensor", "context"))
    if ways <= 3:
        assert features(smaller) == features(strategy)


def test_what_is_legal_is_what_the_planner_offers() -> None:
    legal = legal_for([BLOCK, GRAPH.kind_of(GRAPH.layers[0])], 4)
    assert legal(parse_strategy("zero3x2 tensor2"))
    assert not legal(parse_strategy("expert4 zero3x4"))
    assert not legal(parse_strategy("tensor2"))


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("zero3x16", 4, "zero3x4"),
        ("data2 zero3x4 tensor8+sp recompute", 8, "data2 zero3x2 tensor2+sp recompute"),
        ("ulysses4 tensor2+sp", 4, "ulysses2 tensor2+sp"),
        ("spatial2x4", 4, "spatial2x2"),
        ("data4 recompute", 1, "recompute"),
        ("data3 tensor2", 6, "data3 tensor2"),
    ],
)
def test_degrees_of_a_smaller_plan(text: str, devices: int, expected: str) -> None:
    smaller = shrink_strategy(parse_strategy(text), devices)
    assert (features(smaller), smaller.devices) == (features(parse_strategy(expected)), devices)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A legal plan of a deep model on many devices."""
    stages = draw(st.sampled_from([1, 2, 4, 8]))
    devices = draw(st.sampled_from([1, 2, 4, 8, 16]))
    schedule = draw(st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED]))
    virtual = 2 if schedule is Schedule.INTERLEAVED and stages > 1 else 1
    chosen = draw(st.lists(any_strategy(devices), min_size=1, max_size=3))
    edge = draw(st.sampled_from([one for one in chosen if one in edges(devices)] or edges(devices)))
    names = [layer.name for layer in GRAPH.layers]
    strategies = {name: chosen[index * len(chosen) // len(names)] for index, name in enumerate(names)}
    strategies |= {"before": edge, "after": edge}
    count = stages * virtual
    parts = [names[index * len(names) // count : (index + 1) * len(names) // count] for index in range(count)]
    sizes = {"devices": stages * devices, "batch": 64 * 16, "microbatches": draw(st.sampled_from([1, 4, 16]))}
    return write_plan(parts, strategies, schedule=schedule, virtual=virtual, **sizes)


def edges(devices: int) -> list[Strategy]:
    return [one for one in LEGAL[devices] if one.expert == 1 and one.context == 1 and one.recompute == "none"]


def spots_of(plan: Plan) -> list[LargeLayer]:
    layers = iter(GRAPH.layers)
    placed = [(number, run) for number, stage in enumerate(plan.stages) for run in stage.runs for _ in range(run.count)]
    return [
        LargeLayer(one.name, one.kind, one.role, number, run.strategy)
        for (number, run), one in zip(placed, layers, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from([2, 4, 8]))
def test_the_small_plan_is_legal_and_of_the_same_kind(plan: Plan, processes: int) -> None:
    spots = spots_of(plan)
    strategies = list(dict.fromkeys(spot.strategy for spot in spots))
    size = choose_size(plan, strategies, processes)
    kept = select_layers(spots, size)
    images = {one: shrink_strategy(one, size.devices, SETS[size.devices].__contains__) for one in strategies}
    chosen = {spot.name: one for spot in spots if (one := images[spot.strategy]) is not None}
    assert len(chosen) == len(spots)
    small = small_plan(plan, size, kept, [spot.name for spot in kept], chosen)
    check_runs(check_plan(small))
    assert small.devices <= processes
    assert {spot.strategy for spot in kept} == set(strategies)
    assert {spot.stage for spot in kept if spot.role is not Role.BLOCK} <= {0, len(plan.stages) - 1}
    assert (small.pipeline > 1) == (plan.pipeline > 1)
    assert (small.virtual_stages > 1, small.schedule) == (plan.virtual_stages > 1, plan.schedule)
    assert (small.microbatches > 1) == (plan.microbatches > 1)
    assert sum(run.count for stage in small.stages for run in stage.runs) == len(kept) < len(spots)


def test_pipelines_keep_all_stages_where_there_is_room() -> None:
    stages = [["before", "a"], ["b"], ["c", "after"]]
    names = [name for stage in stages for name in stage]
    plan = write_plan(stages, dict.fromkeys(names, Strategy()), devices=3, batch=8)
    assert choose_size(plan, [Strategy()], 4).stages == 3
    both = Strategy(tensor=4)
    wide = write_plan(stages, dict.fromkeys(names, both), devices=12, batch=8)
    size = choose_size(wide, [both], 4)
    assert (size.groups, size.devices) == (2, 2)


def test_zero_bubble_schedules_stay() -> None:
    layers = ("before", "a", "b", "after")
    plan = write_plan([["before", "a"], ["b", "after"]], dict.fromkeys(layers, Strategy(data=2)), devices=4, batch=8)
    for schedule in ZERO_BUBBLE:
        other = replace(plan, schedule=schedule)
        spots = [LargeLayer(name, "k", Role.BLOCK, number // 2, Strategy(data=2)) for number, name in enumerate(layers)]
        size = choose_size(other, [Strategy(data=2)], 4)
        small = small_plan(other, size, spots, list(layers), dict.fromkeys(layers, Strategy(data=2)))
        assert check_runs(small).schedule is schedule


def plan_for(source: ModelSource, text: str, *, stages: int = 1, devices: int, **fields: object) -> Plan:
    """The same strategy for every layer, and stages of as many layers."""
    model, batch, _ = source.on_meta()
    names = [layer.name for layer in discover_layers(model, batch or model.example_batch(2))]  # type: ignore[operator]
    parts = [names[index * len(names) // stages : (index + 1) * len(names) // stages] for index in range(stages)]
    strategies = dict.fromkeys(names, parse_strategy(text))
    strategies["before"] = strategies["after"] = parse_strategy(text.removesuffix(" recompute"))
    return write_plan(parts, strategies, devices=devices, batch=64, **fields)  # type: ignore[arg-type]


def checked(source: ModelSource, plan: Plan, **options: object) -> Check:
    with training_fork(source, patience=120) as fork:
        return check_numbers(source, plan, fork, timeout=240, **options)  # type: ignore[arg-type]


LLAMA = named_source("llama-tiny")


def test_a_large_plan_trains_like_one_process_when_it_is_small() -> None:
    plan = plan_for(LLAMA, "zero3x16 recompute", stages=4, devices=64, microbatches=4)
    check = checked(LLAMA, plan)
    assert (check.verdict, check.name) == (Verdict.PASSED, "numbers"), check
    assert "4 gloo processes" in check.said
    assert "Not covered: every stage" in check.said
    assert check.details[0] == (
        "plan: 64 devices, 4 stages, batch 64 in 4 micro-batches -> 4 devices, 2 stages, batch 8 in 4 micro-batches"
    )


class _Forgetful(torch.optim.SGD):
    """Leaves out the first parameter."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        first = self.param_groups[0]["params"][0]
        before = first.detach().clone()
        super().step(closure)  # type: ignore[arg-type]
        with torch.no_grad():
            first.copy_(before)


def test_a_gradient_that_is_not_averaged_is_found() -> None:
    plan = plan_for(LLAMA, "data2", devices=2)
    with patch("galvatron_lite.parallelism.data.apply._launch", lambda _bucket: None):
        check = checked(LLAMA, plan)
    assert check.verdict is Verdict.FAILED, check
    assert "gradients of step 1" in check.said
    assert "ranks 0, 1" in check.said


def test_a_gradient_that_a_branch_does_not_return_is_found() -> None:
    alone, data = Strategy(), Strategy(data=2)
    roots = {"one": (("up.0", "down.0"), 0, 1, alone), "two": (("up.1", "down.1"), 1, 1, alone)}
    case = Case("Chains", roots, data, 2, samples=16)
    source = ModelSource("chains", lambda: (make_model(case), make_batch(case), None))
    model, batch, _ = source.make()
    plan = make_plan(case, discover_layers(model, batch))
    check = checked(source, plan)
    assert check.verdict is Verdict.PASSED, check
    real = BranchTransfer.arrive
    with patch.object(BranchTransfer, "arrive", lambda self, _tokens: real(self, [])):
        check = checked(source, plan)
    assert check.verdict is Verdict.FAILED, check
    assert "norm of the gradient" in check.said


def test_a_weight_that_is_not_updated_is_found() -> None:
    plan = plan_for(LLAMA, "tensor2", devices=2)
    real = galvatron_lite.runtime.engine.ParallelModel.optimizer

    def forgetful(self: object, factory: object, **options: object) -> object:
        return real(self, _Forgetful, **options)  # type: ignore[arg-type]

    with patch.object(galvatron_lite.runtime.engine.ParallelModel, "optimizer", forgetful):
        check = checked(LLAMA, plan)
    assert check.verdict is Verdict.FAILED
    assert "weights after step 2" in check.said
    assert any("embed.weight" in line for line in check.details)
    assert not any("gradients of step 1" in line for line in check.details)


def masked() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Samples of which unlike shares of labels count."""
    torch.manual_seed(0)
    model = build("gpt-tiny", vocab=64, layers=4, hidden=16, heads=2, sequence=16)
    tokens = torch.randint(0, 64, (8, 16))
    return model, {
        "tokens": tokens,
        "labels": tokens.where(torch.arange(16) % (torch.arange(8)[:, None] + 1) == 0, -100),
    }


def test_shares_with_unlike_counts_of_labels_weigh_as_in_training() -> None:
    source = factory_source(masked)
    for plan in (plan_for(source, "data2", devices=2), plan_for(source, "whole", devices=1, microbatches=2)):
        check = checked(source, plan)
        assert check.verdict is Verdict.PASSED, check


class Convolutions(torch.nn.Module):
    """A network without blocks; sums over pixels are compared in float64, so its float32 batch is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(pixels)
        return output


def test_a_plain_convolutional_network_is_trained() -> None:
    source = factory_source(
        lambda: (Convolutions(), {"pixels": torch.randn(8, 3, 8, 8)}, lambda output, _: output.square().mean())
    )
    check = checked(source, plan_for(source, "data2", devices=2))
    assert check.verdict is Verdict.PASSED, check
    assert "Batch norms ran as SyncBatchNorm" in check.said


PLAN = write_plan([["before", "after"]], dict.fromkeys(("before", "after"), Strategy(data=2)), devices=2, batch=4)


def good(source: ModelSource, plan: Plan) -> Sequence[Check]:
    assert not dist.is_initialized()
    model, *_ = source.on_meta()
    assert all(parameter.is_meta for parameter in model.parameters())
    return [Check("a", Verdict.PASSED, f"{plan.devices}"), Check("b", Verdict.SKIPPED, "")]


def bad(_source: ModelSource, _plan: Plan) -> Sequence[Check]:
    return [Check("order", Verdict.FAILED, "Rank 1 waits."), Check("b", Verdict.PASSED, "")]


def broken(_source: ModelSource, _plan: Plan) -> Sequence[Check]:
    raise ValueError("no such thing")


def dies(_source: ModelSource, _plan: Plan) -> Sequence[Check]:
    os._exit(3)


def asked() -> list[str]:
    """On a rank of a world that was joined before: what each verification says; and the world still works."""
    told, model = [], PlainModel()
    for verify in (good, bad, broken, dies):
        verifier = Verifier(model, None, None, verify)
        try:
            verifier.check(PLAN)
            told.append("on")
        except (VerificationError, LaunchError) as error:
            told.append(str(error))
        total = torch.ones(1)
        dist.all_reduce(total)
        told.append(str(int(total)))
    assert not any(parameter.is_meta for parameter in model.parameters())
    return told


def test_all_ranks_go_on_or_raise_together(pool: WorkerPool) -> None:
    first, second = pool.run(2, asked)
    assert first == second
    on, a, failed, b, raised, c, died, d = first
    assert (on, a, b, c, d) == ("on", "2", "2", "2", "2")
    assert "order: Rank 1 waits." in failed
    assert "ValueError: no such thing" in raised
    assert "the process that does it ended" in died


def test_numbers_are_checked_without_a_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    Verifier(PlainModel(), None, None, good).check(PLAN)
    assert "1 of 2 checks passed. b: skipped." in capfd.readouterr().err
    with pytest.raises(VerificationError) as caught:
        Verifier(PlainModel(), None, None, bad).check(PLAN)
    assert caught.value.failed == (("order", "Rank 1 waits."),)
    with without_world():
        assert not dist.is_initialized()
