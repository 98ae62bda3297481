"""Weights of the losses of the shares of a batch, so that their mean is the loss of the batch.

A mean over samples is the mean of the means of equal shares. A mean over labels that are not ignored, or weighted by
class, is not: each share's mean has the weight of its labels. Every rank has the global batch, so it computes the
weights of all shares before the step, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own convention
from torch.overrides import TorchFunctionMode

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import ITEMS, batch_size, places, slice_batch

REDUCTIONS = ("mean", "sum")
EVEN = 1e-6
"""Relative difference up to which weights are equal."""


@dataclass(frozen=True, slots=True)
class TargetCount:
    """The divisor of a mean cross-entropy: the number of targets that are not ignored, weighted by class."""

    place: str  # of the targets in a batch; see ``model.batch.map_places``
    shift: int  # how many tokens at the start of each sample are no target (1: the next token is predicted)
    ignored: int  # the target that is ignored
    classes: Tensor | None = None  # weight of each class; None: equal

    def by_sample(self, batch: Any) -> Tensor | None:
        """The weight of each sample (samples,); None if the batch has no such targets."""
        targets = dict(places(batch)).get(self.place)
        if targets is None:
            return None
        targets = targets[:, self.shift :] if self.shift else targets
        counts = targets != self.ignored
        if self.classes is not None:
            classes = self.classes.to(targets.device, torch.float64)
            counts = torch.where(counts, classes[torch.where(counts, targets, 0)], 0.0)
        return counts.reshape(len(targets), -1).sum(1, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class TargetCounts:
    """The weight of a loss of mean cross-entropies, as the trial of the loss determines it."""

    counts: tuple[TargetCount, ...]  # of each cross-entropy with other targets, or other weights of classes
    even: bool = False  # whether the loss has other terms, so that all shares must have equal weights
    filled: bool = False  # whether the loss, or its gradient, is not finite for a share with no weight: none may be so

    def __call__(self, batch: Any) -> Tensor:
        """The weight of some samples."""
        return self.of_shares(batch, 1).sum()

    def of_shares(self, batch: Any, shares: int) -> Tensor:
        """The weights of equal shares of a batch (shares,).

        Raises:
            InputError: a share has no weight and the loss is then not finite, or terms would need different weights.
        """
        by_sample = [weights for count in self.counts if (weights := count.by_sample(batch)) is not None]
        if not by_sample:
            return torch.ones(shares, dtype=torch.float64)
        by_share = [weights.reshape(shares, -1).sum(1) for weights in by_sample]
        if self.filled and any((weights <= 0).any() for weights in by_share):
            raise InputError("loss", "0/0", EMPTY)
        relative = [weights / weights.mean() for weights in by_share]
        relative = [torch.ones_like(by_share[0]), *relative] if self.even else relative
        if any(not torch.allclose(weights, relative[0], rtol=EVEN, atol=EVEN) for weights in relative[1:]):
            names = ", ".join(count.place.lstrip(".") or "the batch" for count in self.counts)
            remedy = (
                f"It is a sum of {'a mean' if self.even else 'means'} over {'' if self.even else 'different '}targets "
                f"({names}), which count unlike in the shares of this batch{', and of other terms' * self.even}. "
                "Give every share as many that count, or a plan that keeps the batch whole (data and zero 1, "
                "one micro-batch)."
            )
            raise InputError("loss", "several means", remedy)
        return by_share[0]


EMPTY = (
    "In a share of a batch in which nothing counts, the gradient of this loss is not finite. Divide by .clamp(min=1) "
    "of the count, so that it is zero."
)


@dataclass(frozen=True, slots=True)
class TermCounts:
    """The weights of a loss's mean cross-entropies, in the order in which the model calls them.

    All other terms are means over samples.
    """

    terms: tuple[TargetCount | None, ...]  # None: a mean over samples

    def of_shares(self, batch: Any, shares: int) -> list[Tensor | None]:
        """The factors of each term, by equal share (shares,); None: all 1."""
        factors: list[Tensor | None] = []
        for term in self.terms:
            samples = None if term is None else term.by_sample(batch)
            counts = None if samples is None else samples.reshape(shares, -1).sum(1)
            factors.append(None if counts is None else counts / counts.mean())
        return factors


LossWeight = Callable[[Any], Tensor | float] | TermCounts
"""``loss_weight(batch)`` is the divisor of the mean loss of some samples (the number of labels that count)."""


def mean_of_targets(function: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a mean cross-entropy over classes, by name; None for any other call."""
    if function not in (F.cross_entropy, F.nll_loss):
        return None
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    is_mean = named.get("reduction", "mean") == "mean" and not named["target"].is_floating_point()
    return named if is_mean else None


