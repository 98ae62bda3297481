"""Fits calibrated constants to measured step times: robust least squares with priors. No torch here.

With residuals r_i = log(predicted_i / measured_i), weights w_i and unknowns x (``parameters``) it minimises

    sum_i w_i |r_i|  +  1/2 sum_k ((x_k - prior_k) / deviation_k)^2,

|r| smoothed to sqrt(r^2 + d^2) - d (d = ``SMOOTH``), because the score is a mean of absolute errors, which outliers
must not govern. The steps are Gauss-Newton on iteratively reweighted squares (P. Huber, "Robust Statistics", 1981,
section 7.8) with a bound on each unknown's step and halving while the objective does not fall (J. Nocedal, S. Wright,
"Numerical Optimization", 2006, sections 10.3 and 3.1). Derivatives are forward differences, one unknown at a time,
of those rows only that use its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.calibration.parameters import Parameter, from_scale, places_of, to_scale, with_places
from galvatron_lite.calibration.schema import Calibration

Array = NDArray[np.float64]
Task = tuple[Calibration, Sequence[int]]
"""A calibration, and the rows to predict with it."""
PredictMany = Callable[[Sequence[Task]], Sequence[Array]]
"""Logarithms of predicted seconds of each task's rows; not a number where a row cannot be predicted."""

SMOOTH = 0.02
"""Residual below which the error counts by its square: published figures repeat within some two per cent."""

NUDGE = 0.02
"""Step of the forward differences on the scale of the fit."""

LARGEST_STEP = 0.8
"""Most that an unknown may move before derivatives are computed anew, on the scale of the fit."""

HALVINGS = 4
"""How often a step that does not help is halved."""

ENOUGH = 1e-3
"""Relative fall of the objective below which the fit ends."""

INNER = 12
"""Reweighted steps on a linearised problem; each goes half its way, for absolute errors have kinks."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows to fit to.

    Attributes:
        measured: logarithm of each row's measured seconds.
        weights: w of the formula above.
        groups: number of the group of rows that a choice is made among, -1 for a row on its own.
        order: weight of a row's residual beside its group's mean residual (what ranks rows within a group), as a
            factor on its own weight.
        uses: entries (``devices/A100``) that each row's prediction depends on.
    """

    measured: Array
    weights: Array
    groups: NDArray[np.int64]
    order: float
    uses: Sequence[frozenset[str]]

    @property
    def fitted(self) -> list[int]:
        """Rows that have weight."""
        return np.flatnonzero(self.weights > 0).tolist()

    def rows_of(self, owner: str) -> list[int]:
        """Rows with weight that use an entry."""
        return [row for row in self.fitted if owner in self.uses[row]]


@dataclass(frozen=True, slots=True)
class Unknowns:
    """What is fitted, and its prior.

    Attributes:
        parameters: the numbers.
        prior: their places before any data.
        deviation: how far from there they are expected.
    """

    parameters: tuple[Parameter, ...]
    prior: Array
    deviation: Array


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit, with what is needed to refit without some rows.

    Attributes:
        places: of the unknowns.
        residuals: logarithms of predicted over measured seconds.
        jacobian: derivative of each residual (rows) by each unknown (columns); empty until computed.
        objective: what was minimised.
    """

    places: Array
    residuals: Array
    jacobian: Array
    objective: float


def unknowns_of(calibration: Calibration, parameters: Sequence[Parameter]) -> Unknowns:
    """Unknowns whose prior is a calibration's own values."""
    deviations = np.array([parameter.scale.deviation for parameter in parameters])
    return Unknowns(tuple(parameters), np.array(places_of(calibration, parameters)), deviations)


def centred(problem: Problem, values: Array) -> Array:
    """Values less the weighted mean of their group; 0 for rows on their own. Works on rows of matrices too."""
    made: Array = np.zeros_like(values)
    for group in np.unique(problem.groups[problem.groups >= 0]):
        rows = np.flatnonzero(problem.groups == group)
        made[rows] = values[rows] - values[rows].mean(axis=0)
    return made


def stacked(problem: Problem, values: Array) -> Array:
    """Residuals (or their derivatives) and below them the same within groups."""
    return np.concatenate([values, centred(problem, values)]) if problem.order > 0 else values


def stacked_weights(problem: Problem, kept: NDArray[np.bool_] | None = None) -> Array:
    """Weights of ``stacked``; 0 for rows not kept."""
    weights = problem.weights if kept is None else np.where(kept, problem.weights, 0.0)
    if problem.order <= 0:
        return weights
    return np.concatenate([weights, np.where(problem.groups >= 0, weights * problem.order, 0.0)])


def objective(unknowns: Unknowns, places: Array, residuals: Array, weights: Array) -> float:
    """The formula above, of stacked residuals."""
    errors = np.sqrt(residuals**2 + SMOOTH**2) - SMOOTH
    surprise = ((places - unknowns.prior) / unknowns.deviation) ** 2
    return float(weights @ errors + surprise.sum() / 2)


def newton_step(unknowns: Unknowns, places: Array, residuals: Array, jacobian: Array, weights: Array) -> Array:
    """One reweighted Gauss-Newton step."""
    weighed = weights / np.sqrt(residuals**2 + SMOOTH**2)
    precision = 1 / unknowns.deviation**2
    curvature = (jacobian * weighed[:, None]).T @ jacobian + np.diag(precision)
    slope = jacobian.T @ (weighed * residuals) + precision * (places - unknowns.prior)
    step: Array = np.asarray(-np.linalg.solve(curvature, slope), dtype=np.float64)
    return step


