"""Large runs predicted from small ones: constants learnt on runs of few devices, held against runs of many.

Within each family, constants are learnt (``validate.calibrate``) from the priors on its runs of at most 64 devices; its
runs of 256 and more are predicted by the planner's path, whose collectives and stragglers follow the law of
``profiler.scale_up``. What small runs of one model alone tell is not carried to another model: what the formulas miss
of that model and what the software costs cannot be told apart. Nothing is fitted to a run of more than 64 devices, of
this family or another: the priors (``configs/calibration/priors``) are from before any fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.errors import InputError
from galvatron_lite.validate.calibrate import calibrate, observation_of
from galvatron_lite.validate.predict import Predictor
from galvatron_lite.validate.rows import PublishedRun

SMALL = 64  # devices of the runs that constants are learnt from, at most
LARGE = 256  # devices of the runs that are predicted, at least


@dataclass(frozen=True, slots=True)
class ScaleUpScores:
    """How far off large runs of a family are; shares of the measured step time."""

    name: str
    small: int  # runs that constants were learnt from
    large: int  # runs that were predicted
    most: int  # devices of the largest of them
    kind: str  # what was learnt: see ``CalibrationResult``
    errors: tuple[float, ...]  # predicted / measured - 1 of each
    before: tuple[float, ...]  # the same by the priors
    seen: tuple[bool, ...]  # whether small runs hold the same model

    @property
    def error(self) -> float:
        """Mean absolute error."""
        return fmean(map(abs, self.errors))

    @property
    def prior_error(self) -> float:
        """Mean absolute error by the priors."""
        return fmean(map(abs, self.before))

    @property
    def seen_error(self) -> float | None:
        """Mean absolute error of runs whose model small runs hold; None where there are none."""
        errors = [abs(error) for error, seen in zip(self.errors, self.seen, strict=True) if seen]
        return fmean(errors) if errors else None


def scale_up_scores(
    runs: Iterable[PublishedRun], priors: Calibration, progress: Callable[[int, int, str], None] | None = None
) -> list[ScaleUpScores]:
    """Scores of every family of language models with runs of both sizes, and of all their runs together."""
    families: dict[str, list[PublishedRun]] = {}
    for run in runs:
        if run.seq_len is not None and run.quality in ("A", "B", None) and run.problem is None:
            families.setdefault(run.family, []).append(run)
    predictor, found = Predictor(priors), list[ScaleUpScores]()
    for number, (name, members) in enumerate(families.items(), 1):
        if progress is not None:
            progress(number, len(families), name)
        scores = _family(name, members, predictor)
        if scores is not None:
            found.append(scores)
    if not found:
        return []
    errors, before, seen = (
        tuple(one for each in found for one in getattr(each, field)) for field in ("errors", "before", "seen")
    )
    small, most = sum(each.small for each in found), max(each.most for each in found)
    return [*found, ScaleUpScores("all", small, len(errors), most, "", errors, before, seen)]


def _family(name: str, runs: Sequence[PublishedRun], predictor: Predictor) -> ScaleUpScores | None:
    large = [run for run in runs if (run.n_gpus or 0) >= LARGE and predictor.judge(run).time is not None]
    small = [observation_of(run, predictor) for run in runs if 0 < (run.n_gpus or 0) <= SMALL] if large else []
    known = [one for one in small if one is not None]
    try:
        made = calibrate(known, predictor.calibration)
    except InputError:  # too few small runs to learn from
        return None
    learnt, models = Predictor(made.calibration, predictor.graphs), {one.model for one in known}
    seen = tuple((run.model or "") in models for run in large)
    errors = [_error(run, learnt if there or len(made.models) > 1 else predictor)
              for run, there in zip(large, seen, strict=True)]  # fmt: skip
    before, most = [_error(run, predictor) for run in large], max(run.n_gpus or 0 for run in large)
    return ScaleUpScores(name, len(known), len(errors), most, made.kind, tuple(errors), tuple(before), seen)


def _error(run: PublishedRun, predictor: Predictor) -> float:
    return (predictor.judge(run).time or 0.0) - 1
