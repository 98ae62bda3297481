"""Stages of one model: where it is cut, what they share, their states, and what their passes draw."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.cyclic.executor import SeededDraws
from galvatron_lite.parallelism.cyclic.mailbox import ALIGNMENT, pack, packed_bytes, unpack
from galvatron_lite.parallelism.cyclic.simulation import equal_cuts, unevenness
from galvatron_lite.parallelism.cyclic.stages import StageStates, cut_stages, stage_of
from galvatron_lite.runtime.cyclic.setup import CyclicOptions, set_up
from tests.parallelism.cyclic.fleet import CPU, SGD, MemoryMailbox, Post, result_of
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan, split

SECONDS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)


def every_split(layers: int, stages: int, joined: list[range]) -> list[tuple[int, ...]]:
    inner = [place for place in range(1, layers) if not any(run.start < place < run.stop for run in joined)]
    return [(0, *chosen, layers) for chosen in combinations(inner, stages - 1)]


def stage_seconds(seconds: list[float], cuts: tuple[int, ...]) -> list[float]:
    return [sum(seconds[start:stop]) for start, stop in pairwise(cuts)]


@given(SECONDS, st.integers(1, 9), st.integers(0, 8), st.integers(0, 4))
def test_no_split_is_better(seconds: list[float], stages: int, first: int, length: int) -> None:
    joined = [range(min(first, len(seconds)), min(first + length, len(seconds)))]
    found = equal_cuts(seconds, stages, joined)
    splits = every_split(len(seconds), stages, joined)
    if not splits:
        assert found == ()
        return
    assert found in splits
    figures = [
        (max(own), sum(one**2 for one in own)) for own in (stage_seconds(seconds, cuts) for cuts in splits)
    ]  # fmt: skip
    own = stage_seconds(seconds, found)
    assert (max(own), sum(one**2 for one in own)) == pytest.approx(min(figures))


def test_equal_layers_are_shared_out_evenly() -> None:
    assert equal_cuts([1.0] * 12, 4) == (0, 3, 6, 9, 12)
    assert unevenness([3.0, 3.0]) == 0.0
    assert unevenness([2.0, 4.0]) == pytest.approx(1 / 3)
    assert equal_cuts([1.0, 1.0], 3) == ()


def test_a_recurrent_layer_uses_what_is_bound() -> None:
    """It keeps a list of its parameters beside their names."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.LSTM(3, 3), nn.Linear(3, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x)[0])

    layers = [Layer(f"blocks.{place}", f"kind{place}", Role.BLOCK, (f"blocks.{place}",)) for place in range(2)]
    part = stage_of(Reads(), layers, [["blocks.0"], ["blocks.1"]], 0, None)
    part.bind({name: nn.Parameter(torch.zeros_like(one)) for name, one in part.parameters().items()})
    output, _ = part.cut.run(lambda: part.model(torch.randn(2, 4, 3)), None)
    assert not output.any()


def test_parameters_tied_within_a_stage_are_bound_everywhere() -> None:
    model, layers, names = blocks_case(3)
    model.blocks[1].weight = model.blocks[0].weight
    part, _ = cut_stages(model, layers, [names[0] + names[1], names[2]], None)
    assert sorted(part.parameters()) == ["blocks.0.bias", "blocks.0.weight", "blocks.1.bias"]
    new = nn.Parameter(torch.zeros(3, 3))
    part.bind({"blocks.0.weight": new})
    assert part.model.blocks[0].weight is part.model.blocks[1].weight is new
    with pytest.raises(InputError, match="Untie"):
        cut_stages(model, layers, names, None)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), max_size=5),
    st.integers(0, 2**20),
)
@settings(max_examples=40, deadline=None)
def test_tensors_come_out_as_they_went_in(shapes: list[tuple[list[int], torch.dtype]], seed: int) -> None:
    torch.manual_seed(seed)
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in shapes]
    buffer = pack(tensors, CPU)
    assert buffer.nbytes == packed_bytes(tensors) <= sum(one.nbytes + ALIGNMENT - 1 for one in tensors)
    for found, tensor in zip(unpack(buffer, tensors), tensors, strict=True):
        assert found.dtype is tensor.dtype
        assert torch.equal(found, tensor)


def states_of(*values: float) -> StageStates:
    states = StageStates({f"p{place}": nn.Parameter(torch.tensor([value])) for place, value in enumerate(values)})
    states.make_optimizer(partial(torch.optim.SGD, lr=1.0), None)
    return states


def loss_of(parameters: dict[str, nn.Parameter]) -> Tensor:
    return (parameters["p0"] ** 2).sum()


def test_updates_are_applied_in_order() -> None:
    states = states_of(1.0)
    states.updates[1] = [torch.tensor([1.0])]
    with pytest.raises(AssertionError, match="version 0 cannot take the update of step 1"):
        states.apply(1, keep=False)


def broken(_: object) -> None:
    raise ValueError("broken")


def test_a_failed_backward_pass_leaves_no_gradients() -> None:
    states = states_of(1.0)
    loss = loss_of(dict(states.at(0)))
    loss.register_hook(broken)
    with pytest.raises(ValueError, match="broken"), states.adding(0, states.at(0)):
        loss.backward()
    assert states.at(0)["p0"].grad is None


COUNT, STEPS, SEED = 4, 4, 11


def dropping() -> tuple[nn.Module, Any, Any]:
    """A stage a block, each of which drops a part of what it makes."""
    torch.manual_seed(0)
    model, layers, stages = blocks_case(COUNT)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = nn.Sequential(block, nn.Dropout(0.4))
    return model, layers, stages


def alone(draws: int, drains: Collection[int], early_release: bool = False) -> tuple[dict[str, Tensor], Tensor]:
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
