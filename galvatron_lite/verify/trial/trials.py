"""Batches to try a model on, each run at once and in shares.

They are the example batch, also in other orders; and variants in which shares count unlike: targets are ignored, masks
are zero, samples are padded or shorter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.model.batch import batch_size, map_places, map_tensors, places, slice_batch
from galvatron_lite.runtime.loss.weights import TargetCount
from galvatron_lite.verify.numbers.shrink_model import with_samples
from galvatron_lite.verify.trial.double import SAMPLES, Double, PassResult, SkippedError, run_pass

SHARES = 2
ROWS = SAMPLES // SHARES  # of each share
TIME_LIMIT = 5.0  # seconds of a trial after which no further batch is begun
TOLERANCE = 2e-3
"""Relative error of a gradient that another order of sums in float32 may cause in a copy of a few layers."""
ORDERS = (0, 2, 1, 3), (0, 3, 1, 2)
"""Orders of the samples in which each two share a part once: else a loss of the largest ones may seem to be a mean."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch, at once and in shares."""

    batch: Any
    full: PassResult
    parts: tuple[Any, ...]  # of the batch, equal in samples
    shares: tuple[PassResult, ...]  # of each part
    counts_alike: bool = True  # whether shares have as many targets as one another

    def relative_error(self, weights: Sequence[float], shares: Sequence[PassResult] | None = None) -> float:
        """Return how far the weighted sum of the shares' losses and gradients is from that of the batch.

        Args:
            weights: of each share; a share of weight 0 may have a loss that is not finite.
            shares: other results than ``self.shares``.
        """
        used = [(weight, share) for weight, share in zip(weights, shares or self.shares, strict=True) if weight]
        error = abs(sum(weight * share.loss for weight, share in used) - self.full.loss) / (abs(self.full.loss) or 1.0)
        largest = {name: float(slope.abs().max()) for name, slope in self.full.gradients.items() if slope.numel()}
        noise = 1e-3 * max(largest.values(), default=0.0)
        for name, size in largest.items():
            gradient = self.full.gradients[name]
            total = sum(weight * share.gradients.get(name, torch.zeros_like(gradient)) for weight, share in used)
            error = max(error, float((total - gradient).abs().max()) / max(size, noise, 1e-30))
        return error if error == error else float("inf")


def is_close(reference: Tensor, other: Tensor | float) -> bool:
    """Whether tensors differ by less than the tolerance, relative to the largest item of the reference."""
    return bool((reference - other).abs().max() <= TOLERANCE * reference.abs().max())


def run_trials(double: Double, counts: Sequence[TargetCount], result: PassResult, size: int) -> Iterator[Trial]:
    """Yield the trial of the example batch, then those of other batches on which the model runs, for a limited time.

    Args:
        counts: of targets that the loss has means over.
        result: of a pass over the example batch.
        size: samples of the user's batch.

    Raises:
        SkippedError: the model does not run on shares of the example batch.
    """
    start = monotonic()
    first = run_trial(double, double.batch, result)
    seconds = (monotonic() - start) / SAMPLES
    yield first
    orders = ((_reorder(double.batch, order), True) for order in ORDERS)
    uneven = _uneven_batches(double.batch, counts)
    padded = ((batch, True) for batch in _padded_batches(double.batch, counts, result.constants))
    resized = ((batch, True) for batch in _resized_batches(double.batch, size, TIME_LIMIT / (2 * seconds)))
    for batch, counts_alike in chain(orders, uneven, padded, resized):
        if monotonic() - start > TIME_LIMIT:
            return
        try:
            trial = run_trial(double, batch, run_pass(double, batch), counts_alike)
        except SkippedError:
            continue
        if trial.full.is_finite:
            yield trial


def run_trial(double: Double, batch: Any, result: PassResult, counts_alike: bool = True) -> Trial:
    """Run a batch, of which the result is given, in shares."""
    samples = batch_size(batch)
    rows = samples // SHARES
    parts = tuple(slice_batch(batch, start, start + rows) for start in range(0, samples, rows))
    return Trial(batch, result, parts, tuple(run_pass(double, part) for part in parts), counts_alike)


def _reorder(batch: Any, order: Sequence[int]) -> Any:
    return map_tensors(batch, lambda tensor: tensor[list(order)] if tensor.shape[:1] == (SAMPLES,) else tensor)


