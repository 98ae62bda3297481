"""Predictions beside measurements: errors, bias, rank correlation, and the regret of choosing by prediction.

With p the predicted and m the measured value of a run: absolute percentage error 100 |p - m| / m, bias 100 (p - m) / m.
Within a group of runs of one model, machine and global batch the regret of choosing by prediction is the measured time
of the run predicted fastest over the best measured time, less one.
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
    """A run that cannot be represented: a short reason, one of few, and for people what to give instead."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run measured, in seconds and bytes; None where it did not."""

    step_seconds: float | None  # of one optimizer step
    peak_memory: int | None  # on the device, or devices, that the run speaks of


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the cost model says of a run."""

    step_seconds: float  # of one optimizer step
    peak_memory: int  # bytes, measured in the way the run measured it (which rank, with or without driver context)
    device_memory: int  # bytes on the fullest device, driver context included; to be held against its capacity
    capacity: int  # bytes of the device
    time: TimeBreakdown  # where the step goes
    memory: MemoryBreakdown  # where the memory of the stage that the run speaks of goes


LEAST_RANKED = 3  # runs a group or family needs for a rank correlation


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A run, what it measured and what was predicted."""

    run: PublishedRun
    measured: MeasuredRun | None  # its figures; None where the run was skipped
    outcome: Predicted | SkipError  # the prediction, or why there is none
    time: float | None = None  # predicted over measured step time; None where it is not scored
    memory: float | None = None  # predicted over measured peak memory; None where it is not scored

    @property
    def scored(self) -> bool:
        """Whether time or memory counts."""
        return self.time is not None or self.memory is not None

    @property
    def ran(self) -> bool:
        """Whether the run is known to have fitted its device."""
        return not self.run.oom and self.measured is not None


_WANTED = (
    "Give iter_time_s (with global_batch), tokens_per_s_per_gpu (with seq_len), samples_per_s or peak_mem_gb; "
    "of grade A-mem memory alone counts."
)


def judge(run: PublishedRun, measured: MeasuredRun, outcome: Predicted) -> ScoredRun:
    """A prediction beside its measurement; a run of a grade that does not count is skipped."""
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
    """Scores of one family of runs; percentages, None where nothing is scored."""

    rows: int  # rows, scored: runs in all, and of which time or memory counts
    scored: int
    skipped: dict[str, int]  # runs that cannot be represented or do not count, by reason
    # time_mape, time_median, time_bias: of step times: mean and median absolute percentage error, mean error
    time_mape: float | None
    time_median: float | None
    time_bias: float | None
    memory_mape: float | None  # memory_mape, memory_bias: of peak memory
    memory_bias: float | None
    spearman: float | None  # rank correlation of predicted and measured step times over the family
    regret: float | None  # regret, regret_max: mean and largest over the groups of two runs or more
    regret_max: float | None = None
    group_spearman: float | None = None  # mean rank correlation within groups of three or more
    groups: int = 0  # of two runs or more
    timed: int = 0  # timed, weighed: runs scored for time and for memory
    weighed: int = 0
    overflowing: int = 0  # runs that ran but are predicted to need more than their device has
    oom: int = 0  # oom, oom_foreseen: runs that ran out of memory, and of which that is predicted
    oom_foreseen: int = 0


Mean = Mapping[str, float | int | None]  # figures averaged over families

AVERAGED = (
    "time_mape", "time_median", "time_bias", "memory_mape", "memory_bias", "spearman", "regret", "regret_max",
    "group_spearman",
)  # fmt: skip
"""Figures that the macro average takes over families."""


def score_families(
    judged: Iterable[ScoredRun], key: Callable[[PublishedRun], str] = lambda run: run.family
) -> dict[str, Scores]:
    """Scores by family (or another key), in the order families first appear."""
    groups: dict[str, list[ScoredRun]] = defaultdict(list)
    for one in judged:
        groups[key(one.run)].append(one)
    return {name: score(members) for name, members in groups.items()}


