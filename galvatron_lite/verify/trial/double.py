"""A small copy of a model on the CPU, and passes of it over a few samples.

The copy lacks most of a model's equal blocks, and is narrower where a large model can be built narrower from its
configuration. Every pass starts from the same state.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.balancing import LOGITS
from galvatron_lite.model.batch import ITEMS, LossFn, call_model, loss_of, map_tensors, resize_batch, tensors_of
from galvatron_lite.model.discover import discover_layers, watch_model
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.meta import BATCH_NORMS, left_to_the_plan, meta_copy, prepare_for_training
from galvatron_lite.model.trace.record import MetaRunError
from galvatron_lite.runtime.loss.weights import ShareScale
from galvatron_lite.runtime.parameters.materialize import Materializer
from galvatron_lite.units import format_count
from galvatron_lite.verify.numbers.shrink_model import calmed, can_drop, cut_for, dropped, narrowed, with_samples
from galvatron_lite.verify.trial.observer import CallObserver
from galvatron_lite.verify.trial.reads import ChangedReads, ItemReads, Site, SiteReads, ValueReads
from galvatron_lite.verify.trial.snapshots import OutsideValues, PlainAttributes

SAMPLES = 4
MAX_BLOCKS = 2  # of each kind
MAX_PARAMETERS = 50_000_000
MAX_FLOPS = 3e10
"""FLOPs of a forward and backward pass of all samples, at most: about a second on one core."""
NARROW_DIVISOR = 2  # by which the sizes of a narrow model can be divided


class SkippedError(GalvatronError):
    """The model cannot be tried; the message says why."""


@dataclass(frozen=True, slots=True)
class Double:
    """A small copy on the CPU, in training mode, without dropout; batch norms use their running statistics."""

    model: nn.Module  # in float32, or in float64 if the original is
    batch: Any  # of ``SAMPLES`` samples, no two alike
    layers: tuple[Layer, ...]  # of the copy
    written: frozenset[str]  # names of parameters that a forward pass writes to, even if their values stay
    loss_fn: LossFn | None = None  # of the original


def make_double(
    model: nn.Module, batch: Any, layers: Sequence[Layer], init_fn: Callable[[nn.Module], None] | None
) -> Double:
    """Copy a model small; with all of its blocks if it does not run without some.

    Args:
        init_fn: initializes the parameters of a module that has none yet (on the meta device).

    Raises:
        SkippedError: the copy cannot be made, is too large, or does not run.
    """
    surplus = _surplus_blocks(model, layers)
    if surplus:
        with suppress(Exception):  # a user's model may raise anything
            double = _make_double(model, batch, surplus, init_fn)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                call_model(copy.deepcopy(double.model), double.batch)
            return double
    return _make_double(model, batch, [], init_fn)


def _make_double(
    model: nn.Module, batch: Any, surplus: Sequence[str], init_fn: Callable[[nn.Module], None] | None
) -> Double:
    small, samples = _small_model(model, batch, surplus)
    samples = cpu_batch(samples, SAMPLES)
    small = calmed(dropped(small, surplus)).train()
    prepare_for_training(small)
    for module in small.modules():
        if isinstance(module, BATCH_NORMS):
            module.eval()
        config: Any = getattr(module, "config", None)
        if getattr(config, f"output_{LOGITS}", False):  # a loss of all tokens together, right under every plan
            setattr(config, f"output_{LOGITS}", False)
    try:
        try:
            watched = watch_model(small, samples)
            layers, written = watched.layers, frozenset(watched.flow.written)
        except MetaRunError:
            layers, written = discover_layers(small), frozenset()
        if any(tensor.is_meta for tensor in (*small.parameters(), *small.buffers())):
            materializer = Materializer(small, layers, torch.device("cpu"), 0, init_fn)
            for layer in layers:
                materializer.place(layer)
        small = small.to("cpu")
        is_double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in small.parameters())
        return Double(small if is_double else small.float(), samples, layers, written)
    except (GalvatronError, RuntimeError, ValueError, TypeError, IndexError) as error:
        blocks = f" with {MAX_BLOCKS} blocks of each kind" if surplus else ""
        raise SkippedError(f"a copy{blocks} does not run ({error})") from error


def _surplus_blocks(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
    """Return paths of blocks beyond the first of their kind."""
    counts, surplus = Counter[str](), []
    for layer in layers:
        if layer.role is not Role.BLOCK or len(layer.modules) != 1 or not can_drop(model, layer.modules[0]):
            continue
        counts[layer.kind] += 1
        if counts[layer.kind] > MAX_BLOCKS:
            surplus.append(layer.modules[0])
    return surplus


def _small_model(model: nn.Module, batch: Any, surplus: Sequence[str]) -> tuple[nn.Module, Any]:
    """Return a copy, still with the surplus blocks, and its batch; a narrower copy where the model is too large."""
    if isinstance(batch, dict):
        batch = {name: value for name, value in batch.items() if name not in (ITEMS, f"output_{LOGITS}")}
    remaining = _remaining_parameters(model, surplus)
    items = sum(parameter.numel() for parameter in remaining)
    if items <= MAX_PARAMETERS and _flops(model, batch, surplus) <= MAX_FLOPS:
        return _copy(model, surplus, remaining), batch
    with torch.device("meta"):
        narrow_model = narrowed(model, NARROW_DIVISOR)
    if narrow_model is None:
        raise SkippedError(
            f"{format_count(items)} parameters, equal blocks left out, are too many or take too long on the CPU"
        )
    return narrow_model[0], cut_for(batch, narrow_model[0])


def _remaining_parameters(model: nn.Module, surplus: Sequence[str]) -> list[nn.Parameter]:
    prefixes = tuple(f"{path}." for path in surplus)
    return [parameter for name, parameter in model.named_parameters() if not name.startswith(prefixes)]


def _flops(model: nn.Module, batch: Any, surplus: Sequence[str]) -> float:
    """Return FLOPs of a forward and backward pass of the copy; 0 if the model does not run without values."""
    with FlopCounterMode(display=False) as counter, suppress(Exception):
        call_model(dropped(meta_copy(model), surplus), resize_batch(batch, SAMPLES))
    return 3.0 * float(counter.get_total_flops())


def _copy(model: nn.Module, surplus: Sequence[str], remaining: Sequence[nn.Parameter]) -> nn.Module:
    """Return a deep copy, with surplus blocks without values: they are dropped later."""
    memo: dict[int, Any] = {}
    for path in surplus:
        for tensor in (*model.get_submodule(path).parameters(), *model.get_submodule(path).buffers()):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    for parameter in remaining:  # surplus blocks may share some
        memo.pop(id(parameter), None)
    try:
        for module in model.modules():
            for tensor in tensors_of(list(vars(module).values())):
                if not tensor.is_leaf:  # deepcopy takes only leaves
                    memo[id(tensor)] = tensor.detach().clone()
        return copy.deepcopy(model, memo)
    except Exception as error:  # a user's object may raise anything
        raise SkippedError(f"copy.deepcopy of the model fails ({error})") from error


def cpu_batch(batch: Any, samples: int | None = None) -> Any:
    """Return a batch on the CPU, in float32 where it is in half precision; of ``samples``, no two alike.

    Raises:
        SkippedError: it is on the meta device.
    """

    def move(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            raise SkippedError("the example batch has no values")
        return tensor.detach().cpu()

    batch, halves = map_tensors(batch, move), (torch.float16, torch.bfloat16)
    batch = batch if samples is None else with_samples(batch, samples)
    return map_tensors(batch, lambda tensor: tensor.float() if tensor.dtype in halves else tensor)


@dataclass(frozen=True, slots=True)
class PassResult:
    """The results of a forward and backward pass. Parameters, buffers and attributes are given by name."""

    loss: float
    gradients: Mapping[str, Tensor]  # of the parameters that have one; dense
    buffers: Mapping[str, Tensor]  # after the pass
    written: Mapping[str, Tensor]  # parameters that the forward pass changed, after it
    reads: Mapping[Site, SiteReads]  # values that the forward pass read of the samples
    kinks: Mapping[tuple[Site, Any], tuple[int, float]]  # as of ``ValueReads``
    attributes: Mapping[str, Any]  # plain attributes and values outside of modules that the forward pass changed
    sparse: tuple[str, ...] = ()  # parameters whose gradients are sparse
    constants: Collection[float] = ()  # that the forward pass compared integers of the samples with; floats: reals
    orders: Mapping[tuple[Site, Any, int], tuple[int, float]] = field(default_factory=dict)  # as of ``ValueReads``

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a number and all gradients are finite."""
        return self.loss == self.loss and all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())


