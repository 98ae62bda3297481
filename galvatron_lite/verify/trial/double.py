"""A small copy of a model, and passes of it over samples."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from galvatron_lite.capture.limits import everything_in, nodes_behind
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.balancing import LOGITS
from galvatron_lite.model.batch import (
    ITEMS,
    LossFn,
    batch_size,
    call_model,
    loss_of,
    map_tensors,
    places,
    resize_batch,
    tensors_of,
)
from galvatron_lite.model.discover import discover_layers, watch_model
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.flow import at
from galvatron_lite.model.trace.meta import BATCH_NORMS, left_to_the_plan, meta_copy, prepare_for_training
from galvatron_lite.model.trace.record import MetaRunError
from galvatron_lite.runtime.loss.weights import ShareScale, TargetCount, mean_of_targets
from galvatron_lite.runtime.parameters.materialize import Materializer
from galvatron_lite.units import format_count
from galvatron_lite.verify.numbers.shrink_model import calmed, can_drop, cut_for, dropped, narrowed, with_samples
from galvatron_lite.verify.trial.attributes import PlainAttributes
from galvatron_lite.verify.trial.outside import OutsideValues
from galvatron_lite.verify.trial.reads import ChangedReads, ListedValues, Site, SiteReads, ValueReads

SAMPLES = 4
KEPT = 2  # blocks of each kind
LARGEST = 50_000_000  # parameters that are tried, at most
MOST_WORK = 3e10
"""FLOPs of a forward and backward pass of all samples, at most: about a second on one core."""
NARROW = 2  # what sizes of a narrow model can be divided by


class SkippedError(GalvatronError):
    """The model cannot be tried; the message says why."""


@dataclass(frozen=True, slots=True)
class Double:
    """A small copy on the CPU, in training mode, without dropout; batch norms use their running statistics."""

    model: nn.Module  # in float32, or in float64 as it was
    batch: Any  # of ``SAMPLES`` samples, no two alike
    layers: tuple[Layer, ...]  # of the copy
    written: frozenset[str]  # names of parameters that a forward pass writes into, also what they were
    loss_fn: LossFn | None = None  # of the model


def make_double(
    model: nn.Module, batch: Any, layers: Sequence[Layer], init_fn: Callable[[nn.Module], None] | None
) -> Double:
    """Copy a model without most of its equal blocks; narrower, too, where it is large and made of a configuration.

    A model that does not run without some of its blocks is copied with all of them.
    """
    gone = _left_out(model, layers)
    if gone:
        with suppress(Exception):  # whatever a user's model does
            double = _double(model, batch, gone, init_fn)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                call_model(copy.deepcopy(double.model), double.batch)
            return double
    return _double(model, batch, [], init_fn)


def _double(model: nn.Module, batch: Any, gone: Sequence[str], init_fn: Callable[[nn.Module], None] | None) -> Double:
    rest = [one for name, one in model.named_parameters() if not any(name.startswith(f"{path}.") for path in gone)]
    small = batch
    if isinstance(batch, dict):
        small = {name: value for name, value in batch.items() if name not in (ITEMS, f"output_{LOGITS}")}
    if sum(one.numel() for one in rest) > LARGEST or _work(model, small, gone) > MOST_WORK:
        double, small = _narrow(model, small, rest)
    else:
        double = _copy(model, gone)
    small = map_tensors(with_samples(map_tensors(small, _on_cpu), SAMPLES), _as_float)
    double = calmed(dropped(double, gone)).train()
    prepare_for_training(double)
    for module in double.modules():
        if isinstance(module, BATCH_NORMS):
            module.eval()
        config: Any = getattr(module, "config", None)
        if getattr(config, f"output_{LOGITS}", False):  # a loss of all tokens together, right under every plan
            setattr(config, f"output_{LOGITS}", False)
    try:
        try:
            watched = watch_model(double, small)
            layers, written = watched.layers, frozenset(watched.flow.written)
        except MetaRunError:
            layers, written = discover_layers(double), frozenset()
        if any(one.is_meta for one in (*double.parameters(), *double.buffers())):
            materializer = Materializer(double, layers, torch.device("cpu"), 0, init_fn)
            for layer in layers:
                materializer.place(layer)
        double = double.to("cpu")
        exact = any(one.dtype in (torch.float64, torch.complex128) for one in double.parameters())
        return Double(double if exact else double.float(), small, layers, written)
    except (GalvatronError, RuntimeError, ValueError, TypeError, IndexError) as error:
        blocks = f" with {KEPT} blocks of each kind" if gone else ""
        raise SkippedError(f"a copy{blocks} does not run ({error})") from error


def _left_out(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
    seen, gone = Counter[str](), []
    for layer in layers:
        if layer.role is not Role.BLOCK or len(layer.modules) != 1 or not can_drop(model, layer.modules[0]):
            continue
        seen[layer.kind] += 1
        if seen[layer.kind] > KEPT:
            gone.append(layer.modules[0])
    return gone


def _copy(model: nn.Module, gone: Sequence[str]) -> nn.Module:
    """A deep copy; blocks that will be dropped are copied without values."""
    memo: dict[int, Any] = {}
    for path in gone:
        for tensor in (*model.get_submodule(path).parameters(), *model.get_submodule(path).buffers()):
            bare = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    kept = {id(one) for name, one in model.named_parameters() if not any(name.startswith(f"{path}.") for path in gone)}
    left = [one for module in model.modules() for one in tensors_of(list(vars(module).values())) if not one.is_leaf]
    try:
        memo = {key: value for key, value in memo.items() if key not in kept}
        return copy.deepcopy(model, memo | {id(one): one.detach().clone() for one in left})
    except Exception as error:  # whatever a user's object does
        raise SkippedError(f"copy.deepcopy of the model fails ({error})") from error


def _work(model: nn.Module, batch: Any, gone: Sequence[str]) -> float:
    """FLOPs of a forward and backward pass of the copy; 0 where it does not run without values."""
    with FlopCounterMode(display=False) as counter, suppress(Exception):
        call_model(dropped(meta_copy(model), gone), resize_batch(batch, SAMPLES))
    return 3.0 * float(counter.get_total_flops())


def _narrow(model: nn.Module, batch: Any, rest: Sequence[Tensor]) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        narrow_model = narrowed(model, NARROW)
    if narrow_model is None:
        items = format_count(sum(one.numel() for one in rest))
        raise SkippedError(f"{items} parameters, equal blocks left out, are too many or take too long on the CPU")
    double, _ = narrow_model
    return double, cut_for(batch, double)


def _on_cpu(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise SkippedError("the example batch has no values")
    return tensor.detach().cpu()


def _as_float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def masks_of(batch: Any, besides: Sequence[str]) -> list[str]:
    """Places of tensors of the samples that are truth values, or zeros and ones alone."""
    return [
        place
        for place, one in places(batch)
        if place not in besides and one.dim() > 0 and one.shape[0] == SAMPLES and prod(one.shape) > SAMPLES - 1
        and (one.dtype is torch.bool or bool(((one == 0) | (one == 1)).all()))
    ]  # fmt: skip


_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]
VALUELESS = ("type_as", _GRADIENT.__get__)
"""Functions of a parameter whose tensors do not depend on its values; beside ``new_*`` and ``*_like``."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a forward and backward pass gave."""

    loss: float  # the value
    gradients: Mapping[str, Tensor]  # of the parameters that have one, by name
    buffers: Mapping[str, Tensor]  # after the pass, by name
    written: Mapping[str, Tensor]  # parameters that the forward pass changed, by name
    reads: Mapping[Site, SiteReads]  # values that the forward pass read of the samples
    bends: Mapping[Site, tuple[int, float]]  # numbers that are clamped and the like: how many, and their sum
    kept: Mapping[str, Any]  # plain attributes of modules that the forward pass changed, by name
    sparse: tuple[str, ...] = ()  # parameters whose gradients are sparse, by name; they are dense here
    constants: Collection[int] = ()  # that it compared whole numbers of the samples with

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are."""
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
    kept: Mapping[str, Any] | None = None,
) -> PassResult:
    """Run the copy on some samples; parameters, buffers, attributes, samples and random state stay as they were.

    ``kept`` are attributes that a pass before it has left; ``other_seed`` is of Python's and numpy's random numbers.
    """
    model = double.model
    attributes, outside = PlainAttributes(model), OutsideValues(model, double.loss_fn)
    attributes.put(kept or {})
    outside.put(kept or {})
    before = {name: one.detach().clone() for name, one in (*model.named_buffers(), *model.named_parameters())}
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    try:
        watching = nullcontext() if observer is None else observer.watching()
        with _seeded(seed, other_seed), left_to_the_plan(), watching, terms.inside():
            batch = map_tensors(batch, torch.clone)  # the model may write into it
            with ValueReads(model, batch, answers) as values, ListedValues():
                loss = loss_of(call_model(model, batch), batch, double.loss_fn)
            loss = loss if scale is None else scale(loss)
        if observer is not None:
            observer.note_leaks(loss)
        with nullcontext() if observer is None else observer.in_backward():
            slopes = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except Exception as error:  # whatever a user's model does
        attributes.restore()
        outside.restore()
        raise SkippedError(f"a copy does not run in float32 on the CPU ({type(error).__name__}: {error})") from error
    left = attributes.restore() | outside.restore()
    gradients = {name: one for name, one in zip(parameters, slopes, strict=True) if one is not None}
    sparse = tuple(name for name, one in gradients.items() if one.is_sparse)
    gradients |= {name: gradients[name].to_dense() for name in sparse}
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
    written = dict[str, Tensor]()
    with torch.no_grad():
        for name, one in (*model.named_buffers(), *model.named_parameters()):
            if name in before and not torch.equal(one, before[name]):
                if isinstance(one, nn.Parameter):
                    written[name] = one.detach().clone()
                one.resize_(before[name].shape).copy_(before[name])  # observers of ranges begin without items
    return PassResult(
        float(loss.detach()), gradients, buffers, written, values.reads, values.bends, left, sparse, values.constants
    )


@contextmanager
def _seeded(seed: int, other_seed: int) -> Iterator[None]:
    """With seeds of torch, and of Python and numpy; all random states stay as they were."""
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


def runs_on(double: Double, batch: Any) -> bool:
    """Whether the copy runs, forward and backward, on all samples of the user's batch at once."""
    try:
        run_pass(double, map_tensors(map_tensors(batch, _on_cpu), _as_float))
    except (SkippedError, InputError):
        return False
    return True


