"""The published runs that constants are fitted to, predicted by several processes."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, isqrt, log, nan

import numpy as np

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import entry_for
from galvatron_lite.cluster.links import link_matching
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.validate.checks import cluster_of
from galvatron_lite.validate.predict import Predictor
from galvatron_lite.validate.results import Predicted, ScoredRun, SkipError
from galvatron_lite.validate.rows import PublishedRun
from studies.calibration.fit import Array, PredictMany, Problem, Task, family_weights
from studies.calibration.stages import Mask, Setup, Staged, calibrated_without, common_without

GRADES = {"A": 1.0, "B": 0.4}  # weight of a row by the quality of its figures

ORDER = 0.5
"""Weight of errors within a group of plans beside errors of time itself: the order of plans is what a planner needs."""

FAMILY = 200.0
"""Weight of a family of many rows: one per cent of its mean error costs 2, a standard deviation of one constant 0.5."""

UNMODELLED = frozenset({"gptoss120b"})
"""Models that are scored but not fitted to, for their kernels are not modelled (attention sinks, clamped activations,
biases of experts, each unfused): constants of other kernels must not be bent to explain them."""

CHUNK = 160  # rows that one process predicts at once

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Published runs whose step time can be predicted and counts."""

    judged: tuple[ScoredRun, ...]  # each with its prediction before the fit
    problem: Problem  # the same as numbers

    @property
    def runs(self) -> tuple[PublishedRun, ...]:
        """The runs themselves."""
        return tuple(one.run for one in self.judged)


def rows_of(runs: Sequence[PublishedRun], calibration: Calibration, most: int, progress: Progress) -> Rows:
    """The runs whose time can be scored; of each family some (``spread``) have weight in the fit."""
    predictor, kept = Predictor(calibration), []
    for number, run in enumerate(runs, 1):
        judged = predictor.judge(run)
        if judged.time is not None:
            kept.append(judged)
        progress(number, len(runs), run.family)
    if not kept:
        raise InputError(
            "--rows", f"{len(runs)} runs", "None has a time that can be scored: galvatron validate says why."
        )
    return Rows(tuple(kept), _problem(kept, calibration, most))


def _problem(kept: Sequence[ScoredRun], calibration: Calibration, most: int) -> Problem:
    groups = group_numbers([one.run for one in kept])
    families = [one.run.family for one in kept]
    fitted = np.array(spread(families, most))
    grades = [weight_of(kept[row].run) for row in fitted]
    weights = np.zeros(len(kept))
    weights[fitted] = family_weights([families[row] for row in fitted], groups[fitted], grades, FAMILY)
    return Problem(
        measured=np.array([log(measured_seconds(one)) for one in kept]),
        weights=weights,
        groups=groups,
        order=ORDER,
        uses=[entries_of(one.run, calibration) for one in kept],
    )


def weight_of(run: PublishedRun) -> float:
    """Weight of a run by the quality of its figures, 0 where its kernels are not modelled."""
    return 0.0 if model_of(run) in UNMODELLED else GRADES.get(run.quality or "B", 0.0)


def spread(families: Sequence[str], most: int) -> list[int]:
    """Rows to fit to, evenly spread over each family: all of up to ``most``, of n more the root of n times ``most``.

    A family's rows count alike in total, however many they are; more of them cost time and add little.
    """
    chosen: list[int] = []
    for family in dict.fromkeys(families):
        rows = [row for row, name in enumerate(families) if name == family]
        count = len(rows) if len(rows) <= most else isqrt(len(rows) * most)
        chosen += [rows[number * len(rows) // count] for number in range(count)]
    return sorted(chosen)


def measured_seconds(judged: ScoredRun) -> float:
    """Measured seconds of a row whose time counts."""
    assert judged.measured is not None
    assert judged.measured.step_seconds is not None
    return judged.measured.step_seconds


def group_numbers(runs: Sequence[PublishedRun]) -> np.ndarray:
    """Number of the group of runs that differ in their plan only; -1 for a run on its own."""
    keys = [(run.family, run.model, run.seq_len, run.image_size, run.gpu, run.n_gpus, run.global_batch) for run in runs]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] if keys.count(key) > 1 else -1 for key in keys], dtype=np.int64)


