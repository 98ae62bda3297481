"""The parts of a model with branches, what stands in their place, and tensors that are not here yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.branches.parts import StandIn, entrances, place_parts, replace_module
from galvatron_lite.runtime.branches.pending import DeferredFunction, PendingTensor, pending
from tests.runtime.branches.jobs import ONE, Case, layers_of, make_model, make_plan

CASE = Case("Coders", {"a": (("coders.0",), 0, 1, ONE), "b": (("coders.1",), 1, 1, ONE)}, ONE, 2)
LAYERS = layers_of(CASE, make_model(CASE))
PLAN = make_plan(CASE, LAYERS)


def with_second(**changes: object) -> Plan:
    return replace(PLAN, branches=(PLAN.branches[0], replace(PLAN.branches[1], **changes)))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (lambda: with_second(roots=("towers.1",)), r"branch b: 'towers\.1' .* no layers there; make the plan anew"),
        (lambda: with_second(first=2), r"branches\.1: 'first 2, devices 1' .* 2 devices"),
        (lambda: with_second(devices=2), r"branches\.1"),
        (lambda: replace(PLAN, stages=PLAN.stages * 2), "plan, stages: 2 .* one stage"),
    ],
)
def test_plans_that_do_not_fit_are_refused(changed: Callable[[], Plan], named: str) -> None:
    with pytest.raises(InputError, match=named):
        place_parts(changed(), LAYERS)


class Lists(nn.Module):
    """Calls what its lists hold one by one, and one of them as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.loose = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.steps = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.whole = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
        self.idle = nn.Linear(2, 2)

    def forward(self, values: Tensor) -> Tensor:
        for module in [*self.loose, *self.steps]:
            values = module(values)
        return self.whole(values)


def test_entrances_are_what_others_call() -> None:
    roots = ("loose", "steps", "whole", "idle")
    found = entrances(Lists(), roots, torch.zeros(1, 2))
    assert found == ("loose.0", "loose.1", "steps.0", "steps.1", "whole", "idle")
    assert entrances(Lists(), roots, None) == ("loose.0", "loose.1", "steps", "whole", "idle")


def test_an_unknown_root_is_named() -> None:
    with pytest.raises(InputError, match="absent"):
        entrances(Lists(), ("absent",), None)


def test_a_stand_in_tells_what_the_module_tells_and_holds_nothing() -> None:
    model = Lists()
    module = model.again = model.whole
    stand = StandIn("whole", module, lambda one, args, _: (one.path, args))
    replace_module(model, module, stand)
    assert model.whole is model.again is stand
    assert not list(stand.parameters())
    assert stand.extra_repr() == module.extra_repr()
    assert stand.insert == module.insert
    assert stand(1) == ("whole", (1,))
    model.eval()
    assert not module.training


class Run:
    """A run of a model."""

    def __init__(self) -> None:
        self.device, self.applied, self.shapes = torch.device("cpu"), list[DeferredFunction](), dict[object, Any]()


class Source:
    """Gives a value, and counts how often it was asked for."""

    def __init__(self, value: Tensor) -> None:
        self.run, self._value, self.asked = Run(), value, 0

    def value(self) -> Tensor:
        self.asked += 1
        return self._value


def source(value: Tensor) -> tuple[Any, Source]:
    made = Source(value)
    return pending(made, torch.empty_like(value, device="meta")), made


def test_functions_are_put_off_until_a_value_is_needed() -> None:
    tensor, made = source(torch.arange(6.0).view(2, 3))
    first, second = (tensor * 2).to(torch.float64, copy=True).split(1)
    joined = torch.cat([second, first + 1])
    assert isinstance(joined, PendingTensor)
    assert (joined.shape, made.asked) == ((2, 3), 0)
    assert joined.sum().item() == 33
    assert joined.tolist() == [[6, 8, 10], [1, 3, 5]]
    assert bool(joined.any())


def test_what_was_put_off_reads_what_was_there_before_a_change() -> None:
    tensor, _ = source(torch.ones(2))
    doubled = tensor * 2
    tensor.add_(5)
    assert doubled.tolist() == [2, 2]
    assert (tensor + 0).tolist() == [6, 6]


def test_a_change_of_an_argument_is_an_error() -> None:
    tensor, _ = source(torch.ones(2))
    other = torch.ones(2)
    total = tensor + other
    other.zero_()
    with pytest.raises(InputError, match="changed in place"):
        total.tolist()


def test_modes_are_those_of_the_call() -> None:
    tensor, _ = source(torch.ones(2))
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        still = tensor * weight
    moving = tensor * weight
    assert (still.requires_grad, moving.requires_grad) == (False, True)
    assert (torch.add(still, 0.0).sum().item(), still.node.value().requires_grad) == (2.0, False)
    moving.sum().backward()
    assert weight.grad.tolist() == [1, 1]


def test_many_functions_one_after_the_other() -> None:
    tensor, _ = source(torch.zeros(1))
    for _ in range(3000):
        tensor = tensor + 1
    assert tensor.item() == 3000
