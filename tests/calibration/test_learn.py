"""What is learnt around a prior, held against closed forms."""

import numpy as np
import pytest

from galvatron_lite.calibration.parameters import learn


def test_straight_lines_have_the_posterior_of_the_textbook() -> None:
    """Two unknowns, five measurements: the normal equations of ridge regression."""
    rows = np.array([[1.0, 0.0], [1.0, 0.5], [0.2, 1.0], [0.0, 2.0], [1.0, 1.0]])
    truth, noise, widths = np.array([0.3, -0.2]), 0.1, np.array([0.5, 0.4])
    logs = rows @ truth + np.array([0.02, -0.05, 0.01, 0.03, -0.02])
    found = learn(lambda x: rows @ x, np.exp(logs).tolist(), [0.0, 0.0], widths.tolist(), noise)
    covariance = np.linalg.inv(rows.T @ rows / noise**2 + np.diag(widths**-2))
    assert found.values == pytest.approx(covariance @ rows.T @ logs / noise**2, abs=1e-6)
    assert found.deviations == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-6)


def test_what_measurements_do_not_tell_stays() -> None:
    found = learn(lambda x: np.array([x[0]]), [2.0], [0.0, 1.5], [1.0, 0.3], 1e-3)
    assert found.values == pytest.approx([np.log(2.0), 1.5], abs=1e-4)
    assert found.deviations[1] == pytest.approx(0.3)


def test_bent_predictions_end_at_the_least_objective() -> None:
    def predict(x: np.ndarray) -> np.ndarray:
        return np.log(1.0 + np.exp(2 * x[:1])) + 0.1 * x[:1] ** 3

    found = learn(predict, [3.0], [0.0], [2.0], 0.1, rounds=8)
    grid = np.linspace(-2, 2, 40001)
    cost = ((np.log(1 + np.exp(2 * grid)) + 0.1 * grid**3 - np.log(3.0)) / 0.1) ** 2 + (grid / 2) ** 2
    assert found.values[0] == pytest.approx(grid[cost.argmin()], abs=2e-3)


def test_it_never_leaves_a_prior_that_is_better() -> None:
    """A step that overshoots is halved, and not taken where no part of it helps."""
    found = learn(lambda x: np.abs(x[:1]), [1.0], [0.0], [1.0], 0.1)
    assert found.values == pytest.approx([0.0], abs=1.1)
    assert np.isfinite(found.values).all()
