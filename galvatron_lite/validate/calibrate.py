"""Fits calibrated constants to measured runs of a user's cluster and software.

The constants of the software, links and devices that the runs use are fitted around their values before
(``calibration.parameters``), so that a few runs change little. Leave-one-setting-out cross-validation chooses between
three models: all of these constants, one common factor on the times of the software's kernels, and the constants
unchanged. The model with the smallest error on settings it was not fitted to is the result.

Leaving out uses the linearisation at the fitted constants: with A the inverse covariance there and J, r the slopes and
residuals of what is left out, the constants move by ``-(A - J'J / noise²)^-1 J'r / noise²`` (Cook 1977, "Detection of
Influential Observation in Linear Regression"). The planner then predicts what was left out with those constants.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import numpy as np

from galvatron_lite.calibration.parameters import (
    Parameter,
    Posterior,
    Vector,
    fit,
    parameters_of,
    scaled_values,
    value_of,
    with_scaled_values,
)
from galvatron_lite.calibration.schema import Calibration, ConstantsOrigin
from galvatron_lite.calibration.store import entry_for
from galvatron_lite.cluster.links import link_matching
from galvatron_lite.errors import InputError
from galvatron_lite.profiler.store import read_profile
from galvatron_lite.runs.schema import PROFILE, is_run, measured, read_run
from galvatron_lite.stacks.catalog import GALVATRON, STACKS, match_stack
from galvatron_lite.validate.checks import device_of
from galvatron_lite.validate.predict import Predictor, step_seconds
from galvatron_lite.validate.results import Predicted, SkipError
from galvatron_lite.validate.rows import PublishedRun, read_runs

LEAST = 3  # fewest settings for a fit
_NOISE = 0.08
"""Standard deviation of the logarithm of measured over predicted time under the right constants: errors of formulas."""

_KERNELS = ("matmul", "attention", "memory", "optimizer")
"""Fields of a software that the common factor multiplies."""
_COMMON_WIDTH = 0.2  # standard deviation of the factor's prior, as a logarithm
_FAR = 2.5
"""Standard deviations beyond which a common factor is rejected: then a field of the rows is wrong or the model is
misread, rather than all kernels of the software so much slower."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured step time of one run."""

    name: str
    model: str  # name of the trained model
    setting: object  # equal for runs that repeat one another
    seconds: float  # measured seconds of a step
    owners: frozenset[str]  # entries of the calibration that its price depends on
    predict: Callable[[Predictor], float]  # returns the predicted seconds of a step


