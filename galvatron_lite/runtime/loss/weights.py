"""How much the loss of each share of a batch counts, so that their mean is the loss of the batch.

A mean over samples is the mean of its equal shares' means. One over labels that count, or weighted by class, is not: a
share's mean counts as much as the labels in it. Every rank sees the global batch, so every rank computes these weights
for all shares before the step, and nothing is sent.
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
"""Relative difference up to which weights are alike."""


@dataclass(frozen=True, slots=True)
class TargetCount:
    """What a mean cross-entropy divides by: its targets that are not ignored, each times the weight of its class."""

    place: str  # of the targets in a batch; see ``model.batch.map_places``
    shift: int  # how many tokens at the start of each sample are no target (1: the next token is predicted)
    ignored: int  # the target that does not count
    classes: Tensor | None = None  # weight of each class; None: all alike

    def by_sample(self, batch: Any) -> Tensor | None:
        """The weight of each sample (samples,); None where the batch has no such targets."""
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
    """A loss weight found by itself: a loss made of mean cross-entropies."""

    counts: tuple[TargetCount, ...]  # of each one with targets, or weights of classes, of its own
    even: bool = False  # whether the loss has other terms, whose shares weigh alike: so must these
    filled: bool = False  # whether the loss, or its gradient, is not finite where nothing counts: no share may be so

    def __call__(self, batch: Any) -> Tensor:
        """The weight of some samples."""
        return self.of_shares(batch, 1).sum()

    def of_shares(self, batch: Any, shares: int) -> Tensor:
        """The weights of equal shares of a batch (shares,)."""
        samples = [one for count in self.counts if (one := count.by_sample(batch)) is not None]
        if not samples:
            return torch.ones(shares, dtype=torch.float64)
        each = [sample.reshape(shares, -1).sum(1) for sample in samples]
        if self.filled and any((one <= 0).any() for one in each):
            raise InputError("loss", "0/0", EMPTY)
        relative = [one / one.mean() for one in each]
        relative = [torch.ones_like(each[0]), *relative] if self.even else relative
        if any(not torch.allclose(one, relative[0], rtol=EVEN, atol=EVEN) for one in relative[1:]):
            names = ", ".join(count.place.lstrip(".") or "the batch" for count in self.counts)
            remedy = (
                f"It is a sum of {'a mean' if self.even else 'means'} over {'' if self.even else 'different '}targets "
                f"({names}), which count unlike in the shares of this batch{', and of other terms' * self.even}. "
                "Give every share as many that count, or a plan that keeps the batch whole (data and zero 1, "
                "one micro-batch)."
            )
            raise InputError("loss", "several means", remedy)
        return each[0]


EMPTY = (
    "In a share of a batch in which nothing counts, the gradient of this loss is not finite. Divide by .clamp(min=1) "
    "of the count, so that it is zero."
)


@dataclass(frozen=True, slots=True)
class TermCounts:
    """Weights found for the terms of a loss: its mean cross-entropies, in the order in which the model calls them.

    All other terms are means over samples.
    """

    terms: tuple[TargetCount | None, ...]  # None: it weighs as a mean over samples

    def of_shares(self, batch: Any, shares: int) -> list[Tensor | None]:
        """What each term of equal shares is multiplied by, each (shares,); None: 1 everywhere."""
        factors: list[Tensor | None] = []
        for term in self.terms:
            samples = None if term is None else term.by_sample(batch)
            counts = None if samples is None else samples.reshape(shares, -1).sum(1)
            factors.append(None if counts is None else counts / counts.mean())
        return factors


LossWeight = Callable[[Any], Tensor | float] | TermCounts
"""``loss_weight(batch)`` of some samples: what their mean loss is a mean over (a number of labels that count)."""


def mean_of_targets(function: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """Arguments of a mean cross-entropy over classes, by name; None: the call is none."""
    if function not in (F.cross_entropy, F.nll_loss):
        return None
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    is_mean = named.get("reduction", "mean") == "mean" and not named["target"].is_floating_point()
    return named if is_mean else None


class ScaledTerms(TorchFunctionMode):
    """Multiplies the mean cross-entropies of a share, in the order of their calls."""

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
        factor = self._factors[self._count - 1]
        return weighted(result, factor)


@dataclass(frozen=True, slots=True)
class ShareScale:
    """What the loss of a share of a batch, or terms of it, are multiplied by."""

    total: Tensor | None = None
    terms: tuple[Tensor | None, ...] = ()

    def inside(self) -> AbstractContextManager[Any]:
        """Around the calls of the model and of ``loss_fn``."""
        return ScaledTerms(self.terms) if self.terms else nullcontext()


def share_scales(weight: LossWeight | None, reduction: str, batch: Any, shares: int) -> list[ShareScale]:
    """The scale of each of the equal shares of a batch; arguments and errors as of ``share_factors``."""
    if isinstance(weight, TermCounts):
        if shares == 1 or _has_count(batch):
            return [ShareScale()] * shares
        terms = weight.of_shares(batch, shares)
        rows = zip(*([None] * shares if term is None else term.float() for term in terms), strict=True)
        return [ShareScale(terms=tuple(row)) for row in rows]
    factors = share_factors(weight, reduction, batch, shares)
    return [ShareScale()] * shares if factors is None else [ShareScale(factor) for factor in factors.float()]


def share_factors(
    weight: Callable[[Any], Tensor | float] | None, reduction: str, batch: Any, shares: int
) -> Tensor | None:
    """Factors (shares,) on the loss of each share, so that the mean over shares is the loss of the batch; None: all 1.

    Shares are equal, one after the other, over all micro-batches of the global batch; where that says
    ``num_items_in_batch``, they have their part of it already. Without a weight all weigh the same.

    Raises:
        InputError: a weight that is negative or no number.
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
    """Raise InputError for an unknown reduction, or a sum that is weighted."""
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
    """The loss of a share times its factor; of a share in which nothing counts, whose mean is 0/0, zero."""
    if factor is None:
        return loss
    factor = factor.to(loss.device)
    scaled = loss * factor
    return torch.where(factor == 0, torch.zeros_like(scaled), scaled)


def check_even(scales: Sequence[ShareScale], trainer: str) -> None:
    """Raise InputError where shares weigh unlike, for a trainer that takes them all alike."""
    factors = torch.tensor([float(one) for scale in scales for one in (scale.total, *scale.terms) if one is not None])
    if not torch.allclose(factors, torch.ones_like(factors), rtol=EVEN):
        few = ", ".join(f"{float(factor):.3g}" for factor in factors[:4]) + (", ..." if len(factors) > 4 else "")
        remedy = (
            f"Micro-batches weigh the same under {trainer}; in this batch they do not ({few}). Give each as "
            "many labels that count, or a plan of synchronous training."
        )
        raise InputError("loss_weight", trainer, remedy)
