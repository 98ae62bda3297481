"""What passes draw: decided by stage and micro-batch, whatever ran before and wherever."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.cyclic.executor import SeededDraws
from galvatron_lite.runtime.cyclic.setup import CyclicOptions, set_up
from tests.parallelism.cyclic.fleet import CPU, SGD, MemoryMailbox, Post, result_of
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan, split

COUNT, STEPS, SEED = 4, 4, 11


def dropping() -> tuple[nn.Module, Any, Any]:
    """A stage a block, each of which drops a part of what it makes."""
    torch.manual_seed(0)
    model, layers, stages = blocks_case(COUNT)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = nn.Sequential(block, nn.Dropout(0.4))
    return model, layers, stages


def alone(draws: int | None, drains: Collection[int], early_release: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters that training on one device gives, and what the process would draw next."""
    model, layers, stages = dropping()
    plan, options = make_plan(stages, "cdp-v2", "single"), CyclicOptions(CPU, draws=draws, early_release=early_release)
    runtime = set_up(copy.deepcopy(model), plan, layers, None, 0, MemoryMailbox(Post()), options)
    for states in runtime.executor.states.values():
        states.make_optimizer(SGD, None)
    for step, batch in enumerate(make_batches(STEPS, COUNT)):
        if step in drains:
            runtime.executor.drain(step)
        runtime.executor.feed(step, split(batch, COUNT))
        runtime.executor.run(runtime.executor.programme.passes(0, step))
    runtime.executor.flush(STEPS)
    return result_of(runtime).parameters, torch.rand(3)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_draining_does_not_change_what_is_dropped() -> None:
    whole, following = alone(SEED, ())
    drained, after = alone(SEED, (1, 3))
    assert equal(whole, drained)
    assert torch.equal(following, after), "the process's own generators stay as they were"
    assert not equal(whole, alone(SEED + 1, ())[0]), "another seed drops others"


def test_passes_that_draw_as_they_come_depend_on_their_order() -> None:
    """Otherwise the tests here could not fail."""
    assert not equal(alone(None, ())[0], alone(None, (1, 3))[0])


def test_early_release_changes_no_draw() -> None:
    assert equal(alone(SEED, ())[0], alone(SEED, (), early_release=True)[0])


@pytest.mark.parametrize(("stage", "number"), [(0, 1), (1, 0)])
def test_each_pass_draws_its_own(stage: int, number: int) -> None:
    draws = SeededDraws(SEED, CPU)
    with draws(0, 0):
        first = torch.rand(4)
    with draws(stage, number):
        other = torch.rand(4)
    with draws(0, 0):
        again = torch.rand(4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