@dataclass(frozen=True, slots=True)
class LearntConstant:
    """One fitted constant."""

    name: str  # ``stacks/nemo/matmul``
    before: float
    value: float
    low: float  # low, high: one standard deviation either side
    high: float
    told: float  # share of the prior's variance that the runs removed


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Fitted constants and their errors, means of |predicted / measured - 1|."""

    calibration: Calibration
    kind: str  # ``constants``, ``common factor``, or ``unchanged`` if neither improves predictions
    constants: tuple[LearntConstant, ...]  # those that the runs constrain
    runs: int
    settings: int
    models: frozenset[str]  # of a single one, errors of its formulas and costs of its software cannot be separated
    before: float  # error of the constants before
    after: float  # error of the returned constants, on the same runs
    left_out: dict[str, float]  # error of each model on settings it was not fitted to
    skipped: dict[str, int]  # rows that cannot be priced, by reason


def read_observations(paths: Iterable[Path], calibration: Calibration) -> tuple[list[MeasuredStep], dict[str, int]]:
    """Return the runs of some files of rows and folders of logs, and the numbers of skipped rows by reason.

    Raises:
        FileFormatError: a file that cannot be read.
    """
    predictor, observations, skipped = Predictor(calibration), list[MeasuredStep](), Counter[str]()
    for path in paths:
        if path.is_dir() and is_run(path):
            observations.append(_logged(path))
            continue
        for run in read_runs(path):
            if (observation := observation_of(run, predictor)) is not None:
                observations.append(observation)
            else:
                outcome = predictor.predict(run)
                skipped[outcome.reason if isinstance(outcome, SkipError) else "no step time"] += 1
    return observations, dict(skipped)


_RESULT_FIELDS = {"run_id", "source", "line", "notes", "derived", "quality", "iter_time_s", "tokens_per_s_per_gpu",
                  "samples_per_s", "peak_mem_gb", "problem"}  # fmt: skip
"""Fields in which runs of one setting may differ."""


def observation_of(run: PublishedRun, predictor: Predictor) -> MeasuredStep | None:
    """Return a row as a measured step; None if its time is not scored."""
    judged = predictor.judge(run)
    if judged.time is None or judged.measured is None:
        return None
    device, seconds, calibration = device_of(run.gpu), judged.measured.step_seconds or 0.0, predictor.calibration
    assert device is not None
    named = [("stacks", match_stack(run.framework).name), ("devices", device.name)]
    if (run.n_gpus or 1) > 1:
        named.append(("links", link_matching(run.intra_link, device.name, between=False)))
    if (run.n_gpus or 1) > (run.gpus_per_node or 8):
        named.append(("links", link_matching(run.inter_net, device.name, between=True)))

    def predict(predictor: Predictor) -> float:
        outcome = predictor.predict(run)
        return outcome.step_seconds if isinstance(outcome, Predicted) else seconds

    setting = tuple(getattr(run, item.name) for item in fields(run) if item.name not in _RESULT_FIELDS)
    owners = frozenset(f"{kind}/{entry_for(calibration, kind, name)}" for kind, name in named)
    return MeasuredStep(run.run_id, run.model or "", setting, seconds, owners, predict)


def _logged(folder: Path) -> MeasuredStep:
    """Return a run of ours by its log; its layers are estimated from data sheets, whatever its profile measured."""
    run = read_run(folder)
    seconds = measured(run.plan_steps[1:] or run.plan_steps, run.plan).seconds
    if not (folder / PROFILE).is_file() or not seconds:
        raise InputError("runs", str(folder), f"It needs {PROFILE} and steps that were trained.")
    profile, plan = read_profile(folder / PROFILE), run.plan
    graph, cluster, stack = profile.graph, profile.cluster, STACKS.get(profile.stack, GALVATRON)

    def predict(predictor: Predictor) -> float:
        return step_seconds(predictor.pricer(graph, cluster, stack, graph.precision, plan), plan)

    owners = frozenset((f"stacks/{stack.name}", f"devices/{cluster.device.name.split('-')[0]}"))
    setting = str((plan.model, plan.devices, plan.global_batch, plan.microbatches, plan.stages))
    return MeasuredStep(str(folder), plan.model, setting, seconds, owners, predict)


class _Prices:
    """Predicts the seconds of runs from scaled parameters; cached by the parameters that a run depends on."""

    def __init__(self, base: Calibration, parameters: Sequence[Parameter], runs: Sequence[MeasuredStep]) -> None:
        self.base, self.parameters, self.runs = base, parameters, runs
        self._relevant = [
            [index for index, parameter in enumerate(parameters) if parameter.owner in run.owners] for run in runs
        ]
        self._cache: dict[tuple[int, bytes], float] = {}
        self._graphs = Predictor(base).graphs

    def logs(self, scaled: Vector, rows: Iterable[int] | None = None) -> Vector:
        """Return the logarithms of predicted seconds of all runs, or of some rows."""
        predictor = Predictor(with_scaled_values(self.base, self.parameters, scaled.tolist()), self._graphs)
        logs = []
        for row in range(len(self.runs)) if rows is None else rows:
            key = (row, scaled[self._relevant[row]].tobytes())
            if key not in self._cache:
                self._cache[key] = float(np.log(self.runs[row].predict(predictor)))
            logs.append(self._cache[key])
        return np.array(logs)


@dataclass(frozen=True, slots=True, eq=False)
class _FittedModel:
    basis: Vector  # (parameters, coefficients): parameters are the start plus basis @ coefficients
    widths: Vector  # standard deviations of the coefficients' priors
    posterior: Posterior  # of the coefficients

    @property
    def change(self) -> Vector:
        """What the fit adds to the parameters."""
        change: Vector = self.basis @ self.posterior.values
        return change


def calibrate(
    runs: Sequence[MeasuredStep],
    base: Calibration,
    *,
    skipped: dict[str, int] | None = None,
    source: str = "runs",
    progress: Callable[[int, int, str], None] | None = None,
) -> CalibrationResult:
    """Fit constants to the runs of a cluster and software.

    Args:
        runs: runs of at least ``LEAST`` settings.
        base: the constants before.
        skipped: numbers of skipped rows by reason, passed on to the result.
        source: where the runs come from, for ``ConstantsOrigin``.
        progress: called with (done, total, label).

    Raises:
        InputError: fewer settings than ``LEAST``.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for row, run in enumerate(runs):
        groups[run.setting].append(row)
    if len(groups) < LEAST:
        left = "".join(f" Rows not used: {count} ({reason})." for reason, count in (skipped or {}).items())
        remedy = f"Give runs of {LEAST} settings at least: each is left out in turn.{left}"
        raise InputError("settings of runs", len(groups), remedy)
    parameters = parameters_of(base, {owner for run in runs for owner in run.owners})
    prices, start = _Prices(base, parameters, runs), np.array(scaled_values(base, parameters))
    seconds = np.array([run.seconds for run in runs])
    errors = {"unchanged": _mean_error(prices.logs(start), seconds)}
    fitted: dict[str, _FittedModel] = {}
    for number, (kind, basis, widths) in enumerate(_models(parameters, base)):
        if progress is not None:
            progress(number, 3, kind)

        def logs(values: Vector, basis: Vector = basis) -> Vector:
            return prices.logs(start + basis @ values)

        posterior = fit(logs, seconds.tolist(), np.zeros(len(widths)), widths, _NOISE, rounds=2)
        if kind == "common factor" and abs(posterior.values[0]) > _FAR * widths[0]:
            continue
        fitted[kind] = _FittedModel(basis, widths, posterior)
        errors[kind] = _left_out_error(fitted[kind], prices, start, seconds, list(groups.values()))
    kind = min(errors, key=lambda name: (errors[name], name != "unchanged"))
    calibrated, after, constants = base, errors["unchanged"], tuple[LearntConstant, ...]()
    if (model := fitted.get(kind)) is not None:
        scaled = start + model.change
        after = _mean_error(prices.logs(scaled), seconds)
        constants = tuple(_constants(model, parameters, start, base))
        calibrated = with_scaled_values(base, parameters, scaled.tolist())
        calibrated = _with_origins(calibrated, {parameter.owner for parameter in parameters}, source, runs, after)
    models = frozenset(run.model for run in runs)
    return CalibrationResult(
        calibrated, kind, constants, len(runs), len(groups), models, errors["unchanged"], after, errors, skipped or {}
    )


