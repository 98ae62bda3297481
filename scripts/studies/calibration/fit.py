"""Fits calibrated constants to measured step times: robust least squares with priors.

With e_i = predicted_i / measured_i - 1 (what is scored), weights w_i, and unknowns x on a scale without bounds
(``parameters``) it minimises

    sum_i w_i |e_i|  +  q sum_i w_i |d_i|  +  1/2 sum_k ((x_k - prior_k) / deviation_k)^2,

d_i being log(predicted_i / measured_i) less its mean over the plans that row i is chosen among (their order), and |.|
smoothed to sqrt(.^2 + s^2) - s (s = ``SMOOTH``): the score is a mean of absolute errors, which outliers must not
govern. The steps are Gauss-Newton on iteratively reweighted squares (P. Huber, "Robust Statistics", 1981, section 7.8),
halved while the objective does not fall (J. Nocedal, S. Wright, "Numerical Optimization", 2006, section 3.1).
Derivatives are forward differences once, then Broyden's update by the predictions made since (the same, section 11.1):
a prediction of all rows costs a thirtieth of their derivatives.

A fit without some rows starts from the priors, and derivatives say nothing of any measurement: what it finds does not
depend on the rows left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.calibration.parameters import Parameter, from_scale, scaled_values, to_scale, with_scaled_values
from galvatron_lite.calibration.schema import Calibration

Array = NDArray[np.float64]
Task = tuple[Calibration, Sequence[int]]  # A calibration, and the rows to predict with it
PredictMany = Callable[[Sequence[Task]], Sequence[Array]]
"""Logarithms of predicted seconds of each task's rows; not a number where a row cannot be predicted."""

SMOOTH = 0.02
"""Error below which it counts by its square: published figures repeat within some two per cent."""

NUDGE = 0.02  # step of the forward differences on the scale of the fit

LARGEST_STEP = 1.5  # most that an unknown may move in one step, on the scale of the fit

HALVINGS = 3  # how often a step that does not help is halved

ENOUGH = 1e-3  # relative fall of the objective below which the fit ends

INNER = 25
"""Reweighted steps on a linearised problem; they go part of their way, for absolute errors have kinks."""

LIMITS = (-3.0, 1.5)
"""Logarithms of predicted over measured are cut here, so that e stays finite on the way."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows to fit to."""

    measured: Array  # logarithm of each row's measured seconds
    weights: Array  # w of the formula above; 0: the row is not fitted to
    groups: NDArray[np.int64]  # number of the group of rows that a choice is made among, -1 for a row on its own
    order: float  # q of the formula above
    uses: Sequence[frozenset[str]]  # entries (``devices/A100``) that each row's prediction depends on

    @property
    def fitted(self) -> list[int]:
        """Rows that have weight."""
        return np.flatnonzero(self.weights > 0).tolist()

    def rows_of(self, owner: str) -> list[int]:
        """Rows with weight that use an entry."""
        return [row for row in self.fitted if owner in self.uses[row]]

    def without(self, left_out: NDArray[np.bool_]) -> Problem:
        """The same rows, some of which have no weight any more."""
        return replace(self, weights=np.where(left_out, 0.0, self.weights))


def as_it_is(calibration: Calibration) -> Calibration:
    """Nothing is arranged."""
    return calibration


@dataclass(frozen=True, slots=True)
class Unknowns:
    """What is fitted, and its prior."""

    parameters: tuple[Parameter, ...]  # the numbers
    prior: Array  # their places before any data
    deviation: Array  # how far from there they are expected
    base: Calibration  # the other numbers
    # what is predicted with, of the calibration that has the unknowns' values
    arranged: Callable[[Calibration], Calibration] = as_it_is

    def at(self, places: Array) -> Calibration:
        """The calibration with the unknowns at these places."""
        return self.arranged(with_scaled_values(self.base, self.parameters, places.tolist()))


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit."""

    places: Array  # of the unknowns
    residuals: Array  # logarithms of predicted over measured seconds; 0 for rows without weight
    jacobian: Array  # derivative of each residual (rows) by each unknown (columns)
    objective: float  # what was minimised


def unknowns_of(
    calibration: Calibration, parameters: Sequence[Parameter], arranged: Callable[[Calibration], Calibration] = as_it_is
) -> Unknowns:
    """Unknowns whose prior is a calibration's own values."""
    deviations = np.array([deviation_of(calibration, parameter) for parameter in parameters])
    prior = np.array(scaled_values(calibration, parameters))
    return Unknowns(tuple(parameters), prior, deviations, calibration, arranged)


def deviation_of(calibration: Calibration, parameter: Parameter) -> float:
    """How far a number is expected from its prior: as its entry says, else as numbers of its kind."""
    origin = calibration.origins.get(parameter.owner)
    own = origin.deviations.get(parameter.field) if origin is not None else None
    return parameter.scale.deviation if own is None else own


def errors_of(residuals: Array) -> Array:
    """Predicted over measured less 1, of logarithms."""
    return np.asarray(np.expm1(np.clip(residuals, *LIMITS)))


def centred(problem: Problem, values: Array) -> Array:
    """Values less the mean over the fitted rows of their group; 0 for other rows. Works on rows of matrices too."""
    made: Array = np.zeros_like(values)
    for group in np.unique(problem.groups[problem.groups >= 0]):
        rows = np.flatnonzero((problem.groups == group) & (problem.weights > 0))
        if len(rows) > 1:
            made[rows] = values[rows] - values[rows].mean(axis=0)
    return made


def objective(problem: Problem, unknowns: Unknowns, places: Array, residuals: Array) -> float:
    """The formula above."""
    surprise = ((places - unknowns.prior) / unknowns.deviation) ** 2
    value = problem.weights @ _smooth(errors_of(residuals)) + surprise.sum() / 2
    if problem.order > 0:
        value += problem.order * (problem.weights @ _smooth(centred(problem, residuals)))
    return float(value)


