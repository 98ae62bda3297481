"""Whether shares of a batch train a model as the batch does, determined before the first step.

A small copy of the model runs on the example batch at once, and on shares of it; also on other batches made from the
example. What can be made right by a loss weight, or by synchronized buffers, trains under every plan. Everything else
rules plans out, or is an error that names the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import chain, count
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import (
    LossFn,
    batch_size,
    call_model,
    loss_of,
    map_tensors,
    model_inputs,
    resize_batch,
    tensors_of,
)
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.model.trace.flow import at
from galvatron_lite.model.trace.meta import left_to_the_plan, meta_copy
from galvatron_lite.parallelism.recompute.apply import recomputed
from galvatron_lite.runtime.loss.weights import LossWeight
from galvatron_lite.verify.numbers.shrink_model import with_samples
from galvatron_lite.verify.trial.double import SAMPLES, Double, PassResult, SkippedError, make_double, run_pass, runs_on
from galvatron_lite.verify.trial.findings import Findings
from galvatron_lite.verify.trial.loss_weight import adds_up, distinct_counts, with_loss_weight
from galvatron_lite.verify.trial.observer import CallObserver, RecordingBatch
from galvatron_lite.verify.trial.reads import Answer, ChangedReads, Site, site_name, values_decide
from galvatron_lite.verify.trial.snapshots import same_values
from galvatron_lite.verify.trial.trials import ROWS, SHARES, TOLERANCE, Trial, is_close, run_trial, run_trials


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
    """Determine what of a model depends on how a batch is shared.

    Args:
        batch: the example batch, on any device.
        layers: of the model.
        loss_fn: of the model's outputs and the batch; None: the model returns the loss.
        weight: the user's ``loss_weight``.
        reduction: the user's ``loss_reduction``, ``mean`` or ``sum``.
        init_fn: initializes the parameters of a module that has none yet.
    """
    try:
        double = replace(make_double(model, batch, layers, init_fn), loss_fn=loss_fn)
    except (SkippedError, InputError) as error:
        return Findings(skipped=str(error))
    try:
        observer = CallObserver(double.model, double.layers, model)
        full = run_pass(double, double.batch, observer=observer)
        repeated, unused = _repeat(double)
    except (SkippedError, InputError) as error:
        # rows of one tensor may number those of another, as edges do nodes: no share of such a batch runs
        return Findings(skipped=str(error), undivided=runs_on(double, batch))
    if not full.is_finite:
        return Findings(skipped=f"the loss of the example batch, or a gradient of it, is not finite ({full.loss})")
    if repeated.loss != full.loss:
        return _unsteady_findings(double, full, observer)
    terms = observer.target_counts(double.batch)
    try:
        attributes = _carried_attributes(double, full)
        trials = list(run_trials(double, distinct_counts(terms), full, batch_size(batch)))
        findings = _state_findings(model, layers, double, trials[0], attributes)
        bound, bound_around = _bound_modules(double, trials[0])
    except SkippedError as error:  # in a share of the batch
        return Findings(skipped=str(error), undivided=True)
    findings = replace(
        findings,
        outside=tuple(observer.outside),
        unused=unused,
        leaking=tuple(dict.fromkeys(observer.leaking)),
        foreign=tuple(observer.foreign.values()),
        sparse=full.sparse,
        written=tuple(sorted(double.written.union(full.written))),
        takes_gradients=observer.takes_gradients,
        unscaled=not _scales(double, full),
        unrepeatable=not _repeats_blocks(double, trials[0]),
        bound=bound,
        bound_around=bound_around,
    )
    if not _writes_alike(trials[0]) or _splits_statistics(model, batch):
        return replace(findings, undivided=True)  # each rank would update them by its own samples
    findings = with_loss_weight(findings, double, trials, weight, reduction, terms)
    if findings.undivided:
        return findings
    if batch_size(batch) > 1:
        findings = replace(findings, least_samples=_least_samples(double, findings.weight or weight, reduction))
    return _with_reads(findings, double, trials)


def _repeat(double: Double) -> tuple[PassResult, tuple[str, ...]]:
    """Run the example batch with other seeds; return also its entries that neither the model nor the loss takes."""
    loss_fn = double.loss_fn
    if loss_fn is None or not isinstance(double.batch, Mapping):
        return run_pass(double, double.batch, seed=1, other_seed=1), ()
    recording = RecordingBatch(double.batch)

    @wraps(loss_fn)  # so that values that the loss function keeps are restored
    def record(output: Any, _: Any) -> Tensor:
        return loss_fn(output, recording)

    result = run_pass(replace(double, loss_fn=record), double.batch, seed=1, other_seed=1)
    taken = recording.read_entries | model_inputs(double.model, double.batch).keys()
    return result, tuple(sorted(recording.keys() - taken))


def _unsteady_findings(double: Double, full: PassResult, observer: CallObserver) -> Findings:
    """Return findings on a loss that is another with other seeds."""
    if run_pass(double, double.batch).loss != full.loss:
        return Findings(nondeterministic=True)
    return Findings(
        outside=tuple(observer.outside),
        draws_elsewhere=run_pass(double, double.batch, other_seed=1).loss != full.loss,
        skipped="the loss depends on random numbers, also without dropout, and so differs from pass to pass",
    )


def _state_findings(
    model: nn.Module, layers: Sequence[Layer], double: Double, trial: Trial, attributes: Sequence[str]
) -> Findings:
    """Return findings on buffers that a forward pass updates, and on attributes that it changes and the next reads."""
    layer_paths = [path for layer in layers for path in layer.modules]  # also of layers that the copy lacks
    modules = dict(double.model.named_modules())
    # both for values outside of modules, which code inside of layers may read, or around them
    anywhere = {name for name in attributes if name.rpartition(".")[0] not in modules}
    inside = {name for name in attributes if any(at(name, path) for path in layer_paths)}
    buffers = _updated_buffers(model, double, trial)
    uncombined = _read_buffers(double, trial, [name for name, rule in buffers if not rule])
    return Findings(
        attributes=tuple(attributes),
        attributes_inside=bool(anywhere | inside),
        attributes_around=bool(anywhere or set(attributes) - inside),
        buffers=buffers,
        uncombined=(*uncombined, *(name for name in attributes if not _leaves_alike(name, trial))),
        buffers_between=tuple(name for name, _ in buffers if not any(at(name, path) for path in layer_paths)),
    )


def _updated_buffers(model: nn.Module, double: Double, trial: Trial) -> tuple[tuple[str, str], ...]:
    """Return the buffers of the user's model that a forward pass updates, and how the updates of shares combine."""
    initial = dict(double.model.named_buffers())
    passes = trial.full, *trial.shares
    changed = [
        name
        for name, buffer in initial.items()
        if any(not torch.equal(result.buffers[name], buffer) for result in passes)
    ]
    if not changed:
        return ()
    # what only one share updates (entries of a codebook) seems to be a sum: so let both shares be the same
    batch = map_tensors(
        trial.parts[0], lambda tensor: torch.cat([tensor] * SHARES) if tensor.shape[:1] == (ROWS,) else tensor
    )
    repeated = run_pass(double, batch), trial.shares[:1] * SHARES
    rules: dict[tuple[type, str], str] = {}
    for name in changed:
        fitting = {"mean": 1 / SHARES, "sum": 1.0}
        for full, shares in ((trial.full, trial.shares), repeated):
            after = [result.buffers[name].double() for result in (full, *shares)]
            if any(buffer.shape != initial[name].shape for buffer in after):
                fitting = {}
                break
            change, *share_changes = (buffer - initial[name].double() for buffer in after)
            fitting = {rule: scale for rule, scale in fitting.items() if is_close(change, scale * sum(share_changes))}
        path, _, local_name = name.rpartition(".")
        kind, rule = (type(double.model.get_submodule(path)), local_name), next(iter(fitting), "")
        rules[kind] = rule if rules.get(kind, rule) == rule else ""
    return tuple(
        (f"{path}.{local_name}".lstrip("."), rules[type(module), local_name])
        for path, module in model.named_modules()
        for local_name, _ in module.named_buffers(recurse=False)
        if (type(module), local_name) in rules
    )


