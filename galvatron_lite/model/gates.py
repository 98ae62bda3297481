"""Gated MLPs that save two tensors for ``silu(gate) * up``, not three: the gate and ``up``.

Autograd saves the gate for the activation function, and the activated gate for the product. Here backward activates the
gate again, as in Megatron-Core's fused SwiGLU, at the price of one element-wise kernel.
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
"""Functions whose input autograd saves."""
_NODES = ("SiluBackward0", "GeluBackward0")
_PLAIN = getattr(Tensor.__torch_function__, "__func__", None)
_PRODUCTS: frozenset[Any] = frozenset({torch.mul, Tensor.mul, Tensor.__mul__})
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a factor of shape "
    "{}, of which version {} is needed, is at version {}."
)


def keep_gates(module: nn.Module) -> None:
    """Change a module in place so that gated MLPs inside it do not save activated gates.

    An MLP is a module that holds its activation function as a module without parameters and submodules.
    """
    for parent in module.modules():
        bare = (child for child in parent.children() if not [*child.parameters(), *child.children()])
        if not isinstance(parent, (nn.Sequential, nn.ModuleList)) and any(map(_is_activation, bare)):
            gated = _GatedForward(parent.forward)
            parent.forward = update_wrapper(partial(_GatedForward.run, gated), gated.forward)


@contextmanager
def keeping_gates(module: nn.Module) -> Iterator[None]:
    """``keep_gates`` while inside."""
    before = [(part, vars(part).get("forward")) for part in module.modules()]
    keep_gates(module)
    try:
        yield
    finally:
        for part, forward in before:
            vars(part).pop("forward", None)
            if forward is not None:
                part.forward = forward


def _is_activation(module: nn.Module) -> bool:
    """Whether a module is SiLU or GELU; a class of the user is recognised by the autograd node of a copy's run."""
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
    """The forward of a module that may gate; if its first pass does not, later passes run unchanged."""

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
    """The result of an activation function, and how to compute it again."""

    result: Tensor | None
    source: Tensor | None
    again: Function


class _Gating(TorchFunctionMode):
    """Lets products save the input of an activation function instead of its result."""

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
            for index, activated in enumerate(self._activated):
                if args[0] is activated.result or args[1] is activated.result:
                    self.found = True
                    return _multiplied(func, self._activated.pop(index), args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not kwargs.get("inplace"):
            self._activated.append(_Activated(result, args[0], partial(func, **kwargs)))
        return result


def _multiplied(func: Function, activated: _Activated, args: Any, kwargs: Any) -> Any:
    # private, as there is no other way to let hooks around this one (offloading, recomputation) have what is kept;
    # transforms of torch.func allow none
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return func(*args, **kwargs)
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    with saved_tensors_hooks(partial(_pack, activated, outer), _unpack):
        product = func(*args, **kwargs)
    activated.result = activated.source = None  # autograd holds the hook
    return product


def _pack(activated: _Activated, outer: tuple[Function, Function] | None, tensor: Tensor) -> Any:
    """Pack a factor, with its version if there are no outer hooks: with hooks autograd checks no versions."""
    kept, again = tensor, None
    if tensor is activated.result and activated.source is not None:
        kept, again = activated.source, activated.again
    return (kept, kept._version, None, again) if outer is None else (outer[0](kept), 0, outer[1], again)


def _unpack(packed: Any) -> Tensor:
    kept, version, outer, again = packed
    if outer is not None:
        kept = outer(kept)
    elif kept._version != version:
        raise RuntimeError(_MODIFIED.format(tuple(kept.shape), version, kept._version))
    factor: Tensor = kept if again is None else again(kept)
    return factor