def score(judged: Sequence[ScoredRun]) -> Scores:
    """Scores of some runs."""
    times = [one.time for one in judged if one.time is not None]
    memories = [one.memory for one in judged if one.memory is not None]
    pairs = [_pair(one) for one in judged if one.time is not None]
    groups = [group for group in decision_groups(judged) if len(group) > 1]
    regrets = [100 * regret(group) for group in groups]
    ranked = [spearman(group) for group in groups if len(group) >= LEAST_RANKED]
    ratios = [value for value in ranked if value is not None]
    predicted = [(one, one.outcome) for one in judged if isinstance(one.outcome, Predicted)]
    over = [one for one, outcome in predicted if outcome.device_memory > outcome.capacity]
    return Scores(
        rows=len(judged),
        scored=sum(one.scored for one in judged),
        skipped=dict(Counter(one.outcome.reason for one in judged if isinstance(one.outcome, SkipError)).most_common()),
        time_mape=_mean([100 * abs(ratio - 1) for ratio in times]),
        time_median=100 * median(abs(ratio - 1) for ratio in times) if times else None,
        time_bias=_mean([100 * (ratio - 1) for ratio in times]),
        memory_mape=_mean([100 * abs(ratio - 1) for ratio in memories]),
        memory_bias=_mean([100 * (ratio - 1) for ratio in memories]),
        spearman=spearman(pairs) if len(pairs) >= LEAST_RANKED else None,
        regret=_mean(regrets),
        regret_max=max(regrets, default=None),
        group_spearman=_mean(ratios),
        groups=len(groups),
        timed=len(times),
        weighed=len(memories),
        overflowing=sum(one.ran for one in over),
        oom=sum(bool(one.run.oom) for one, _ in predicted),
        oom_foreseen=sum(bool(one.run.oom) for one in over),
    )


def macro(families: Iterable[Scores]) -> dict[str, float | int | None]:
    """Plain means over families that have the figure, and totals of what is counted."""
    every = list(families)
    means = {name: _mean([v for scores in every if (v := getattr(scores, name)) is not None]) for name in AVERAGED}
    counted = [item.name for item in fields(Scores) if isinstance(getattr(every[0], item.name), int)] if every else []
    return means | {name: sum(getattr(scores, name) for scores in every) for name in counted}


def macros(
    judged: Sequence[ScoredRun], key: Callable[[PublishedRun], str] = lambda run: run.family
) -> dict[str, dict[str, float | int | None]]:
    """The macro average over all families, over the language models' alone (runs with a sequence length) and over those
    of mixtures of experts."""
    language = [one for one in judged if one.run.seq_len is not None]
    mixtures = [one for one in language if (one.run.n_experts or 0) > 1]
    named = {"macro": judged, "macro_language": language, "macro_mixtures": mixtures}
    return {name: macro(score_families(runs, key).values()) for name, runs in named.items() if runs}


Pair = tuple[float, float]  # predicted and measured seconds


def _pair(one: ScoredRun) -> Pair:
    assert isinstance(one.outcome, Predicted)
    assert one.measured is not None
    return one.outcome.step_seconds, one.measured.step_seconds or 0.0


def decision_groups(judged: Iterable[ScoredRun]) -> list[list[Pair]]:
    """Timed runs that differ in their plan only: one model and input, one machine, one global batch."""
    groups: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for one in judged:
        run = one.run
        if one.time is not None:
            model = (run.family, run.model, run.seq_len, run.image_size)
            groups[*model, run.gpu, run.n_gpus, run.global_batch].append(_pair(one))
    return list(groups.values())


def regret(group: Sequence[Pair]) -> float:
    """Measured time of the run predicted fastest over the best measured, less one; the mean of equal predictions."""
    least = min(predicted for predicted, _ in group)
    best = min(measured for _, measured in group)
    return fmean(measured for predicted, measured in group if predicted == least) / best - 1


def spearman(pairs: Sequence[Pair]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, equal values sharing a mean rank; None without spread."""
    try:
        return correlation(*(ranks(values) for values in zip(*pairs, strict=True)))
    except StatisticsError:
        return None


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values), 1):
        places[value].append(place)
    return [fmean(places[value]) for value in values]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
