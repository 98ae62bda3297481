"""Recomputation: discard activations in forward and compute them again in backward.

A layer may count its calls, update buffers (a moving average) or append to a cache among its arguments. When it runs
again in backward it must see the state of the first run, and leave the current state unchanged (``LayerState``).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.gates import keep_gates
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.trace.meta import left_to_the_plan
from galvatron_lite.parallelism.context import ring as _ring  # noqa: F401  (registers its operator)
from galvatron_lite.parallelism.recompute.sums import MUTATED, KeptSums

_STATELESS = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module, Tensor)
_MACHINERY = ("torch", "deepspeed", "galvatron_lite")
"""Packages whose objects are not restored, since they also track the second run."""


@dataclass(slots=True)
class _Container:
    """A container, its content before a call, and copies, with versions, of its tensors that may be overwritten."""

    path: str
    value: Any
    names: tuple[str, ...] | None = None  # of the attributes of a module that are compared; None: all
    content: Any = None
    copies: dict[Any, tuple[int, Tensor]] = field(default_factory=dict)

    def read(self) -> Any:
        if isinstance(self.value, dict):
            names = self.value if self.names is None else [name for name in self.names if name in self.value]
            return {name: self.value[name] for name in names}
        return self.value.copy()

    def write(self, content: Any) -> None:
        if self.names is None:
            self.value.clear()
        if isinstance(self.value, (dict, set)):
            self.value.update(content)
        else:
            self.value.extend(content)

    def tensors(self) -> Iterator[tuple[Any, Tensor]]:
        """Tensors of its content other than parameters, by key."""
        if not isinstance(self.content, set):
            for key, value in self.content.items() if isinstance(self.content, dict) else enumerate(self.content):
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    yield key, value

    def keep_overwritten(self) -> None:
        """Drop the copies of tensors that the call did not overwrite."""
        for key, (version, copied) in list(self.copies.items()):
            tensor = self.content[key]
            without_values = tensor.is_meta or isinstance(tensor, FakeTensor)  # as in dry runs
            if tensor._version == version and (without_values or torch.equal(tensor, copied)):
                del self.copies[key]

    @property
    def changed(self) -> bool:
        """Whether it has other objects than before the call, or unequal plain values."""
        now = self.read()
        if isinstance(now, set):
            return bool(now != self.content)
        if isinstance(now, dict):
            return now.keys() != self.content.keys() or any(_differ(now[key], self.content[key]) for key in now)
        return len(now) != len(self.content) or any(map(_differ, now, self.content))


def _differ(first: Any, second: Any) -> bool:
    plain = isinstance(first, (int, float, str)) and type(first) is type(second)
    return first is not second and not (plain and first == second)


class LayerState:
    """The state that a layer can change: attributes and buffers of its modules, and objects among its arguments.

    The first call finds out whether the layer changes any. If not, later calls do not check. Attributes that are added
    later are not checked.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._idempotent = type(module) in (nn.ReLU, nn.ReLU6)  # may run again on an input that it overwrote
        self._changes = True
        self._overwritten: set[tuple[str, Any]] | None = None  # None until the first call
        self._modules = [
            (path, child, tuple(name for name in vars(child) if not name.startswith("_") and name != "training"))
            for path, child in module.named_modules()
        ]

    def call(self, run: Callable[[list[_Container]], Any], arguments: Any) -> Any:
        """Run the layer; ``run`` gets its state before the call.

        Raises:
            InputError: the layer overwrites a tensor among its arguments.
        """
        if not self._changes:
            return run([])
        before = list(self._containers(arguments))
        for container in before:
            container.content = container.read()
            container.copies = {
                key: (value._version, value.detach().clone())
                for key, value in container.tensors()
                if self._overwritten is None or (container.path, key) in self._overwritten
            }
        versions = [(tensor, tensor._version) for tensor in tensors_of(arguments)]
        output = run(before)
        if not self._idempotent and any(tensor._version != version for tensor, version in versions):
            remedy = "It overwrites a tensor that it is given, and cannot run again on it: plan it without recompute."
            raise InputError("recompute", self._name, remedy)
        if self._overwritten is None:
            for container in before:
                container.keep_overwritten()
            self._overwritten = {(container.path, key) for container in before for key in container.copies}
            self._changes = bool(self._overwritten) or any(container.changed for container in before)
            if not self._changes:
                before.clear()
        return output

    def _containers(self, arguments: Any) -> Iterator[_Container]:
        seen: set[int] = set()
        for path, module, names in self._modules:
            yield _Container(f"{path}.", vars(module), names)
            yield _Container(f"{path}._buffers", module._buffers)
            for name in names:
                yield from _inside(f"{path}.{name}", vars(module).get(name), seen)
        yield from _inside("arguments", arguments, seen)


@contextmanager
def as_before(containers: list[_Container]) -> Iterator[None]:
    """Restore the state of a layer before its first run inside, and the current state afterwards."""
    now = [(container, container.read()) for container in containers]
    for container in containers:
        content = container.content.copy()
        for key, (_, copied) in container.copies.items():
            content[key] = copied
        container.write(content)
    try:
        yield
    finally:
        for container, content in now:
            container.write(content)


