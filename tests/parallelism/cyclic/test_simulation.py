"""Stages of one model, their states and draws; the seconds of a training step."""

from __future__ import annotations

import random
from collections.abc import Callable
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
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicPass, CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.cyclic.simulation import equal_cuts, loop_of, round_seconds
from galvatron_lite.parallelism.cyclic.stages import StageStates, cut_stages, stage_of
from galvatron_lite.runtime.cyclic.setup import CyclicOptions
from tests.parallelism.cyclic.fleet import CPU, train
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan

COUNTS, RULES, SETTINGS = st.integers(1, 6), st.sampled_from(CyclicRule), st.sampled_from(CyclicSetting)
Seconds = Callable[[CyclicPass], float]
Sent = Callable[[CyclicMessage], float]


def looped(rule: CyclicRule, setting: CyclicSetting, count: int, seconds: Seconds, sent: Sent) -> float:
    loop = loop_of(rule, setting, count)
    return round_seconds(loop, [seconds(slot.action) for slot in loop.slots], [sent(one) for one in loop.messages])


def walked(rule: CyclicRule, setting: CyclicSetting, count: int, seconds: Seconds, sent: Sent, steps: int) -> float:
    """Growth of the last end over the second half of ``steps`` training steps, process by process."""
    programme = CyclicProgramme(rule, setting, count)
    clock, link, arrived = dict[int, float](), dict[int, float](), dict[CyclicMessage, float]()
    ends = []
    passes = [
        [(one.moment.time, one.moment.backward, process, one) for one in programme.passes(process, step)]
        for process in range(programme.processes)
        for step in range(steps)
    ]
    for time, backward, process, one in sorted((entry for own in passes for entry in own), key=lambda e: e[:3]):
        start = max([clock.get(process, 0.0), *(arrived[message] for message in one.receives)])
        clock[process] = start + seconds(one)
        for message in one.sends:
            link[process] = max(link.get(process, 0.0), clock[process]) + sent(message)
            arrived[message] = link[process]
        if (one.moment.worker, one.moment.stage, backward) == (count - 1, 0, True):
            ends.append(clock[process])
        assert time >= 0
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half)


@pytest.mark.parametrize("rule", CyclicRule)
@pytest.mark.parametrize("setting", CyclicSetting)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_equal_stages_take_2n_time_steps(count: int, setting: CyclicSetting, rule: CyclicRule) -> None:
    # systems.md 2.2: a step is 2N time steps; on one device each holds N passes. Unequal passes wait for nobody either.
    alone = count if setting is CyclicSetting.SINGLE else 1
    for forward, backward in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0)):
        step = looped(rule, setting, count, lambda one, f=forward, b=backward: b if one.moment.backward else f,
                      lambda _: 0.0)  # type: ignore[misc]  # fmt: skip
        assert step == pytest.approx(alone * count * (forward + backward))


@pytest.mark.parametrize("rule", CyclicRule)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_data_hides_short_messages(count: int, rule: CyclicRule) -> None:
    for taken in (0.1, 0.5, 0.75, 0.99):
        step = looped(rule, CyclicSetting.DATA, count, lambda _: 1.0, lambda _, d=taken: d)  # type: ignore[misc]
        # v2: the last worker's update of stage 2 goes to the worker before it for the very next time step, and that
        # one's gradient sum comes back: two messages where the timeline has one free time step. v1 waits for neither.
        shown = max(2 * taken - 1, 0.0) if rule is CyclicRule.V2 else 0.0
        assert step == pytest.approx(2.0 * count + shown)
    # One message a time step: the link of a process sets the pace once a message takes longer than a pass.
    slow = looped(rule, CyclicSetting.DATA, count, lambda _: 1.0, lambda _: 3.0)
    most = max(
        sum(len(slot.sends) for slot in loop_of(rule, CyclicSetting.DATA, count).slots if slot.process == process)
        for process in range(count)
    )
    assert most <= 2 * count
    assert slow >= 3.0 * most


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), RULES, SETTINGS, st.integers(0, 10**6))
def test_equals_a_walk_through_many_steps(count: int, rule: CyclicRule, setting: CyclicSetting, seed: int) -> None:
    draw = random.Random(seed)
    passes = [(draw.uniform(0.1, 1.0), draw.uniform(0.1, 2.0)) for _ in range(count)]
    links = [draw.choice([0.0, draw.uniform(0.0, 1.0)]) for _ in range(count)]

    def seconds(one: CyclicPass) -> float:
        return passes[one.moment.stage][one.moment.backward] + 0.01 * len(one.applies)

    def sent(message: CyclicMessage) -> float:
        return links[message.stage]

    found = looped(rule, setting, count, seconds, sent)
    assert found == pytest.approx(walked(rule, setting, count, seconds, sent, 80), rel=0.02)


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
def test_tensors_are_serialised_unchanged(shapes: list[tuple[list[int], torch.dtype]], seed: int) -> None:
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


def test_early_release_changes_no_draw() -> None:
    found = []
    for early in (False, True):
        model, layers, stages = dropping()
        options = CyclicOptions(CPU, draws=SEED, early_release=early)
        plan = make_plan(stages, "cdp-v2", "single")
        ((result,), _) = train(model, plan, layers, make_batches(STEPS, COUNT), options=options)
        found.append(result.parameters)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


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
