"""Scores ``profiler.transfer`` on published runs: transfer of profiles to another device, and from small to large runs.

Transfer (``pairs_of``): a pair is two runs that agree in source, software, model, sample, precision, number of devices,
degrees and recomputation, on devices of two types (``device_type``). Several measurements of one setting count once, by
their median. The profile of one device is its estimate, with constants fitted to all runs of that software on that
device, and all times scaled so that the step takes as long as measured. ``transfer_profile`` carries it to the other
device, where the plan of the other run prices it. Both directions are scored; a pair's error is their mean. Nothing is
fitted to the target device: constants are the priors (``configs/calibration/priors``).

Scale-up (``scale_up_scores``): in each family, constants are fitted (``validate.calibrate``) from the priors to runs of
at most 64 devices, and runs of 256 and more devices are predicted with them. Constants fitted to a single model are not
used for another one, since errors of the model's formulas and costs of the software cannot be separated. Nothing is
fitted to a run of more than 64 devices in any family: the priors precede all fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median

import numpy as np

from galvatron_lite.calibration.parameters import Vector, fit
from galvatron_lite.calibration.schema import Calibration, StackConstants
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.profiler.transfer import FITTED, WIDTHS, device_type, scaled_constants, transfer_profile
from galvatron_lite.validate.calibrate import calibrate, observation_of
from galvatron_lite.validate.checks import device_of
from galvatron_lite.validate.plans import batch_of
from galvatron_lite.validate.predict import InterpretedRun, Predictor, measured_of, step_seconds
from galvatron_lite.validate.rows import PublishedRun

_SHARED_FIELDS = (
    "family", "framework", "model", "arch", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len",
    "image_size", "n_experts", "moe_topk", "moe_ffn", "n_gpus", "dp", "tp", "pp", "cp", "ep", "vpp", "pp_schedule",
    "zero_stage", "act_ckpt", "seq_parallel", "precision", "flash_attn", "optimizer",
)  # fmt: skip
"""Fields in which both runs of a pair agree; the batch may differ, as memories do."""
_NOISE = 0.1
"""Standard deviation of the logarithm of step times, from runs repeated on one machine."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A training setting and its measured step time."""

    run: InterpretedRun
    seconds: float  # seconds of a step, the median of all measurements
    batch: int  # samples of a step

    @property
    def device(self) -> str:
        """The type of its devices."""
        return device_type(self.run.cluster.device.name)

    def with_constants(self, constants: StackConstants) -> Setting:
        """Return the setting with other constants of its software, whose name is a key of cached prices."""
        stack = self.run.stack
        name = f"{stack.name} {hash(tuple(getattr(constants, field) for field in FITTED))}"
        return replace(self, run=replace(self.run, stack=replace(stack, name=name, constants=constants)))

    def estimated(self, predictor: Predictor) -> float:
        """Return the estimated seconds of a step."""
        return step_seconds(LayerPricer(predictor.profile_of(self.run, self.run.plan)), self.run.plan)


@dataclass(frozen=True, slots=True)
class Pair:
    """The errors of step times transferred between two devices, |predicted / measured - 1|, mean of both directions."""

    family: str
    devices: tuple[str, str]
    same_batch: bool
    error: float  # by ``transfer_profile``
    peak_error: float  # by the ratio of peak rates


@dataclass(frozen=True, slots=True)
class PairScores:
    """Mean errors of some pairs, in per cent."""

    name: str  # the devices, the family, or ``all``
    pairs: int
    same: int  # pairs with the same batch
    error: float
    median: float
    same_error: float | None  # of pairs with the same batch; None if there are none
    peak_error: float  # by the ratio of peak rates


