"""Gated MLPs keep two tensors for their product, not three: ``silu(gate) * up`` needs the gate and ``up``.

Autograd keeps the gate for the activation function, and its result for the product. The result is made of the gate once
more in backward, as in Megatron-Core's fused SwiGLU, at the price of one element-wise kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
_ACTIVATIONS: frozenset[Any] = frozenset({functional.silu, functional.gelu})
"""Functions of which autograd keeps the input."""
_NODES = ("SiluBackward0", "GeluBackward0")
_PLAIN = getattr(Tensor.__torch_function__, "__func__", None)
_PRODUCTS: frozenset[Any] = frozenset({torch.mul, Tensor.mul, Tensor.__mul__})
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a factor of shape "
    "{}, of which version {} is needed, is at version {}."
)


def keep_gates(module: nn.Module) -> None:
    """Have gated MLPs inside a module keep no results of their activation functions, in place.

    An MLP is a module that holds its activation function: one without parameters and modules of its own.
    """
    for parent in module.modules():
        bare = (one for one in parent.children() if next(one.parameters(), None) is None and not [*one.children()])
        if not isinstance(parent, (nn.Sequential, nn.ModuleList)) and any(map(_is_activation, bare)):
            gated = _GatedForward(parent.forward)
            parent.forward = update_wrapper(partial(_GatedForward.run, gated), gated.forward)


@contextmanager
def keeping_gates(module: nn.Module) -> Iterator[None]:
    """As ``keep_gates``, while inside."""
    before = [(one, vars(one).get("forward")) for one in module.modules()]
    keep_gates(module)
    try:
        yield
    finally:
        for one, forward in before:
            vars(one).pop("forward", None)
            if forward is not None:
                one.forward = forward


def _is_activation(module: nn.Module) -> bool:
    """Whether a module is one of the functions; one of the model's own is told by what autograd notes of a copy."""
    if type(module).__module__.startswith("torch.nn."):
        return isinstance(module, (nn.SiLU, nn.GELU))
    if any(True for _ in module.buffers()):  # what it remembers of a pass (an observer of ranges) stays as it is
        return False
    sample = torch.zeros(1, requires_grad=True)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            node = copy.deepcopy(module).forward(sample).grad_fn
    except Exception:  # whatever the user's code does
        return False
    return node is not None and node.name() in _NODES


@dataclass(slots=True)
class _GatedForward:
    """The forward of a module that may gate; one whose first pass does not runs as it is from then on."""

    forward: Function
    gates: bool = True

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.gates or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with _Gating() as gating:
            output = self.forward(*args, **kwargs)
        self.gates = gating.found
        return output


@dataclass(slots=True, eq=False)
class _Activated:
    """What an activation function gave, and how it is made again."""

    result: Tensor | None
    source: Tensor | None
    again: Function


class _Gating(TorchFunctionMode):
    """Has products keep the source of what an activation function gave, in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._activated: list[_Activated] = []

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ACTIVATIONS and (func not in _PRODUCTS or not self._activated):
            return func(*args, **kwargs)
        # types that take functions apart
        overrides = ((kind, getattr(kind.__torch_function__, "__func__", None)) for kind in types)
        wrapping = next((kind for kind, override in overrides if override not in (None, _PLAIN)), None)
        if wrapping is not None:
            with self:  # calls on what its tensors hold come here again
                return wrapping.__torch_function__(func, types, args, kwargs)
        if func in _PRODUCTS:
            for place, one in enumerate(self._activated):
                if args[0] is one.result or args[1] is one.result:
                    self.found = True
                    return _multiplied(func, self._activated.pop(place), args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not kwargs.get("inplace"):
            self._activated.append(_Activated(result, args[0], partial(func, **kwargs)))
        return result


def _multiplied(func: Function, one: _Activated, args: Any, kwargs: Any) -> Any:
    # private, as there is no other way to let hooks around this one (offloading, recomputation) have what is kept;
    # transforms of torch.func allow none
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return func(*args, **kwargs)
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    with saved_tensors_hooks(partial(_pack, one, outer), _unpack):
        product = func(*args, **kwargs)
    one.result = one.source = None  # autograd holds the hook
    return product


def _pack(one: _Activated, outer: tuple[Function, Function] | None, tensor: Tensor) -> Any:
    """What is kept of a factor; without hooks around, its version: where there are hooks, autograd checks none."""
    kept, again = tensor, None
    if tensor is one.result and one.source is not None:
        kept, again = one.source, one.again
    return (kept, kept._version, None, again) if outer is None else (outer[0](kept), 0, outer[1], again)


def _unpack(packed: Any) -> Tensor:
    kept, version, outer, again = packed
    if outer is not None:
        kept = outer(kept)
    elif kept._version != version:
        raise RuntimeError(_MODIFIED.format(tuple(kept.shape), version, kept._version))
    factor: Tensor = kept if again is None else again(kept)
    return factor
