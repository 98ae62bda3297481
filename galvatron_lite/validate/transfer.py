"""Profiles carried to another device, held against published runs of one model and software on two devices.

A pair is two runs that agree in source, software, model, sample, precision, number of devices, degrees and
recomputation, on devices of two types (``profiler.transfer.device_type``). What several sources or hosts measured of
one such setting counts once, by its median. Stands in for the profile on one device: the estimate of the layers, with
what all runs of that software on that device say of its classes of operators, and all times multiplied so that the
step costs what was measured. It is carried over by ``transfer_profile`` and priced with the plan of the other run.
Both directions are scored, and a pair's error is their mean.

Nothing is fitted to the device that is carried to: constants are the priors (``configs/calibration/priors``).

Large runs predicted from small ones: constants learnt on runs of few devices, held against runs of many.

Within each family, constants are learnt (``validate.calibrate``) from the priors on its runs of at most 64 devices; its
runs of 256 and more are predicted by the planner's path, whose collectives and stragglers follow the law of
``profiler.transfer.scale_up``. What small runs of one model alone tell is not carried to another model: what the
formulas miss of that model and what the software costs cannot be told apart. Nothing is fitted to a run of more than 64
devices, of this family or another: the priors (``configs/calibration/priors``) are from before any fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median

import numpy as np

from galvatron_lite.calibration.parameters import Vector, learn
from galvatron_lite.calibration.schema import Calibration, StackConstants
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.profiler.transfer import LEARNT, WIDTHS, device_type, moved_constants, transfer_profile
from galvatron_lite.validate.calibrate import calibrate, observation_of
from galvatron_lite.validate.checks import device_of
from galvatron_lite.validate.plans import batch_of
from galvatron_lite.validate.predict import InterpretedRun, Predictor, measured_of, step_seconds
from galvatron_lite.validate.rows import PublishedRun

_SAME = (
    "family", "framework", "model", "arch", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len",
    "image_size", "n_experts", "moe_topk", "moe_ffn", "n_gpus", "dp", "tp", "pp", "cp", "ep", "vpp", "pp_schedule",
    "zero_stage", "act_ckpt", "seq_parallel", "precision", "flash_attn", "optimizer",
)  # fmt: skip
"""Fields in which both runs of a pair agree; they may differ in the batch where memories do."""
_NOISE = 0.1
"""Standard deviation of measured step times (``calibration.parameters``): runs repeated on one machine."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one or several runs trained, where, and how long a step took."""

    understood: InterpretedRun
    seconds: float  # of a step, median of what was measured
    batch: int  # samples a step

    @property
    def device(self) -> str:
        """The type of its devices."""
        return device_type(self.understood.cluster.device.name)

    def with_constants(self, constants: StackConstants) -> Setting:
        """The same under software that costs otherwise; prices are remembered by its name."""
        stack = self.understood.stack
        name = f"{stack.name} {hash(tuple(getattr(constants, each) for each in LEARNT))}"
        return replace(self, understood=replace(self.understood, stack=replace(stack, name=name, constants=constants)))

    def estimated(self, predictor: Predictor) -> float:
        """Seconds of a step by data sheets and the software's constants."""
        run = self.understood
        return step_seconds(LayerPricer(predictor.profile_of(run, run.plan)), run.plan)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two devices, and how far off their step times are when carried to one another."""

    family: str
    devices: tuple[str, str]
    same_batch: bool
    error: float  # mean of both directions, |predicted / measured - 1|
    peak_error: float  # the same by the ratio of peak rates


@dataclass(frozen=True, slots=True)
class PairScores:
    """Errors of some pairs, in per cent; None where there are none."""

    name: str  # of the devices or the family
    pairs: int
    same: int  # of them with the same batch, too
    error: float
    median: float
    same_error: float | None
    peak_error: float  # by the ratio of peak rates


def score_pairs(pairs: Sequence[Pair]) -> list[PairScores]:
    """Scores by devices, by family, and of all."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in sorted(pairs, key=lambda pair: pair.devices):
        groups[" and ".join(pair.devices)].append(pair)
    for pair in pairs:
        groups[pair.family].append(pair)
    scores = []
    for name, members in (*groups.items(), ("all", pairs)):
        errors, peaks = ([100 * getattr(pair, field) for pair in members] for field in ("error", "peak_error"))
        same = [100 * pair.error for pair in members if pair.same_batch]
        held = fmean(same) if same else None
        scores.append(PairScores(name, len(members), len(same), fmean(errors), median(errors), held, fmean(peaks)))
    return scores


