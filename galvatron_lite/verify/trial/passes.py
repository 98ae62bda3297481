"""Forward and backward passes of a copy, and what is seen while it runs: means over targets, parameters, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from galvatron_lite.model.batch import LossFn, call_model, loss_of, places, tensors_of
from galvatron_lite.model.discover_blocks import at
from galvatron_lite.runtime.loss_weight import ShareScale, TargetCount, mean_of_targets
from galvatron_lite.verify.trial.double import Double, SkippedError

_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]
VALUELESS = ("type_as", _GRADIENT.__get__)
"""Functions of a parameter whose tensors do not depend on its values; beside ``new_*`` and ``*_like``."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a forward and backward pass gave."""

    loss: float  # the value
    gradients: Mapping[str, Tensor]  # of the parameters that have one, by name
    buffers: Mapping[str, Tensor]  # after the pass, by name

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are."""
        return self.loss == self.loss and all(bool(one.isfinite().all()) for one in self.gradients.values())


def run_pass(
    double: Double,
    batch: Any,
    loss_fn: LossFn | None,
    scale: Callable[[Tensor], Tensor] | None = None,
    observer: CallObserver | None = None,
    seed: int = 0,
    terms: ShareScale = ShareScale(),  # noqa: B008 - it is frozen
) -> PassResult:
    """Run the copy on some samples; buffers and random state are left as they were."""
    model = double.model
    before = {name: one.detach().clone() for name, one in model.named_buffers()}
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    try:
        watching = nullcontext() if observer is None else observer.watching()
        with torch.random.fork_rng(devices=[]), watching, terms.inside():
            torch.manual_seed(seed)
            loss = loss_of(call_model(model, batch), batch, loss_fn)
        loss = loss if scale is None else scale(loss)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except Exception as error:  # whatever a user's model does
        raise SkippedError(f"a copy does not run in float32 on the CPU ({type(error).__name__}: {error})") from error
    gradients = {name: one for name, one in zip(parameters, found, strict=True) if one is not None}
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
    with torch.no_grad():
        for name, one in model.named_buffers():
            if name in before and not torch.equal(one, before[name]):
                one.copy_(before[name])
    return PassResult(float(loss.detach()), gradients, buffers)


@dataclass
class ObservedPass:
    """What was seen in a pass."""

    # arguments of each mean cross-entropy: its targets, the target that is ignored, weights of classes
    means: list[tuple[Tensor, int, Tensor | None]] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)  # names of parameters that code outside of their layers reads


class CallObserver(TorchFunctionMode):
    """Sees functions called while a copy runs."""

    def __init__(self, double: Double, original: nn.Module) -> None:
        super().__init__()
        self.seen, self._model = ObservedPass(), double.model
        self._running: list[str] = []
        self._ran: set[str] = set()
        self._read: dict[str, tuple[tuple[str, ...], bool]] = {}
        layers = [path for layer in double.layers for path in layer.modules]
        self._holders: dict[int, tuple[str, list[str], list[str]]] = {}
        for path, module in double.model.named_modules():
            for name, one in module.named_parameters(recurse=False):
                _, direct, holders = self._holders.setdefault(id(one), (f"{path}.{name}".lstrip("."), [], []))
                direct.append(path)
                holders.extend(layer for layer in layers if at(path, layer))
        self._originals = {id(one): name for name, one in original.named_parameters()}
        self._found: dict[str, list[str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the copy runs."""
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                enter = module.register_forward_pre_hook(partial(self._enter, path))
                leave = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            with self:
                yield
        self.seen.outside.extend(name for name, direct in self._found.items() if not direct or self._ran & {*direct})

    def _enter(self, path: str, *_: Any) -> None:
        self._running.append(path)
        self._ran.add(path)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
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
        for one in tensors_of((args, kwargs)):
            if not isinstance(one, nn.Parameter):
                continue
            if id(one) in self._originals:
                self._found.setdefault(self._originals[id(one)], [])
            elif id(one) in self._holders:
                held, direct, holders = self._holders[id(one)]
                if holders and not any(at(path, holder) for path in self._running for holder in holders):
                    self._found.setdefault(held, direct)


def terms_of(seen: ObservedPass, batch: Any) -> tuple[TargetCount | None, ...]:
    """The targets of the means that were seen, in their order, as entries of the batch; None for one that is none."""
    entries = [(_entry(target, ignored, batch), ignored, classes) for target, ignored, classes in seen.means]
    return tuple(
        None if place is None else TargetCount(*place, ignored, classes) for place, ignored, classes in entries
    )


def counts_of(terms: Sequence[TargetCount | None]) -> tuple[TargetCount, ...]:
    """Those that are unlike."""
    counts: list[TargetCount] = []
    for count in terms:
        if count is not None and not any(_same(count, other) for other in counts):
            counts.append(count)
    return tuple(counts)


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


def _same(one: TargetCount, other: TargetCount) -> bool:
    if (one.place, one.shift, one.ignored) != (other.place, other.shift, other.ignored):
        return False
    if one.classes is None or other.classes is None:
        return one.classes is other.classes
    return torch.equal(one.classes, other.classes)


def relative_error(reference: PassResult, shares: Sequence[PassResult], parts: Sequence[float]) -> float:
    """How far the weighted sum of shares' losses and gradients is from that of the batch."""
    used = [(part, share) for part, share in zip(parts, shares, strict=True) if part]
    worst = abs(sum(part * share.loss for part, share in used) - reference.loss) / (abs(reference.loss) or 1.0)
    noise = 1e-3 * max((float(one.abs().max()) for one in reference.gradients.values() if one.numel()), default=0.0)
    for name, gradient in reference.gradients.items():
        if gradient.numel():
            mixed = sum(part * share.gradients.get(name, torch.zeros_like(gradient)) for part, share in used)
            error, largest = float((mixed - gradient).abs().max()), float(gradient.abs().max())
            worst = max(worst, error / max(largest, noise, 1e-30))
    return worst if worst == worst else float("inf")