def score_pairs(pairs: Sequence[Pair]) -> list[PairScores]:
    """Return the scores by devices, by family, and of all pairs."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in sorted(pairs, key=lambda pair: pair.devices):
        groups[" and ".join(pair.devices)].append(pair)
    for pair in pairs:
        groups[pair.family].append(pair)
    scores = []
    for name, members in (*groups.items(), ("all", pairs)):
        errors, peaks = ([100 * getattr(pair, field) for pair in members] for field in ("error", "peak_error"))
        same = [100 * pair.error for pair in members if pair.same_batch]
        same_error = fmean(same) if same else None
        scores.append(
            PairScores(name, len(members), len(same), fmean(errors), median(errors), same_error, fmean(peaks))
        )
    return scores


def pairs_of(
    runs: Iterable[PublishedRun], calibration: Calibration, progress: Callable[[int, int, str], None] | None = None
) -> list[Pair]:
    """Return all pairs of some runs; ``progress`` is called with (done, total, label)."""
    predictor, groups = Predictor(calibration), defaultdict[tuple[object, ...], dict[PublishedRun, str]](dict)
    for run in runs:
        device = device_of(run.gpu)
        if run.quality in ("A", "B", None) and run.problem is None and not run.oom and device is not None:
            groups[tuple(getattr(run, name) for name in _SHARED_FIELDS)][run] = device_type(device.name)
    settings = {key: _settings(types, predictor) for key, types in groups.items() if len(set(types.values())) > 1}

    def software(key: tuple[object, ...], setting: Setting) -> tuple[object, ...]:
        return (*key[:2], setting.run.cluster.device.name)

    by_software = defaultdict[tuple[object, ...], list[Setting]](list)
    for key, members in settings.items():
        for member in members:
            by_software[software(key, member)].append(member)
    constants = {name: _fitted_constants(members, predictor) for name, members in by_software.items()}
    pairs: list[Pair] = []
    for number, (key, members) in enumerate(settings.items(), 1):
        fitted = [member.with_constants(constants[software(key, member)]) for member in members]
        pairs += _pairs(str(key[0]), fitted, predictor)
        if progress is not None:
            progress(number, len(settings), str(key[0]))
    return pairs


def _settings(runs: Iterable[PublishedRun], predictor: Predictor) -> list[Setting]:
    """Return a setting for each device, batch and micro-batch.

    Runs faster than the peak of their devices are left out: PyTorch of 2020 to 2022 multiplied in TF32 where tables say
    fp32.
    """
    settings = defaultdict[tuple[str, int, int | None], list[Setting]](list)
    for run in runs:
        try:
            interpreted, batch = predictor.interpret(run), batch_of(run)
        except GalvatronError:
            continue
        seconds, prediction = measured_of(run, batch).step_seconds, interpreted.prediction
        if seconds and prediction.mfu * prediction.step_seconds <= seconds:
            key = (interpreted.cluster.device.name, batch.size, run.micro_batch)
            settings[key].append(Setting(interpreted, seconds, batch.size))
    return [replace(members[0], seconds=median(member.seconds for member in members)) for members in settings.values()]


def _fitted_constants(settings: Sequence[Setting], predictor: Predictor) -> StackConstants:
    """Return the constants of one software on one device, fitted to measured steps."""
    prior = settings[0].run.stack.constants

    def predict(logs: Vector) -> Vector:
        constants = scaled_constants(prior, logs)
        return np.log([setting.with_constants(constants).estimated(predictor) for setting in settings])

    measured = [setting.seconds for setting in settings]
    return scaled_constants(prior, fit(predict, measured, np.zeros(len(WIDTHS)), WIDTHS, _NOISE).values)


def _pairs(family: str, settings: Sequence[Setting], predictor: Predictor) -> Iterator[Pair]:
    for first, second in combinations(settings, 2):
        if first.device != second.device:
            directions = ((first, second), (second, first))
            error = fmean(abs(_transferred(a, b, predictor) / b.seconds - 1) for a, b in directions)
            peak = fmean(abs(_by_peak(a, b) / b.seconds - 1) for a, b in directions)
            low, high = sorted((first.device, second.device))
            plans = {(setting.run.plan.global_batch, setting.run.plan.microbatches) for setting in (first, second)}
            yield Pair(family, (low, high), len(plans) == 1, error, peak)


def _precision(here: Setting, there: Setting) -> str:
    """Return the precision of matmuls: TF32 if either device uses it, while the other then multiplies in fp32."""
    precisions = [setting.run.precision for setting in (here, there)]
    return "tf32" if "tf32" in precisions else precisions[0]


def _by_peak(here: Setting, there: Setting) -> float:
    """Return the seconds of a step there by the ratio of peak rates in the precision of compute."""
    precision = _precision(here, there)
    peaks = (setting.run.cluster.device.peak for setting in (here, there))
    peak_here, peak_there = (peak.get(precision, peak["fp16" if precision == "bf16" else "fp32"]) for peak in peaks)
    return here.seconds / here.batch * there.batch * peak_here / peak_there


def _transferred(here: Setting, there: Setting, predictor: Predictor) -> float:
    """Return the seconds of a step there by the profile from here, scaled to the step time measured here."""
    pace = here.seconds / here.estimated(predictor)
    profile = predictor.profile_of(here.run, there.run.plan)
    layers = tuple(
        replace(point, forward=point.forward * pace, backward=point.backward * pace) for point in profile.layers
    )
    update = replace(profile.optimizer, seconds_per_item=profile.optimizer.seconds_per_item * pace)
    stack = here.run.stack
    moved = transfer_profile(
        replace(profile, layers=layers, optimizer=update), there.run.cluster, precision=_precision(here, there),
        stack=stack, calibration=predictor.calibration, factors=stack.constants,
    )  # fmt: skip
    return step_seconds(LayerPricer(moved), there.run.plan)


SMALL = 64  # most devices of the runs that constants are fitted to
LARGE = 256  # fewest devices of the runs that are predicted


@dataclass(frozen=True, slots=True)
class ScaleUpScores:
    """Errors of large runs of a family, as shares of the measured step time."""

    name: str
    small: int  # runs that constants were fitted to
    large: int  # runs that were predicted
    most: int  # devices of the largest of them
    kind: str  # what was fitted, as ``CalibrationResult.kind``
    errors: tuple[float, ...]  # predicted / measured - 1 of each large run
    before: tuple[float, ...]  # the same by the priors
    seen: tuple[bool, ...]  # whether a small run trained the same model

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
        """Mean absolute error of runs whose model a small run trained; None if there are none."""
        errors = [abs(error) for error, seen in zip(self.errors, self.seen, strict=True) if seen]
        return fmean(errors) if errors else None


def scale_up_scores(
    runs: Iterable[PublishedRun], priors: Calibration, progress: Callable[[int, int, str], None] | None = None
) -> list[ScaleUpScores]:
    """Return the scores of the families of language models with runs of both sizes, and of all their runs together."""
    families: dict[str, list[PublishedRun]] = {}
    for run in runs:
        if run.seq_len is not None and run.quality in ("A", "B", None) and run.problem is None:
            families.setdefault(run.family, []).append(run)
    predictor, scores = Predictor(priors), list[ScaleUpScores]()
    for number, (name, members) in enumerate(families.items(), 1):
        if progress is not None:
            progress(number, len(families), name)
        family = _family_scores(name, members, predictor)
        if family is not None:
            scores.append(family)
    if not scores:
        return []
    errors, before, seen = (
        tuple(value for family in scores for value in getattr(family, field)) for field in ("errors", "before", "seen")
    )
    small, most = sum(family.small for family in scores), max(family.most for family in scores)
    return [*scores, ScaleUpScores("all", small, len(errors), most, "", errors, before, seen)]


def _family_scores(name: str, runs: Sequence[PublishedRun], predictor: Predictor) -> ScaleUpScores | None:
    large = [run for run in runs if (run.n_gpus or 0) >= LARGE and predictor.judge(run).time is not None]
    steps = [observation_of(run, predictor) for run in runs if 0 < (run.n_gpus or 0) <= SMALL] if large else []
    small = [step for step in steps if step is not None]
    try:
        calibrated = calibrate(small, predictor.calibration)
    except InputError:  # too few small runs for a fit
        return None
    fitted, models = Predictor(calibrated.calibration, predictor.graphs), {step.model for step in small}
    seen = tuple((run.model or "") in models for run in large)
    errors = [_error(run, fitted if is_seen or len(calibrated.models) > 1 else predictor)
              for run, is_seen in zip(large, seen, strict=True)]  # fmt: skip
    before, most = [_error(run, predictor) for run in large], max(run.n_gpus or 0 for run in large)
    return ScaleUpScores(name, len(small), len(errors), most, calibrated.kind, tuple(errors), tuple(before), seen)


def _error(run: PublishedRun, predictor: Predictor) -> float:
    return (predictor.judge(run).time or 0.0) - 1
