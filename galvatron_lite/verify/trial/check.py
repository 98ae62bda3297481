"""Whether a model's loss and gradients of a batch are those of its shares, found out before the first step.

A small copy of the model is run on the example batch at once, and on shares of it; also on batches made uneven, in
which targets are ignored and masks are zero. What a loss weight makes equal is trained under every plan. Everything
else is an error with its remedy, or rules plans out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import LossFn, map_places, model_inputs, slice_batch
from galvatron_lite.model.graph import Layer, Recompute
from galvatron_lite.model.trace.flow import at
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.loss.weights import (
    LossWeight,
    TargetCount,
    TargetCounts,
    TermCounts,
    share_factors,
    share_scales,
    weighted,
)
from galvatron_lite.verify.trial.double import (
    SAMPLES,
    CallObserver,
    Double,
    NotedBatch,
    PassResult,
    SkippedError,
    counts_of,
    make_double,
    masks_of,
    relative_error,
    run_pass,
    runs_on,
    terms_of,
)

SHARES = 2
ENOUGH = 5.0  # seconds of a trial after which no further batch is begun
TOLERANCE = 2e-3
"""Relative error of a gradient that another order of sums in float32 may make in a copy of a few layers."""
MEAN, SUM, WHOLE = "weighted mean", "sum", "whole"


@dataclass(frozen=True, slots=True)
class Findings:
    """What of a model depends on how a batch is shared."""

    weight: LossWeight | None = None  # a loss weight that was found; None: shares weigh the same, or the user gave one
    whole: bool = False  # whether the loss is right only for the batch as one: no plan may share it out
    # parameters that code outside of their layers reads; such a plan has whole parameters
    outside: tuple[str, ...] = ()
    written: tuple[str, ...] = ()  # parameters that a forward pass changes, such as averages of others
    differentiates: bool = False  # whether a forward pass takes gradients, which are differentiated again
    # buffers that a forward pass updates from the batch: ``mean`` or ``sum`` of what shares make of them, or empty
    # where it is neither
    buffers: tuple[tuple[str, str], ...] = ()
    # those of the buffers that no layer holds: code between layers updates them, which a stage runs for its own layers
    loose: tuple[str, ...] = ()
    # shapes of parameters that get gradients and that the model does not hold, as those of a loss function
    unheld: tuple[str, ...] = ()
    # entries of the batch that neither the model nor the loss function takes
    unread: tuple[str, ...] = ()
    skipped: str = ""  # why nothing was found out; empty where it was
    unsaid: InputError | None = None  # what has to be said of the loss before a batch can be shared out; None: nothing

    def pins(self) -> dict[str, tuple[str, ...]]:
        """What the planner keeps to: ``fix`` and ``forbid`` of ``galvatron plan``."""
        if self.unsaid is not None:
            raise self.unsaid
        fix = ("dp=1", "microbatches=1") if self.whole else ("microbatches=1",) * bool(self.written)
        forbid = (
            *(OUTSIDE_NEEDS if self.outside or self.written or self.differentiates else ()),
            *(SAMPLES_NEED if self.buffers else ()),
        )
        forbid += ("recompute",) * bool(self.written or self.differentiates)
        forbid += ("pipeline",) * bool(self.loose and not self.outside)
        return {name: words for name, words in (("fix", fix), ("forbid", forbid)) if words}

    def notes(self) -> list[str]:
        """What pins are there for, in words."""
        notes = []
        if self.whole:
            notes.append("the loss compares samples with one another: only plans that keep the batch whole (dp 1, one "
                         "micro-batch) train like one process")  # fmt: skip
        if self.outside:
            notes.append(f"code outside of their layers reads {_few(self.outside)}: every device holds all parameters")
        if self.differentiates:
            notes.append("forward passes take gradients: every device holds all parameters, and none recomputes")
        if self.written:
            notes.append(
                f"forward passes change {_few(self.written)}: every device holds all and runs its samples once"
            )
        return notes

    def without_plan(self, devices: int, uncaptured: str = "", pins: str = "") -> InputError:
        """The error that no plan on so many devices trains like one process: what rules plans out, and what to change.

        Args:
            devices: more than one.
            uncaptured: the part of the model that values of tensors steer; empty where it was captured.
            pins: of the user, beside which there is no plan; empty where there are none.
        """
        reasons, remedies = [], [f"lift {pins}"] if pins else []
        names = _few([name for name, _ in self.buffers])
        if self.whole:
            reasons.append("the loss compares samples with one another, so that it takes the batch as a whole")
        if self.buffers:
            reasons.append(f"forward passes update {names} from the samples, so that no rank may have part of a sample")
            remedies.append(
                f"update {names} behind the last read of a forward pass, where it reads what it has updated"
            )
        elif self.whole:
            remedies.append(
                "make the loss a mean over samples (of one that balances experts: over each sample's tokens)"
            )
        if self.outside:
            reasons.append(f"code outside of their layers reads {_few(self.outside)}")
        if self.differentiates:
            reasons.append("forward passes take gradients, which nothing that is split can differentiate again")
        if self.written:
            reasons.append(f"forward passes change {_few(self.written)}")
        if uncaptured:
            reasons.append(
                f"values of tensors decide what {uncaptured} runs, so that ranks share nothing but the batch"
            )
            remedies.append(
                "stack experts in one module that takes hidden states, chosen experts and their weights "
                "(model.zoo.moe.Experts), of which plans may keep the batch whole"
            )
        remedies.append("train in one process; check=False trains the mean of the shares' losses")
        why, what = "; ".join(reasons), "; or ".join(remedies)
        remedy = f"On {devices} devices no plan trains like one process: {why}. {what[:1].upper()}{what[1:]}."
        field, value = ("buffers", names) if self.buffers else ("loss", "of the batch as a whole")
        return InputError(*(("fix", pins) if pins else (field, value)), remedy)

    @property
    def synced(self) -> dict[str, str]:
        """Rules of the buffers that ranks keep alike."""
        return {name: rule for name, rule in self.buffers if rule}

    def warnings(self) -> list[str]:
        """What could not be found out, or cannot be kept right, in words."""
        lines = []
        if lone := [name for name, rule in self.buffers if not rule]:
            lines.append(f"Forward passes update {_few(lone)} from the samples, by neither a mean nor a sum over them: "
                         "each rank and micro-batch updates its own by its share.")  # fmt: skip
        if self.unheld:
            lines.append(
                f"Parameters that the model does not hold (of shape {_few(self.unheld)}) get gradients: nothing trains "
                "them here, and each rank has the gradient of its own samples. Make what holds them a submodule of the "
                "model (model.criterion = criterion), or let them get none (requires_grad_(False))."
            )
        if self.unread:
            names = _few(self.unread)
            lines.append(
                f"Neither the model's forward nor loss_fn takes {names} of the batch: is an argument misspelled?"
            )
        if self.skipped:
            lines.append(f"Whether the loss of a batch is that of its shares was not tried: {self.skipped}. If it is a "
                         "mean over samples, pass check=False to leave this out.")  # fmt: skip
        return lines

    def check(self, plan: Plan) -> None:
        """Refuse a plan under which the model trains otherwise than in one process.

        Raises:
            InputError: it shares a batch that must stay whole, or parameters that code outside of their layers reads.
        """
        if self.unsaid is not None and shares_batch(plan):
            raise self.unsaid
        strategies = [run.strategy for stage in plan.stages for run in stage.runs]
        if self.whole and shares_batch(plan):
            shares = f"{plan.microbatches} micro-batches" if plan.microbatches > 1 else "data parallelism"
            remedy = (
                "The loss compares samples with one another: that of the batch is no mean of its shares' losses. Give "
                "a plan that keeps the batch whole (--fix dp=1 --fix microbatches=1), or none, to have one found. If "
                "it is a mean over samples on your data, pass check=False."
            )
            raise InputError("loss", f"of a plan with {shares}", remedy)
        if self.buffers and any(map(_shares_inside, strategies)):
            remedy = (
                "Forward passes update these buffers from the samples, of which a rank under this plan has a part of "
                "each. Give a plan of data parallelism, ZeRO or stages, or none, to have one found."
            )
            raise InputError("buffers", _few([name for name, _ in self.buffers]), remedy)
        if self.loose and len(plan.stages) > 1:
            remedy = (
                "Code between layers updates these buffers, and only one stage runs it. Give a plan of one stage, or "
                "none, to have one found; or move buffers and update into a module that is called."
            )
            raise InputError("buffers", _few(self.loose), remedy)
        shared = any(strategy.parameter_shards > 1 or _shares_inside(strategy) for strategy in strategies)
        shared = shared or len(plan.stages) > 1 or bool(plan.branches)
        again = any(strategy.recompute is not Recompute.NONE for strategy in strategies)
        kept = all(
            strategy.devices == strategy.replicas and strategy.offload is Offload.NONE for strategy in strategies
        )
        if self.written and (shared or again or not kept or plan.microbatches > 1):
            remedy = (
                "Forward passes change these parameters: further micro-batches and recomputation would do so again, "
                "and shards, shares and stages do not hold all. Change them after optimizer.step(), or give a plan of "
                "data parallelism alone with one micro-batch, or none, to have one found."
            )
            raise InputError("parameters", _few(self.written), remedy)
        if self.differentiates and (shared or again):
            remedy = (
                "Forward passes take gradients, through layers of which a rank under this plan has a share, or which "
                "it would run or gather again at most once. Give a plan of data parallelism or ZeRO-1 with one stage "
                "and without recomputation, or none, to have one found."
            )
            raise InputError("model", "that calls torch.autograd.grad", remedy)
        if self.outside and shared:
            remedy = (
                "Code outside of their layers reads these parameters, of which a rank under this plan has a share, or "
                "none. Give a plan of data parallelism or ZeRO-1 with one stage, or none, to have one found; or move "
                "what reads them into the optimizer (weight_decay) or into their layers."
            )
            raise InputError("parameters", _few(self.outside), remedy)


def _shares_inside(one: Strategy) -> bool:
    return one.devices > one.batch_degree or lines_of(one).spread is not None


SAMPLES_NEED = ("tensor", "context", "expert", "spatial", "channel", "branches")
"""Dimensions under which a forward pass updates a buffer from parts of samples."""
OUTSIDE_NEEDS = ("pipeline", "zero", "tensor", "context", "expert", "spatial", "channel", "branches")
"""Dimensions that leave a rank without whole parameters, or count a term of the loss more than once."""


def shares_batch(plan: Plan) -> bool:
    """Whether a plan works on a batch in more than one share."""
    degrees = (run.strategy.batch_degree for stage in plan.stages for run in stage.runs)
    return plan.microbatches > 1 or plan.cyclic is not None or any(degree > 1 for degree in degrees)


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
        double = make_double(model, batch, layers, init_fn)
    except (SkippedError, InputError) as error:
        return Findings(skipped=str(error))
    try:
        observer = CallObserver(double, model)
        full_pass = run_pass(double, double.batch, loss_fn, observer=observer)
        noted = NotedBatch(double.batch) if loss_fn is not None and isinstance(double.batch, Mapping) else None
        noting = loss_fn if loss_fn is None or noted is None else lambda output, _: loss_fn(output, noted)
        again = run_pass(double, double.batch, noting, seed=1)
    except (SkippedError, InputError) as error:
        # rows of one tensor may number those of another, as edges do nodes: no share of such a batch runs
        return Findings(skipped=str(error), whole=runs_on(double, batch, loss_fn))
    outside = tuple(observer.seen.outside)
    if again.loss != full_pass.loss:
        return Findings(
            outside=outside,
            skipped="the same batch gives another loss again, dropout apart: it is random, or the model keeps "
            "something from pass to pass, which further micro-batches and recomputation change more often",
        )
    if not full_pass.is_finite:
        return Findings(skipped=f"the loss of the example batch, or a gradient of it, is not finite ({full_pass.loss})")
    terms = terms_of(observer.seen, double.batch)
    counts = counts_of(terms)
    try:
        trials = list(_trials(double, counts, full_pass, loss_fn))
    except SkippedError as error:  # in a share of the batch
        return Findings(skipped=str(error), whole=True)
    buffers = _buffers(model, double, trials[0])
    held = [path for layer in layers for path in layer.modules]
    loose = tuple(name for name, _ in buffers if not any(at(name, path) for path in held))
    taken = model_inputs(double.model, double.batch)
    unread = () if noted is None else tuple(sorted(noted.keys() - noted.read - taken.keys()))
    findings = Findings(
        outside=outside, buffers=buffers, loose=loose, unread=unread,
        unheld=tuple(observer.seen.unheld.values()), written=tuple(sorted(double.written.union(full_pass.written))),
        differentiates=observer.seen.differentiates,
    )  # fmt: skip
    shares = trials[0].shares
    if any(
        not _close(one, share.written.get(name, 0.0)) for share in shares for name, one in full_pass.written.items()
    ):
        return replace(findings, whole=True)  # each rank would change them by its own samples
    target_counts = TargetCounts(counts) if counts else None
    by_term = TermCounts(terms) if counts else None
    for candidate in (weight,) if weight is not None or reduction == "sum" else (target_counts, by_term, None):
        try:
            if all(_equal(double, trial, candidate, reduction, loss_fn) for trial in trials):
                return replace(findings, weight=None if weight is not None else candidate)
        except InputError as error:
            return replace(findings, unsaid=error)
    if target_counts is not None and weight is None and _equal(double, trials[0], None, reduction, loss_fn):
        # right for the example; its counts are compared in every step
        return replace(findings, weight=replace(target_counts, even=True))
    if several := _several(counts):
        return replace(findings, unsaid=InputError("loss", "several means", several))
    kinds = {_kind(trial, sums=reduction != "sum") for trial in trials} - {""}
    if kinds == {SUM}:
        remedy = "The loss is a sum over samples: pass loss_reduction='sum'."
        return replace(findings, unsaid=InputError("loss_reduction", reduction, remedy))
    if kinds <= {MEAN, SUM}:
        value = None if weight is None else "that was given"
        return replace(findings, unsaid=InputError("loss_weight", value, WEIGHT))
    return replace(findings, whole=True)


WEIGHT = (
    "The loss is a mean in which samples weigh unlike: over a mask, or with weights of its own. Pass loss_weight=, a "
    "function of some samples of a batch that gives what their mean is a mean over, such as lambda batch: "
    'batch["mask"].sum(); or keep the batch whole: a plan with data and zero 1 and one micro-batch. check=False trains '
    "as if all shares weighed the same."
)


EMPTY = (
    "In a share of a batch in which nothing counts, the gradient of this loss is not finite. Divide by .clamp(min=1) "
    "of the count, so that it is zero."
)


def _several(counts: Sequence[TargetCount]) -> str:
    if len(counts) < 2:
        return ""
    names = " and ".join(count.place.lstrip(".") or "the batch" for count in counts)
    return (
        f"The loss is a sum of means over different targets ({names}), which count unlike in shares of a batch: no "
        "weight makes it of its shares' losses. Divide each sum by a number that the batch says, or keep the batch "
        "whole: a plan with data and zero 1 and one micro-batch."
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch, at once and in shares."""

    batch: Any
    whole: PassResult
    shares: tuple[PassResult, ...]