def pairs_of(
    runs: Iterable[PublishedRun], calibration: Calibration, progress: Callable[[int, int, str], None] | None = None
) -> list[Pair]:
    """Every pair of some runs, see the module; ``progress`` is called with (done, total, label)."""
    predictor, groups = Predictor(calibration), defaultdict[tuple[object, ...], dict[PublishedRun, str]](dict)
    for run in runs:
        device = device_of(run.gpu)
        if run.quality in ("A", "B", None) and run.problem is None and not run.oom and device is not None:
            groups[tuple(getattr(run, name) for name in _SAME)][run] = device_type(device.name)
    several = {key: _settings(types, predictor) for key, types in groups.items() if len(set(types.values())) > 1}
    software = defaultdict[tuple[object, ...], list[Setting]](list)
    for key, members in several.items():
        for member in members:
            software[*key[:2], member.understood.cluster.device.name].append(member)
    learnt = {name: _learnt(members, predictor) for name, members in software.items()}
    pairs: list[Pair] = []
    for number, (key, members) in enumerate(several.items(), 1):
        sides = [member.with_constants(learnt[*key[:2], member.understood.cluster.device.name]) for member in members]
        pairs += _pairs(str(key[0]), sides, predictor)
        if progress is not None:
            progress(number, len(several), str(key[0]))
    return pairs


def _settings(runs: Iterable[PublishedRun], predictor: Predictor) -> list[Setting]:
    """One for every device, batch and micro-batch, but where a step would be beyond the peak of its devices: PyTorch of
    2020 to 2022 multiplied in TF32 where tables say fp32."""
    settings = defaultdict[tuple[str, int, int | None], list[Setting]](list)
    for run in runs:
        try:
            understood, batch = predictor.understand(run), batch_of(run)
        except GalvatronError:
            continue
        seconds, prediction = measured_of(run, batch).step_seconds, understood.prediction
        if seconds and prediction.mfu * prediction.step_seconds <= seconds:
            key = (understood.cluster.device.name, batch.size, run.micro_batch)
            settings[key].append(Setting(understood, seconds, batch.size))
    return [replace(members[0], seconds=median(member.seconds for member in members)) for members in settings.values()]


def _learnt(settings: Sequence[Setting], predictor: Predictor) -> StackConstants:
    """What the steps of one software on one device say of each class of operators there."""
    prior = settings[0].understood.stack.constants

    def predict(places: Vector) -> Vector:
        constants = moved_constants(prior, places)
        return np.log([setting.with_constants(constants).estimated(predictor) for setting in settings])

    measured = [setting.seconds for setting in settings]
    return moved_constants(prior, learn(predict, measured, np.zeros(len(WIDTHS)), WIDTHS, _NOISE).values)


def _pairs(family: str, sides: Sequence[Setting], predictor: Predictor) -> Iterator[Pair]:
    for one, other in combinations(sides, 2):
        if one.device != other.device:
            ways = ((one, other), (other, one))
            error = fmean(abs(_carried(a, b, predictor) / b.seconds - 1) for a, b in ways)
            peak = fmean(abs(_by_peak(a, b) / b.seconds - 1) for a, b in ways)
            near, far = sorted((one.device, other.device))
            plans = {(side.understood.plan.global_batch, side.understood.plan.microbatches) for side in (one, other)}
            yield Pair(family, (near, far), len(plans) == 1, error, peak)


def _precision(here: Setting, there: Setting) -> str:
    """Of matmuls: TF32 where either device has it and the software uses it; others then multiply in fp32."""
    both = [side.understood.precision for side in (here, there)]
    return "tf32" if "tf32" in both else both[0]


def _by_peak(here: Setting, there: Setting) -> float:
    """Seconds of a step there by the ratio of peak rates in the precision of compute."""
    precision = _precision(here, there)
    peaks = (side.understood.cluster.device.peak for side in (here, there))
    one, other = (peak.get(precision, peak["fp16" if precision == "bf16" else "fp32"]) for peak in peaks)
    return here.seconds / here.batch * there.batch * one / other


def _carried(here: Setting, there: Setting, predictor: Predictor) -> float:
    """Seconds of a step there by the profile from here, whose times are such that the step here took what it did."""
    one, other, pace = here.understood, there.understood, here.seconds / here.estimated(predictor)
    profile = predictor.profile_of(one, other.plan)
    layers = tuple(replace(each, forward=each.forward * pace, backward=each.backward * pace) for each in profile.layers)
    update = replace(profile.optimizer, seconds_per_item=profile.optimizer.seconds_per_item * pace)
    moved = transfer_profile(
        replace(profile, layers=layers, optimizer=update), other.cluster, precision=_precision(here, there),
        stack=one.stack, calibration=predictor.calibration, factors=one.stack.constants,
    )  # fmt: skip
    return step_seconds(LayerPricer(moved), other.plan)


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
    usable = [one for one in small if one is not None]
    try:
        calibrated = calibrate(usable, predictor.calibration)
    except InputError:  # too few small runs to learn from
        return None
    learnt, models = Predictor(calibrated.calibration, predictor.graphs), {one.model for one in usable}
    seen = tuple((run.model or "") in models for run in large)
    errors = [_error(run, learnt if there or len(calibrated.models) > 1 else predictor)
              for run, there in zip(large, seen, strict=True)]  # fmt: skip
    before, most = [_error(run, predictor) for run in large], max(run.n_gpus or 0 for run in large)
    return ScaleUpScores(name, len(usable), len(errors), most, calibrated.kind, tuple(errors), tuple(before), seen)


def _error(run: PublishedRun, predictor: Predictor) -> float:
    return (predictor.judge(run).time or 0.0) - 1
