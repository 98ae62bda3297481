"""Fits against a cost model whose true constants are known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from galvatron_lite.calibration.fit import (
    Array,
    Problem,
    Task,
    centred,
    family_weights,
    fit,
    jacobian_of,
    objective,
    refit_without,
    residuals_of,
    stacked,
    stacked_weights,
    unknowns_of,
)
from galvatron_lite.calibration.parameters import Parameter, value_of, with_places
from galvatron_lite.calibration.schema import Calibration, DeviceConstants, LinkConstants, StackConstants

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
    found = with_places(START, UNKNOWNS.parameters, places.tolist())
    return [value_of(found, parameter) for parameter in UNKNOWNS.parameters]


def test_true_constants_are_found() -> None:
    found = fit(_problem(), UNKNOWNS, START, _predict, steps=20)
    assert _values(found.places) == pytest.approx([0.55, 0.05], rel=0.02)
    assert np.abs(found.residuals).max() < 0.02


def test_outliers_do_not_govern() -> None:
    spoilt = MEASURED.copy()
    spoilt[::7] += 1.0  # every seventh row took 2.7 times as long as it should
    found = fit(_problem(spoilt), UNKNOWNS, START, _predict, steps=20)
    assert _values(found.places) == pytest.approx([0.55, 0.05], rel=0.05)


def test_without_weight_the_prior_stays() -> None:
    problem = replace(_problem(), weights=np.zeros(60))
    found = fit(problem, UNKNOWNS, START, _predict)
    assert found.places == pytest.approx(UNKNOWNS.prior)


def test_the_objective_is_the_formula() -> None:
    places = UNKNOWNS.prior + UNKNOWNS.deviation * np.array([1.0, -2.0])
    # Errors far beyond the smoothing count as |r| less the smoothing; the prior adds (1 + 4) / 2.
    value = objective(UNKNOWNS, places, np.array([3.0, -5.0]), np.array([2.0, 1.0]))
    assert value == pytest.approx(2 * 2.98 + 4.98 + 2.5, abs=1e-3)


def test_derivatives_are_those_of_the_closed_form() -> None:
    residuals = residuals_of(_problem(), _seconds(START, range(60)))
    jacobian = jacobian_of(_problem(), UNKNOWNS, START, UNKNOWNS.prior, residuals, _predict)
    host = np.where(np.arange(60) < 40, 0.01, 0.0)
    compute = WORK / 0.7
    # d log(c / e + h) / d logit e = -(1 - e) compute / total; by log h it is h / total.
    assert jacobian[:, 0] == pytest.approx(-0.3 * compute / (compute + host), rel=0.03)
    assert jacobian[:, 1] == pytest.approx(host / (compute + host), rel=0.03, abs=1e-12)


def test_a_row_that_cannot_be_predicted_counts_nothing() -> None:
    def half(tasks: Sequence[Task]) -> list[Array]:
        return [np.where(np.array(rows) % 2 == 0, _seconds(c, rows), np.nan) for c, rows in tasks]

    found = fit(_problem(), UNKNOWNS, START, half, steps=20)
    assert _values(found.places) == pytest.approx([0.55, 0.05], rel=0.02)


def test_leaving_rows_out_agrees_with_a_fit_without_them() -> None:
    noisy = MEASURED + np.random.default_rng(3).normal(0, 0.05, 60)
    kept = np.arange(60) % 5 != 0
    found = fit(_problem(noisy), UNKNOWNS, START, _predict, steps=20)
    problem = replace(_problem(noisy), weights=np.where(kept, 50.0, 0.0))
    whole = fit(problem, UNKNOWNS, START, _predict, steps=20)
    again = refit_without(_problem(noisy), UNKNOWNS, replace(found, jacobian=_jacobian(found.places)), kept)
    assert again == pytest.approx(whole.places, abs=0.02)


def test_leaving_nothing_out_changes_little() -> None:
    found = fit(_problem(), UNKNOWNS, START, _predict, steps=20)
    again = refit_without(_problem(), UNKNOWNS, replace(found, jacobian=_jacobian(found.places)), np.full(60, True))
    assert again == pytest.approx(found.places, abs=0.02)


def _jacobian(places: Array) -> Array:
    there = with_places(START, UNKNOWNS.parameters, places.tolist())
    residuals = residuals_of(_problem(), _seconds(there, range(60)))
    return jacobian_of(_problem(), UNKNOWNS, START, places, residuals, _predict)


def test_centring_takes_the_mean_of_each_group() -> None:
    problem = _problem(groups=np.repeat([0, 1, -1], 20))
    values = np.arange(60.0)
    made = centred(problem, values)
    assert made[:20] == pytest.approx(np.arange(20) - 9.5)
    assert made[20:40] == pytest.approx(np.arange(20) - 9.5)
    assert not made[40:].any()


def test_order_within_groups_has_rows_and_weights_of_its_own() -> None:
    problem = _problem(order=0.5, groups=np.repeat([0, 1, -1], 20))
    assert len(stacked(problem, MEASURED)) == 120
    weights = stacked_weights(problem)
    assert weights[60:100] == pytest.approx(25.0)
    assert not weights[100:].any()
    assert not stacked_weights(problem, np.full(60, False)).any()


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