def _trials(
    double: Double, counts: Sequence[TargetCount], result: PassResult, loss_fn: LossFn | None
) -> Iterator[Trial]:
    """The example, and batches made uneven of it; those on which the model does not run are left out."""
    begun = monotonic()
    yield _tried(double, double.batch, result, loss_fn)
    for batch in _uneven(double.batch, counts):
        if monotonic() - begun > ENOUGH:
            return
        try:
            trial = _tried(double, batch, run_pass(double, batch, loss_fn), loss_fn)
        except SkippedError:
            continue
        if trial.whole.is_finite:
            yield trial


def _tried(double: Double, batch: Any, result: PassResult, loss_fn: LossFn | None) -> Trial:
    rows = SAMPLES // SHARES
    parts = [slice_batch(batch, start, start + rows) for start in range(0, SAMPLES, rows)]
    return Trial(batch, result, tuple(run_pass(double, part, loss_fn) for part in parts))


def _uneven(batch: Any, counts: Sequence[TargetCount]) -> Iterator[Any]:
    """Batches whose first share counts less: fewer targets and mask entries in its first sample, then none in it."""
    ignored = {count.place: count.ignored for count in counts}
    masks = masks_of(batch, tuple(ignored))

    def fewer(place: str, tensor: Tensor) -> Tensor:
        if place not in ignored and place not in masks:
            return tensor
        changed = tensor.clone()
        value = ignored.get(place, 0)
        if tensor.dim() == 1:
            changed[0] = value
        else:
            changed[0, ..., 1 + (tensor.shape[-1] > 2) :] = value
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


