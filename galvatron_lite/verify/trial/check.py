"""Whether a model's loss and gradients of a batch are those of its shares, found out before the first step.

A small copy of the model is run on the example batch at once, and on shares of it; also on batches made uneven, in
which targets are ignored and masks are zero. What a loss weight makes equal is trained under every plan. Everything
else is an error with its remedy, or rules plans out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import isclose
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import LossFn, map_places, map_tensors, model_inputs, places, slice_batch
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace.flow import at
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
from galvatron_lite.verify.trial.attributes import same_values
from galvatron_lite.verify.trial.double import (
    SAMPLES,
    CallObserver,
    Double,
    NotedBatch,
    PassResult,
    SkippedError,
    make_double,
    masks_of,
    norms_of_parts,
    run_pass,
    runs_on,
    terms_of,
)
from galvatron_lite.verify.trial.findings import Findings
from galvatron_lite.verify.trial.reads import Answer, ChangedReads, Site, decides, name_of_site

SHARES = 2
ENOUGH = 5.0  # seconds of a trial after which no further batch is begun
TOLERANCE = 2e-3
"""Relative error of a gradient that another order of sums in float32 may make in a copy of a few layers."""
MEAN, SUM, WHOLE = "weighted mean", "sum", "whole"
_EVEN = [1 / SHARES] * SHARES
ORDERS = (0, 2, 1, 3), (0, 3, 1, 2)
"""Of the samples, so that each two are once in one share: a loss of the largest ones may else seem to be a mean."""


def try_model(
    model: nn.Module,
    batch: Any,
    layers: Sequence[Layer],
    *,
    loss_fn: LossFn | None = None,
    weight: LossWeight | None = None,
    reduction: str = "mean",
    init_fn: Callable[[nn.Module], None] | None = None,
) -> Findings:
    """Find out what of a model depends on how a batch is shared."""
    try:
        double = replace(make_double(model, batch, layers, init_fn), loss_fn=loss_fn)
    except (SkippedError, InputError) as error:
        return Findings(skipped=str(error))
    try:
        observer = CallObserver(double, model)
        full_pass = run_pass(double, double.batch, observer=observer)
        noted = NotedBatch(double.batch) if loss_fn is not None and isinstance(double.batch, Mapping) else None
        noting = double
        if loss_fn is not None and noted is not None:
            noting = replace(double, loss_fn=lambda output, _: loss_fn(output, noted))
        again = run_pass(noting, double.batch, seed=1, other_seed=1)
    except (SkippedError, InputError) as error:
        # rows of one tensor may number those of another, as edges do nodes: no share of such a batch runs
        return Findings(skipped=str(error), undivided=runs_on(double, batch))
    outside = tuple(observer.seen.outside)
    if again.loss != full_pass.loss and full_pass.is_finite:
        if run_pass(double, double.batch).loss != full_pass.loss:
            return Findings(unsteady=True)
        return Findings(
            outside=outside,
            draws_elsewhere=run_pass(double, double.batch, other_seed=1).loss != full_pass.loss,
            skipped="the loss of the same batch is another one in every pass, also without dropout",
        )
    if not full_pass.is_finite:
        return Findings(skipped=f"the loss of the example batch, or a gradient of it, is not finite ({full_pass.loss})")
    terms = terms_of(observer.seen, double.batch)
    counts = _unlike(terms)
    try:
        kept = _kept(double, full_pass)
        trials = list(_trials(double, counts, full_pass))
        buffers = _buffers(model, double, trials[0])
        remembered = _remembered(double, trials[0], [name for name, rule in buffers if not rule])
    except SkippedError as error:  # in a share of the batch
        return Findings(skipped=str(error), undivided=True)
    held = [path for layer in layers for path in layer.modules]
    modules = dict(double.model.named_modules())
    elsewhere = [name for name in kept if name.rpartition(".")[0] not in modules]  # read by layers, or around them
    taken = model_inputs(double.model, double.batch)
    findings = Findings(
        outside=outside,
        kept=kept,
        kept_inside=any(name in elsewhere or any(at(name, path) for path in held) for name in kept),
        kept_around=any(name in elsewhere or not any(at(name, path) for path in held) for name in kept),
        buffers=buffers,
        remembered=(*remembered, *(name for name in kept if not _kept_alike(name, trials[0]))),
        loose=tuple(name for name, _ in buffers if not any(at(name, path) for path in held)),
        unread=() if noted is None else tuple(sorted(noted.keys() - noted.read - taken.keys())),
        leaking=tuple(dict.fromkeys(observer.seen.leaking)),
        unheld=tuple(observer.seen.unheld.values()),
        sparse=full_pass.sparse,
        written=tuple(sorted(double.written.union(full_pass.written))),
        differentiates=observer.seen.differentiates,
    )
    written = full_pass.written.items()
    unlike = any(not _close(one, share.written.get(name, 0.0)) for share in trials[0].shares for name, one in written)
    if unlike or norms_of_parts(model, batch):
        return replace(findings, undivided=True)  # each rank would change them by its own samples
    findings = _with_weight(findings, double, trials, weight, reduction, counts, terms)
    return findings if findings.undivided else _with_reads(findings, double, trials)


def _with_reads(findings: Findings, double: Double, trials: Sequence[Trial]) -> Findings:
    """With the places where values of the samples decide what runs."""
    full, compares, asks = trials[0].full, list[str](), list[str]()

    def changes(site: Site, answer: Answer) -> bool:
        try:
            other = run_pass(double, trials[0].batch, answers=ChangedReads(site, len(full.reads[site].values), answer))
        except SkippedError:  # an assertion; a share that does not run says so
            return False
        buffers = any(not torch.equal(one, other.buffers[name]) for name, one in full.buffers.items())
        return buffers or other.loss != other.loss or _relative_error(full, [other], [1.0]) > TOLERANCE

    for site, read in full.reads.items():
        if any(_read_apart(one, site) for one in trials) or all(_is_read_by_share(one, site) for one in trials):
            continue
        if decides(read.values, partial(changes, site)):
            (compares if read.compared else asks).append(name_of_site(site))
    for site, (numbers, total) in full.bends.items():
        bends = [one.bends.get(site, (0, total)) for one in trials[0].shares]
        # of numbers that each sample has there would be fewer in a share
        if all(one[0] == numbers for one in bends) and any(
            abs(one[1] - total) > TOLERANCE * abs(total) for one in bends
        ):
            compares.append(name_of_site(site))
    return replace(findings, compares=tuple(dict.fromkeys(compares)), asks=tuple(dict.fromkeys(asks)))


def _read_apart(trial: Trial, site: Site) -> bool:
    """Whether shares of a batch read other truths at a site than the batch at once."""
    every = [one.reads[site].values if site in one.reads else [] for one in (trial.full, *trial.shares)]
    return isinstance(next((one[0] for one in every if one), None), bool) and any(one != every[0] for one in every)


def _is_read_by_share(trial: Trial, site: Site) -> bool:
    """Whether the batch reads at a site what its shares read, one after another, as where each sample is matched.

    Only for real numbers: truths and whole numbers may be the same by chance.
    """
    shares = [share.reads[site].values if site in share.reads else [] for share in trial.shares]
    values, together = trial.full.reads[site].values, [value for part in shares for value in part]
    if len(together) != len(values) or not all(shares) or not all(isinstance(value, float) for value in values):
        return False
    return all(map(partial(isclose, rel_tol=1e-5, abs_tol=1e-6), values, together))


def _fills(trial: Trial, weight: TargetCounts) -> bool:
    """Whether no share of a trial is without anything that counts."""
    factors = share_factors(weight, "mean", trial.batch, SHARES)
    return factors is None or bool((factors > 0).all())


def _unlike(terms: Sequence[TargetCount | None]) -> tuple[TargetCount, ...]:
    """Those that are unlike."""
    counts: list[TargetCount] = []
    for count in terms:
        if count is not None and not any(_same(count, other) for other in counts):
            counts.append(count)
    return tuple(counts)


def _same(one: TargetCount, other: TargetCount) -> bool:
    if (one.place, one.shift, one.ignored) != (other.place, other.shift, other.ignored):
        return False
    if one.classes is None or other.classes is None:
        return one.classes is other.classes
    return torch.equal(one.classes, other.classes)


def _with_weight(
    findings: Findings,
    double: Double,
    trials: Sequence[Trial],
    weight: LossWeight | None,
    reduction: str,
    counts: tuple[TargetCount, ...],
    terms: tuple[TargetCount | None, ...],
) -> Findings:
    """With what makes the loss of a batch that of its shares: the weight that was given, or one that is found; or with
    what has to be said of the loss."""
    target_counts = TargetCounts(counts) if counts else None
    by_term = TermCounts(terms) if counts else None
    for candidate in (weight,) if weight is not None or reduction == "sum" else (target_counts, by_term, None):
        try:
            if all(_equal(double, trial, candidate, reduction) for trial in trials):
                return replace(findings, weight=None if weight is not None else candidate)
        except InputError as error:
            if weight is not None or target_counts is None or not _fills(trials[0], target_counts):
                return replace(findings, unsaid=error)
            return replace(findings, weight=replace(target_counts, filled=True))
    if weight is not None:
        without = _with_weight(findings, double, trials, None, reduction, counts, terms)
        if without.unsaid is None and not without.undivided:
            return replace(findings, unsaid=InputError("loss_weight", "that was given", NEEDLESS))
    alike = [trial for trial in trials if trial.counts_alike]
    if target_counts is not None and weight is None and all(_equal(double, trial, None, reduction) for trial in alike):
        # right for the example; its counts are compared in every step
        return replace(findings, weight=replace(target_counts, even=True))
    if len(counts) > 1:
        names = " and ".join(count.place.lstrip(".") or "the batch" for count in counts)
        factors = TermCounts(terms).of_shares(trials[0].batch, SHARES)
        even = all(one is None or torch.allclose(one, torch.ones_like(one)) for one in factors)
        remedy = BESIDE if even else SEVERAL.replace("NAMES", names)
        return replace(findings, unsaid=InputError("loss", "several means", remedy))
    kinds = {_kind(trial, sums=reduction != "sum") for trial in trials} - {""}
    if kinds == {SUM}:
        remedy = "The loss is a sum over samples: pass loss_reduction='sum'."
        return replace(findings, unsaid=InputError("loss_reduction", reduction, remedy))
    if kinds <= {MEAN, SUM}:
        value = None if weight is None else "that was given"
        return replace(findings, unsaid=InputError("loss_weight", value, WEIGHT))
    return replace(findings, undivided=True)


WEIGHT = (
    "The loss is a mean in which samples weigh unlike: over a mask, over what is not padding, or with weights of its "
    "own. Pass loss_weight=, a function that counts what the mean of some samples is taken over, such as lambda batch: "
    'batch["mask"].sum(); or keep the batch whole: a plan without data parallelism or ZeRO (dp=1) of one micro-batch. '
    "check=False trains as if all shares weighed the same."
)
_DIVIDE = (
    "Divide each sum by a number that is in the batch, or keep the batch whole: a plan without data parallelism and "
    "ZeRO (dp=1), of one micro-batch."
)
SEVERAL = (
    "The loss adds means over different targets (NAMES), of which shares of a batch have unlike numbers: no one "
    f"weight fits. {_DIVIDE}"
)
BESIDE = f"A term beside the cross-entropies is a mean over a mask, or compares samples with one another. {_DIVIDE}"
NEEDLESS = (
    "It does not fit batches whose shares have unlike numbers of targets. Leave it out: weights that fit are found."
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch, at once and in shares."""

    batch: Any
    full: PassResult
    parts: tuple[Any, ...]  # of the batch
    shares: tuple[PassResult, ...]  # of each part
    counts_alike: bool = True  # whether shares have as many targets and mask entries as one another