def _smooth(values: Array) -> Array:
    return np.asarray(np.sqrt(values**2 + SMOOTH**2) - SMOOTH)


def newton_step(problem: Problem, unknowns: Unknowns, places: Array, residuals: Array, jacobian: Array) -> Array:
    """One reweighted Gauss-Newton step."""
    precision = 1 / unknowns.deviation**2
    curvature, slope = np.diag(precision), precision * (places - unknowns.prior)
    errors = errors_of(residuals)
    terms = [(problem.weights, errors, jacobian * (errors + 1)[:, None])]
    if problem.order > 0:
        terms.append((problem.order * problem.weights, centred(problem, residuals), centred(problem, jacobian)))
    for weights, values, derivatives in terms:
        weighed = weights / np.sqrt(values**2 + SMOOTH**2)
        curvature = curvature + (derivatives * weighed[:, None]).T @ derivatives
        slope = slope + derivatives.T @ (weighed * values)
    return np.asarray(-np.linalg.solve(curvature, slope), dtype=np.float64)


def solved(problem: Problem, unknowns: Unknowns, found: Fit, reach: float = LARGEST_STEP) -> Array:
    """Where the problem linearised at a fit has its least objective, no unknown moved by more than ``reach``."""
    there, least, best = found.places, np.inf, found.places
    for number in range(INNER):
        residuals = found.residuals + found.jacobian @ (there - found.places)
        height = objective(problem, unknowns, there, residuals)
        if height < least:
            least, best = height, there
        step = newton_step(problem, unknowns, there, residuals, found.jacobian)
        part = 0.7 if number < INNER // 3 else 0.4
        there = np.clip(there + part * step, found.places - reach, found.places + reach)
    return best


def residuals_at(problem: Problem, unknowns: Unknowns, places: Array, predict: PredictMany) -> Array:
    """Logarithms of predicted over measured; rows that cannot be predicted have none and count nothing."""
    rows, made = problem.fitted, np.zeros(len(problem.measured))
    found = predict([(unknowns.at(places), rows)])[0]
    made[rows] = np.nan_to_num(found - problem.measured[rows], nan=0.0)
    return made


def jacobian_of(problem: Problem, unknowns: Unknowns, places: Array, predict: PredictMany) -> Array:
    """Forward differences of the predictions of rows with weight; no measurement enters.

    A step goes towards the values allowed where a value is at its bound.
    """
    rows = problem.fitted
    here = np.zeros(len(problem.measured))
    steps = [_nudge(parameter, place) for parameter, place in zip(unknowns.parameters, places, strict=True)]
    touched = [problem.rows_of(parameter.owner) for parameter in unknowns.parameters]
    tasks: list[Task] = [(unknowns.at(places), rows)]
    for column, step in enumerate(steps):
        moved = places.copy()
        moved[column] += step
        tasks.append((unknowns.at(moved), touched[column]))
    answers = predict(tasks)
    here[rows] = answers[0]
    jacobian: Array = np.zeros((len(here), len(steps)))
    for column, found in enumerate(answers[1:]):
        jacobian[touched[column], column] = np.nan_to_num((found - here[touched[column]]) / steps[column], nan=0.0)
    return jacobian


def _nudge(parameter: Parameter, place: float) -> float:
    inside = to_scale(parameter, from_scale(parameter, place + NUDGE))
    return NUDGE if inside > place + NUDGE / 2 else -NUDGE


def updated(unknowns: Unknowns, jacobian: Array, moved: Array, change: Array) -> Array:
    """Broyden's update: the least change of the derivatives that explains how the residuals changed.

    Distances are in deviations of the priors.
    """
    scaled = moved / unknowns.deviation**2
    length = float(moved @ scaled)
    if length == 0:
        return jacobian
    return np.asarray(jacobian + np.outer(change - jacobian @ moved, scaled / length))


def fit(
    problem: Problem,
    unknowns: Unknowns,
    predict: PredictMany,
    *,
    start: Array | None = None,
    jacobian: Array | None = None,
    steps: int = 8,
    report: Callable[[int, Fit], None] | None = None,
) -> Fit:
    """The unknowns that fit best."""
    places = unknowns.prior.copy() if start is None else start
    if jacobian is None:
        jacobian = jacobian_of(problem, unknowns, places, predict)
    residuals = residuals_at(problem, unknowns, places, predict)
    found = Fit(places, residuals, jacobian, objective(problem, unknowns, places, residuals))
    for number in range(1, steps + 1):
        before = found.objective
        found = _step(problem, unknowns, found, predict)
        if report is not None:
            report(number, found)
        if before - found.objective < ENOUGH * before:
            break
    return found


def _step(problem: Problem, unknowns: Unknowns, found: Fit, predict: PredictMany) -> Fit:
    """One step, halved where it does not help; the derivatives learn from each try."""
    whole, jacobian = solved(problem, unknowns, found) - found.places, found.jacobian
    for halving in range(HALVINGS):
        places = found.places + whole / 2**halving
        residuals = residuals_at(problem, unknowns, places, predict)
        jacobian = updated(unknowns, jacobian, places - found.places, residuals - found.residuals)
        height = objective(problem, unknowns, places, residuals)
        if height < found.objective:
            return Fit(places, residuals, jacobian, height)
    return replace(found, jacobian=jacobian)


def family_weights(families: Sequence[str], groups: NDArray[np.int64], grades: Sequence[float], total: float) -> Array:
    """Weights that give each family of rows about the same total.

    Within a family half is shared by rows alike and half by groups alike, so that a family's many rows of one group do
    not govern it. Families of few rows count less: n rows count n / (n + 2).
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