def _equal(double: Double, trial: Trial, weight: LossWeight | None, reduction: str, loss_fn: LossFn | None) -> bool:
    if isinstance(weight, TermCounts):
        try:
            shares = _scaled(double, trial, weight, reduction, loss_fn)
        except SkippedError:
            return False
        return relative_error(trial.whole, shares, [1 / SHARES] * SHARES) <= TOLERANCE
    try:
        factors = share_factors(weight, reduction, trial.batch, SHARES)
    except InputError:
        if isinstance(weight, TargetCounts):
            return False
        raise
    parts = [1 / SHARES] * SHARES if factors is None else [float(factor) / SHARES for factor in factors]
    if relative_error(trial.whole, trial.shares, parts) > TOLERANCE:
        return False
    if 0.0 in parts:  # nothing counts: its loss may be 0/0, but not the gradients that are summed with others
        rows, place = SAMPLES // SHARES, parts.index(0.0)
        empty = slice_batch(trial.batch, place * rows, (place + 1) * rows)
        if not run_pass(double, empty, loss_fn, lambda loss: weighted(loss, torch.zeros(()))).is_finite:
            raise InputError("loss", "0/0", EMPTY)
    return True


def _scaled(
    double: Double, trial: Trial, weight: TermCounts, reduction: str, loss_fn: LossFn | None
) -> list[PassResult]:
    rows = SAMPLES // SHARES
    scales = share_scales(weight, reduction, trial.batch, SHARES)
    parts = [slice_batch(trial.batch, start, start + rows) for start in range(0, SAMPLES, rows)]
    return [run_pass(double, part, loss_fn, terms=scale) for part, scale in zip(parts, scales, strict=True)]


