"""What layers read of one another, and what must travel between stages because of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.pipeline.cost import chunks_in_flight
from galvatron_lite.parallelism.pipeline.flow import LayerFlow, Output, flow_of, sources_of, unknown
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass, ScheduleConfig, stage_at
from galvatron_lite.parallelism.pipeline.table import actions_of, ends, room_of
from galvatron_lite.parallelism.pipeline.times import PassOrder, StageTimes
from galvatron_lite.plans.schema import Schedule
from tests.equivalence.families import build_family
from tests.runtime.pictures import Pictures, make_net, make_pictures
from tests.schedules import EXECUTABLE, ZERO_BUBBLE


def names_of(flow: LayerFlow, layers: tuple[Layer, ...]) -> list[set[str]]:
    """By cut: modules whose outputs cross it."""
    return [{one.path for one in flow.crossing(cut)} for cut in range(1, len(layers))]


def test_code_between_layers_hands_on_what_it_read() -> None:
    case = Pictures([])
    model, batch = make_net(case), make_pictures(case)
    layers = discover_layers(model, batch, blocks=[f"blocks.{number}" for number in range(3)])
    flow = flow_of(model, layers, batch)
    assert flow.enters(1)
    crossing = [set(), {"blocks.0"}, {"blocks.0", "blocks.1"}, {"blocks.0", "blocks.2"}]
    assert names_of(flow, layers) == crossing


def test_models_without_skip_connections_are_chains() -> None:
    for family in ("zoo-gpt", "llama", "bert", "vit"):
        model, batch, layers = build_family(family, 2)
        assert flow_of(model, layers, batch).is_chain, family


class Branches(nn.Module):
    """Its output is more than its loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        first = self.blocks[0](value)
        return {"first": first, "last": self.blocks[2](self.blocks[1](first))}


def test_only_what_the_loss_is_made_of_is_read() -> None:
    model, batch = Branches(), (torch.randn(4, 3),)
    layers = discover_layers(model, batch, blocks=[f"blocks.{number}" for number in range(3)])

    def loss(output: Any, _: Any) -> Tensor:
        value: Tensor = output["last"].mean()
        return value

    assert flow_of(model, layers, batch, loss).is_chain
    assert not flow_of(model, layers, batch).is_chain


def test_unknown_tensors_tell_shapes_device_and_sources() -> None:
    home = torch.device("cpu")
    ones = [Output("a", 0, ""), Output("b", 1, ".0")]
    left, right = (unknown(torch.empty(2, 3, device="meta"), frozenset([one]), home) for one in ones)
    both = torch.cat([left.relu(), torch.zeros(2, 1), right * 2], 1)
    assert both.shape == (2, 7)
    assert sources_of(both) == set(ones)
    assert both.device == home
    assert both.new_ones(2).tolist() == [1, 1]
    assert torch.zeros_like(left).sum() == 0
    assert sources_of(left.to(home, torch.float64)) == {ones[0]}
    known = torch.zeros(2, 3)
    known[0] = left[1]
    assert sources_of(known) == {ones[0]}
    right += left
    assert sources_of(right) == set(ones)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.inner(x) + table.mean()


class Lending(nn.Module):
    """Every block is handed the table, or else the code behind the blocks reads it."""

    def __init__(self, to_all: bool) -> None:
        super().__init__()
        self.to_all = to_all
        self.start = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.table, self.end = nn.Embedding(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x, self.table.weight if self.to_all else torch.ones(1))
        x = self.end(x)
        return (x if self.to_all else x + self.table.weight.sum()).mean()


def test_a_lent_parameter_is_named_before_anything_is_cut() -> None:
    model, batch = Lending(to_all=True), torch.zeros(2, 4)
    graph = trace(model, batch, loss_fn=lambda output, _: output)
    assert "table.weight" in graph.whole
    flow = flow_of(model, graph.layers, batch)
    for cut in range(1, len(graph.layers)):
        with pytest.raises(InputError, match=r"table\.weight"):
            flow.check(cut, graph.layers)