def solved(unknowns: Unknowns, places: Array, residuals: Array, jacobian: Array, weights: Array) -> Array:
    """Places where the problem linearised at ``places`` is solved, each unknown moved by ``LARGEST_STEP`` at most."""
    there = places
    for _ in range(INNER):
        step = newton_step(unknowns, there, residuals + jacobian @ (there - places), jacobian, weights)
        there = np.clip(there + step / 2, places - LARGEST_STEP, places + LARGEST_STEP)
    return there


def residuals_of(problem: Problem, predicted: Array) -> Array:
    """Logarithms of predicted over measured; rows that cannot be predicted have none and count nothing."""
    known: Array = np.nan_to_num(predicted - problem.measured, nan=0.0)
    return known


def jacobian_of(
    problem: Problem,
    unknowns: Unknowns,
    calibration: Calibration,
    places: Array,
    residuals: Array,
    predict: PredictMany,
) -> Array:
    """Forward differences; a step towards the values allowed where a value is at its bound."""
    steps = np.array([_nudge(parameter, place) for parameter, place in zip(unknowns.parameters, places, strict=True)])
    touched = [problem.rows_of(parameter.owner) for parameter in unknowns.parameters]
    tasks: list[Task] = []
    for column, rows in enumerate(touched):
        moved = places.copy()
        moved[column] += steps[column]
        tasks.append((with_places(calibration, unknowns.parameters, moved.tolist()), rows))
    jacobian: Array = np.zeros((len(residuals), len(steps)))
    for column, (rows, found) in enumerate(zip(touched, predict(tasks), strict=True)):
        change = (found - problem.measured[rows] - residuals[rows]) / steps[column]
        jacobian[rows, column] = np.nan_to_num(change, nan=0.0)
    return jacobian


def _nudge(parameter: Parameter, place: float) -> float:
    inside = to_scale(parameter, from_scale(parameter, place + NUDGE))
    return NUDGE if inside > place + NUDGE / 2 else -NUDGE


def fit(
    problem: Problem,
    unknowns: Unknowns,
    calibration: Calibration,
    predict: PredictMany,
    *,
    steps: int = 8,
    report: Callable[[int, Fit], None] | None = None,
) -> Fit:
    """The unknowns that fit best, from where a calibration has them.

    Args:
        problem: rows.
        unknowns: what is fitted.
        calibration: start; entries and fields that are not unknown stay as they are.
        predict: the cost model.
        steps: at most so many Gauss-Newton steps.
        report: called after each with its number and the fit so far.
    """
    weights, rows = stacked_weights(problem), problem.fitted
    places = np.array(places_of(calibration, unknowns.parameters))

    def at(where: Array) -> tuple[Array, float]:
        found = np.full(len(problem.measured), np.nan)
        found[rows] = predict([(with_places(calibration, unknowns.parameters, where.tolist()), rows)])[0]
        residuals = residuals_of(problem, found)
        return residuals, objective(unknowns, where, stacked(problem, residuals), weights)

    residuals, least = at(places)
    jacobian = np.zeros((len(residuals), 0))
    for number in range(1, steps + 1):
        jacobian = jacobian_of(problem, unknowns, calibration, places, residuals, predict)
        aim = solved(unknowns, places, stacked(problem, residuals), stacked(problem, jacobian), weights)
        step, before = aim - places, least
        for halving in range(HALVINGS):
            tried = places + step / 2**halving
            there, height = at(tried)
            if height < least:
                places, residuals, least = tried, there, height
                break
        if report is not None:
            report(number, Fit(places, residuals, jacobian, least))
        if before - least < ENOUGH * before:
            break
    return Fit(places, residuals, jacobian, least)


def refit_without(problem: Problem, unknowns: Unknowns, found: Fit, kept: NDArray[np.bool_]) -> Array:
    """Places of the unknowns refitted to the rows kept, on the problem linearised at the whole fit."""
    jacobian, weights = stacked(problem, found.jacobian), stacked_weights(problem, kept)
    return solved(unknowns, found.places, stacked(problem, found.residuals), jacobian, weights)


def family_weights(families: Sequence[str], groups: NDArray[np.int64], grades: Sequence[float], total: float) -> Array:
    """Weights that give each family of rows about the same total.

    Within a family half is shared by rows alike and half by groups alike, so that a family's many rows of one group do
    not govern it. Families of few rows count less: n rows count n / (n + 2).

    Args:
        families: of each row.
        groups: as in ``Problem``.
        grades: factor on each row for the quality of its measurement.
        total: weight of a family of many rows.
    """
    names = np.array(families)
    weights: Array = np.zeros(len(names))
    for name in np.unique(names):
        rows = np.flatnonzero(names == name)
        own = np.where(groups[rows] >= 0, groups[rows], -2 - np.arange(len(rows)))
        _, inverse, counts = np.unique(own, return_inverse=True, return_counts=True)
        share = 0.5 / len(rows) + 0.5 / (len(counts) * counts[inverse])
        weights[rows] = total * len(rows) / (len(rows) + 2) * share
    graded: Array = weights * np.array(grades)
    return graded


def with_prior(unknowns: Unknowns, calibration: Calibration) -> Unknowns:
    """The same unknowns with another calibration's values as prior."""
    return replace(unknowns, prior=np.array(places_of(calibration, unknowns.parameters)))