def entries_of(run: PublishedRun, calibration: Calibration) -> frozenset[str]:
    """The entries of a calibration that a run's prediction depends on."""
    used = {f"stacks/{entry_for(calibration, 'stacks', match_stack(run.framework).name)}"}
    try:
        cluster = cluster_of(run, calibration)
    except SkipError:
        return frozenset(used)
    device = cluster.device
    used.add(f"devices/{entry_for(calibration, 'devices', device.name)}")
    if cluster.devices > 1:
        used.add(f"links/{link_matching(run.intra_link, device.name)}")
    if len(cluster.levels) > 1:
        used.add(f"links/{link_matching(run.inter_net, device.name, between=True)}")
    return frozenset(used)


def model_of(run: PublishedRun) -> str:
    """The model's name as rows are left out by it: however it is spelled, and however many of its layers were kept."""
    return re.sub(r"[^a-z0-9.]", "", re.sub(r"-L\d+$", "", run.model or "").lower())


def model_folds(runs: Sequence[PublishedRun], most: int) -> list[list[str]]:
    """Models to leave out together, no two of one family where ``most`` folds allow it; families with most go first."""
    families: dict[str, list[str]] = {}
    for run in runs:
        families.setdefault(run.family, [])
        if model_of(run) not in families[run.family]:
            families[run.family].append(model_of(run))
    folds: list[list[str]] = [[] for _ in range(min(most, max(map(len, families.values()), default=1)))]
    placed: dict[str, int] = {}
    for _, models in sorted(families.items(), key=lambda item: -len(item[1])):
        for model in models:
            if model not in placed:
                beside = [sum(other in fold for other in models) for fold in folds]
                placed[model] = min(range(len(folds)), key=lambda n: (beside[n], len(folds[n])))
                folds[placed[model]].append(model)
    return folds


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows to predict with constants that other rows' measurements may not enter."""

    rows: tuple[int, ...]  # to predict
    left_out: Mask  # of all rows, which are not fitted to
    unseen: bool  # whether the rows' stacks count as never seen


# What a worker process works on; set once when it starts.
_RUNS: list[PublishedRun] = []
_GRAPHS: dict[object, ModelGraph] = {}


def _start(runs: Sequence[PublishedRun]) -> None:
    _RUNS[:] = runs


def _predict(task: Task) -> list[float]:
    calibration, rows = task
    predictor = Predictor(calibration, graphs=_GRAPHS)
    return [_log_seconds(predictor.predict(_RUNS[row])) for row in rows]


def _log_seconds(outcome: Predicted | SkipError) -> float:
    return log(outcome.step_seconds) if isinstance(outcome, Predicted) else nan


def _predict_here(tasks: Sequence[Task]) -> list[Array]:
    return [np.array(_predict(task)) for task in tasks]


def _fold(fold: Fold, problem: Problem, setup: Setup, whole: Staged) -> list[float]:
    made = common_without if fold.unseen else calibrated_without
    return _predict((made(fold.left_out, problem, setup, whole, _predict_here), fold.rows))


@dataclass(frozen=True, slots=True)
class Workers:
    """The cost model on several processes."""

    predict: PredictMany  # as the fit wants it
    # logarithms of predicted seconds of each fold's rows
    folds: Callable[[Sequence[Fold], Problem, Setup, Staged], list[list[float]]]


@contextmanager
def workers(runs: Sequence[PublishedRun], processes: int, progress: Progress) -> Iterator[Workers]:
    """Processes that predict these runs."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _start, (tuple(runs),)) as pool:

        def predict(tasks: Sequence[Task]) -> list[Array]:
            pieces = [
                (number, (calibration, rows[start : start + CHUNK]))
                for number, (calibration, rows) in enumerate(tasks)
                for start in range(0, len(rows), CHUNK)
            ]
            found: list[list[float]] = [[] for _ in tasks]
            answers = pool.map(_predict, [piece for _, piece in pieces])
            for done, ((number, _), answer) in enumerate(zip(pieces, answers, strict=True), 1):
                found[number] += answer
                progress(done, len(pieces), "")
            return [np.array(one) for one in found]

        def folds(each: Sequence[Fold], problem: Problem, setup: Setup, whole: Staged) -> list[list[float]]:
            waiting = [pool.submit(_fold, fold, problem, setup, whole) for fold in each]
            found = []
            for done, one in enumerate(waiting, 1):
                found.append(one.result())
                progress(done, len(waiting), "folds")
            return found

        yield Workers(predict, folds)


def judged_again(judged: ScoredRun, seconds: float) -> ScoredRun:
    """A row with another prediction of its time."""
    assert isinstance(judged.outcome, Predicted)
    outcome = replace(judged.outcome, step_seconds=exp(seconds))
    return replace(judged, outcome=outcome, time=exp(seconds) / measured_seconds(judged))
