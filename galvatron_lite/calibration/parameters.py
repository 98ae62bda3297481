"""Calibrated constants as the unknowns of a fit: one number each, on a scale without bounds.

A share of a data sheet lies between 0 and 1 and is fitted as its logit; times and factors are above 0 and are fitted
as their logarithm. Each unknown has a prior: a normal distribution on that scale around the value before the fit, as
wide as figures of its kind are uncertain.

Constants learnt from measurements around a prior, with how sure they are.

Unknowns x have independent normal priors N(mean, width²), logarithms of measurements independent errors N(0, noise²).
The most likely x minimises

    sum((log predicted(x) - log measured)² / noise²) + sum((x - mean)² / width²)

by Gauss-Newton steps with halving; its covariance is the inverse of J'J / noise² + diag(1 / width²) there, J the
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
"""Stands for 0 on a logarithmic scale: a nanosecond, a billionth, a byte that counts for nothing."""


@dataclass(frozen=True, slots=True)
class FitScale:
    """How one field of constants is fitted."""

    share: bool  # whether it lies between 0 and 1 (logit), else above 0 (logarithm)
    deviation: float  # standard deviation of the prior on that scale
    low: float  # low, high: values the fit never leaves, in the field's own unit
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
        """The entry with its kind: ``devices/A100``."""
        return f"{self.kind}/{self.entry}"

    @property
    def name(self) -> str:
        """For people and files: ``devices/A100/matmul/bf16``."""
        return "/".join(part for part in (self.kind, self.entry, self.field, self.key) if part)

    @property
    def scale(self) -> FitScale:
        """How it is fitted."""
        return SCALES[self.kind][self.field]


def parameters_of(calibration: Calibration, owners: Collection[str]) -> tuple[Parameter, ...]:
    """Every fitted number of the entries named (``devices/A100``), in the order of the calibration."""
    parameters: list[Parameter] = []
    for kind, scales in SCALES.items():
        for entry, constants in getattr(calibration, kind).items():
            for name in (item.name for item in fields(constants) if f"{kind}/{entry}" in owners):
                if name in scales:
                    value = getattr(constants, name)
                    keys = value if isinstance(value, dict) else ("",)
                    parameters += [Parameter(kind, entry, name, key) for key in keys]
    return tuple(parameters)


def value_of(calibration: Calibration, parameter: Parameter) -> float:
    """The number itself, in its own unit."""
    value = getattr(getattr(calibration, parameter.kind)[parameter.entry], parameter.field)
    return float(value[parameter.key] if parameter.key else value)


def to_scale(parameter: Parameter, value: float) -> float:
    """A value on the scale of the fit, after clipping to the values allowed."""
    scale = parameter.scale
    inside = min(max(value, scale.low, SMALLEST), scale.high)
    return log(inside / (1 - inside)) if scale.share else log(inside)


def from_scale(parameter: Parameter, place: float) -> float:
    """The inverse of ``to_scale``, within the values allowed."""
    scale = parameter.scale
    value = 1 / (1 + exp(-place)) if scale.share else exp(min(place, 100.0))
    return min(max(value, scale.low), scale.high)


def places_of(calibration: Calibration, parameters: Iterable[Parameter]) -> list[float]:
    """Where a calibration lies on the scale of the fit."""
    return [to_scale(parameter, value_of(calibration, parameter)) for parameter in parameters]


def with_places(calibration: Calibration, parameters: Sequence[Parameter], places: Sequence[float]) -> Calibration:
    """A calibration with numbers replaced."""
    changed: dict[str, dict[str, Any]] = {}
    for parameter, place in zip(parameters, places, strict=True):
        entries = changed.setdefault(parameter.kind, dict(getattr(calibration, parameter.kind)))
        old, value = entries[parameter.entry], from_scale(parameter, place)
        new = getattr(old, parameter.field) | {parameter.key: value} if parameter.key else value
        entries[parameter.entry] = replace(old, **{parameter.field: new})
    return replace(calibration, **changed)  # type: ignore[arg-type]


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
    best, slopes_here = objective(logs, values), slopes
    for _ in range(rounds):
        slopes_here = slopes if slopes is not None else _slopes(predict, values, logs)
        curvature = slopes_here.T @ slopes_here / noise**2 + np.diag(precision)
        step = np.linalg.solve(curvature, slopes_here.T @ (target - logs) / noise**2 - precision * (values - prior))
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
    assert slopes_here is not None
    spread = np.sqrt(np.diag(np.linalg.inv(slopes_here.T @ slopes_here / noise**2 + np.diag(precision))))
    return Learnt(values, spread, slopes_here)


def _slopes(predict: Callable[[Vector], Vector], values: Vector, logs: Vector) -> NDArray[np.float64]:
    columns = []
    for place in range(len(values)):
        moved = values.copy()
        moved[place] += _STEP
        columns.append((predict(moved) - logs) / _STEP)
    return np.stack(columns, axis=1) if columns else np.zeros((len(logs), 0))
