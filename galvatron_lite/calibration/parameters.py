"""Calibrated constants as the unknowns of a fit: one number each, on a scale without bounds.

A share of a data sheet lies between 0 and 1 and is fitted as its logit; times and factors are above 0 and are fitted
as their logarithm. Each unknown has a prior: a normal distribution on that scale around the value before the fit, as
wide as figures of its kind are uncertain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log
from typing import Any

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.errors import InputError

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


def parameter_named(name: str) -> Parameter:
    """The parameter of a name such as ``devices/A100/matmul/bf16``."""
    kind, entry, field, *key = name.split("/")
    if kind not in SCALES or field not in SCALES[kind]:
        raise InputError("parameter", name, "Give KIND/ENTRY/FIELD with a field that is fitted.")
    return Parameter(kind, entry, field, *key)


def parameters_of(calibration: Calibration, owners: Collection[str]) -> tuple[Parameter, ...]:
    """Every fitted number of the entries named (``devices/A100``), in the order of the calibration."""
    return tuple(
        parameter
        for kind in SCALES
        for entry, constants in getattr(calibration, kind).items()
        if f"{kind}/{entry}" in owners
        for parameter in _numbers(kind, entry, constants)
    )


def _numbers(kind: str, entry: str, constants: Any) -> Iterator[Parameter]:
    for field in fields(constants):
        if field.name not in SCALES[kind]:
            continue
        value = getattr(constants, field.name)
        if isinstance(value, dict):
            yield from (Parameter(kind, entry, field.name, key) for key in value)
        else:
            yield Parameter(kind, entry, field.name)


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
    changed: dict[str, dict[str, dict[str, Any]]] = {}
    for parameter, place in zip(parameters, places, strict=True):
        value = from_scale(parameter, place)
        entry = changed.setdefault(parameter.kind, {}).setdefault(parameter.entry, {})
        if parameter.key:
            entry.setdefault(parameter.field, {})[parameter.key] = value
        else:
            entry[parameter.field] = value
    kinds: dict[str, Any] = {kind: _replaced(getattr(calibration, kind), entries) for kind, entries in changed.items()}
    return replace(calibration, **kinds)


def _replaced(entries: Mapping[str, Any], changed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    whole = dict(entries)
    for name, values in changed.items():
        old = entries[name]
        whole[name] = replace(
            old,
            **{
                field: getattr(old, field) | value if isinstance(value, dict) else value
                for field, value in values.items()
            },
        )
    return whole