def test_one_that_its_own_layer_alone_reads_may_be_cut_off() -> None:
    model, batch = Lending(to_all=False), torch.zeros(2, 4)
    graph = trace(model, batch, loss_fn=lambda output, _: output)
    flow = flow_of(model, graph.layers, batch)
    held = next(layer.name for layer in graph.layers if "table" in layer.modules)
    assert held == "after"
    assert graph.whole == ""
    assert flow.borrowed == ()
    flow.check(2, graph.layers)


# The table of passes: every pass once, dependences met, no deadlock however slowly messages are taken.


SECONDS = st.floats(0.1, 2)


@st.composite
def courses(draw: st.DrawFn) -> tuple[ScheduleConfig, PassOrder | None]:
    """A pipeline, and for zero-bubble orders stages whose passes take any time."""
    schedule, groups = draw(st.sampled_from(EXECUTABLE)), draw(st.integers(2, 5))
    virtual = {Schedule.INTERLEAVED: draw(st.integers(2, 3)), Schedule.ZERO_BUBBLE_V: 2}.get(schedule, 1)
    course = ScheduleConfig(schedule, groups, virtual, draw(st.integers(1, 12)))
    if draw(st.booleans()):
        return course, None
    times = [(draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(SECONDS)) for _ in range(groups * virtual)]
    stages = tuple(StageTimes(forward, back + weight, send, send, weight) for forward, back, weight, send in times)
    return course, PassOrder(stages, draw(st.floats(0, 1)), draw(st.floats(0.2, 1)))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(courses())
def test_every_pass_happens_once_and_after_what_it_needs(given: tuple[ScheduleConfig, PassOrder | None]) -> None:
    course, order = given
    table = actions_of(course, order)
    kinds = 3 if course.schedule in ZERO_BUBBLE else 2
    for own in table:
        assert len(own) == len(set(own)) == kinds * course.virtual * course.microbatches
    done: set[tuple[Pass, int, int]] = set()
    todo = [list(own) for own in table]
    last = course.groups * course.virtual - 1
    while any(todo):
        before = len(done)
        for group, own in enumerate(todo):
            while own:
                what, index = own[0].what, own[0].microbatch
                stage = stage_at(course.schedule, course.groups, group, own[0].chunk)
                needs = {
                    Pass.FORWARD: [(Pass.FORWARD, stage - 1, index)] if stage else [],
                    Pass.BACKWARD: [(Pass.FORWARD, stage, index)]
                    + ([(Pass.BACKWARD, stage + 1, index)] if stage < last else []),
                    Pass.WEIGHT: [(Pass.BACKWARD, stage, index)],
                }[what]
                if not set(needs) <= done:
                    break
                done.add((what, stage, index))
                own.pop(0)
        assert len(done) > before, "every group waits"