def norms_of_parts(model: nn.Module, batch: Any) -> bool:
    """Whether a ``SyncBatchNorm`` takes statistics of some of the samples at a time, in one process: among ranks it
    would take those of other samples. Without values; False where the model does not run so.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    if not norms:
        return False
    # of a prime number of samples, no part has as many items as a multiple of it
    samples = next(n for n in count(max(batch_size(batch), 12)) if all(n % divisor for divisor in range(2, n)))
    parts = list[bool]()

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        parts.append(args[0].numel() // args[0].shape[1] % samples != 0)

    with suppress(Exception):  # whatever a user's model does
        twin = meta_copy(model)
        for module in twin.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.eval().register_forward_pre_hook(note)
        call_model(twin, resize_batch(batch, samples))
    return any(parts)


class NotedBatch(dict[str, Any]):
    """A batch that notes which of its entries are read."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self.read = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self.read.update(self.keys())
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict."""
        self.read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        """As of any dict; all entries count as read."""
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        """See ``items``."""
        return [self[key] for key in self]


@dataclass
class ObservedPass:
    """What was seen in a pass."""

    # arguments of each mean cross-entropy: its targets, the target that is ignored, weights of classes
    means: list[tuple[Tensor, int, Tensor | None]] = field(default_factory=list)
    differentiates: bool = False  # whether the model takes gradients while it runs
    outside: list[str] = field(default_factory=list)  # names of parameters that code outside of their layers reads
    leaking: list[str] = field(
        default_factory=list
    )  # layers of which the loss is made otherwise than by what they return
    unheld: dict[int, str] = field(default_factory=dict)  # shapes of parameters with gradients that no module holds


class CallObserver(TorchFunctionMode):
    """Sees functions called while a copy runs."""

    def __init__(self, double: Double, original: nn.Module) -> None:
        super().__init__()
        self.seen, self._model = ObservedPass(), double.model
        self._running: list[str] = []
        layers = [path for layer in double.layers for path in layer.modules]
        self._holders: dict[int, tuple[str, list[str], list[str]]] = {}
        for path, module in double.model.named_modules():
            for name, one in module.named_parameters(recurse=False):
                _, direct, holders = self._holders.setdefault(id(one), (f"{path}.{name}".lstrip("."), [], []))
                direct.append(path)
                holders.extend(layer for layer in layers if at(path, layer))
        hooked = [path for path, module in double.model.named_modules() if module._forward_hooks]
        self._layers, self._ends = {*layers, *hooked}, set[Node | None]()  # what calls of these modules returned
        self._originals = {id(one): name for name, one in original.named_parameters()}
        self._found: dict[str, list[str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the copy runs."""
        with self._hooked(self._enter), self:
            yield
        self._note_outside()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """While gradients are taken, where reversible layers run again, without the modules around them."""

        def enter(path: str, module: nn.Module, _: Any) -> None:
            self._enter(path)
            self._note_parameters(module.parameters(recurse=False))

        with self._hooked(enter):
            yield
        self._note_outside()

    @contextmanager
    def _hooked(self, enter: Callable[..., None]) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                stack.callback(module.register_forward_pre_hook(partial(enter, path)).remove)
                stack.callback(module.register_forward_hook(partial(self._leave, path), always_call=True).remove)
            yield

    def _note_outside(self) -> None:
        # a module without a forward only holds parameters for others, as the root does
        runs = {path for path, one in self._model.named_modules() if type(one).forward is not nn.Module.forward}
        self.seen.outside = [name for name, direct in self._found.items() if not direct or runs.intersection(direct)]

    def _enter(self, path: str, *_: Any) -> None:
        self._running.append(path)

    def _leave(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self._running.pop()
        if path in self._layers:
            self._ends |= {tensor.grad_fn for tensor in everything_in(output)}

    def note_leaks(self, loss: Tensor) -> None:
        """Note layers that reach the loss by another way than what they return, or what a hook of the model takes."""
        for node in nodes_behind([loss], self._ends):
            parameter = getattr(node, "variable", None)
            if id(parameter) in self._holders:
                name, _, holders = self._holders[id(parameter)]
                if holders and name not in self._found:
                    self.seen.leaking.append(holders[0])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.seen.differentiates |= function is torch.autograd.grad
        mean = mean_of_targets(function, args, kwargs)
        if mean is not None:
            weight = mean.get("weight")
            classes = None if weight is None else weight.detach().clone()
            self.seen.means.append((mean["target"].detach().clone(), mean.get("ignore_index", -100), classes))
        if any(True for _ in tensors_of(result)):
            self._note_reads(function, args, kwargs)
        return result

    def _note_reads(self, function: Any, args: Any, kwargs: Any) -> None:
        name = getattr(function, "__name__", "")
        if name.startswith("new_") or name.endswith("_like") or name in VALUELESS or function in VALUELESS:
            return
        if name == "to" and not isinstance(args[0], nn.Parameter):
            return
        self._note_parameters(one for one in tensors_of((args, kwargs)) if isinstance(one, nn.Parameter))

    def _note_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if id(parameter) in self._originals:
                self._found.setdefault(self._originals[id(parameter)], [])
            elif id(parameter) in self._holders:
                held, direct, holders = self._holders[id(parameter)]
                if holders and not any(holder in self._running for holder in holders):
                    self._found.setdefault(held, direct)
            elif parameter.requires_grad and torch.is_grad_enabled():
                self.seen.unheld[id(parameter)] = str(list(parameter.shape))


def terms_of(seen: ObservedPass, batch: Any) -> tuple[TargetCount | None, ...]:
    """The targets of the means that were seen, in their order, as entries of the batch; None for one that is none."""
    entries = [(_entry(target, ignored, batch), ignored, classes) for target, ignored, classes in seen.means]
    return tuple(
        None if place is None else TargetCount(*place, ignored, classes) for place, ignored, classes in entries
    )


def _entry(target: Tensor, ignored: int, batch: Any) -> tuple[str, int] | None:
    """Which entry of the batch targets are, as it is or without its first token."""
    flat = target.reshape(-1)
    # labels may equal the inputs in an example: an entry that is named so goes first, then the last one
    entries = [*places(batch)][::-1]
    entries.sort(key=lambda entry: not any(word in entry[0] for word in ("label", "target")))
    for place, one in entries:
        if one.is_floating_point() or one.dim() == 0:
            continue
        if _equal(one.reshape(-1), flat) or (one.dim() == 2 and _equal(one.t().reshape(-1), flat)):
            return place, 0
        if one.dim() < 2 or one.shape[1] < 2:
            continue
        padded = torch.nn.functional.pad(one.movedim(1, -1), (0, 1), value=ignored)[..., 1:].movedim(-1, 1)
        if _equal(one[:, 1:].reshape(-1), flat) or _equal(padded.reshape(-1), flat):
            return place, 1
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())