def _read_buffers(double: Double, trial: Trial, names: Sequence[str]) -> tuple[str, ...]:
    """Return the buffers, if the next loss depends on whether the batch updated them or a share of it."""
    before, losses = {name: buffer.clone() for name, buffer in double.model.named_buffers()}, set[float]()

    def set_buffers(values: Mapping[str, Tensor]) -> None:
        for name, buffer in double.model.named_buffers():  # a forward pass may have replaced them
            if name in names:
                buffer.resize_(values[name].shape).copy_(values[name])

    for result in (trial.full, trial.shares[0]):
        set_buffers(result.buffers)
        losses.add(run_pass(double, trial.batch).loss)
    set_buffers(before)
    return tuple(names) if len(losses) > 1 else ()


def _carried_attributes(double: Double, result: PassResult) -> tuple[str, ...]:
    """Return plain attributes that a forward pass changes and the next loss reads."""

    def change_loss(names: Collection[str]) -> bool:
        attributes = {name: result.attributes[name] for name in names}
        return bool(names) and run_pass(double, double.batch, attributes=attributes).loss != result.loss

    if not change_loss(result.attributes):
        return ()
    return tuple(name for name in result.attributes if change_loss([name]))


def _leaves_alike(name: str, trial: Trial) -> bool:
    """Whether shares of a batch leave an attribute as the batch does: the same, or a row for each sample."""
    full, shares = trial.full.attributes[name], [share.attributes.get(name) for share in trial.shares]
    if isinstance(full, Tensor) and full.shape[:1] == (SAMPLES,) and all(isinstance(value, Tensor) for value in shares):
        rows = torch.cat([value for value in shares if isinstance(value, Tensor)])
        return rows.shape == full.shape and is_close(full, rows)
    return all(same_values(full, value) for value in shares)