def _kind(trial: Trial, *, sums: bool) -> str:
    """What the batch's loss is of its shares' losses: their mean (empty), a weighted mean, a sum, or neither."""
    if not all(share.is_finite for share in trial.shares):
        return ""
    if relative_error(trial.whole, trial.shares, [1 / SHARES] * SHARES) <= TOLERANCE:
        return ""
    if sums and relative_error(trial.whole, trial.shares, [1.0] * SHARES) <= TOLERANCE:
        return SUM
    parts = _fitted(trial)
    fits = min(parts) > -TOLERANCE and abs(sum(parts) - 1) <= TOLERANCE
    return MEAN if fits and relative_error(trial.whole, trial.shares, parts) <= 2 * TOLERANCE else WHOLE


def _fitted(trial: Trial) -> list[float]:
    """The weights by which shares' gradients come nearest to the batch's (least squares)."""
    names = list(trial.whole.gradients)

    def dot(one: PassResult, other: PassResult) -> float:
        pairs = ((one.gradients.get(name), other.gradients.get(name)) for name in names)
        return sum(float((a.double() * b.double()).sum()) for a, b in pairs if a is not None and b is not None)

    products = torch.tensor([[dot(a, b) for b in trial.shares] for a in trial.shares], dtype=torch.float64)
    wanted = torch.tensor([dot(a, trial.whole) for a in trial.shares], dtype=torch.float64)
    fitted: list[float] = (torch.linalg.pinv(products, rtol=1e-9) @ wanted).tolist()
    return fitted


def _buffers(model: nn.Module, double: Double, trial: Trial) -> tuple[tuple[str, str], ...]:
    """Buffers of the user's model that a forward pass updates, and how shares' updates make that of the batch."""
    initial = dict(double.model.named_buffers())
    rules: dict[tuple[type, str], str] = {}
    for name, after in trial.whole.buffers.items():
        if name not in initial:
            continue
        before, parts = initial[name], [share.buffers[name] for share in trial.shares]
        if all(torch.equal(one, before) for one in (after, *parts)):
            continue
        changes = [(part.double() - before.double()) for part in parts]
        change = after.double() - before.double()
        path, _, local_name = name.rpartition(".")
        mean, total = sum(changes) / len(changes), sum(changes)
        rule = "mean" if _close(change, mean) else "sum" if _close(change, total) else ""
        rules[type(double.model.get_submodule(path)), local_name] = rule
    return tuple(
        (f"{path}.{local_name}".lstrip("."), rules[type(module), local_name])
        for path, module in model.named_modules()
        for local_name, _ in module.named_buffers(recurse=False)
        if (type(module), local_name) in rules
    )


def _close(one: Tensor, other: Tensor | float) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