class ScaledTerms(TorchFunctionMode):
    """Multiplies the mean cross-entropies of a share by factors, in the order of their calls."""

    def __init__(self, factors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._factors, self._count = factors, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if mean_of_targets(function, args, kwargs or {}) is None:
            return result
        self._count += 1
        if self._count > len(self._factors):
            remedy = "This batch makes the model call more of them than the example did: pass loss_weight=."
            raise InputError("cross-entropies of a loss", self._count, remedy)
        return weighted(result, self._factors[self._count - 1])


@dataclass(frozen=True, slots=True)
class ShareScale:
    """The factor of the loss of a share of a batch, or those of its terms."""

    total: Tensor | None = None
    terms: tuple[Tensor | None, ...] = ()

    def inside(self) -> AbstractContextManager[Any]:
        """The context in which to call the model and ``loss_fn``."""
        return ScaledTerms(self.terms) if self.terms else nullcontext()


def share_scales(weight: LossWeight | None, reduction: str, batch: Any, shares: int) -> list[ShareScale]:
    """The scales of the equal shares of a batch; arguments and errors as of ``share_factors``."""
    if isinstance(weight, TermCounts):
        if shares == 1 or _has_count(batch):
            return [ShareScale()] * shares
        terms = weight.of_shares(batch, shares)
        rows = zip(*([None] * shares if term is None else term for term in terms), strict=True)
        return [ShareScale(terms=tuple(row)) for row in rows]
    factors = share_factors(weight, reduction, batch, shares)
    return [ShareScale()] * shares if factors is None else [ShareScale(factor) for factor in factors]


def share_factors(
    weight: Callable[[Any], Tensor | float] | None, reduction: str, batch: Any, shares: int
) -> Tensor | None:
    """The factors (shares,) of the losses of shares with which their mean is the loss of the batch; None: all 1.

    Shares are equal and consecutive, over all micro-batches of the global batch. If the batch has
    ``num_items_in_batch``, each share has its part of it already. Without a weight all shares have the same.

    Raises:
        InputError: a weight is negative or not finite.
    """
    if shares == 1:
        return None
    if reduction == "sum":
        return torch.full((shares,), float(shares))
    if weight is None or _has_count(batch):
        return None
    weights = weight.of_shares(batch, shares) if isinstance(weight, TargetCounts) else _called(weight, batch, shares)
    return weights / weights.mean()


def _has_count(batch: Any) -> bool:
    return isinstance(batch, Mapping) and batch.get(ITEMS) is not None


def check_reduction(reduction: str, weight: LossWeight | None) -> None:
    """Raise InputError for an unknown reduction, or a sum with a weight."""
    if reduction not in REDUCTIONS:
        raise InputError("loss_reduction", reduction, "Give 'mean' or 'sum'.")
    if reduction == "sum" and weight is not None:
        raise InputError("loss_weight", "with loss_reduction='sum'", "A sum needs no weight: leave one of them out.")


def _called(weight: Callable[[Any], Tensor | float], batch: Any, shares: int) -> Tensor:
    rows = batch_size(batch) // shares
    parts = (slice_batch(batch, start, start + rows) for start in range(0, shares * rows, rows))
    weights = torch.tensor([float(weight(part)) for part in parts], dtype=torch.float64)
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        remedy = "It must give a number of at least 0 for any samples of a batch: what their mean loss is a mean over."
        raise InputError("loss_weight", weights.tolist(), remedy)
    return weights


def weighted(loss: Tensor, factor: Tensor | None) -> Tensor:
    """The loss of a share times its factor; zero if the factor is zero, as the mean is then 0/0."""
    if factor is None:
        return loss
    factor = factor.to(loss.device, torch.promote_types(loss.dtype, torch.float32))
    scaled = loss * factor
    return torch.where(factor == 0, torch.zeros_like(scaled), scaled)


def check_even(scales: Sequence[ShareScale], trainer: str) -> None:
    """Raise InputError if shares have different weights, for a trainer that supports only equal weights."""
    factors = torch.tensor([float(one) for scale in scales for one in (scale.total, *scale.terms) if one is not None])
    if not torch.allclose(factors, torch.ones_like(factors), rtol=EVEN):
        few = ", ".join(f"{float(factor):.3g}" for factor in factors[:4]) + (", ..." if len(factors) > 4 else "")
        remedy = (
            f"Micro-batches weigh the same under {trainer}; in this batch they do not ({few}). Give each as "
            "many labels that count, or a plan of synchronous training."
        )
        raise InputError("loss_weight", trainer, remedy)