def _uneven_batches(batch: Any, counts: Sequence[TargetCount]) -> Iterator[tuple[Any, bool]]:
    """Yield batches whose first share counts less.

    Its first sample has fewer targets and mask entries, and masks of the other share are full; then it has none at all;
    then its first sample has fewer of either alone. Each comes with whether shares have as many targets as one another.
    """
    ignored = {count.place: count.ignored for count in counts}
    masks = _masks(batch, ignored)

    def count_fewer(changing: Collection[str], place: str, tensor: Tensor) -> Tensor:
        if place not in changing:
            return tensor
        changed = tensor.clone()
        _after_first(changed).fill_(ignored.get(place, 0))
        if place in masks:
            changed[ROWS:] = 1
        return changed

    def count_none(place: str, tensor: Tensor) -> Tensor:
        if place not in (ignored or masks):
            return tensor
        changed = tensor.clone()
        changed[:ROWS] = ignored.get(place, 0)
        return changed

    if ignored or masks:
        yield map_places(batch, partial(count_fewer, [*ignored, *masks])), False
        yield map_places(batch, count_none), False
    if ignored and masks:
        yield map_places(batch, partial(count_fewer, ignored)), False
        yield map_places(batch, partial(count_fewer, masks)), True


def _after_first(tensor: Tensor) -> Tensor:
    """Return a view of the first sample without its first tokens: two of them, or one of short samples."""
    return tensor[0] if tensor.dim() == 1 else tensor[0, ..., 1 + (tensor.shape[-1] > 2) :]


def _padded_batches(batch: Any, counts: Sequence[TargetCount], constants: Collection[float]) -> Iterator[Any]:
    """Yield batches in which samples differ in length.

    In some, the first sample is padded, and none of the other share, with each number that a forward pass compares
    integers, or real numbers, of the samples with. In another, the last sample is shorter: each sample has an integer
    that may be its length.
    """
    ignored = {count.place: count.ignored for count in counts}
    masks = _masks(batch, ignored)
    integers = {
        place: tensor
        for place, tensor in places(batch)
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.shape[:1] == (SAMPLES,)
        and place not in masks
    }  # fmt: skip

    def pad(padded: str, constant: float, place: str, tensor: Tensor) -> Tensor:
        if place != padded:
            return tensor
        changed = tensor.clone()
        _after_first(changed).fill_(constant)
        others = tensor[tensor != constant]
        half = changed[ROWS:]
        half[half == constant] = others[0] if others.numel() else constant
        return changed

    def shorten(place: str, tensor: Tensor) -> Tensor:
        if place not in integers or place in ignored or tensor.dim() > 1:
            return tensor
        changed = tensor.clone()
        changed[-1] = max(int(tensor[-1]) // 2, min(int(tensor[-1]), 1))
        return changed

    for place, tensor in places(batch):
        if tensor.is_floating_point() and tensor.shape[:1] == (SAMPLES,) and place not in masks:
            for constant in constants:
                if isinstance(constant, float):
                    yield map_places(batch, partial(pad, place, constant))
    for place, tensor in integers.items():
        limits = torch.iinfo(tensor.dtype)
        whole = sorted(constant for constant in constants if isinstance(constant, int))
        for constant in whole if tensor.dim() > 1 and tensor.shape[-1] > 1 else ():
            if limits.min <= constant <= limits.max and constant != ignored.get(place):
                yield map_places(batch, partial(pad, place, constant))
    if any(not torch.equal(shorten(place, tensor), tensor) for place, tensor in integers.items()):
        yield map_places(batch, shorten)


def _resized_batches(batch: Any, size: int, limit: float) -> Iterator[Any]:
    """Yield batches of as many samples as the user's, of half of them, and so on: code may count them."""
    while size > SHARES and size % SHARES == 0:
        if size <= limit and size != SAMPLES:
            yield with_samples(batch, size)
        size //= SHARES


def _masks(batch: Any, ignored: Mapping[str, int]) -> list[str]:
    """Return places of tensors of the samples, without targets, that hold truth values or only zeros and ones."""
    return [
        place
        for place, tensor in places(batch)
        if place not in ignored and tensor.dim() > 0 and tensor.shape[0] == SAMPLES and prod(tensor.shape) >= SAMPLES
        and (tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all()))
    ]  # fmt: skip