def _trials(double: Double, counts: Sequence[TargetCount], result: PassResult) -> Iterator[Trial]:
    """The example, also in other orders, and batches made uneven of it; those on which the model does not run are left
    out."""
    begun = monotonic()
    yield _tried(double, double.batch, result)
    orders = ((_ordered(double.batch, order), True) for order in ORDERS)
    uneven = ((one, False) for one in _uneven(double.batch, counts))
    padded = ((one, True) for one in _padded(double.batch, counts, result.constants))
    for batch, alike in chain(orders, uneven, padded):
        if monotonic() - begun > ENOUGH:
            return
        try:
            trial = _tried(double, batch, run_pass(double, batch))
        except SkippedError:
            continue
        if trial.full.is_finite:
            yield replace(trial, counts_alike=alike)


def _tried(double: Double, batch: Any, result: PassResult) -> Trial:
    rows = SAMPLES // SHARES
    parts = tuple(slice_batch(batch, start, start + rows) for start in range(0, SAMPLES, rows))
    return Trial(batch, result, parts, tuple(run_pass(double, part) for part in parts))


def _ordered(batch: Any, order: Sequence[int]) -> Any:
    return map_tensors(batch, lambda one: one[list(order)] if one.shape[:1] == (SAMPLES,) else one)


def _uneven(batch: Any, counts: Sequence[TargetCount]) -> Iterator[Any]:
    """Batches whose first share counts less: fewer targets and mask entries in its first sample, then none in it; masks
    of the other share are full."""
    ignored = {count.place: count.ignored for count in counts}
    masks = masks_of(batch, tuple(ignored))

    def fewer(place: str, tensor: Tensor) -> Tensor:
        if place not in ignored and place not in masks:
            return tensor
        changed = tensor.clone()
        first = changed[0] if tensor.dim() == 1 else changed[0, ..., 1 + (tensor.shape[-1] > 2) :]
        first.fill_(ignored.get(place, 0))
        if place in masks:
            changed[SAMPLES // SHARES :] = 1
        return changed

    def none(place: str, tensor: Tensor) -> Tensor:
        if place not in (ignored or masks):
            return tensor
        changed = tensor.clone()
        changed[: SAMPLES // SHARES] = ignored.get(place, 0)
        return changed

    if ignored or masks:
        yield map_places(batch, fewer)
        yield map_places(batch, none)


def _padded(batch: Any, counts: Sequence[TargetCount], constants: Collection[int]) -> Iterator[Any]:
    """Batches in which samples are of unlike lengths.

    The first sample is padded, and none of the other share, with each number that a forward pass compares whole numbers
    of samples with. Or the last sample is shorter, where each sample has one whole number, which may be its length.
    """
    ignored = {count.place: count.ignored for count in counts}
    masks = masks_of(batch, [*ignored])
    numbers = {
        place: tensor
        for place, tensor in places(batch)
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.shape[:1] == (SAMPLES,)
        and place not in masks
    }  # fmt: skip

    def padded(wanted: str, constant: int, place: str, tensor: Tensor) -> Tensor:
        if place != wanted:
            return tensor
        changed = tensor.clone()
        changed[0, ..., 1 + (tensor.shape[-1] > 2) :] = constant
        others = tensor[tensor != constant]
        half = changed[SAMPLES // SHARES :]
        half[half == constant] = others[0] if others.numel() else constant
        return changed

    def shorter(place: str, tensor: Tensor) -> Tensor:
        if place not in numbers or place in ignored or tensor.dim() > 1:
            return tensor
        changed = tensor.clone()
        changed[-1] = max(int(tensor[-1]) // 2, min(int(tensor[-1]), 1))
        return changed

    for place, tensor in numbers.items():
        limits = torch.iinfo(tensor.dtype)
        for constant in sorted(constants) if tensor.dim() > 1 and tensor.shape[-1] > 1 else ():
            if limits.min <= constant <= limits.max and constant != ignored.get(place):
                yield map_places(batch, partial(padded, place, constant))
    if any(not torch.equal(shorter(place, tensor), tensor) for place, tensor in numbers.items()):
        yield map_places(batch, shorter)


def _equal(double: Double, trial: Trial, weight: LossWeight | None, reduction: str) -> bool:
    """Whether the loss of the batch, and its gradients, are those of its shares under a weight."""
    if isinstance(weight, TermCounts):
        scales = share_scales(weight, reduction, trial.batch, SHARES)
        try:
            shares = [run_pass(double, part, terms=scale) for part, scale in zip(trial.parts, scales, strict=True)]
        except SkippedError:
            return False
        return _relative_error(trial.full, shares, _EVEN) <= TOLERANCE
    try:
        factors = share_factors(weight, reduction, trial.batch, SHARES)
    except InputError:
        if isinstance(weight, TargetCounts):
            return False
        raise
    parts = _EVEN if factors is None else [float(factor) / SHARES for factor in factors]
    if _relative_error(trial.full, trial.shares, parts) > TOLERANCE:
        return False
    if 0.0 in parts:  # nothing counts: its loss may be 0/0, but not the gradients that are summed with others
        empty = trial.parts[parts.index(0.0)]
        if not run_pass(double, empty, lambda loss: weighted(loss, torch.zeros(()))).is_finite:
            raise InputError("loss", "0/0", EMPTY)
    return True


def _relative_error(reference: PassResult, shares: Sequence[PassResult], parts: Sequence[float]) -> float:
    """How far the weighted sum of shares' losses and gradients is from that of the batch."""
    used = [(part, share) for part, share in zip(parts, shares, strict=True) if part]
    worst = abs(sum(part * share.loss for part, share in used) - reference.loss) / (abs(reference.loss) or 1.0)
    largest = {name: float(one.abs().max()) for name, one in reference.gradients.items() if one.numel()}
    noise = 1e-3 * max(largest.values(), default=0.0)
    for name, most in largest.items():
        gradient = reference.gradients[name]
        mixed = sum(part * share.gradients.get(name, torch.zeros_like(gradient)) for part, share in used)
        worst = max(worst, float((mixed - gradient).abs().max()) / max(most, noise, 1e-30))
    return worst if worst == worst else float("inf")


def _kind(trial: Trial, *, sums: bool) -> str:
    """What the batch's loss is of its shares' losses: their mean (empty), a weighted mean, a sum, or neither."""
    if not all(share.is_finite for share in trial.shares):
        return ""
    if _relative_error(trial.full, trial.shares, _EVEN) <= TOLERANCE:
        return ""
    if sums and _relative_error(trial.full, trial.shares, [1.0] * SHARES) <= TOLERANCE:
        return SUM
    parts = _fitted(trial)
    fits = min(parts) > -TOLERANCE and abs(sum(parts) - 1) <= TOLERANCE
    return MEAN if fits and _relative_error(trial.full, trial.shares, parts) <= 2 * TOLERANCE else WHOLE


def _fitted(trial: Trial) -> list[float]:
    """The weights by which shares' gradients come nearest to the batch's (least squares)."""
    names = list(trial.full.gradients)

    def dot(one: PassResult, other: PassResult) -> float:
        pairs = ((one.gradients.get(name), other.gradients.get(name)) for name in names)
        return sum(float((a.double() * b.double()).sum()) for a, b in pairs if a is not None and b is not None)

    products = torch.tensor([[dot(a, b) for b in trial.shares] for a in trial.shares], dtype=torch.float64)
    wanted = torch.tensor([dot(a, trial.full) for a in trial.shares], dtype=torch.float64)
    fitted: list[float] = (torch.linalg.pinv(products, rtol=1e-9) @ wanted).tolist()
    return fitted


def _buffers(model: nn.Module, double: Double, trial: Trial) -> tuple[tuple[str, str], ...]:
    """Buffers of the user's model that a forward pass updates, and how shares' updates make that of the batch."""
    initial = dict(double.model.named_buffers())
    passes = trial.full, *trial.shares
    changed = [
        name for name, one in initial.items() if any(not torch.equal(made.buffers[name], one) for made in passes)
    ]
    if not changed:
        return ()
    # what one share alone updates (entries of a codebook) seems to be a sum: so let both shares be one
    rows = SAMPLES // SHARES
    batch = map_tensors(trial.parts[0], lambda one: torch.cat([one] * SHARES) if one.shape[:1] == (rows,) else one)
    twice = run_pass(double, batch)
    rules: dict[tuple[type, str], str] = {}
    for name in changed:
        fitting = {"mean": 1 / SHARES, "sum": 1.0}
        for full, shares in ((trial.full, trial.shares), (twice, trial.shares[:1] * SHARES)):
            after = [one.buffers[name].double() for one in (full, *shares)]
            if any(one.shape != initial[name].shape for one in after):
                fitting = {}
                break
            change, *parts = (one - initial[name].double() for one in after)
            fitting = {rule: scale for rule, scale in fitting.items() if _close(change, scale * sum(parts))}
        path, _, local_name = name.rpartition(".")
        kind, rule = (type(double.model.get_submodule(path)), local_name), next(iter(fitting), "")
        rules[kind] = rule if rules.get(kind, rule) == rule else ""
    return tuple(
        (f"{path}.{local_name}".lstrip("."), rules[type(module), local_name])
        for path, module in model.named_modules()
        for local_name, _ in module.named_buffers(recurse=False)
        if (type(module), local_name) in rules
    )


def _remembered(double: Double, trial: Trial, names: Sequence[str]) -> tuple[str, ...]:
    """The buffers, where the loss of the next batch depends on who updated them: the batch or a share of it."""
    before, losses = {name: one.clone() for name, one in double.model.named_buffers()}, set[float]()

    def set_to(values: Mapping[str, Tensor]) -> None:
        for name, one in double.model.named_buffers():  # a forward pass may have put others in their place
            if name in names:
                one.resize_(values[name].shape).copy_(values[name])

    for made in (trial.full, trial.shares[0]):
        set_to(made.buffers)
        losses.add(run_pass(double, trial.batch).loss)
    set_to(before)
    return tuple(names) if len(losses) > 1 else ()


def _kept(double: Double, result: PassResult) -> tuple[str, ...]:
    """Attributes that a forward pass changes and the loss of the next one reads."""

    def matters(names: Collection[str]) -> bool:
        kept = {name: result.kept[name] for name in names}
        return bool(names) and run_pass(double, double.batch, kept=kept).loss != result.loss

    return tuple(name for name in result.kept if matters([name])) if matters(result.kept) else ()


def _kept_alike(name: str, trial: Trial) -> bool:
    """Whether shares of a batch leave an attribute as the batch does: the same, or a row for each sample."""
    full, shares = trial.full.kept[name], [share.kept.get(name) for share in trial.shares]
    if isinstance(full, Tensor) and full.shape[:1] == (SAMPLES,) and all(isinstance(one, Tensor) for one in shares):
        rows = torch.cat([one for one in shares if isinstance(one, Tensor)])
        return rows.shape == full.shape and _close(full, rows)
    return all(same_values(full, one) for one in shares)


def _close(one: Tensor, other: Tensor | float) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())
