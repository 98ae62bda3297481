"""Constants learnt from measurements around a prior, with how sure they are.

Unknowns x have independent normal priors N(mean, width²), logarithms of measurements independent errors N(0, noise²).
The most likely x minimises

    sum((log predicted(x) - log measured)² / noise²) + sum((x - mean)² / width²)

by Gauss-Newton steps with halving; its covariance is the inverse of J'J / noise² + diag(1 / width²) there, J the
derivatives of the logarithms (Gelman et al., Bayesian Data Analysis, 3rd ed., 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_STEP = 1e-3  # of the derivatives, beside unknowns of widths about 0.1 to 2
_HALVINGS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """What measurements say of some unknowns."""

    values: Vector  # most likely
    deviations: Vector  # standard deviations, that of the prior where measurements say nothing
    slopes: NDArray[np.float64]  # of the logarithms of predictions at the values, (measurements, unknowns)


def learn(
    predict: Callable[[Vector], Vector],
    measured: Sequence[float],
    mean: Sequence[float] | Vector,
    widths: Sequence[float] | Vector,
    noise: float,
    rounds: int = 3,
    slopes: NDArray[np.float64] | None = None,
) -> Learnt:
    """The most likely unknowns.

    Args:
        predict: logarithms of predictions at some values.
        measured: what was measured, above 0.
        mean: of the priors, where the search begins.
        widths: standard deviations of the priors.
        noise: standard deviation of the logarithms of measurements.
        rounds: Gauss-Newton steps at most.
        slopes: derivatives that are known, used in every step; None: by differences, anew in each.
    """
    target, prior, precision = np.log(np.asarray(measured)), np.asarray(mean, float), np.asarray(widths, float) ** -2.0

    def objective(logs: Vector, values: Vector) -> float:
        return float(((logs - target) ** 2).sum() / noise**2 + (precision * (values - prior) ** 2).sum())

    values, logs = prior.copy(), predict(prior)
    best, known = objective(logs, values), slopes
    for _ in range(rounds):
        known = slopes if slopes is not None else _slopes(predict, values, logs)
        curvature = known.T @ known / noise**2 + np.diag(precision)
        step = np.linalg.solve(curvature, known.T @ (target - logs) / noise**2 - precision * (values - prior))
        for halving in range(_HALVINGS):
            tried = values + step / 2**halving
            reached = predict(tried)
            if (cost := objective(reached, tried)) < best:
                break
        else:
            break
        gain, values, logs, best = best - cost, tried, reached, cost
        if gain < 1e-3 * best:
            break
    assert known is not None
    spread = np.sqrt(np.diag(np.linalg.inv(known.T @ known / noise**2 + np.diag(precision))))
    return Learnt(values, spread, known)


def _slopes(predict: Callable[[Vector], Vector], values: Vector, logs: Vector) -> NDArray[np.float64]:
    columns = []
    for place in range(len(values)):
        moved = values.copy()
        moved[place] += _STEP
        columns.append((predict(moved) - logs) / _STEP)
    return np.stack(columns, axis=1) if columns else np.zeros((len(logs), 0))