def run_pass(
    double: Double,
    batch: Any,
    scale: Callable[[Tensor], Tensor] | None = None,
    observer: CallObserver | None = None,
    seed: int = 0,
    other_seed: int = 0,
    terms: ShareScale = ShareScale(),  # noqa: B008 - it is frozen
    answers: ChangedReads | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> PassResult:
    """Run the copy on some samples; parameters, buffers, attributes, samples and random state stay as they were.

    Args:
        scale: applied to the loss before backward.
        observer: observes the pass.
        seed: of torch's random numbers.
        other_seed: of Python's and numpy's random numbers.
        terms: scales of the terms of the loss.
        answers: values to read instead of those of the samples.
        attributes: values of attributes that an earlier pass left.

    Raises:
        SkippedError: the copy does not run on these samples.
    """
    model = double.model
    plain_attributes, outside = PlainAttributes(model), OutsideValues(model, double.loss_fn)
    plain_attributes.put(attributes or {})
    outside.put(attributes or {})
    before = {name: tensor.detach().clone() for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        watching = nullcontext() if observer is None else observer.watching()
        with _seeded(seed, other_seed), left_to_the_plan(), _without_autocast(), watching, terms.inside():
            batch = map_tensors(batch, torch.clone)  # the model may write into it
            with ValueReads(model, batch, answers) as values, ItemReads():
                loss = loss_of(call_model(model, batch), batch, double.loss_fn)
            loss = loss if scale is None else scale(loss)
        if observer is not None:
            observer.note_leaks(loss)
        with nullcontext() if observer is None else observer.in_backward():
            slopes = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except Exception as error:  # a user's model may raise anything
        plain_attributes.restore()
        outside.restore()
        _restore_tensors(model, before)
        raise SkippedError(f"a copy does not run in float32 on the CPU ({type(error).__name__}: {error})") from error
    changed = plain_attributes.restore() | outside.restore()
    gradients = {name: slope for name, slope in zip(parameters, slopes, strict=True) if slope is not None}
    sparse = tuple(name for name, gradient in gradients.items() if gradient.is_sparse)
    gradients |= {name: gradients[name].to_dense() for name in sparse}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    written = _restore_tensors(model, before)
    return PassResult(
        float(loss.detach()), gradients, buffers, written, values.reads, values.kinks, changed, sparse,
        values.constants, values.orders,
    )  # fmt: skip


def _restore_tensors(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore parameters and buffers; return the parameters that had changed, as they were."""
    written = dict[str, Tensor]()
    with torch.no_grad():
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if name in before and not torch.equal(tensor, before[name]):
                if isinstance(tensor, nn.Parameter):
                    written[name] = tensor.detach().clone()
                if tensor.shape != before[name].shape:  # observers of ranges begin without items
                    tensor.resize_(before[name].shape)
                tensor.copy_(before[name])
    return written


@contextmanager
def _seeded(seed: int, other_seed: int) -> Iterator[None]:
    """Seed torch, and Python and numpy; restore all random states afterwards."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(other_seed)
        numpy.random.seed(other_seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Let the model's own ``torch.autocast`` do nothing: rounding would seem to be a difference between shares."""
    begin = torch.autocast.__init__

    def begin_disabled(self: torch.autocast, device_type: str, *_: Any, **__: Any) -> None:
        begin(self, device_type, enabled=False)

    torch.autocast.__init__ = begin_disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = begin  # type: ignore[method-assign]


def runs_on(double: Double, batch: Any) -> bool:
    """Whether the copy runs, forward and backward, on all samples of the user's batch at once."""
    try:
        run_pass(double, cpu_batch(batch))
    except (SkippedError, InputError):
        return False
    return True
