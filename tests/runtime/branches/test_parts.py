"""Plans with branches that do not fit the model or themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.branches.parts import place_parts
from tests.runtime.branches.networks import ONE, Case, layers_of, make_model, make_plan

CASE = Case("Coders", {"a": (("coders.0",), 0, 1, ONE), "b": (("coders.1",), 1, 1, ONE)}, ONE, 2)
LAYERS = layers_of(CASE, make_model(CASE))
PLAN = make_plan(CASE, LAYERS)


def with_second(**changes: object) -> Plan:
    return replace(PLAN, branches=(PLAN.branches[0], replace(PLAN.branches[1], **changes)))


def test_every_layer_has_one_home() -> None:
    trunk, *branches = place_parts(PLAN, LAYERS)
    names = [layer.name for part in (trunk, *branches) for layer in part.layers]
    assert sorted(names) == sorted(layer.name for layer in LAYERS)
    assert [(part.name, part.first, part.devices) for part in branches] == [("a", 0, 1), ("b", 1, 1)]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (lambda: with_second(roots=("towers.1",)), r"branch b: 'towers\.1' .* no layers there; make the plan anew"),
        (lambda: with_second(first=2), "devices of b: '2 to 2'"),
        (lambda: with_second(devices=2), "strategies of b"),
        (lambda: replace(PLAN, stages=PLAN.stages * 2), "plan: '2 stages'"),
    ],
)
def test_plans_that_do_not_fit_are_refused(changed: Callable[[], Plan], named: str) -> None:
    with pytest.raises(InputError, match=named):
        place_parts(changed(), LAYERS)
