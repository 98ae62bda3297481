"""Calibrated constants as parameters of a fit, and the fit to measurements around a prior.

Every parameter is fitted on an unbounded scale: the logit of a share of a data sheet (between 0 and 1), the logarithm
of a time or factor (above 0). Its prior is a normal distribution on that scale around the value before the fit, as
wide as figures of its kind are uncertain.

With independent priors N(mean, width²) of the parameters x and independent errors N(0, noise²) of the logarithms of
measurements, the maximum a posteriori estimate minimises

    sum((log predicted(x) - log measured)² / noise²) + sum((x - mean)² / width²)

by Gauss-Newton steps with halving. Its covariance is the inverse of J'J / noise² + diag(1 / width²), with J the
derivatives of the logarithms (Gelman et al., Bayesian Data Analysis, 3rd ed., 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.calibration.schema import Calibration

SMALLEST = 1e-9
"""Stands in for 0 on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class FitScale:
    """How one field of constants is fitted."""

    share: bool  # whether it lies between 0 and 1 (logit) or above 0 (logarithm)
    deviation: float  # standard deviation of the prior on that scale
    low: float  # low, high: bounds of the fit in the field's unit
    high: float


SCALES: Mapping[str, Mapping[str, FitScale]] = {
    "devices": {
        # Logits: 0.3 is 0.77 to 0.87 around 0.82, the spread of published large matmuls on one device type.
        "matmul": FitScale(True, 0.3, 0.3, 0.97),
        "attention": FitScale(True, 0.4, 0.1, 0.95),
        "attention_backward": FitScale(True, 0.4, 0.08, 0.95),
        "memory": FitScale(True, 0.4, 0.5, 0.97),
        # Not a logit: consumer devices boost beyond the clock of their data sheet.
        "convolution": FitScale(False, 0.3, 0.05, 1.5),
    },
    "links": {
        "efficiency": FitScale(True, 0.6, 0.2, 0.97),
        "latency": FitScale(False, 0.4, 1e-6, 2e-4),
        "half_size": FitScale(False, 0.7, 1e3, 1e8),
    },
    "stacks": {
        "kernel_host": FitScale(False, 0.8, 5e-7, 1.5e-4),
        "microbatch_host": FitScale(False, 2.0, 1e-6, 5e-2),
        "step_host": FitScale(False, 2.0, 1e-4, 1.0),
        "matmul": FitScale(False, 0.16, 0.7, 1.6),
        "attention": FitScale(False, 0.3, 0.4, 3.0),
        "ring": FitScale(False, 0.2, 0.9, 2.5),
        "memory": FitScale(False, 0.35, 0.3, 3.0),
        "optimizer": FitScale(False, 0.3, 0.5, 4.0),
        "hidden": FitScale(True, 1.0, 0.01, 0.99),
        "straggling": FitScale(False, 2.0, 1e-5, 0.1),
    },
}
"""Fields that are fitted, by kind of constants."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number of a calibration."""

    kind: str  # ``devices``, ``links`` or ``stacks``
    entry: str  # name of the entry
    field: str  # name of the field
    key: str = ""  # of a field that is a mapping (precision, dimension), else empty

    @property
    def owner(self) -> str:
        """The entry and its kind: ``devices/A100``."""
        return f"{self.kind}/{self.entry}"

    @property
    def name(self) -> str:
        """Display name: ``devices/A100/matmul/bf16``."""
        return "/".join(part for part in (self.kind, self.entry, self.field, self.key) if part)

    @property
    def scale(self) -> FitScale:
        """How it is fitted."""
        return SCALES[self.kind][self.field]


def parameters_of(calibration: Calibration, owners: Collection[str]) -> tuple[Parameter, ...]:
    """Return the fitted parameters of the entries ``owners`` (``devices/A100``), in the order of the calibration."""
    parameters: list[Parameter] = []
    for kind, scales in SCALES.items():
        for entry, constants in getattr(calibration, kind).items():
            for item in fields(constants) if f"{kind}/{entry}" in owners else ():
                if item.name in scales:
                    value = getattr(constants, item.name)
                    keys = value if isinstance(value, dict) else ("",)
                    parameters += [Parameter(kind, entry, item.name, key) for key in keys]
    return tuple(parameters)