def _inside(path: str, value: Any, seen: set[int]) -> Iterator[_Container]:
    """The mutable containers in a nest of containers and objects."""
    if isinstance(value, _STATELESS) or id(value) in seen:
        return
    seen.add(id(value))
    content = value
    if not isinstance(value, (tuple, dict, list, deque, set)):
        content = getattr(value, "__dict__", None)
        if type(content) is not dict or type(value).__module__.partition(".")[0] in _MACHINERY:
            return  # an annotation such as tuple[int] has the attributes of its class, which cannot be written
    if not isinstance(content, tuple):
        yield _Container(path, content)
    if not isinstance(content, set):
        for key, item in list(content.items() if isinstance(content, dict) else enumerate(content)):
            yield from _inside(f"{path}.{key}", item, seen)


Forward = Callable[..., Any]

_aten = torch.ops.aten
KEPT_OPERATORS: frozenset[Any] = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_attention_math_for_mps.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.galvatron.ring_attention.default,
    }
)
"""Operators whose outputs selective recomputation keeps: matmuls, convolutions and attention."""


def recomputed(forward: Forward, recompute: Recompute, module: nn.Module | None = None) -> Forward:
    """Wrap a forward function to recompute in backward; return ``forward`` itself if nothing is recomputed.

    ``FULL`` saves only the inputs. ``SELECTIVE`` saves the outputs of ``KEPT_OPERATORS``, and for row-split matmuls the
    sum over the tensor group (``recompute.sums``); it recomputes the rest. Both use non-reentrant
    ``torch.utils.checkpoint``. Both runs see the same random numbers and the same state of the module (buffers,
    counters, caches among its arguments), and state changes once.

    The returned function raises ``InputError`` if the module overwrites a tensor among its arguments.

    Args:
        forward: of a module.
        recompute: what is computed again.
        module: of ``forward``; without one only the arguments are checked for changes.
    """
    if recompute is Recompute.NONE:
        return forward
    forward = _wrapped(forward, recompute)
    state = LayerState(nn.Module() if module is None else module)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def first(before: list[Any]) -> Any:
            options: Any = {"context_fn": functools.partial(_contexts, recompute, before)}
            # the caller may add to a list after the call; the state of one that the layer adds to is restored
            held_args, held_kwargs = [_held(value) for value in args], {k: _held(value) for k, value in kwargs.items()}
            runs = count()

            def either(*given: Any) -> Any:
                return forward(*held_args, **held_kwargs) if next(runs) and not before else forward(*given, **kwargs)

            with left_to_the_plan(decides=False):
                return checkpoint(either, *args, use_reentrant=False, **options)

        return state.call(first, (args, kwargs))

    return run


def _held(value: Any) -> Any:
    """Return a list or dict as it is now, or another argument."""
    return value.copy() if type(value) in (list, dict) else value


def apply_recompute(module: nn.Module, recompute: Recompute) -> None:
    """Make a module recompute, in place. Its hooks stay outside and run once.

    Gated MLPs save only their gates, whether or not the module recomputes (``model.gates``).
    """
    keep_gates(module)
    if recompute is not Recompute.NONE:
        module.forward = recomputed(module.forward, recompute, module)


def _wrapped(forward: Forward, recompute: Recompute) -> Forward:
    """Wrap forward so that both runs call the same operators.

    Autocast does not cache the casts of weights: they are recomputed like other tensors, and a run that finds casts of
    an earlier call in the cache would call fewer operators than the second run.

    Under selective recomputation in-place activations (ReLU) return new tensors, since saved tensors must not change.

    The second run is inside ``backward``, which a guarded loss calls with tensor subclasses disabled; sharded tensors
    need them enabled. Checkpoints in the layer's code do nothing in either run.
    """
    selective = recompute is Recompute.SELECTIVE

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        in_place = _OutOfPlace() if selective else nullcontext()
        with torch._C._EnableTorchFunction(), left_to_the_plan(), in_place, casting_anew():
            try:
                return forward(*args, **kwargs)
            except RuntimeError as error:
                if not selective or MUTATED not in str(error):
                    raise
                remedy = "A layer changes in place what a matmul or convolution gave: plan it with full recomputation."
                raise InputError("recompute", Recompute.SELECTIVE.value, remedy) from error

    return run


def casting_anew() -> AbstractContextManager[Any]:
    """Return the active autocast, without its cache."""
    kind = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    if kind is None:
        return nullcontext()
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)


class _OutOfPlace(TorchFunctionMode):
    def __torch_function__(self, func: Forward, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        return func(*args, **({**options, "inplace": False} if options.get("inplace") else options))


def _contexts(
    recompute: Recompute, before: list[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of the first run, and of the second run, which restores the layer's state before the first."""
    if recompute is not Recompute.SELECTIVE:
        return nullcontext(), as_before(before)
    first, again = create_selective_checkpoint_contexts(list(KEPT_OPERATORS))  # type: ignore[no-untyped-call]
    sums = KeptSums()
    return _nested(sums.active(again=False), first), _nested(as_before(before), sums.active(again=True), again)


@contextmanager
def _nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
