"""The weights of shares with which their losses and gradients add up to those of the batch.

The user's weight is tried, or the numbers of targets of the cross-entropies that the model calls. Where none fits, the
loss is compared with sums and weighted means of its shares, for an error that says what to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.loss.weights import (
    EMPTY,
    LossWeight,
    TargetCount,
    TargetCounts,
    TermCounts,
    share_factors,
    share_scales,
    weighted,
)
from galvatron_lite.verify.trial.double import Double, PassResult, SkippedError, run_pass
from galvatron_lite.verify.trial.findings import Findings
from galvatron_lite.verify.trial.trials import SHARES, TOLERANCE, Trial

EQUAL_WEIGHTS = (1 / SHARES,) * SHARES
_MEAN, _WEIGHTED_MEAN, _SUM, _OTHER = "mean", "weighted mean", "sum", "other"

_FULL_BATCH = "keep the batch whole: a plan without data parallelism or ZeRO (dp=1), with one micro-batch"
UNEVEN = (
    "The loss is a mean in which samples weigh differently (over a mask, over what is not padding, or with weights), "
    "so it is not the mean of the losses of equal shares of a batch. Pass loss_weight=, a function that returns what "
    'the mean of some samples is divided by, such as lambda batch: batch["mask"].sum(); or '
    f"{_FULL_BATCH}. check=False trains as if all shares weighed the same."
)
SEVERAL = (
    "The loss adds means over different targets ({}), of which shares of a batch have different proportions, so that "
    f"no one weight fits. Divide each sum by a number that is in the batch, or {_FULL_BATCH}."
)
BESIDE = (
    "A term beside the cross-entropies is a mean over a mask, or compares samples with one another, so that no weights "
    f"of shares fit. Divide each sum by a number that is in the batch, or {_FULL_BATCH}."
)
NEEDLESS = (
    "With it, the losses of shares do not add up to that of the batch if shares have different numbers of targets; "
    "without it they do. Leave it out: weights that fit are determined from the batch."
)
SUM = "The loss is a sum over samples, not a mean: pass loss_reduction='sum'."


def with_loss_weight(
    findings: Findings,
    double: Double,
    trials: Sequence[Trial],
    weight: LossWeight | None,
    reduction: str,
    terms: tuple[TargetCount | None, ...],
) -> Findings:
    """Return findings with a loss weight that fits; or with the error that the user must resolve; or undivided.

    Args:
        weight: the user's; None: none.
        reduction: ``mean`` or ``sum``.
        terms: the divisors of the mean cross-entropies of the loss.
    """
    counts = distinct_counts(terms)
    target_counts = TargetCounts(counts) if counts else None
    candidates: tuple[LossWeight | None, ...] = (weight,)
    if target_counts is not None and weight is None and reduction != "sum":
        candidates = target_counts, TermCounts(terms), None
    for candidate in candidates:
        try:
            if all(adds_up(double, trial, candidate, reduction) for trial in trials):
                return replace(findings, weight=None if weight is not None else candidate)
        except InputError as error:
            if weight is not None or target_counts is None or not _all_count(trials[0], target_counts):
                return replace(findings, loss_error=error)
            return replace(findings, weight=replace(target_counts, filled=True))
    if weight is not None:
        without = with_loss_weight(findings, double, trials, None, reduction, terms)
        if without.loss_error is None and not without.undivided:
            return replace(findings, loss_error=InputError("loss_weight", "your function", NEEDLESS))
    alike = [trial for trial in trials if trial.counts_alike]
    if target_counts is not None and weight is None and all(adds_up(double, trial, None, reduction) for trial in alike):
        # right for the example; every step checks that shares count alike
        return replace(findings, weight=replace(target_counts, even=True))
    loss_error = _loss_error(trials, weight, reduction, terms)
    return replace(findings, undivided=loss_error is None, loss_error=loss_error)


def _loss_error(
    trials: Sequence[Trial], weight: LossWeight | None, reduction: str, terms: tuple[TargetCount | None, ...]
) -> InputError | None:
    """Return what to state of a loss that no weight fits; None if it is no weighted mean or sum over samples."""
    counts = distinct_counts(terms)
    if len(counts) > 1:
        names = " and ".join(count.place.lstrip(".") or "the batch" for count in counts)
        factors = TermCounts(terms).of_shares(trials[0].batch, SHARES)
        even = all(factor is None or torch.allclose(factor, torch.ones_like(factor)) for factor in factors)
        return InputError("loss", "several means", BESIDE if even else SEVERAL.format(names))
    relations = {_relation(trial, allow_sum=reduction != "sum") for trial in trials} - {_MEAN}
    if relations == {_SUM}:
        return InputError("loss_reduction", reduction, SUM)
    if relations <= {_WEIGHTED_MEAN, _SUM}:
        return InputError("loss_weight", None if weight is None else "your function", UNEVEN)
    return None


def distinct_counts(terms: Sequence[TargetCount | None]) -> tuple[TargetCount, ...]:
    """Return the divisors that differ."""
    counts: list[TargetCount] = []
    for count in terms:
        if count is not None and not any(_is_same(count, other) for other in counts):
            counts.append(count)
    return tuple(counts)


def _is_same(count: TargetCount, other: TargetCount) -> bool:
    if (count.place, count.shift, count.ignored) != (other.place, other.shift, other.ignored):
        return False
    if count.classes is None or other.classes is None:
        return count.classes is other.classes
    return torch.equal(count.classes, other.classes)


def _all_count(trial: Trial, weight: TargetCounts) -> bool:
    """Whether every share has targets that count."""
    factors = share_factors(weight, "mean", trial.batch, SHARES)
    return factors is None or bool((factors > 0).all())


def adds_up(double: Double, trial: Trial, weight: LossWeight | None, reduction: str) -> bool:
    """Whether the losses and gradients of shares add up to those of the batch under a weight.

    Raises:
        InputError: the user's weight is wrong, or gradients of a share in which nothing counts are not finite.
    """
    if isinstance(weight, TermCounts):
        scales = share_scales(weight, reduction, trial.batch, SHARES)
        try:
            shares = [run_pass(double, part, terms=scale) for part, scale in zip(trial.parts, scales, strict=True)]
        except SkippedError:
            return False
        return trial.relative_error(EQUAL_WEIGHTS, shares) <= TOLERANCE
    try:
        factors = share_factors(weight, reduction, trial.batch, SHARES)
    except InputError:
        if isinstance(weight, TargetCounts):
            return False
        raise
    weights = list(EQUAL_WEIGHTS) if factors is None else [float(factor) / SHARES for factor in factors]
    if trial.relative_error(weights) > TOLERANCE:
        return False
    if 0.0 in weights:  # nothing counts: the loss may be 0/0, but gradients are summed with those of others
        empty = trial.parts[weights.index(0.0)]
        if not run_pass(double, empty, lambda loss: weighted(loss, torch.zeros(()))).is_finite:
            raise InputError("loss", "0/0", EMPTY)
    return True


def _relation(trial: Trial, *, allow_sum: bool) -> str:
    """Return what the loss of the batch is of the losses of its shares; their mean, where one is not finite."""
    if not all(share.is_finite for share in trial.shares):
        return _MEAN
    if trial.relative_error(EQUAL_WEIGHTS) <= TOLERANCE:
        return _MEAN
    if allow_sum and trial.relative_error([1.0] * SHARES) <= TOLERANCE:
        return _SUM
    weights = _fit_weights(trial)
    fits = min(weights) > -TOLERANCE and abs(sum(weights) - 1) <= TOLERANCE
    return _WEIGHTED_MEAN if fits and trial.relative_error(weights) <= 2 * TOLERANCE else _OTHER


def _fit_weights(trial: Trial) -> list[float]:
    """Return the weights with which gradients of shares come nearest to that of the batch (least squares)."""
    names = list(trial.full.gradients)

    def dot(first: PassResult, second: PassResult) -> float:
        pairs = ((first.gradients.get(name), second.gradients.get(name)) for name in names)
        return sum(float((a.double() * b.double()).sum()) for a, b in pairs if a is not None and b is not None)

    products = torch.tensor([[dot(a, b) for b in trial.shares] for a in trial.shares], dtype=torch.float64)
    target = torch.tensor([dot(a, trial.full) for a in trial.shares], dtype=torch.float64)
    weights: list[float] = (torch.linalg.pinv(products, rtol=1e-9) @ target).tolist()
    return weights
