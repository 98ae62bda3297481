"""Fits against a cost model whose true constants are known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from galvatron_lite.calibration.parameters import Parameter, value_of, with_scaled_values
from galvatron_lite.calibration.schema import (
    Calibration,
    ConstantsOrigin,
    DeviceConstants,
    LinkConstants,
    StackConstants,
)
from studies.calibration.fit import (
    Array,
    Fit,
    Problem,
    Task,
    centred,
    deviation_of,
    family_weights,
    fit,
    jacobian_of,
    objective,
    residuals_at,
    solved,
    unknowns_of,
    updated,
)

pytestmark = pytest.mark.study

START = Calibration(
    devices={
        "default": DeviceConstants({"bf16": 0.7}, 0.5, 0.5, 0.8),
        "A": DeviceConstants({"bf16": 0.7}, 0.5, 0.5, 0.8),
    },
    links={"default": LinkConstants(0.8, 1e-5)},
    stacks={"default": StackConstants(), "s": StackConstants(step_host=0.01)},
)
GENERATOR = np.random.default_rng(7)
WORK = np.exp(GENERATOR.uniform(-4, 2, 60))
"""Seconds of each row at full speed; rows from 40 on use no stack."""
USES = [frozenset({"devices/A", "stacks/s"} if row < 40 else {"devices/A"}) for row in range(60)]


def _seconds(calibration: Calibration, rows: Sequence[int]) -> Array:
    host = [calibration.stacks["s"].step_host if "stacks/s" in USES[row] else 0.0 for row in rows]
    return np.asarray(np.log(WORK[list(rows)] / calibration.devices["A"].matmul["bf16"] + np.array(host)))


def _predict(tasks: Sequence[Task]) -> list[Array]:
    return [_seconds(calibration, rows) for calibration, rows in tasks]


TRUE = replace(
    START,
    devices=START.devices | {"A": replace(START.devices["A"], matmul={"bf16": 0.55})},
    stacks=START.stacks | {"s": StackConstants(step_host=0.05)},
)
MEASURED = _seconds(TRUE, range(60))
ALONE = np.full(60, -1)


def _problem(measured: Array = MEASURED, order: float = 0.0, groups: np.ndarray = ALONE) -> Problem:
    return Problem(measured, np.full(60, 50.0), groups, order, USES)


UNKNOWNS = unknowns_of(START, (Parameter("devices", "A", "matmul", "bf16"), Parameter("stacks", "s", "step_host")))


def _values(places: Array) -> list[float]:
    found = with_scaled_values(START, UNKNOWNS.parameters, places.tolist())
    return [value_of(found, parameter) for parameter in UNKNOWNS.parameters]


def test_true_constants_are_found() -> None:
    found = fit(_problem(), UNKNOWNS, _predict, steps=20)
    assert _values(found.places) == pytest.approx([0.55, 0.05], rel=0.02)
    assert np.abs(found.residuals).max() < 0.02


@pytest.mark.parametrize("start", [[0.5, 0.5], [-0.8, 3.0], [1.5, -1.0]])
def test_the_start_does_not_matter(start: list[float]) -> None:
    there = fit(_problem(), UNKNOWNS, _predict, start=UNKNOWNS.prior + np.array(start), steps=30)
    assert _values(there.places) == pytest.approx([0.55, 0.05], rel=0.02)


def test_outliers_do_not_govern() -> None:
    spoilt = MEASURED.copy()
    spoilt[::7] += 1.0  # every seventh row took 2.7 times as long as it should
    found = fit(_problem(spoilt), UNKNOWNS, _predict, steps=20)
    assert _values(found.places) == pytest.approx([0.55, 0.05], rel=0.05)


def test_without_weight_the_prior_stays() -> None:
    found = fit(_problem().without(np.full(60, True)), UNKNOWNS, _predict)
    assert found.places == pytest.approx(UNKNOWNS.prior)


def test_rows_left_out_do_not_change_what_is_found() -> None:
    left_out = np.arange(60) % 5 == 0
    poisoned = np.where(left_out, MEASURED + 3.0, MEASURED)
    slopes = jacobian_of(_problem(), UNKNOWNS, UNKNOWNS.prior, _predict)
    clean, other = (
        fit(_problem(measured).without(left_out), UNKNOWNS, _predict, jacobian=slopes, steps=20)
        for measured in (MEASURED, poisoned)
    )
    assert other.places.tolist() == clean.places.tolist()
    assert _values(clean.places) == pytest.approx([0.55, 0.05], rel=0.02)
    kept_in = fit(_problem(poisoned), UNKNOWNS, _predict, jacobian=slopes, steps=20)
    assert kept_in.places.tolist() != clean.places.tolist()


def test_the_objective_is_the_formula() -> None:
    places = UNKNOWNS.prior + UNKNOWNS.deviation * np.array([1.0, -2.0])
    residuals = np.zeros(60)
    residuals[:2] = np.log([1.5, 0.4])  # errors of +50 % and -60 %
    value = objective(_problem(), UNKNOWNS, places, residuals)
    # Far beyond the smoothing errors count as |e| less the smoothing; the prior adds (1 + 4) / 2.
    assert value == pytest.approx(50 * (0.48 + 0.58) + 2.5, rel=2e-3)
    # Among themselves log 1.5 and log 0.4 lie 0.661 to either side of their mean.
    grouped = replace(_problem(order=0.5, groups=np.array([0, 0] + [-1] * 58)))
    more = objective(grouped, UNKNOWNS, places, residuals) - value
    assert more == pytest.approx(0.5 * 50 * 2 * (0.661 - 0.02), rel=2e-3)


def test_derivatives_are_those_of_the_closed_form() -> None:
    jacobian = jacobian_of(_problem(), UNKNOWNS, UNKNOWNS.prior, _predict)
    host = np.where(np.arange(60) < 40, 0.01, 0.0)
    compute = WORK / 0.7
    # d log(c / e + h) / d logit e = -(1 - e) compute / total; by log h it is h / total.
    assert jacobian[:, 0] == pytest.approx(-0.3 * compute / (compute + host), rel=0.03)
    assert jacobian[:, 1] == pytest.approx(host / (compute + host), rel=0.03, abs=1e-12)


def test_derivatives_hold_no_measurement() -> None:
    one, other = (
        jacobian_of(_problem(m), UNKNOWNS, UNKNOWNS.prior, _predict) for m in (MEASURED, MEASURED[::-1] + 1.0)
    )
    assert one.tolist() == other.tolist()


def test_an_update_explains_the_change_and_nothing_across_it() -> None:
    jacobian = np.random.default_rng(1).normal(size=(5, 2))
    moved, change = np.array([0.3, -0.2]), np.arange(5.0)
    made = updated(UNKNOWNS, jacobian, moved, change)
    assert made @ moved == pytest.approx(change)
    measure = moved / UNKNOWNS.deviation**2  # right angles are those of deviations
    aside = np.array([1.0, 1.0])
    aside -= moved * (aside @ measure) / (moved @ measure)
    assert made @ aside == pytest.approx(jacobian @ aside)


def test_a_row_that_cannot_be_predicted_counts_nothing() -> None:
    def half(tasks: Sequence[Task]) -> list[Array]:
        return [np.where(np.array(rows) % 2 == 0, _seconds(c, rows), np.nan) for c, rows in tasks]

    found = fit(_problem(), UNKNOWNS, half, steps=20)
    assert _values(found.places) == pytest.approx([0.55, 0.05], rel=0.02)


def test_no_step_goes_further_than_it_may() -> None:
    residuals = residuals_at(_problem(), UNKNOWNS, UNKNOWNS.prior, _predict)
    jacobian = jacobian_of(_problem(), UNKNOWNS, UNKNOWNS.prior, _predict)
    there = Fit(UNKNOWNS.prior, residuals, jacobian, 0.0)
    assert np.abs(solved(_problem(), UNKNOWNS, there, reach=0.1) - UNKNOWNS.prior).max() <= 0.1 + 1e-12


def test_an_entry_says_how_sure_its_prior_is() -> None:
    matmul, memory = Parameter("devices", "A", "matmul", "bf16"), Parameter("devices", "A", "memory")
    sure = replace(START, origins={"devices/A": ConstantsOrigin("a benchmark", deviations={"matmul": 0.05})})
    assert deviation_of(sure, matmul) == 0.05
    assert deviation_of(sure, memory) == memory.scale.deviation == deviation_of(START, memory)


def test_centring_takes_the_mean_of_each_group() -> None:
    problem = _problem(groups=np.repeat([0, 1, -1], 20))
    values = np.arange(60.0)
    made = centred(problem, values)
    assert made[:20] == pytest.approx(np.arange(20) - 9.5)
    assert made[20:40] == pytest.approx(np.arange(20) - 9.5)
    assert not made[40:].any()


def test_rows_left_out_are_not_part_of_their_group() -> None:
    problem = _problem(groups=np.repeat([0, 1, -1], 20)).without(np.arange(60) < 10)
    made = centred(problem, np.arange(60.0))
    assert not made[:10].any()
    assert made[10:20] == pytest.approx(np.arange(10) - 4.5)


def test_families_weigh_alike_whatever_their_rows() -> None:
    families = ["many"] * 200 + ["few"] * 20 + ["single"]
    groups = np.array([0] * 150 + [1] * 50 + [-1] * 21)
    weights = family_weights(families, groups, [1.0] * 221, 10.0)
    assert weights[:200].sum() == pytest.approx(10 * 200 / 202)
    assert weights[200:220].sum() == pytest.approx(10 * 20 / 22)
    assert weights[220] == pytest.approx(10 / 3)
    # The small group's rows weigh more than the large one's, but less than if groups alone counted.
    assert 1 < weights[199] / weights[0] < 3


def test_poorer_figures_weigh_less() -> None:
    weights = family_weights(["f"] * 4, np.full(4, -1), [1.0, 1.0, 0.4, 0.4], 6.0)
    assert weights == pytest.approx([1.0, 1.0, 0.4, 0.4])