def _writes_alike(trial: Trial) -> bool:
    """Whether each share of a batch changes parameters in forward as the batch does."""
    return all(
        is_close(parameter, share.written.get(name, 0.0))
        for share in trial.shares
        for name, parameter in trial.full.written.items()
    )


def _scales(double: Double, full: PassResult) -> bool:
    """Whether gradients scale with the loss, also where backward clips them: far larger and smaller ones, too."""
    for scale in (2.0**10, 2.0**-10):
        scaled = run_pass(double, double.batch, scale=partial(torch.mul, scale))
        if Trial(double.batch, full, (), (scaled,)).relative_error([1 / scale]) > TOLERANCE:
            return False
    return True


def _bound_modules(double: Double, trial: Trial) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return layers, and modules around them, that are given or return other than rows of samples or means of them."""
    full, *shares = (_moved_tensors(double, batch) for batch in (trial.batch, *trial.parts))
    if any([moved[:2] for moved in full] != [moved[:2] for moved in share] for share in shares):
        return (), ()
    bound = dict.fromkeys(
        path
        for (path, is_output, tensor), *others in zip(full, *shares, strict=True)
        if not _is_of_samples(tensor, [other for *_, other in others], is_output)
    )
    layers = {path for layer in double.layers for path in layer.modules}
    inside, around = [path for path in bound if path in layers], [path for path in bound if path not in layers]
    return tuple(inside), tuple(around)


def _moved_tensors(double: Double, batch: Any) -> list[tuple[str, bool, Tensor]]:
    """Return what layers are given and return in a pass: path of the layer, whether it is an output, the tensor."""
    moved = list[tuple[str, bool, Tensor]]()

    def note(path: str, is_output: bool, nest: Any) -> None:
        moved.extend(
            (path, is_output, tensor.detach().clone())
            for tensor in tensors_of(nest)
            if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_complex() or is_wrapped(tensor))
        )

    def enter(path: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        note(path, False, (args, kwargs))

    def leave(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        note(path, True, output)

    with ExitStack() as stack:
        layers = [path for layer in double.layers for path in layer.modules]
        for path, module in double.model.named_modules():
            if not path or not (path in layers or any(at(layer, path) for layer in layers)):
                continue
            stack.callback(module.register_forward_pre_hook(partial(enter, path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(leave, path)).remove)
        run_pass(double, batch)
    return moved


def _is_of_samples(full: Tensor, shares: Sequence[Tensor], is_output: bool) -> bool:
    """Whether shares have the rows of a tensor (integers: in any order), or without rows the same, or its mean."""
    if any(share.dim() != full.dim() for share in shares):
        return False
    differing = [dim for dim in range(full.dim()) if any(share.shape[dim] != full.shape[dim] for share in shares)]
    if not differing:
        compared = [torch.stack([share.double() for share in shares]).mean(0)] if is_output else shares
        return not full.numel() or all(is_close(full.double(), other.double()) for other in compared)
    if len(differing) > 1 or full.is_floating_point():
        return len(differing) == 1
    rows = [
        sorted(tensor.movedim(differing[0], 0).reshape(tensor.shape[differing[0]], -1).tolist())
        for tensor in (full, torch.cat(list(shares), differing[0]))
    ]
    return bool(rows[0] == rows[1])


def _repeats_blocks(double: Double, trial: Trial) -> bool:
    """Whether gradients stay the same if blocks run again in backward, which follows the next forward pass."""
    blocks = [
        double.model.get_submodule(path) for one in double.layers if one.role is Role.BLOCK for path in one.modules
    ]

    def run_next(loss: Tensor) -> Tensor:
        batch = map_tensors(trial.parts[1], torch.clone)
        with left_to_the_plan():
            return loss + loss_of(call_model(double.model, batch), batch, double.loss_fn)

    try:
        once = run_pass(double, trial.parts[0], scale=run_next)
    except SkippedError:  # of values that the first pass left
        return True
    with ExitStack() as stack:
        for block in blocks:
            forward = block.forward
            block.forward = recomputed(forward, Recompute.FULL, block)
            stack.callback(setattr, block, "forward", forward)
        try:
            again = run_pass(double, trial.parts[0], scale=run_next)
        except SkippedError:
            return False
    return not once.is_finite or Trial(trial.batch, once, (), (again,)).relative_error([1.0]) <= TOLERANCE


def _splits_statistics(model: nn.Module, batch: Any) -> bool:
    """Whether a ``SyncBatchNorm`` takes statistics of some of the samples at a time: ranks would mix other samples.

    The model runs without values; False if it cannot.
    """
    if not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return False
    # of a prime number of samples, no part has as many items as a multiple of it
    samples = next(n for n in count(max(batch_size(batch), 12)) if all(n % divisor for divisor in range(2, n)))
    splits = list[bool]()

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        splits.append(args[0].numel() // args[0].shape[1] % samples != 0)

    with suppress(Exception):  # a user's model may raise anything
        twin = meta_copy(model)
        for module in twin.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.eval().register_forward_pre_hook(note)
        call_model(twin, resize_batch(batch, samples))
    return any(splits)


def _least_samples(double: Double, weight: LossWeight | None, reduction: str) -> int:
    """Return the samples that a share must have: two, if one alone does not run or gives another loss."""
    batch = with_samples(double.batch, SHARES)
    try:
        trial = run_trial(double, batch, run_pass(double, batch))
        return 1 if not trial.full.is_finite or adds_up(double, trial, weight, reduction) else SHARES
    except SkippedError:
        return SHARES
    except InputError:  # samples without targets
        return 1


def _with_reads(findings: Findings, double: Double, trials: Sequence[Trial]) -> Findings:
    """Return findings with the places where values of the samples decide what runs."""
    first = trials[0]
    compares, guards = list[str](), list[str]()

    def changes_result(site: Site, answer: Answer, count: int = 0, operator: Any = None) -> bool:
        changed = ChangedReads(site, count, answer, operator)
        try:
            other = run_pass(double, first.batch, answers=changed)
        except SkippedError:  # an assertion; a share that does not run says so
            return False
        updates = any(not torch.equal(buffer, other.buffers[name]) for name, buffer in first.full.buffers.items())
        return updates or other.loss != other.loss or first.relative_error([1.0], [other]) > TOLERANCE

    for site, read in first.full.reads.items():
        if any(_reads_differ(trial, site) for trial in trials) or all(
            _reads_by_sample(trial, site) for trial in trials
        ):
            continue
        if values_decide(read.values, partial(changes_result, site, count=len(read.values))):
            (compares if read.compared else guards).append(site_name(site))
    for (site, operator), kink in first.full.kinks.items():
        if _is_of_batch(kink, [share.kinks.get((site, operator), (0, 0.0)) for share in first.shares]):
            compares.append(site_name(site))
    for key, order in first.full.orders.items():
        site, operator, _ = key
        if _is_of_batch(order, [share.orders.get(key, (0, 0.0)) for share in first.shares]) and (
            changes_result(site, _other_order, operator=operator)
        ):
            compares.append(site_name(site))
    return replace(findings, compares=tuple(dict.fromkeys(compares)), guards=tuple(dict.fromkeys(guards)))


def _is_of_batch(number: tuple[int, float], shares: Sequence[tuple[int, float]]) -> bool:
    """Whether numbers, of which count and sum are given, are made of all samples: those of each would be fewer."""
    count, total = number
    return all(share_count == count for share_count, _ in shares) and any(
        abs(share_total - total) > TOLERANCE * abs(total) for _, share_total in shares
    )


def _other_order(output: Tensor) -> Tensor:
    """Return what an operator might compute if another number were the larger one."""
    return ~output if output.dtype is torch.bool else 2 * output + 1


def _reads_differ(trial: Trial, site: Site) -> bool:
    """Whether shares read other truth values at a site than the batch: their losses tell whether that matters."""
    reads = [result.reads[site].values if site in result.reads else [] for result in (trial.full, *trial.shares)]
    first = next((values[0] for values in reads if values), None)
    return isinstance(first, bool) and any(values != reads[0] for values in reads)


def _reads_by_sample(trial: Trial, site: Site) -> bool:
    """Whether the batch reads at a site what its shares read, in any order, as code does that decides sample by sample.

    Only for real numbers: truth values and integers may be the same by chance.
    """
    shares = [share.reads[site].values if site in share.reads else [] for share in trial.shares]
    values, joined = trial.full.reads[site].values, list(chain.from_iterable(shares))
    if len(joined) != len(values) or not all(shares) or not all(isinstance(value, float) for value in values):
        return False
    return all(map(partial(isclose, rel_tol=1e-5, abs_tol=1e-6), sorted(values), sorted(joined)))
