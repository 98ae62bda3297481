"""Profiles carried to another device, held against published runs of one model and software on two devices.

A pair is two runs that agree in source, software, model, sample, precision, number of devices, degrees and
recomputation, on devices of two types (``profiler.transfer.device_type``). What several sources or hosts measured of
one such setting counts once, by its median. Stands in for the profile on one device: the estimate of the layers, with
what all runs of that software on that device say of its classes of operators, and all times multiplied so that the
step costs what was measured. It is carried over by ``transfer_profile`` and priced with the plan of the other run.
Both directions are scored, and a pair's error is their mean.

Nothing is fitted to the device that is carried to: constants are the priors (``configs/calibration/priors``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median

import numpy as np

from galvatron_lite.calibration.learn import Vector, learn
from galvatron_lite.calibration.schema import Calibration, StackConstants
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import GalvatronError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.transfer import LEARNT, WIDTHS, device_type, moved_constants, transfer_profile
from galvatron_lite.validate.checks import device_of
from galvatron_lite.validate.plans import Batch, batch_of
from galvatron_lite.validate.predict import InterpretedRun, Predictor, measured_of
from galvatron_lite.validate.rows import PublishedRun

_SAME = (
    "family", "framework", "model", "arch", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len",
    "image_size", "n_experts", "moe_topk", "moe_ffn", "n_gpus", "dp", "tp", "pp", "cp", "ep", "vpp", "pp_schedule",
    "zero_stage", "act_ckpt", "seq_parallel", "precision", "flash_attn", "optimizer",
)  # fmt: skip
"""Fields in which both runs of a pair agree; they may differ in the batch where memories do."""


@dataclass(frozen=True, slots=True)
class CarriedSide:
    """One setting on one device."""

    setting: Setting
    factors: StackConstants  # what the software costs, as the runs on this device tell
    pace: float  # factor on the times of layers so estimated with which a step takes as long

    @property
    def device(self) -> str:
        """The type of its devices."""
        return device_type(self.setting.understood.cluster.device.name)


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
    return [_score(name, members) for name, members in (*groups.items(), ("all", pairs))]


def _score(name: str, pairs: Sequence[Pair]) -> PairScores:
    same = [100 * pair.error for pair in pairs if pair.same_batch]
    errors, peaks = ([100 * getattr(pair, field) for pair in pairs] for field in ("error", "peak_error"))
    held = fmean(same) if same else None
    return PairScores(name, len(pairs), len(same), fmean(errors), median(errors), held, fmean(peaks))


def pairs_of(
    runs: Iterable[PublishedRun], calibration: Calibration, progress: Callable[[int, int, str], None] | None = None
) -> list[Pair]:
    """Every pair of some runs, see the module; ``progress`` is called with (done, total, label)."""
    predictor = Predictor(calibration)
    groups: dict[tuple[object, ...], list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.quality in ("A", "B", None) and run.problem is None and not run.oom and device_of(run.gpu) is not None:
            groups[tuple(getattr(run, name) for name in _SAME)].append(run)
    several = {key: members for key, members in groups.items() if len({_type_of(run) for run in members}) > 1}
    settings = {key: _settings(members, predictor) for key, members in several.items()}
    learnt = _learnt_by_device(settings, predictor)
    pairs: list[Pair] = []
    for number, (key, members) in enumerate(settings.items(), 1):
        sides = [_side(one, learnt[_software(key, one)], predictor) for one in members]
        pairs += _pairs(str(key[0]), sides, predictor)
        if progress is not None:
            progress(number, len(settings), str(key[0]))
    return pairs


def _type_of(run: PublishedRun) -> str:
    device = device_of(run.gpu)
    assert device is not None
    return device_type(device.name)


@dataclass(frozen=True, slots=True)
class Setting:
    """What one or several runs trained, where, and how long a step took."""

    understood: InterpretedRun
    seconds: float  # of a step, median of what was measured
    batch: int  # samples a step


def _settings(runs: Sequence[PublishedRun], predictor: Predictor) -> list[Setting]:
    known: dict[tuple[str, int, int | None], list[Setting]] = defaultdict(list)
    for run in runs:
        batch = batch_of(run)
        try:
            understood = predictor.understand(run)
        except GalvatronError:
            continue
        if isinstance(understood, InterpretedRun) and isinstance(batch, Batch):
            seconds = measured_of(run, batch).step_seconds
            if seconds and _possible(understood, seconds):
                key = (understood.cluster.device.name, batch.size, run.micro_batch)
                known[key].append(Setting(understood, seconds, batch.size))
    return [replace(members[0], seconds=median(one.seconds for one in members)) for members in known.values()]


def _possible(understood: InterpretedRun, seconds: float) -> bool:
    """Whether the devices can do the step's matmuls in that time at all in the precision that is stated: PyTorch of
    2020 to 2022 multiplied in TF32 where tables say fp32."""
    prediction = understood.prediction
    return prediction.mfu * prediction.step_seconds / seconds <= 1.0


def _software(key: tuple[object, ...], setting: Setting) -> tuple[object, ...]:
    return key[0], key[1], setting.understood.cluster.device.name


def _learnt_by_device(
    settings: Mapping[tuple[object, ...], Sequence[Setting]], predictor: Predictor
) -> dict[tuple[object, ...], StackConstants]:
    """What the runs of one software on one device say of each class of operators there."""
    groups: dict[tuple[object, ...], list[Setting]] = defaultdict(list)
    for key, members in settings.items():
        for one in members:
            groups[_software(key, one)].append(one)
    return {key: _learnt(members, predictor) for key, members in groups.items()}


def _pairs(family: str, sides: Sequence[CarriedSide], predictor: Predictor) -> Iterator[Pair]:
    for one, other in combinations(sides, 2):
        if one.device != other.device:
            errors = [abs(_carried(a, b, predictor) / b.setting.seconds - 1) for a, b in ((one, other), (other, one))]
            peaks = [abs(_by_peak(a, b) / b.setting.seconds - 1) for a, b in ((one, other), (other, one))]
            devices = tuple(sorted((one.device, other.device)))
            plans = [side.setting.understood.plan for side in (one, other)]
            same = len({(plan.global_batch, plan.microbatches) for plan in plans}) == 1
            yield Pair(family, (devices[0], devices[1]), same, fmean(errors), fmean(peaks))


def _by_peak(here: CarriedSide, there: CarriedSide) -> float:
    """Seconds of a step there by the ratio of peak rates in the precision of compute."""
    precision = _precision(here, there)
    peaks = (side.setting.understood.cluster.device.peak for side in (here, there))
    one, other = (peak.get(precision, peak["fp16" if precision == "bf16" else "fp32"]) for peak in peaks)
    return here.setting.seconds / here.setting.batch * there.setting.batch * one / other


def _precision(here: CarriedSide, there: CarriedSide) -> str:
    """Of matmuls: TF32 where either device has it and the software uses it; others then multiply in fp32."""
    both = [side.setting.understood.precision for side in (here, there)]
    return "tf32" if "tf32" in both else both[0]


def _carried(here: CarriedSide, there: CarriedSide, predictor: Predictor) -> float:
    """Seconds of a step there by the profile from here."""
    one, other = here.setting.understood, there.setting.understood
    profile = _paced(predictor.profile_of(_with(one, here.factors), other.plan), here.pace)
    moved = transfer_profile(
        profile,
        other.cluster,
        precision=_precision(here, there),
        stack=one.stack,
        calibration=predictor.calibration,
        factors=here.factors,
    )
    return _seconds(moved, other.plan)


def _seconds(profile: Profile, plan: Plan) -> float:
    priced = price_plan(LayerPricer(profile), plan)
    assert priced.prediction is not None
    return priced.prediction.step_seconds


def _paced(profile: Profile, pace: float) -> Profile:
    """The profile with all times of layers and of the update multiplied."""
    layers = tuple(replace(one, forward=one.forward * pace, backward=one.backward * pace) for one in profile.layers)
    update = replace(profile.optimizer, seconds_per_item=profile.optimizer.seconds_per_item * pace)
    return replace(profile, layers=layers, optimizer=update)


_NOISE = 0.1
"""Standard deviation of measured step times (``calibration.learn``): runs repeated on one machine."""


def _learnt(settings: Sequence[Setting], predictor: Predictor) -> StackConstants:
    """What steps of one software on one device say of each class of operators."""
    prior = settings[0].understood.stack.constants

    def predict(places: Vector) -> Vector:
        constants = moved_constants(prior, places)
        return np.log([_step(_with(one.understood, constants), predictor) for one in settings])

    measured = [one.seconds for one in settings]
    return moved_constants(prior, learn(predict, measured, np.zeros(len(WIDTHS)), WIDTHS, _NOISE).values)


def _step(understood: InterpretedRun, predictor: Predictor) -> float:
    return _seconds(predictor.profile_of(understood, understood.plan), understood.plan)


def _side(setting: Setting, factors: StackConstants, predictor: Predictor) -> CarriedSide:
    seconds = _step(_with(setting.understood, factors), predictor)
    return CarriedSide(setting, factors, setting.seconds / seconds)


def _with(understood: InterpretedRun, constants: StackConstants) -> InterpretedRun:
    name = f"{understood.stack.name} {hash(tuple(getattr(constants, each) for each in LEARNT))}"
    return replace(understood, stack=replace(understood.stack, name=name, constants=constants))
