"""Scores of predictions against measurements: errors, bias, rank correlation, and regret.

With p the predicted and m the measured value of a run, its absolute percentage error is 100 |p - m| / m and its bias
100 (p - m) / m. The regret of a group of runs of one model, machine and global batch is the measured time of the run
predicted fastest over the best measured time, minus one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import StatisticsError, correlation, fmean, median

from galvatron_lite.errors import GalvatronError
from galvatron_lite.plans.schema import MemoryBreakdown, TimeBreakdown
from galvatron_lite.validate.rows import PublishedRun


class SkipError(GalvatronError):
    """A run that cannot be represented: one of few short reasons, and a detail for people with the remedy."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Measurements of a run; None if it has none."""

    step_seconds: float | None  # seconds of one optimizer step
    peak_memory: int | None  # bytes on the device, or devices, that the run reports


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions for a run."""

    step_seconds: float  # seconds of one optimizer step
    peak_memory: int  # bytes, counted as the run counts them (which rank, with or without driver context)
    device_memory: int  # bytes on the fullest device, driver context included
    capacity: int  # bytes of the device
    time: TimeBreakdown
    memory: MemoryBreakdown  # of the stage that the run reports


LEAST_RANKED = 3  # fewest runs for a rank correlation


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A run with its measurement and prediction."""

    run: PublishedRun
    measured: MeasuredRun | None  # None if the run was skipped
    outcome: Predicted | SkipError  # the prediction, or why there is none
    time: float | None = None  # predicted over measured step time; None if it is not scored
    memory: float | None = None  # predicted over measured peak memory; None if it is not scored

    @property
    def scored(self) -> bool:
        """Whether time or memory counts."""
        return self.time is not None or self.memory is not None

    @property
    def ran(self) -> bool:
        """Whether the run fitted its device."""
        return not self.run.oom and self.measured is not None

    @property
    def figures(self) -> tuple[Predicted, MeasuredRun]:
        """Prediction and measurement of a scored run."""
        assert isinstance(self.outcome, Predicted)
        assert self.measured is not None
        return self.outcome, self.measured


_WANTED = (
    "Give iter_time_s (with global_batch), tokens_per_s_per_gpu (with seq_len), samples_per_s or peak_mem_gb; "
    "of grade A-mem memory alone counts."
)