def _models(parameters: Sequence[Parameter], base: Calibration) -> Iterator[tuple[str, Vector, Vector]]:
    """Yield name, basis and prior widths of the models: one factor on all kernels of the software, or all constants."""
    common = [[1.0 if parameter.kind == "stacks" and parameter.field in _KERNELS else 0.0] for parameter in parameters]
    yield "common factor", np.array(common), np.array([_COMMON_WIDTH])
    widths = [base.origins[p.owner].deviations.get(p.field, p.scale.deviation) if p.owner in base.origins
              else p.scale.deviation for p in parameters]  # fmt: skip
    yield "constants", np.eye(len(parameters)), np.array(widths)


def _left_out_error(
    model: _FittedModel, prices: _Prices, start: Vector, seconds: Vector, groups: Sequence[Sequence[int]]
) -> float:
    """Return the mean error over settings, each predicted by a fit without it."""
    slopes, values = model.posterior.slopes, model.posterior.values
    residuals = np.log(seconds) - prices.logs(start + model.change)
    precision = slopes.T @ slopes / _NOISE**2 + np.diag(model.widths**-2.0)
    errors: list[float] = []
    for rows in groups:
        part = slopes[rows]
        moved = np.linalg.solve(precision - part.T @ part / _NOISE**2, part.T @ residuals[rows] / _NOISE**2)
        logs = prices.logs(start + model.basis @ (values - moved), rows)
        errors += np.abs(np.exp(logs) / seconds[rows] - 1).tolist()
    return fmean(errors)


def _mean_error(logs: Vector, seconds: Vector) -> float:
    return float(np.abs(np.exp(logs) / seconds - 1).mean())


_LEAST_GAIN = 0.05  # share of its prior's variance that runs must remove for a constant to be reported


def _constants(
    model: _FittedModel, parameters: Sequence[Parameter], start: Vector, base: Calibration
) -> Iterator[LearntConstant]:
    """Yield the fitted constants that runs constrain, the most certain first."""
    scaled = start + model.change
    spread = np.sqrt((model.basis**2) @ (model.posterior.deviations**2))
    prior = np.sqrt((model.basis**2) @ (model.widths**2))
    gain = 1 - (spread / np.where(prior > 0, prior, 1.0)) ** 2
    for index in np.argsort(-gain, kind="stable"):
        if prior[index] > 0 and gain[index] > _LEAST_GAIN:
            parameter, center, deviation = parameters[index], scaled[index], spread[index]
            value, low, high = (
                value_of(with_scaled_values(base, [parameter], [number]), parameter)
                for number in (center, center - deviation, center + deviation)
            )
            yield LearntConstant(parameter.name, value_of(base, parameter), value, low, high, float(gain[index]))


def _with_origins(
    calibration: Calibration, owners: set[str], source: str, runs: Sequence[MeasuredStep], error: float
) -> Calibration:
    """Return the calibration with new origins of its entries ``owners``."""
    date, origins = datetime.now(UTC).date().isoformat(), dict(calibration.origins)
    for owner in owners:
        rows, before = sum(owner in run.owners for run in runs), origins.get(owner, ConstantsOrigin(""))
        text = f"{before.source}; corrected by {source}" if before.source else f"Corrected by {source}"
        origins[owner] = replace(before, source=text, date=date, rows=rows, residual=round(error, 4))
    return replace(calibration, origins=origins, provenance=(*calibration.provenance, f"{date}: corrected by {source}"))
