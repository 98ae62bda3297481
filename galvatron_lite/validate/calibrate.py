"""Constants corrected for one's cluster and software by runs that were measured there.

What can move are the constants of the software, links and devices that the runs use (``calibration.parameters``), each
around its value before with the width of its prior, so that a few runs move little and what they do not tell stays.
Three answers are held against each other by leaving every setting out in turn: all of these constants, one common
factor on the times of the software's kernels, and none at all. The one whose predictions of runs it did not see are
best is the result; where neither of the first two beats the last, that is the constants as they were.

Leaving out is exact for the straight lines through the most likely constants: with A the inverse covariance there and
J, r the slopes and residuals of what is left out, the constants move by ``-(A - J'J / noise²)^-1 J'r / noise²``
(Cook 1977, "Detection of Influential MeasuredStep in Linear Regression"). What was left out is then predicted by the
planner's path with those constants.
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
    Learnt,
    Parameter,
    Vector,
    learn,
    parameters_of,
    places_of,
    value_of,
    with_places,
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

LEAST = 3  # settings that can be left out in turn
_NOISE = 0.08
"""Standard deviation of the logarithm of measured over predicted under the right constants: what formulas miss."""

_KERNELS = ("matmul", "attention", "memory", "optimizer")
"""Fields of a software that the common factor is on."""
_COMMON_WIDTH = 0.2  # of its prior, as a logarithm
_FAR = 2.5
"""Standard deviations from which a common factor says that a field of the rows is wrong, or that the model is not
understood, rather than that the software's kernels are all so much slower."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured run."""

    name: str
    model: str  # that was trained
    setting: object  # equal for runs that only repeat one another
    seconds: float  # of a step, measured
    owners: frozenset[str]  # entries of the calibration that price it
    predict: Callable[[Predictor], float]  # seconds of a step


@dataclass(frozen=True, slots=True)
class LearntConstant:
    """What runs say of one constant."""

    name: str  # ``stacks/nemo/matmul``
    before: float
    value: float
    low: float  # low, high: one standard deviation either way
    high: float
    told: float  # share of the prior's variance that the runs took away


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Constants and how good they are on the runs; errors are means of |predicted / measured - 1|."""

    calibration: Calibration
    kind: str  # ``constants``, ``common factor``, or ``unchanged`` where neither helps
    constants: tuple[LearntConstant, ...]  # those that moved, or that runs tell something of
    runs: int
    settings: int
    models: frozenset[str]  # of one alone, what its formulas miss and what its software costs cannot be told apart
    before: float  # error of the constants as they were
    after: float  # of those that are returned, on the same runs
    left_out: dict[str, float]  # of each answer, on runs that it did not see
    skipped: dict[str, int]  # rows that cannot be priced, by reason


def read_observations(paths: Iterable[Path], calibration: Calibration) -> tuple[list[MeasuredStep], dict[str, int]]:
    """The runs of some files of rows and folders of logs, and why others are left out.

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


_APART = {"run_id", "source", "line", "notes", "derived", "quality", "iter_time_s", "tokens_per_s_per_gpu",
          "samples_per_s", "peak_mem_gb", "problem"}  # fmt: skip
"""Fields in which runs of one setting may differ."""


def observation_of(run: PublishedRun, predictor: Predictor) -> MeasuredStep | None:
    """A row as a measured step; None where it is not scored for time."""
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

    setting = tuple(getattr(run, item.name) for item in fields(run) if item.name not in _APART)
    owners = frozenset(f"{kind}/{entry_for(calibration, kind, name)}" for kind, name in named)
    return MeasuredStep(run.run_id, run.model or "", setting, seconds, owners, predict)


