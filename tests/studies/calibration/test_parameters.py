from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.errors import InputError
from studies.calibration.parameters import (
    SCALES,
    Parameter,
    from_scale,
    parameter_named,
    parameters_of,
    places_of,
    to_scale,
    value_of,
    with_places,
)

pytestmark = pytest.mark.study

SHIPPED = load_calibration()
SHARE = Parameter("devices", "A100", "matmul", "bf16")
TIME = Parameter("stacks", "megatron-lm", "kernel_host")


@given(st.floats(0, 1))
def test_a_share_comes_back_within_its_bounds(value: float) -> None:
    back = from_scale(SHARE, to_scale(SHARE, value))
    assert back == pytest.approx(min(max(value, SHARE.scale.low), SHARE.scale.high))


@given(st.floats(-50, 50))
def test_no_place_leaves_the_bounds(place: float) -> None:
    for parameter in (SHARE, TIME):
        assert parameter.scale.low <= from_scale(parameter, place) <= parameter.scale.high


def test_shares_are_fitted_as_logits_and_times_as_logarithms() -> None:
    assert to_scale(SHARE, 0.8) == pytest.approx(1.3862943611198906)  # log 4
    assert to_scale(TIME, 1e-5) == pytest.approx(-11.512925464970229)  # log 1e-5


def test_every_field_that_is_fitted_exists() -> None:
    owners = {f"{kind}/{name}" for kind in SCALES for name in getattr(SHIPPED, kind)}
    found = {(p.kind, p.field) for p in parameters_of(SHIPPED, owners)}
    # Shares of hidden communication are fitted where an entry names a dimension.
    assert found | {("stacks", "hidden")} == {(kind, field) for kind, fields in SCALES.items() for field in fields}


def test_names_lead_back_to_parameters() -> None:
    every = parameters_of(SHIPPED, {"devices/A100", "links/nvlink3", "stacks/megatron-lm"})
    assert [parameter_named(p.name) for p in every] == list(every)
    with pytest.raises(InputError):
        parameter_named("devices/A100/colour")


def test_only_what_is_named_changes() -> None:
    changed = with_places(SHIPPED, (SHARE, TIME), (to_scale(SHARE, 0.5), to_scale(TIME, 2e-5)))
    assert value_of(changed, SHARE) == pytest.approx(0.5)
    assert value_of(changed, TIME) == pytest.approx(2e-5)
    a100 = changed.devices["A100"]
    restored = replace(a100, matmul=a100.matmul | {"bf16": value_of(SHIPPED, SHARE)})
    assert restored == SHIPPED.devices["A100"]
    assert changed.links == SHIPPED.links
    assert {k: v for k, v in changed.stacks.items() if k != "megatron-lm"} == {
        k: v for k, v in SHIPPED.stacks.items() if k != "megatron-lm"
    }


def test_places_are_those_of_the_values() -> None:
    every = parameters_of(SHIPPED, {"devices/H100"})
    assert [from_scale(p, x) for p, x in zip(every, places_of(SHIPPED, every), strict=True)] == pytest.approx(
        [value_of(SHIPPED, p) for p in every]
    )
