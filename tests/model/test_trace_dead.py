"""Dead parameters: changing them changes nothing that a model gives; changing any other does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from galvatron_lite.capture.limits import dead_parameters, everything_in
from galvatron_lite.capture.trace import trace
from galvatron_lite.model.batch import call_model
from galvatron_lite.model.graph import DeadParameters
from galvatron_lite.model.trace.flow import DataFlow
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.model.trace.run import observe

WIDTH = 6


@dataclass
class Answer:
    """An output of a user's own class."""

    value: Tensor


class Case(nn.Module):
    """Two linear layers and whatever ``how`` does with what they give."""

    def __init__(self, how: Callable[[Case, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("slow", torch.zeros(WIDTH))
        self.how = how
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return self.how(self, self.one(x), self.two(x))


def overwritten(_: Case, one: Tensor, two: Tensor) -> Tensor:
    result = torch.zeros_like(one)
    result[:, :3] = one[:, :3]
    result[:, 3:].add_(two[:, 3:])
    return result


def slowly(model: Case, one: Tensor, two: Tensor) -> Tensor:
    """What one step writes, the next one reads."""
    result = one + model.slow
    model.slow.mul_(0.5).add_(two.detach().mean(0))
    return result


def counted(model: Case, one: Tensor, two: Tensor) -> Tensor:
    """Only the running statistics see the second one."""
    model.norm(two)
    return one


def remembered(model: Case, one: Tensor, two: Tensor) -> Tensor:
    model.kept = two.sum()
    return one


NORM = {"norm"}
CASES: dict[str, tuple[Callable[[Case, Tensor, Tensor], Any], set[str]]] = {
    "both": (lambda _, one, two: one * two, NORM),
    "dropped": (lambda _, one, two: one, {"two", *NORM}),
    "argmax": (lambda _, one, two: (one, two.argmax(-1)), NORM),
    "detached": (lambda _, one, two: one - two.detach(), NORM),
    "overwritten": (overwritten, NORM),
    "a user's class": (lambda _, one, two: Answer(one + two), NORM),
    "in a nest": (lambda _, one, two: {"a": [one], "b": ({"c": two},)}, NORM),
    "where": (lambda _, one, two: torch.where(two > 0, one, 0.0), NORM),
    "sorted": (lambda _, one, two: one.gather(1, two.argsort(1)), NORM),
    "slowly": (slowly, NORM),
    "counted": (counted, {"two", *NORM}),
    "remembered": (remembered, NORM),
}
SEEN_LATER = ("slowly", "remembered")
"""Cases where one run's outputs do not show it."""


def dead_of(model: nn.Module, batch: Any) -> tuple[DeadParameters, ...]:
    twin, shapes = meta_copy(model), batch.to("meta")
    flow = DataFlow(twin, shapes)
    return dead_parameters(twin, flow, observe(twin, shapes, [], flow).output)


def changes(model: nn.Module, batch: Any, name: str) -> bool:
    """Whether a parameter changes what a model gives."""
    outputs = []
    for factor in (1.0, -1.7):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.get_parameter(name).mul_(factor).add_(factor)
            outputs.append(list(everything_in(call_model(twin, batch))))
    return not all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_dead_parameters_change_nothing(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Case(CASES[name][0]), torch.randn(16, WIDTH)
    dead = dead_of(model, batch)
    assert {one.path for one in dead} == CASES[name][1]
    for path, _ in model.named_parameters():
        told = any(path.startswith(f"{one.path}.") for one in dead)
        assert changes(model, batch, path) != told or (name in SEEN_LATER and path.startswith("two"))


class Random(nn.Module):
    """Linear layers wired at random; some that nothing reads."""

    def __init__(self, reads: list[list[int]], given: list[int], ways: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in reads)
        self.reads, self.given, self.ways = reads, given, ways

    def forward(self, x: Tensor) -> list[Tensor]:
        made = [x]
        for layer, reads, way in zip(self.layers, self.reads, self.ways, strict=True):
            taken = torch.stack([made[place] for place in reads]).sum(0)
            value = layer(taken)
            if way == 1:
                value = value.clone().add_(taken.view(-1, WIDTH)).reshape(value.shape)
            if way == 2:
                value = torch.cat([value[:, :2], value.new_zeros(len(value), WIDTH - 2)], 1)
            made.append(value)
        return [made[place] for place in self.given]


@st.composite
def wirings(draw: st.DrawFn) -> Random:
    count = draw(st.integers(1, 6))
    reads = [draw(st.lists(st.integers(0, place), min_size=1, max_size=2)) for place in range(count)]
    given_ = draw(st.lists(st.integers(1, count), min_size=1, max_size=2))
    return Random(reads, given_, draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))


@settings(max_examples=60, deadline=None)
@given(wirings())
def test_dead_layers_of_random_wirings_are_those_without_a_gradient(model: Random) -> None:
    batch = torch.ones(2, WIDTH)
    sum(one.sum() for one in model(batch)).backward()
    expected = [f"layers.{n}" for n, layer in enumerate(model.layers) if layer.weight.grad is None]
    found = [one.path for one in dead_of(model, batch)]
    assert found == (["layers"] if len(expected) == len(model.layers) else expected)


def test_a_loss_leaves_out_what_it_does_not_read() -> None:
    model, batch = Case(lambda _, one, two: (one, two)), torch.randn(4, WIDTH)
    graphs = [
        trace(model, batch, loss_fn=lambda output, _, used=used: sum(output[place].sum() for place in used))
        for used in ((0,), (0, 1))
    ]
    assert [[one.path for one in graph.dead] for graph in graphs] == [["two", "norm"], ["norm"]]
    assert graphs[0].notes == (
        "54 of 96 parameters never reach the loss: two, norm. They train nothing and cost 864 B of states with Adam in "
        "fp32: use what these modules give, or remove them.",
    )


def test_shared_parameters_live_where_one_of_their_modules_does() -> None:
    model = nn.Module()
    with torch.device("meta"):
        model.one, model.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.two.weight = model.one.weight
    model.forward = lambda x: model.two(x)  # type: ignore[method-assign]
    batch = torch.zeros(2, WIDTH, device="meta")
    flow = DataFlow(model, batch)
    output = observe(model, batch, [], flow).output
    assert dead_parameters(model, flow, output) == (DeadParameters("one.bias", WIDTH),)