def _logged(folder: Path) -> MeasuredStep:
    """A run of ours by its log; its layers are estimated anew from data sheets, whatever its profile measured."""
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
    """Predicted seconds of observations by the places of parameters; what a change does not touch is remembered."""

    def __init__(self, base: Calibration, parameters: Sequence[Parameter], runs: Sequence[MeasuredStep]) -> None:
        self.base, self.parameters, self.runs = base, parameters, runs
        self._uses = [
            [place for place, parameter in enumerate(parameters) if parameter.owner in run.owners] for run in runs
        ]
        self._known: dict[tuple[int, bytes], float] = {}
        self._graphs = Predictor(base).graphs

    def logs(self, places: Vector, rows: Iterable[int] | None = None) -> Vector:
        """Logarithms of predicted seconds."""
        predictor = Predictor(with_places(self.base, self.parameters, places.tolist()), self._graphs)
        found = []
        for row in range(len(self.runs)) if rows is None else rows:
            key = (row, places[self._uses[row]].tobytes())
            if key not in self._known:
                self._known[key] = float(np.log(self.runs[row].predict(predictor)))
            found.append(self._known[key])
        return np.array(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    basis: Vector  # (parameters, unknowns): places are the start plus basis @ unknowns
    widths: Vector
    learnt: Learnt


def calibrate(
    runs: Sequence[MeasuredStep],
    base: Calibration,
    *,
    skipped: dict[str, int] | None = None,
    source: str = "runs",
    progress: Callable[[int, int, str], None] | None = None,
) -> CalibrationResult:
    """Constants for the runs' cluster and software; see the module.

    Args:
        runs: of at least ``LEAST`` settings.
        base: constants as they are.
        skipped: rows that were left out, by reason, for the answer.
        source: where the runs come from, for ``ConstantsOrigin``.
        progress: called with (done, total, label).

    Raises:
        InputError: too few settings to leave one out.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for row, run in enumerate(runs):
        groups[run.setting].append(row)
    if len(groups) < LEAST:
        left = "".join(f" Rows not used: {count} ({reason})." for reason, count in (skipped or {}).items())
        remedy = f"Give runs of {LEAST} settings at least: each is left out in turn.{left}"
        raise InputError("settings of runs", len(groups), remedy)
    parameters = parameters_of(base, {owner for run in runs for owner in run.owners})
    prices, start = _Prices(base, parameters, runs), np.array(places_of(base, parameters))
    seconds = np.array([run.seconds for run in runs])
    errors = {"unchanged": _mean_error(prices.logs(start), seconds)}
    answers: dict[str, _Answer] = {}
    for number, (kind, basis, widths) in enumerate(_answers(parameters, base)):
        if progress is not None:
            progress(number, 3, kind)

        def logs(values: Vector, basis: Vector = basis) -> Vector:
            return prices.logs(start + basis @ values)

        learnt = learn(logs, seconds.tolist(), np.zeros(len(widths)), widths, _NOISE, rounds=2)
        if kind == "common factor" and abs(learnt.values[0]) > _FAR * widths[0]:
            continue
        answers[kind] = _Answer(basis, widths, learnt)
        errors[kind] = _left_out(answers[kind], prices, start, seconds, list(groups.values()))
    kind = min(errors, key=lambda name: (errors[name], name != "unchanged"))
    answer = answers.get(kind)
    places = start if answer is None else start + answer.basis @ answer.learnt.values
    calibrated = with_places(base, parameters, places.tolist()) if answer is not None else base
    after = _mean_error(prices.logs(places), seconds)
    constants = () if answer is None else tuple(_constants(answer, parameters, start, base))
    if answer is not None:
        calibrated = _with_origins(calibrated, {parameter.owner for parameter in parameters}, source, runs, after)
    models = frozenset(run.model for run in runs)
    return CalibrationResult(
        calibrated, kind, constants, len(runs), len(groups), models, errors["unchanged"], after, errors, skipped or {}
    )


def _answers(parameters: Sequence[Parameter], base: Calibration) -> Iterator[tuple[str, Vector, Vector]]:
    """What may be learnt: one factor on all kernels of the software, or every constant."""
    common = [[1.0 if parameter.kind == "stacks" and parameter.field in _KERNELS else 0.0] for parameter in parameters]
    yield "common factor", np.array(common), np.array([_COMMON_WIDTH])
    widths = [base.origins[p.owner].deviations.get(p.field, p.scale.deviation) if p.owner in base.origins
              else p.scale.deviation for p in parameters]  # fmt: skip
    yield "constants", np.eye(len(parameters)), np.array(widths)


def _left_out(
    answer: _Answer, prices: _Prices, start: Vector, seconds: Vector, groups: Sequence[Sequence[int]]
) -> float:
    """Mean error of every setting by constants learnt without it."""
    slopes, values = answer.learnt.slopes, answer.learnt.values
    residuals = np.log(seconds) - prices.logs(start + answer.basis @ values)
    precision = slopes.T @ slopes / _NOISE**2 + np.diag(answer.widths**-2.0)
    wrong: list[float] = []
    for rows in groups:
        part = slopes[rows]
        moved = np.linalg.solve(precision - part.T @ part / _NOISE**2, part.T @ residuals[rows] / _NOISE**2)
        logs = prices.logs(start + answer.basis @ (values - moved), rows)
        wrong += np.abs(np.exp(logs) / seconds[rows] - 1).tolist()
    return fmean(wrong)


def _mean_error(logs: Vector, seconds: Vector) -> float:
    return float(np.abs(np.exp(logs) / seconds - 1).mean())


_TOLD = 0.05  # share of its prior's variance from which a constant is worth a line


def _constants(
    answer: _Answer, parameters: Sequence[Parameter], start: Vector, base: Calibration
) -> Iterator[LearntConstant]:
    """What was learnt, what runs tell most of first."""
    places = start + answer.basis @ answer.learnt.values
    spread = np.sqrt((answer.basis**2) @ (answer.learnt.deviations**2))
    prior = np.sqrt((answer.basis**2) @ (answer.widths**2))
    certainty = 1 - (spread / np.where(prior > 0, prior, 1.0)) ** 2
    for at in np.argsort(-certainty, kind="stable"):
        if prior[at] > 0 and certainty[at] > _TOLD:
            parameter, tried = parameters[at], (places[at], places[at] - spread[at], places[at] + spread[at])
            value, low, high = (value_of(with_places(base, [parameter], [place]), parameter) for place in tried)
            yield LearntConstant(parameter.name, value_of(base, parameter), value, low, high, float(certainty[at]))


def _with_origins(
    calibration: Calibration, owners: set[str], source: str, runs: Sequence[MeasuredStep], error: float
) -> Calibration:
    """The calibration with what its entries rest on now."""
    date, origins = datetime.now(UTC).date().isoformat(), dict(calibration.origins)
    for owner in owners:
        rows, before = sum(owner in run.owners for run in runs), origins.get(owner, ConstantsOrigin(""))
        text = f"{before.source}; corrected by {source}" if before.source else f"Corrected by {source}"
        origins[owner] = replace(before, source=text, date=date, rows=rows, residual=round(error, 4))
    return replace(calibration, origins=origins, provenance=(*calibration.provenance, f"{date}: corrected by {source}"))