@settings(max_examples=120, deadline=None, derandomize=True)
@given(courses())
def test_declared_messages_under_way_suffice(given: tuple[ScheduleConfig, PassOrder | None]) -> None:
    course, order = given
    table = actions_of(course, order)
    room = room_of(course, table)
    assert ends(course, table, room)
    assert room == 2 or not ends(course, table, room // 2)


def test_too_few_messages_under_way_are_noticed() -> None:
    """Two groups that would each wait for the other to take a message: an order that runs far ahead."""
    course = ScheduleConfig(Schedule.ZERO_BUBBLE_2P, 2, 1, 1)
    (first,), (second,) = ([own] for own in actions_of(course))
    assert ends(course, (first, second), 1)
    assert not ends(course, (first, second[::-1]), 100)


@pytest.mark.parametrize(("groups", "virtual"), [(2, 2), (3, 2), (4, 3), (5, 4)])
def test_interleaved_holds_what_is_priced(groups: int, virtual: int) -> None:
    """Whatever a micro-batch of each chunk takes: the worst priced moment is the worst of all."""
    course, draw = ScheduleConfig(Schedule.INTERLEAVED, groups, virtual, 5 * groups), random.Random(groups)
    for group, own in enumerate(actions_of(course)):
        priced = chunks_in_flight(Schedule.INTERLEAVED, groups, group, course.microbatches, virtual)
        # Narayanan et al. 2021, section 2.2
        assert max(sum(counts) for _, counts in priced) == 2 * (groups - group - 1) + (virtual - 1) * groups + 1
        every = list(backward_moments(own, virtual))
        assert set(priced) <= set(every)
        for _ in range(200):
            kept = [draw.choice((0, 1, draw.randrange(1, 1000))) for _ in range(virtual)]
            once, extra = ([draw.choice((0, draw.randrange(3000))) for _ in range(virtual)] for _ in range(2))

            size = partial(bytes_at, kept, once, extra)
            assert max(map(size, priced)) == max(map(size, every))


def bytes_at(
    kept: Sequence[int], once: Sequence[int], extra: Sequence[int], moment: tuple[int, tuple[int, ...]]
) -> int:
    """By chunk: of each micro-batch, of any at all, of a backward pass."""
    chunk, counts = moment
    return extra[chunk] + sum(n * more + (n > 0) * first for n, more, first in zip(counts, kept, once, strict=True))


def backward_moments(actions: Sequence[Action], virtual: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every backward pass of a group: of which chunk, and what is held of each when it begins."""
    for place, action in enumerate(actions):
        if action.what is Pass.BACKWARD:
            done = Counter((one.what, one.chunk) for one in actions[:place])
            yield action.chunk, tuple(done[Pass.FORWARD, c] - done[Pass.BACKWARD, c] for c in range(virtual))


@pytest.mark.parametrize("schedule", [schedule for schedule in EXECUTABLE if schedule.virtual_stages == 1])
@pytest.mark.parametrize(("groups", "microbatches"), [(2, 1), (3, 7), (4, 16)])
def test_facts_of_a_schedule_are_those_of_its_table(schedule: Schedule, groups: int, microbatches: int) -> None:
    long = actions_of(ScheduleConfig(schedule, groups, 1, microbatches + 5))
    for group, own in enumerate(actions_of(ScheduleConfig(schedule, groups, 1, microbatches))):
        assert schedule.splits_backward == any(action.what is Pass.WEIGHT for action in own)
        last = Pass.WEIGHT if schedule.splits_backward else Pass.BACKWARD
        held = [held_between(actions, last) for actions in (own, long[group])]
        most = schedule.in_flight(groups, group, microbatches)
        assert held[0] <= most if schedule.splits_backward else held[0] == most
        if schedule.settles and microbatches >= groups:
            assert held[0] == held[1]


def held_between(actions: Sequence[Action], last: Pass) -> int:
    """The most micro-batches between their forward and their last pass."""
    held = most = 0
    for action in actions:
        held += (action.what is Pass.FORWARD) - (action.what is last)
        most = max(most, held)
    return most


@settings(max_examples=60, deadline=None, derandomize=True)
@given(courses())
def test_zero_bubble_holds_no_more_than_its_limit(given: tuple[ScheduleConfig, PassOrder | None]) -> None:
    course, order = given
    if course.schedule not in ZERO_BUBBLE:
        return
    limit = course.groups * (1 if course.schedule is Schedule.ZERO_BUBBLE_1P else 2)
    share = 1.0 if order is None else order.share
    for own in actions_of(course, order):
        held: Counter[Pass] = Counter()
        for action in own:
            held[action.what] += 1
            whole, pending = held[Pass.FORWARD] - held[Pass.BACKWARD], held[Pass.BACKWARD] - held[Pass.WEIGHT]
            assert whole + share * pending <= limit + 1e-6
