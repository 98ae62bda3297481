"""Executors of all settings against the plain reference of delayed gradient descent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from galvatron_lite.parallelism.cyclic.mailbox import ALIGNMENT
from galvatron_lite.runtime.cyclic.setup import programme_of
from tests.cyclic_reference import Step, train_reference
from tests.parallelism.cyclic.fleet import Result, train
from tests.parallelism.cyclic.models import Mixed, blocks_case, make_batches, make_plan, mixed_case, split

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=True),
}
SETTINGS = ["single", "data", "stages"]
RULES = ["cdp-v1", "cdp-v2"]
STEPS = 4


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check(results: list[Result], steps: list[Step]) -> None:
    """Every process has the reference's parameters, and knows the losses that it should."""
    count, found = len(steps[0].losses), set[str]()
    for result in results:
        found |= result.parameters.keys()
        for name, value in result.parameters.items():
            torch.testing.assert_close(value, steps[-1].parameters[name], rtol=0, atol=1e-12)
        for number, loss in result.losses.items():
            assert loss == pytest.approx(steps[number // count].losses[number % count], abs=1e-12)
    assert found == steps[-1].parameters.keys()
    assert {number for result in results for number in result.losses} == set(range(count * len(steps)))


@cache
def of_blocks(count: int, rule: str, name: str) -> tuple[Any, list[Any], list[Step]]:
    """A case of equal blocks, its batches, and what the reference makes of them."""
    torch.manual_seed(count)
    case, batches = blocks_case(count), make_batches(STEPS, count)
    parts = [split(batch, count) for batch in batches]
    return case, batches, train_reference(case[0], case[2], parts, optimizer_factory=OPTIMIZERS[name], rule=rule)


RUNS = [
    (setting, rule, count)
    for count in (1, 2, 3, 5, 6)
    for number, setting in enumerate(SETTINGS)
    for rule in RULES
    if count < 5 or setting == "single" or (number + count) % 2 == RULES.index(rule)
]
"""Both rules of every count, and every setting of it; of the larger ones not every pair of the two."""


@pytest.mark.parametrize(("setting", "rule", "count"), RUNS)
def test_equals_the_reference(setting: str, rule: str, count: int) -> None:
    more = [] if count != 3 else ["sgd"] if rule == "cdp-v1" else ["adamw"]
    for name in ["adam" if count % 2 else "momentum", *more]:
        (model, layers, stages), batches, expected = of_blocks(count, rule, name)
        results, _ = train(model, make_plan(stages, rule, setting), layers, batches, OPTIMIZERS[name])
        check(results, expected)


MIXED_STAGES = [["stem", "scale", "blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "norm", "head"]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_skips_over_stages_and_norms(setting: str, rule: str) -> None:
    """A skip travels around a stage; on one device the norm sees the micro-batches in their order."""
    model, layers, stages = mixed_case()
    batches = make_batches(STEPS, 3, rows=4)
    parts = [split(batch, 3) for batch in batches]
    expected = train_reference(model, MIXED_STAGES, parts, optimizer_factory=OPTIMIZERS["adam"], rule=rule)
    plan = make_plan(stages, rule, setting, rows=4)
    results, _ = train(model, plan, layers, batches, OPTIMIZERS["adam"], example=batches[0])
    check(results, expected)
    if setting == "single":
        for name, value in results[0].buffers.items():
            torch.testing.assert_close(value, expected[-1].buffers[name])


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_stage_has_its_schedule_of_learning_rates(setting: str) -> None:
    model, layers, stages = blocks_case(3)
    batches, halved = make_batches(STEPS, 3), partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    parts = [split(batch, 3) for batch in batches]
    expected = train_reference(model, stages, parts, optimizer_factory=OPTIMIZERS["adam"], scheduler_factory=halved)
    results, _ = train(model, make_plan(stages, "cdp-v2", setting), layers, batches, OPTIMIZERS["adam"], halved)
    check(results, expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_draining_changes_nothing(setting: str, rule: str) -> None:
    """Every bit is that of a run without a break: after the first step, in the middle, twice in a row."""
    model, layers, stages = blocks_case(4)
    batches, plan = make_batches(STEPS, 4), make_plan(stages, rule, setting)
    whole, _ = train(model, plan, layers, batches, OPTIMIZERS["adam"])
    broken, _ = train(model, plan, layers, batches, OPTIMIZERS["adam"], drains={0, 1, 3})
    for one, other in zip(whole, broken, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_flushing_begins_anew(setting: str, rule: str) -> None:
    """What follows a flush is a run of the reference that begins with what was flushed."""
    model, layers, stages = blocks_case(3)
    batches = make_batches(STEPS, 3)
    parts = [split(batch, 3) for batch in batches]
    first = train_reference(model, stages, parts[:2], rule=rule)
    results, _ = train(model, make_plan(stages, rule, setting), layers, batches, flushes={2})
    model.load_state_dict(first[-1].parameters)
    check(results, [*first, *train_reference(model, stages, parts[2:], rule=rule)])


@pytest.mark.parametrize("setting", SETTINGS)
def test_frozen_and_unused_parameters_stay(setting: str) -> None:
    """Those without a gradient are not decayed either, as in plain torch."""
    model, layers, stages = blocks_case(3)
    model.blocks[0].weight.requires_grad_(False)
    model.blocks[1].idle = torch.nn.Parameter(torch.ones(2))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    batches = make_batches(3, 3)
    results, _ = train(model, make_plan(stages, "cdp-v2", setting), layers, batches, OPTIMIZERS["adamw"])
    for result in results:
        for name, value in result.parameters.items():
            assert torch.equal(value, before[name]) == (name in ("blocks.0.weight", "blocks.1.idle"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [2, 5])
def test_data_sends_a_stage_a_time_step(count: int, rule: str) -> None:
    """At most 1/N of the parameters' bytes from a process in a time step, where an all-reduce sends all at once."""
    model, layers, stages = blocks_case(count)
    plan, batches = make_plan(stages, rule, "data"), make_batches(STEPS, count)
    _, post = train(model, plan, layers, batches)
    programme, burst = programme_of(plan), Counter[tuple[int, int]]()
    for process in range(count):
        for one in (one for step in range(STEPS) for one in programme.passes(process, step)):
            burst[process, one.moment.time] += sum(post.sent[message] for message in one.sends)
    share = sum(parameter.nbytes for parameter in model.parameters()) // count
    assert share <= max(burst.values()) < share + 4 * ALIGNMENT


def test_a_model_without_values_is_the_same_in_every_setting() -> None:
    _, layers, stages = mixed_case()
    with torch.device("meta"):
        model = Mixed()
    model.scale = torch.nn.Parameter(torch.ones(3))
    batches, found = make_batches(3, 3, rows=4), dict[str, dict[str, torch.Tensor]]()
    for setting in SETTINGS:
        plan = make_plan(stages, "cdp-v2", setting, rows=4)
        results, _ = train(model, plan, layers, batches, example=batches[0])
        found[setting] = {name: value for result in results for name, value in result.parameters.items()}
    for other in found.values():
        assert other.keys() == found["single"].keys()
        assert all(torch.equal(value, found["single"][name]) for name, value in other.items())