def judge(run: PublishedRun, measured: MeasuredRun, outcome: Predicted) -> ScoredRun:
    """Return a run with the ratios of prediction to measurement that its grade allows; skipped if there are none."""
    time = memory = None
    if measured.step_seconds and run.quality in ("A", "B", None):
        time = outcome.step_seconds / measured.step_seconds
    if measured.peak_memory and run.quality in ("A", "B", "A-mem", None):
        memory = outcome.peak_memory / measured.peak_memory
    if time is None and memory is None and not run.oom:
        return ScoredRun(run, measured, SkipError("nothing measured that counts", _WANTED))
    return ScoredRun(run, measured, outcome, time, memory)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one family of runs, in percent; None if nothing is scored."""

    rows: int  # runs
    scored: int  # runs scored for time or memory
    skipped: dict[str, int]  # numbers of runs that cannot be represented or do not count, by reason
    time_mape: float | None  # mean absolute error of step times
    time_median: float | None  # median absolute error of step times
    time_bias: float | None  # mean error of step times
    memory_mape: float | None  # mean absolute error of peak memory
    memory_bias: float | None  # mean error of peak memory
    spearman: float | None  # rank correlation of predicted and measured step times over the family
    regret: float | None  # mean over the groups of two runs or more
    regret_max: float | None = None  # largest of the groups
    group_spearman: float | None = None  # mean rank correlation within groups of three or more
    groups: int = 0  # groups of two runs or more
    timed: int = 0  # runs scored for time
    weighed: int = 0  # runs scored for memory
    overflowing: int = 0  # runs that ran but are predicted to exceed their device's memory
    oom: int = 0  # runs that ran out of memory
    oom_foreseen: int = 0  # of these, runs predicted to exceed their device's memory


Mean = Mapping[str, float | int | None]  # figures averaged over families

AVERAGED = (
    "time_mape", "time_median", "time_bias", "memory_mape", "memory_bias", "spearman", "regret", "regret_max",
    "group_spearman",
)  # fmt: skip
"""Figures that ``macro`` averages over families."""


def score_families(
    judged: Iterable[ScoredRun], key: Callable[[PublishedRun], str] = lambda run: run.family
) -> dict[str, Scores]:
    """Return the scores by family (or another key), in the order families first appear."""
    groups: dict[str, list[ScoredRun]] = defaultdict(list)
    for scored in judged:
        groups[key(scored.run)].append(scored)
    return {name: score(members) for name, members in groups.items()}


def score(judged: Sequence[ScoredRun]) -> Scores:
    """Return the scores of some runs."""
    times = [scored.time for scored in judged if scored.time is not None]
    memories = [scored.memory for scored in judged if scored.memory is not None]
    pairs = [_pair(scored) for scored in judged if scored.time is not None]
    groups = [group for group in decision_groups(judged) if len(group) > 1]
    regrets = [100 * regret(group) for group in groups]
    ranked = [spearman(group) for group in groups if len(group) >= LEAST_RANKED]
    correlations = [value for value in ranked if value is not None]
    predicted = [(scored, scored.outcome) for scored in judged if isinstance(scored.outcome, Predicted)]
    overflowing = [scored for scored, outcome in predicted if outcome.device_memory > outcome.capacity]
    reasons = Counter(scored.outcome.reason for scored in judged if isinstance(scored.outcome, SkipError))
    return Scores(
        rows=len(judged),
        scored=sum(scored.scored for scored in judged),
        skipped=dict(reasons.most_common()),
        time_mape=_mean([100 * abs(ratio - 1) for ratio in times]),
        time_median=100 * median(abs(ratio - 1) for ratio in times) if times else None,
        time_bias=_mean([100 * (ratio - 1) for ratio in times]),
        memory_mape=_mean([100 * abs(ratio - 1) for ratio in memories]),
        memory_bias=_mean([100 * (ratio - 1) for ratio in memories]),
        spearman=spearman(pairs) if len(pairs) >= LEAST_RANKED else None,
        regret=_mean(regrets),
        regret_max=max(regrets, default=None),
        group_spearman=_mean(correlations),
        groups=len(groups),
        timed=len(times),
        weighed=len(memories),
        overflowing=sum(scored.ran for scored in overflowing),
        oom=sum(bool(scored.run.oom) for scored, _ in predicted),
        oom_foreseen=sum(bool(scored.run.oom) for scored in overflowing),
    )


def macro(families: Iterable[Scores]) -> dict[str, float | int | None]:
    """Return the means over families that have a figure, and the sums of counts."""
    scores = list(families)
    means = {name: _mean([v for family in scores if (v := getattr(family, name)) is not None]) for name in AVERAGED}
    counts = [item.name for item in fields(Scores) if isinstance(getattr(scores[0], item.name), int)] if scores else []
    return means | {name: sum(getattr(family, name) for family in scores) for name in counts}


def macros(
    judged: Sequence[ScoredRun], key: Callable[[PublishedRun], str] = lambda run: run.family
) -> dict[str, dict[str, float | int | None]]:
    """Return ``macro`` of all families, of language models (runs with a sequence length) and of mixtures of experts."""
    language = [scored for scored in judged if scored.run.seq_len is not None]
    mixtures = [scored for scored in language if (scored.run.n_experts or 0) > 1]
    named = {"macro": judged, "macro_language": language, "macro_mixtures": mixtures}
    return {name: macro(score_families(runs, key).values()) for name, runs in named.items() if runs}


Pair = tuple[float, float]  # predicted and measured seconds


def _pair(scored: ScoredRun) -> Pair:
    predicted, measured = scored.figures
    return predicted.step_seconds, measured.step_seconds or 0.0


def decision_groups(judged: Iterable[ScoredRun]) -> list[list[Pair]]:
    """Group timed runs that differ in their plan only: equal model and input, machine, and global batch."""
    groups: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for scored in judged:
        run = scored.run
        if scored.time is not None:
            model = (run.family, run.model, run.seq_len, run.image_size)
            groups[*model, run.gpu, run.n_gpus, run.global_batch].append(_pair(scored))
    return list(groups.values())


def regret(group: Sequence[Pair]) -> float:
    """Return the measured time of the run predicted fastest (the mean of ties) over the best measured, minus one."""
    least = min(predicted for predicted, _ in group)
    best = min(measured for _, measured in group)
    return fmean(measured for predicted, measured in group if predicted == least) / best - 1


def spearman(pairs: Sequence[Pair]) -> float | None:
    """Return Spearman's rank correlation; None if one side has equal values only."""
    try:
        return correlation(*(ranks(values) for values in zip(*pairs, strict=True)))
    except StatisticsError:
        return None


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1; equal values share their mean rank."""
    positions: dict[float, list[int]] = defaultdict(list)
    for position, value in enumerate(sorted(values), 1):
        positions[value].append(position)
    return [fmean(positions[value]) for value in values]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