def value_of(calibration: Calibration, parameter: Parameter) -> float:
    """Return a parameter's value in its unit."""
    value = getattr(getattr(calibration, parameter.kind)[parameter.entry], parameter.field)
    return float(value[parameter.key] if parameter.key else value)


def to_scale(parameter: Parameter, value: float) -> float:
    """Return a value, clipped to the parameter's bounds, on the scale of the fit."""
    scale = parameter.scale
    inside = min(max(value, scale.low, SMALLEST), scale.high)
    return log(inside / (1 - inside)) if scale.share else log(inside)


def from_scale(parameter: Parameter, scaled: float) -> float:
    """Return the value, within the parameter's bounds, of a number on the scale of the fit."""
    scale = parameter.scale
    value = 1 / (1 + exp(-scaled)) if scale.share else exp(min(scaled, 100.0))
    return min(max(value, scale.low), scale.high)


def scaled_values(calibration: Calibration, parameters: Iterable[Parameter]) -> list[float]:
    """Return the values of parameters on the scale of the fit."""
    return [to_scale(parameter, value_of(calibration, parameter)) for parameter in parameters]


def with_scaled_values(
    calibration: Calibration, parameters: Sequence[Parameter], scaled: Sequence[float]
) -> Calibration:
    """Return the calibration with new values, on the scale of the fit, of some parameters."""
    changed: dict[str, dict[str, Any]] = {}
    for parameter, number in zip(parameters, scaled, strict=True):
        entries = changed.setdefault(parameter.kind, dict(getattr(calibration, parameter.kind)))
        old, value = entries[parameter.entry], from_scale(parameter, number)
        new = getattr(old, parameter.field) | {parameter.key: value} if parameter.key else value
        entries[parameter.entry] = replace(old, **{parameter.field: new})
    return replace(calibration, **changed)  # type: ignore[arg-type]


Vector = NDArray[np.float64]
_STEP = 1e-3  # of the differences that derivatives are computed by; priors are about 0.1 to 2 wide
_HALVINGS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """Parameters after a fit."""

    values: Vector  # the maximum a posteriori estimate
    deviations: Vector  # standard deviations
    slopes: NDArray[np.float64]  # derivatives of the logarithms of predictions, (measurements, parameters)


def fit(
    predict: Callable[[Vector], Vector],
    measured: Sequence[float],
    mean: Sequence[float] | Vector,
    widths: Sequence[float] | Vector,
    noise: float,
    rounds: int = 3,
) -> Posterior:
    """Fit parameters to measurements.

    Args:
        predict: returns the logarithms of predictions for some parameters.
        measured: measurements, above 0.
        mean: means of the priors, where the search begins.
        widths: standard deviations of the priors.
        noise: standard deviation of the logarithms of measurements.
        rounds: most Gauss-Newton steps, at least 1.
    """
    target, prior, precision = np.log(np.asarray(measured)), np.asarray(mean, float), np.asarray(widths, float) ** -2.0

    def objective(logs: Vector, values: Vector) -> float:
        return float(((logs - target) ** 2).sum() / noise**2 + (precision * (values - prior) ** 2).sum())

    values, logs = prior.copy(), predict(prior)
    best = objective(logs, values)
    for _ in range(rounds):
        jacobian = _jacobian(predict, values, logs)
        curvature = jacobian.T @ jacobian / noise**2 + np.diag(precision)
        step = np.linalg.solve(curvature, jacobian.T @ (target - logs) / noise**2 - precision * (values - prior))
        for halving in range(_HALVINGS):
            candidate = values + step / 2**halving
            candidate_logs = predict(candidate)
            if (cost := objective(candidate_logs, candidate)) < best:
                break
        else:
            break
        gain, values, logs, best = best - cost, candidate, candidate_logs, cost
        if gain < 1e-3 * best:
            break
    return Posterior(values, np.sqrt(np.diag(np.linalg.inv(curvature))), jacobian)


def _jacobian(predict: Callable[[Vector], Vector], values: Vector, logs: Vector) -> NDArray[np.float64]:
    columns = []
    for index in range(len(values)):
        moved = values.copy()
        moved[index] += _STEP
        columns.append((predict(moved) - logs) / _STEP)
    return np.stack(columns, axis=1) if columns else np.zeros((len(logs), 0))
